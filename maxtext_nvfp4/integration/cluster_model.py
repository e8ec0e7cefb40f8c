"""A config's model on a cluster's mesh, in shapes, on a machine that need not have the devices."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from maxtext_nvfp4.doctor.cluster import Cluster, MeshPlan, derive
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import cluster_mesh
from maxtext_nvfp4.integration.config import load_config, mode_defaults
from maxtext_nvfp4.integration.config_checks import MODE
from maxtext_nvfp4.integration.config_files import chosen_keys
from maxtext_nvfp4.integration.extents import mesh_sizes


class Planned(NamedTuple):
    """A mesh, the config on it, and its model in shapes."""

    mesh: MeshPlan
    config: Any
    model: nnx.Module


def _nodes(count: int) -> str:
    return f"--nodes {count}"


def plan(argv: Sequence[str], cluster: Cluster) -> MeshPlan:
    """The mesh of a config on a cluster; see `planned`."""
    return planned(argv, cluster).mesh


def planned(argv: Sequence[str], cluster: Cluster, machines: Callable[[int], str] = _nodes) -> Planned:
    """The mesh of a config on a cluster, and what it was tried with.

    Args:
      argv: Program name, YAML file, then `key=value` arguments.
      cluster: The cluster.
      machines: How a user asks for so many nodes.

    Raises:
      ConfigError: Anything wrong in the config, or a choice that fits neither the cluster nor the model.
    """
    raw = cluster_mesh.checked_keys(argv)
    mesh = derive(cluster, cluster_mesh.parallelism(raw, "ici"), cluster_mesh.parallelism(raw, "dcn"))
    assert not cluster_mesh.fault(cluster, mesh.ici, mesh.dcn), "MaxText refuses what was derived"
    config = load_for(argv, raw, mesh)
    model = abstract_model(config)
    if fault := undivided(model, mesh, machines):
        raise ConfigError(f"{fault[0]}; write {fault[1]}")
    return Planned(mesh, config, model)


def load_for(argv: Sequence[str], raw: Mapping[str, Any], mesh: MeshPlan | None) -> Any:
    """The config for a mesh. MaxText lets one be read for devices that are not there, to compile ahead."""
    cluster = mesh.cluster if mesh else Cluster(nodes=1, gpus_per_node=1, rack_gpus=1)
    sizes = mesh.overrides() if mesh else _ones(raw)
    emulated = {"nvfp4": {**(raw.get("nvfp4") or {}), "backend": "emulated"}}
    return load_config(
        argv,
        **mode_defaults(raw, chosen_keys(argv)),
        **sizes,
        **(emulated if raw.get("quantization") == MODE else {}),
        num_slices=cluster.racks,
        internal_compile=True,
        internal_compile_num_devices=cluster.devices,
        skip_jax_distributed_system=True,
        log_config=False,
    )


def _ones(raw: Mapping[str, Any]) -> dict[str, int]:
    return {
        f"{network}_{name}_parallelism": 1
        for network in ("ici", "dcn")
        for name in cluster_mesh.parallelism(raw, network)
    }


def abstract_model(config: Any) -> nnx.Module:
    """The model in shapes, sharded over a mesh that has no devices."""
    from maxtext.utils.model_creation_utils import create_nnx_abstract_model

    sizes = mesh_sizes(config)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    model: nnx.Module = create_nnx_abstract_model(config, mesh)[1]
    return model


def undivided(
    model: nnx.Module, mesh: MeshPlan, machines: Callable[[int], str] = _nodes
) -> tuple[str, str] | None:
    """Which parameter of an abstract model its mesh does not divide, and what to write; None if it divides all."""
    found, largest = "", 0
    fsdp = mesh.ici.get("fsdp", 1)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        sharding, shape = leaf.get_value().sharding, leaf.get_value().shape
        for size, axes in zip(shape, sharding.spec, strict=False):
            names = (axes,) if isinstance(axes, str) else axes or ()
            parts = math.prod(sharding.mesh.shape[name] for name in names)
            if size % parts and not found:
                found = (
                    f"{'/'.join(map(str, path))} has {size} along an axis that is divided over {parts} devices "
                    f"({' and '.join(names)})"
                )
            if "fsdp" in names:
                others = parts // fsdp
                largest = math.gcd(largest, size // others if size % others == 0 else 1)
    return (found, _divides(mesh, largest, machines)) if found else None


def _divides(mesh: MeshPlan, largest: int, machines: Callable[[int], str]) -> str:
    """What to write where FSDP, which alone is filled in without being asked for, must divide `largest`."""
    fsdp, per_node = mesh.ici.get("fsdp", 1), mesh.cluster.gpus_per_node
    less = math.gcd(fsdp, largest)
    if less in (1, fsdp):
        return "sizes of the ici_* and dcn_* axes that divide it, or take another number of GPUs"
    split = f"ici_fsdp_parallelism={less} ici_data_parallelism={mesh.ici.get('data', 1) * fsdp // less}"
    # Fewer nodes of each rack, all of whose GPUs are FSDP's.
    fit = (
        count
        for count in range(mesh.cluster.per_rack // per_node, 0, -1)
        if largest % (count * per_node) == 0
    )
    nodes = next(fit, 0) if fsdp == mesh.cluster.per_rack else 0
    return f"{machines(nodes * mesh.cluster.racks)}, or {split}" if nodes else split
