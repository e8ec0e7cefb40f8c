"""`maxtext-nvfp4 doctor` and `mesh` on this machine, which has no GPU."""

import functools
import json
import os
import re
import textwrap
from pathlib import Path

import jax
import pytest
import yaml
from doctor_facts import MODEL

from maxtext_nvfp4 import cli
from maxtext_nvfp4.doctor import probes
from maxtext_nvfp4.doctor.targets import TARGETS

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="says what a machine without a GPU is told"
)


@pytest.fixture(autouse=True)
def one_look_at_jax(monkeypatch):
    """Asks JAX once for all tests: each time is a process of its own."""
    view = _view()
    monkeypatch.setattr(probes, "_jax", lambda environment: view)
    monkeypatch.setattr(probes, "gpus", lambda: ((), ""))


@functools.cache
def _view():
    return probes._jax(os.environ)


def doctor(capsys, *arguments):
    """Exit status and checks by name."""
    status = cli.main(["doctor", *arguments, "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert report["can_start"] == (status == 0)
    return status, {check["name"]: check for check in report["checks"]}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yml"
    keys = {**MODEL, "hardware": "cpu", "attention": "dot_product", "skip_jax_distributed_system": True}
    path.write_text(yaml.safe_dump({**keys, "base_output_directory": str(tmp_path)}))
    return str(path)


def test_a_machine_without_a_gpu_is_told_so(capsys):
    status, checks = doctor(capsys)
    assert status == 0
    hardware = checks["nvfp4_hardware"]
    assert hardware["status"] == "note"
    assert "NVFP4 hardware is missing: there is no NVIDIA GPU here" in hardware["found"]
    assert "backend emulated works here" in hardware["fix"]
    assert "--target gb200" in hardware["fix"]


def test_a_run_on_the_cpu_can_start(config, capsys):
    assert cli.main(["doctor", config]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-1].startswith("the run can start: 1 note, ")
    assert "by backend emulated" in out


def test_a_run_on_gpus_cannot_start_here(capsys):
    status, checks = doctor(capsys, str(ROOT / "configs" / "llama3-8b.yml"))
    assert status == 2
    assert checks["platform"]["status"] == "problem"
    assert "--target gb200" in checks["platform"]["fix"]
    assert checks["nvfp4_hardware"]["status"] == "note"


def test_cpus_of_several_machines_are_one_slice(capsys):
    """As `scripts/slurm/train.sbatch` asks before the demo runs on nodes without GPUs."""
    keys = ("skip_jax_distributed_system=false", "ici_fsdp_parallelism=2", "dataset_type=synthetic")
    cluster = ("--nodes", "2", "--gpus-per-node", "1")
    status, checks = doctor(capsys, *cluster, str(ROOT / "configs" / "demo-cpu.yml"), *keys)
    assert status == 0
    assert checks["mesh"]["status"] == "ok"


@pytest.mark.parametrize(
    ("name", "target", "nodes", "racks"),
    [
        ("llama3-8b", "gb200", 1, "1 x 4 = 4 devices in 1 NVLink domain"),
        ("llama3.1-70b", "gb200", 16, "16 x 4 = 64 devices in 1 NVLink domain"),
        ("llama3.1-405b", "gb300", 32, "32 x 4 = 128 devices in 2 NVLink domains of 64"),
        ("qwen3-8b", "b300", 2, "2 x 8 = 16 devices in 2 NVLink domains of 8"),
    ],
)
def test_the_examples_can_start_where_they_are_meant_for(name, target, nodes, racks, capsys):
    path = str(ROOT / "configs" / f"{name}.yml")
    status, checks = doctor(capsys, "--target", target, "--nodes", str(nodes), path)
    assert status == 0
    assert checks["racks"]["found"] == racks
    for check in ("mesh", "gpu_memory", "gemm_shapes", "batch", "gradient_accumulation", "attention"):
        assert checks[check]["status"] == "ok", checks[check]
    assert "by backend transformer_engine" in checks["recipe"]["found"]
    assert TARGETS[target].gpu in checks["nvfp4_hardware"]["found"]
    assert "platform" not in checks


def test_a_config_for_another_kind_of_device(tmp_path, capsys):
    """MaxText takes TPUs unless told otherwise."""
    path = tmp_path / "tpu.yml"
    path.write_text(yaml.safe_dump({key: value for key, value in MODEL.items() if key != "hardware"}))
    status, checks = doctor(capsys, str(path), "--target", "gb200", f"base_output_directory={tmp_path}")
    assert status == 2
    assert checks["hardware_key"]["status"] == "problem"
    assert "hardware: tpu" in checks["hardware_key"]["found"]
    assert checks["hardware_key"]["fix"] == "hardware: gpu_multiprocess"
    status, checks = doctor(capsys, str(path), f"base_output_directory={tmp_path}")
    assert checks["hardware_key"]["fix"] == "hardware: cpu"


def test_a_model_that_is_too_large_for_a_tray(capsys):
    status, checks = doctor(capsys, str(ROOT / "configs" / "llama3.1-405b.yml"), "--target", "gb200")
    assert status == 2
    # 406 billion parameters of 16 bytes on 4 GPUs.
    assert "1.62 TB a GPU of 186 GB" in checks["gpu_memory"]["found"]
    assert "more GPUs" in checks["gpu_memory"]["fix"]


def test_sizes_that_the_kernels_do_not_take(capsys):
    path = str(ROOT / "configs" / "qwen3-8b.yml")
    arguments = ["per_device_batch_size=1", "max_target_length=4128"]
    status, checks = doctor(capsys, path, *arguments, "--target", "gb200")
    assert status == 2
    assert "wgrad: M=4128 (tokens on one device) is not a multiple of 64" in checks["gemm_shapes"]["found"]
    assert "nvfp4.on_unsupported: bf16" in checks["gemm_shapes"]["fix"]


def test_variables_that_would_interfere_are_named_and_hidden(config, capsys, monkeypatch):
    monkeypatch.setenv("M_CHECKPOINT_PERIOD", "100")
    monkeypatch.setenv("M_ICI_FSDP_PARALLELISM", "3")
    status, checks = doctor(capsys, config)
    assert status == 0
    assert checks["config_environment"]["status"] == "note"
    assert "M_CHECKPOINT_PERIOD" in checks["config_environment"]["found"]
    assert "M_ICI_FSDP_PARALLELISM" in checks["config_environment"]["found"]
    assert (
        "3 of them at most" in checks["checkpoint_space"]["found"]
    )  # of 10 steps, not one of the variable's 100
    assert os.environ["M_CHECKPOINT_PERIOD"] == "100"


def test_without_maxtext_the_config_is_not_read(config, capsys, monkeypatch):
    installed = probes._installed
    monkeypatch.setattr(probes, "_installed", lambda name: "" if name == "maxtext" else installed(name))
    status, checks = doctor(capsys, config)
    assert status == 2
    assert "maxtext not installed" in checks["pinned_packages"]["found"]
    assert checks["config"]["found"].startswith("CONFIG was not read: maxtext not installed")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bas_emb_dim=3"], "bas_emb_dim: got 3: no such MaxText option; write base_emb_dim"),
        (
            ["ici_fsdp_parallelism=four"],
            "ici_fsdp_parallelism: got four: not a number of devices; write an integer of 1 or more",
        ),
        (["nvfp4.recipe=papers"], "nvfp4.recipe"),
    ],
)
@pytest.mark.parametrize("command", ["doctor", "mesh"])
def test_a_mistake_in_the_config_is_one_message(command, arguments, says, config, capsys):
    assert cli.main([command, config, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "0"], "got 0: not a count; write an integer from 1 to 999999"),
        (["--nodes", "\u0663"], "not a count"),
        (["--nodes", "99999999999999999999"], "not a count"),
        (["--target", "h100"], "gb200"),
        (["--gpus"], "--gpus"),
    ],
)
def test_wrong_options(arguments, says, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["doctor", *arguments])
    assert error.value.code == 2
    assert says in capsys.readouterr().err


def test_targets_of_the_command_line_are_those_of_the_table(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert f"{{{','.join(TARGETS)}}}" in capsys.readouterr().out


def test_mesh_says_the_same_as_text_and_as_json(capsys):
    arguments = ["mesh", str(ROOT / "configs" / "llama3.1-405b.yml"), "--nodes", "32", "--gpus-per-node", "4"]
    assert cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cluster"] == {
        "nodes": 32, "gpus_per_node": 4, "rack_gpus": 72, "racks": 2, "gpus_per_rack": 64,
    }  # fmt: skip
    assert report["settings"] == {
        "ici_fsdp_parallelism": 64, "dcn_data_parallelism": 1, "dcn_fsdp_parallelism": 2,
    }  # fmt: skip
    assert report["settings"].items() <= report["parallelism"].items()
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == " ".join(f"{key}={value}" for key, value in report["settings"].items())
    assert all(why in text for why in report["why"])


def test_the_page_shows_what_mesh_prints(capsys):
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"^    \$ maxtext-nvfp4 (mesh .*)\n((?:    .*\n|\n)+)", page, re.M)[0]
    arguments = [str(ROOT / word) if word.endswith(".yml") else word for word in command.split()]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == textwrap.dedent(shown).strip() + "\n"


def test_a_mesh_that_cannot_be(config, capsys):
    assert cli.main(["mesh", config, "ici_tensor_parallelism=5", "--nodes", "18"]) == 2
    assert "write ici_tensor_parallelism: 4, or another number of GPUs" in capsys.readouterr().err
    assert cli.main(["mesh", config, "--nodes", "37"]) == 2
    assert "write --nodes 36 or --nodes 39" in capsys.readouterr().err
