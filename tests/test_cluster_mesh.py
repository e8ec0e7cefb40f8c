"""The parallelism for a cluster: by hand, and by MaxText's own rules."""

import itertools
import math
from pathlib import Path

import pytest
from doctor_facts import MODEL
from maxtext.configs import pyconfig

from maxtext_nvfp4.doctor.cluster import Cluster, derive
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import cluster_mesh, cluster_model, register
from maxtext_nvfp4.integration.config import load_config

CONFIGS = Path(__file__).parents[1] / "configs"
ICI = {"data": 1, "fsdp": -1, "tensor": 1}
DCN = {"data": -1, "fsdp": 1, "tensor": 1}


def cluster(nodes, gpus_per_node=4, rack_gpus=72):
    return Cluster(nodes=nodes, gpus_per_node=gpus_per_node, rack_gpus=rack_gpus)


@pytest.mark.parametrize(
    ("nodes", "ici", "dcn", "expected"),
    [
        # One tray, one rack, two racks: MaxText's defaults.
        (1, {}, {}, "ici_fsdp_parallelism=4 dcn_data_parallelism=1"),
        (18, {}, {}, "ici_fsdp_parallelism=72 dcn_data_parallelism=1"),
        (36, {}, {}, "ici_fsdp_parallelism=72 dcn_data_parallelism=2"),
        # 128 GPUs of two racks, as the 405B config has them.
        (
            32,
            {},
            {"data": 1, "fsdp": -1},
            "ici_fsdp_parallelism=64 dcn_data_parallelism=1 dcn_fsdp_parallelism=2",
        ),
        # What was chosen stays.
        (18, {"tensor": 4}, {}, "ici_fsdp_parallelism=18 ici_tensor_parallelism=4 dcn_data_parallelism=1"),
        (
            4,
            {"data": -1, "fsdp": 4},
            {},
            "ici_data_parallelism=4 ici_fsdp_parallelism=4 dcn_data_parallelism=1",
        ),
        # FSDP gives way to the cluster, not the others.
        (
            8,
            {"fsdp": 4, "tensor": 2},
            {},
            "ici_fsdp_parallelism=16 ici_tensor_parallelism=2 dcn_data_parallelism=1",
        ),
        (36, {"fsdp": 72}, {"data": 4}, "ici_fsdp_parallelism=72 dcn_data_parallelism=2"),
        (
            36,
            {},
            {"data": 1, "fsdp": 4},
            "ici_fsdp_parallelism=72 dcn_data_parallelism=1 dcn_fsdp_parallelism=2",
        ),
        # Within one rack nothing is asked of the network between racks.
        (18, {}, {"data": 1, "fsdp": 2}, "ici_fsdp_parallelism=72 dcn_data_parallelism=1"),
    ],
)
def test_parallelism_of_a_cluster(nodes, ici, dcn, expected):
    mesh = derive(cluster(nodes), {**ICI, **ici}, {**DCN, **dcn})
    assert mesh.arguments() == expected
    assert math.prod(mesh.ici.values()) * math.prod(mesh.dcn.values()) == 4 * nodes


def test_fsdp_gives_way_before_the_axis_that_may_be_anything():
    mesh = derive(cluster(1, gpus_per_node=2), {"data": -1, "fsdp": 4, "tensor": 1}, DCN)
    assert (mesh.ici["data"], mesh.ici["fsdp"]) == (1, 2)
    assert mesh.changed == ("ici_fsdp_parallelism",)
    assert "ici_fsdp_parallelism=4 as written does not fit" in mesh.why[0]


@pytest.mark.parametrize(
    ("machines", "ici", "says"),
    [
        (cluster(18), {"tensor": 5}, "ici_tensor_parallelism=5: 5 does not divide 72, the GPUs of an NVLink domain; "
         "write ici_tensor_parallelism: 4"),
        (cluster(18), {"tensor": 8, "data": 5}, "40 does not divide 72"),
        (cluster(37), {}, "37 nodes need 3 racks, and do not divide into them equally, as JAX demands; "
         "write --nodes 36 or --nodes 39"),
        (cluster(2, gpus_per_node=8, rack_gpus=4), {}, "write --rack-gpus 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_message(machines, ici, says):
    with pytest.raises(ConfigError) as error:
        derive(machines, {**ICI, **ici}, DCN)
    assert says in str(error.value)


def test_why_names_what_was_given_up():
    mesh = derive(cluster(18), ICI, {**DCN, "data": 1, "fsdp": 2})
    assert mesh.changed == ("dcn_fsdp_parallelism",)
    assert "one NVLink domain" in mesh.why[1]
    assert "dcn_fsdp_parallelism=2" in mesh.why[1]
    assert "72" in mesh.why[0]


def test_maxtext_refuses_exactly_what_is_changed():
    """MaxText's own function for filling a mesh agrees on which sizes fit, over a grid of them."""
    fitting = refused = 0
    for nodes, data, fsdp, dcn_data in itertools.product((2, 18, 36), (1, 2, -1), (1, 4, 72, -1), (1, 2, -1)):
        ici, dcn = {"data": data, "fsdp": fsdp, "tensor": 1}, {"data": dcn_data, "fsdp": 1, "tensor": 1}
        if data == fsdp == -1:
            continue  # refused before
        machines = cluster(nodes)
        changed = derive(machines, ici, dcn).changed
        assert bool(cluster_mesh.fault(machines, ici, dcn)) == bool(changed), (nodes, ici, dcn)
        fitting, refused = fitting + (not changed), refused + bool(changed)
    assert fitting > 20
    assert refused > 20


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    register()
    path = tmp_path_factory.mktemp("mesh") / "tiny.yml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in MODEL.items() if key != "nvfp4"))
    return ["", str(path)]


def test_keys_are_those_of_maxtexts_axes(config):
    """Each axis of the mesh has a key, and the size that the key says."""
    raw = cluster_mesh.checked_keys([*config, "quantization=''"])
    names = list(cluster_mesh.parallelism(raw, "ici"))
    chosen = {"data": 3, "pipeline": 2, "fsdp": 5, "tensor": 4}
    sizes = {f"ici_{name}_parallelism": chosen.get(name, 1) for name in names}
    loaded = load_config(
        [*config, "quantization=''"],
        **sizes,
        num_slices=1,
        internal_compile=True,
        internal_compile_num_devices=math.prod(sizes.values()),
        skip_jax_distributed_system=True,
    )
    # With several stages MaxText puts their axis first.
    axes = {"pipeline": "stage"}
    found = dict(zip(loaded.mesh_axes, loaded.ici_parallelism, strict=True))
    assert found == {axes.get(name, name): chosen.get(name, 1) for name in names}


def test_maxtext_reads_a_config_for_the_derived_mesh(config):
    assert isinstance(config, list)
    mesh = cluster_model.plan([*config, "ici_tensor_parallelism=2"], cluster(32))
    loaded = load_config(
        config,
        **mesh.overrides(),
        num_slices=2,
        internal_compile=True,
        internal_compile_num_devices=128,
        skip_jax_distributed_system=True,
    )
    assert isinstance(loaded, pyconfig.HyperParameters)
    assert math.prod(loaded.ici_parallelism) == 64
    assert math.prod(loaded.dcn_parallelism) == 2


def test_the_same_config_within_one_rack_is_refused_by_maxtext(config):
    """The rule that every dcn_* is 1 within a rack is MaxText's."""
    with pytest.raises(ConfigError, match="only one slice"):
        load_config([*config, "dcn_fsdp_parallelism=2", "dcn_data_parallelism=1"], num_slices=1,
                    skip_jax_distributed_system=True)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "nodes", "expected"),
    [
        ("llama3-8b", 1, "ici_fsdp_parallelism=4 dcn_data_parallelism=1"),
        ("llama3.1-70b", 16, "ici_fsdp_parallelism=64 dcn_data_parallelism=1"),
        ("llama3.1-405b", 32, "ici_fsdp_parallelism=64 dcn_data_parallelism=1 dcn_fsdp_parallelism=2"),
    ],
)
def test_examples(name, nodes, expected):
    register()
    mesh = cluster_model.plan(["", str(CONFIGS / f"{name}.yml")], cluster(nodes))
    assert mesh.arguments() == expected
    assert not mesh.changed


@pytest.mark.parametrize(("nodes", "fits"), [(18, "--nodes 16"), (36, "--nodes 32"), (9, "--nodes 8")])
def test_a_mesh_that_does_not_divide_the_model_is_refused_with_one_that_does(nodes, fits):
    register()
    path = str(CONFIGS / "llama3.1-70b.yml")
    with pytest.raises(ConfigError, match="kernel has 8192 along an axis that is divided over") as refused:
        cluster_model.plan(["", path], cluster(nodes))
    said, _, write = str(refused.value).partition("; write ")
    assert "(fsdp)" in said
    whole, pairs = write.split(", or ")
    assert whole == fits
    assert cluster_model.plan(["", path], cluster(int(whole.split()[1])))
    assert cluster_model.plan(["", path, *pairs.split()], cluster(nodes)).ici["data"] == 9


@pytest.mark.parametrize("value", [0, -2, 1.5, True, "four", None])
def test_a_number_of_devices_that_is_none(value, config):
    raw = {**cluster_mesh.checked_keys([*config, "quantization=''"]), "ici_fsdp_parallelism": value}
    with pytest.raises(ConfigError, match=r"ici_fsdp_parallelism: got .*: not a number of devices; write"):
        cluster_mesh.parallelism(raw, "ici")
