"""What scripts/launch.sh makes of the environments that start it, how its processes end, and one run through it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import whole_runs as runs
import yaml

ROOT = Path(__file__).parent.parent

# Says who it is, then does what the test wants of it.
PROGRAM = f"""#!{sys.executable} -S
import json, os, sys
names = "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_PROCESS_COUNT", "JAX_LOCAL_DEVICE_IDS", "XLA_FLAGS"
print(json.dumps({{"arguments": sys.argv[1:], **{{name: os.environ.get(name) for name in names}}}}), flush=True)
exec(os.environ.get("BEHAVIOUR", ""))
"""

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "tray[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
POD = {"JOB_COMPLETION_INDEX": "1", "JAX_COORDINATOR_ADDRESS": "run-0-0.run", "PODS_IN_JOB": "2"}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "n1:7000", "JAX_PROCESS_ID": "1", "JAX_PROCESS_COUNT": "2"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """launch.sh of a checkout without .venv, beside a maxtext-nvfp4 that only pretends."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    program = tmp_path / "bin" / "maxtext-nvfp4"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return tmp_path / "scripts" / "launch.sh"


@pytest.fixture
def start(script: Path):
    """Starts launch.sh with nothing but the given environment."""

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [script, *arguments],
            env={"PATH": f"{script.parents[1]}/bin:/usr/bin:/bin", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def launch(start) -> Callable[..., list[dict[str, Any]]]:
    """Runs it to a good end; returns what its processes were told, by their number."""

    def launch(**environment: str) -> list[dict[str, Any]]:
        process = start("config.yml", "steps=3", **environment)
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        told = [json.loads(line) for line in said.splitlines()]
        assert all(process["arguments"] == ["train", "config.yml", "steps=3"] for process in told)
        return sorted(told, key=lambda process: int(process["JAX_PROCESS_ID"]))

    return launch


def places(told: list[dict[str, Any]]) -> list[tuple[str, str, str, str | None]]:
    names = "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_PROCESS_COUNT", "JAX_LOCAL_DEVICE_IDS"
    return [tuple(process[name] for name in names) for process in told]  # type: ignore[misc]


def test_a_slurm_task_is_one_process(launch) -> None:
    port = 61440 + 5000 % 4096
    assert places(launch(**SLURM)) == [(f"tray07:{port}", "5", "8", None)]
    assert places(launch(**SLURM, CUDA_VISIBLE_DEVICES="0,1,2,3")) == [(f"tray07:{port}", "5", "8", "1")]
    assert places(launch(**SLURM, JAX_COORDINATOR_ADDRESS="10.0.0.1")) == [("10.0.0.1:61440", "5", "8", None)]


@pytest.mark.parametrize("nodes", ["a1", "a1,b[2-3]", "a[1-2]", "a[1,3],b7", "a[1]"])
def test_the_coordinator_is_the_first_node_of_the_step(launch, nodes: str) -> None:
    assert places(launch(**{**SLURM, "SLURM_STEP_NODELIST": nodes}))[0][0].startswith("a1:")


def test_the_coordinator_under_slurm_is_the_one_that_jax_finds(launch, monkeypatch) -> None:
    from jax._src.clusters.slurm_cluster import SlurmCluster

    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert SlurmCluster.is_env_present()
    found = SlurmCluster.get_coordinator_address(timeout_secs=None, override_coordinator_port=None)
    assert [found] == [place[0] for place in places(launch(**SLURM))]


@pytest.mark.parametrize(("node", "tasks"), [("0", 4), ("1", 4), ("2", 2), ("3", 1)])
def test_the_tasks_of_each_node_are_counted_from_slurms_list(launch, node: str, tasks: int) -> None:
    here = {"SLURM_NODEID": node, "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2,1"}
    devices = ",".join(map(str, range(tasks)))
    assert places(launch(**{**SLURM, **here}, CUDA_VISIBLE_DEVICES=devices))[0][3] == "0"


def test_a_pod_of_an_indexed_job(launch) -> None:
    address = "run-0-0.run:61440"
    assert places(launch(**POD)) == [(address, "1", "2", None)]
    four = [(address, str(id), "8", str(id - 4)) for id in range(4, 8)]
    assert places(launch(**POD, CUDA_VISIBLE_DEVICES="0,1,2,3")) == four
    assert places(launch(**POD, CUDA_VISIBLE_DEVICES="0,1,2,3", PROCESSES_PER_POD="4")) == four
    assert places(launch(**POD, PROCESSES_PER_POD="2")) == [
        (address, "2", "4", None),
        (address, "3", "4", None),
    ]


def test_a_pod_of_a_job_set_of_two_racks(launch) -> None:
    told = launch(**POD, JOBS="2", JOB_INDEX="1", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert [place[1:] for place in places(told)] == [(str(12 + gpu), "16", str(gpu)) for gpu in range(4)]


def test_ids_of_all_pods_are_those_from_zero_up(launch) -> None:
    ids = [
        int(place[1])
        for job in ("0", "1")
        for pod in ("0", "1")
        for place in places(
            launch(
                **{**POD, "JOB_COMPLETION_INDEX": pod}, JOBS="2", JOB_INDEX=job, CUDA_VISIBLE_DEVICES="0,1"
            )
        )
    ]
    assert ids == list(range(8))


def test_a_process_described_by_hand(launch) -> None:
    assert places(launch(**BY_HAND)) == [("n1:7000", "1", "2", None)]
    assert places(launch(**BY_HAND, JAX_LOCAL_DEVICE_IDS="3", CUDA_VISIBLE_DEVICES="0,1,2,3")) == [
        ("n1:7000", "1", "2", "3")
    ]


def test_a_machine_alone(launch) -> None:
    [(address, *rest)] = places(launch())
    assert address.startswith("127.0.0.1:")
    assert rest == ["0", "1", None]
    told = places(launch(CUDA_VISIBLE_DEVICES="GPU-a,GPU-b"))
    assert [place[1:] for place in told] == [("0", "2", "0"), ("1", "2", "1")]
    assert len({place[0] for place in told}) == 1


@pytest.mark.parametrize("devices", ["", "-1", "NoDevFiles"])
def test_no_visible_gpu_is_one_process(launch, devices: str) -> None:
    assert [place[1:] for place in places(launch(CUDA_VISIBLE_DEVICES=devices))] == [("0", "1", None)]


def test_gpus_are_counted_by_nvidia_smi_where_nothing_hides_them(launch, script: Path) -> None:
    smi = script.parents[1] / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\n[ \"$1\" = -L ] && printf 'GPU 0: A (UUID: x)\\n  MIG 1g\\nGPU 1: A\\n'\n")
    smi.chmod(0o755)
    assert len(launch()) == 2
    assert len(launch(JAX_PLATFORMS="cpu")) == 1


def test_the_environment_of_gb200_is_for_gpus_alone(launch) -> None:
    assert launch(XLA_FLAGS="--mine")[0]["XLA_FLAGS"] == "--mine"
    flags = launch(XLA_FLAGS="--mine", CUDA_VISIBLE_DEVICES="0")[0]["XLA_FLAGS"].split()
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags
    assert flags[-1] == "--mine"


CANNOT_BE = {
    "device of nothing": (
        {"JAX_LOCAL_DEVICE_IDS": "0"},
        None,
        "set CUDA_VISIBLE_DEVICES to choose some; unset",
    ),
    "no config": ({}, [], "no config; write scripts/launch.sh CONFIG.yml"),
    "count without id": ({**BY_HAND, "JAX_PROCESS_ID": ""}, None, "JAX_PROCESS_ID is not set"),
    "id without count": ({**BY_HAND, "JAX_PROCESS_COUNT": ""}, None, "JAX_PROCESS_COUNT is not set"),
    "no coordinator": ({**BY_HAND, "JAX_COORDINATOR_ADDRESS": ""}, None, "JAX_COORDINATOR_ADDRESS is not"),
    "id too large": ({**BY_HAND, "JAX_PROCESS_ID": "2"}, None, "JAX_PROCESS_ID=2: write a whole number"),
    "id no number": ({**BY_HAND, "JAX_PROCESS_ID": "one"}, None, "JAX_PROCESS_ID=one: write a whole number"),
    "octal": ({**BY_HAND, "JAX_PROCESS_ID": "01"}, None, "JAX_PROCESS_ID=01: write a whole number"),
    "count zero": ({**BY_HAND, "JAX_PROCESS_COUNT": "0"}, None, "JAX_PROCESS_COUNT=0: write a whole number"),
    "port": ({**BY_HAND, "JAX_COORDINATOR_ADDRESS": "n1:x"}, None, "write host or host:port"),
    "port too large": ({**BY_HAND, "JAX_COORDINATOR_ADDRESS": "n1:70000"}, None, "write host or host:port"),
    "processes without index": ({"PROCESSES_PER_POD": "2"}, None, "Indexed; unset PROCESSES_PER_POD"),
    "pods without index": ({"PODS_IN_JOB": "2"}, None, "completionMode: Indexed; unset PODS_IN_JOB"),
    "pod without pods": ({**POD, "PODS_IN_JOB": ""}, None, "PODS_IN_JOB is not set"),
    "pod without coordinator": (
        {**POD, "JAX_COORDINATOR_ADDRESS": ""},
        None,
        "JAX_COORDINATOR_ADDRESS is not set",
    ),
    "pod out of range": ({**POD, "PODS_IN_JOB": "1"}, None, "JOB_COMPLETION_INDEX=1: write a whole number"),
    "job out of range": ({**POD, "JOB_INDEX": "1"}, None, "JOB_INDEX=1: write a whole number from 0 to 0"),
    "jobs no number": ({**POD, "JOBS": "two"}, None, "JOBS=two: write a whole number"),
    "pod with an id": (
        {**POD, "JAX_PROCESS_ID": "0"},
        None,
        "Kubernetes numbers the pods; unset JAX_PROCESS_ID",
    ),
    "processes and GPUs of a pod": (
        {**POD, "PROCESSES_PER_POD": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        None,
        "PROCESSES_PER_POD=2: this pod sees 4 GPUs",
    ),
    "Slurm without srun": (
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
        None,
        "SLURM_JOB_ID=7: this is a Slurm job, but not a task that srun started",
    ),
    "Slurm without count": ({**SLURM, "SLURM_NTASKS": ""}, None, "SLURM_NTASKS is not set"),
    "Slurm out of range": ({**SLURM, "SLURM_PROCID": "8"}, None, "SLURM_PROCID=8: write a whole number"),
    "Slurm with an id": ({**SLURM, "JAX_PROCESS_ID": "0"}, None, "Slurm numbers the processes; unset"),
    "Slurm's GPUs hidden": (
        {**SLURM, "CUDA_VISIBLE_DEVICES": "0"},
        None,
        "4 tasks on this node, and each sees 1 GPUs: one process per GPU",
    ),
    "one task for all GPUs": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x8)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        None,
        "write --ntasks-per-node=4 --gpus-per-node=4, and no --gpus-per-task",
    ),
}


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    CANNOT_BE.values(),
    ids=[name.replace(" ", "-") for name in CANNOT_BE],
)
def test_an_environment_that_cannot_be_is_one_message(
    start, environment: dict[str, str], arguments: list[str] | None, message: str
) -> None:
    process = start(*(["config.yml"] if arguments is None else arguments), **environment)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said == ""
    [line] = errors.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_without_the_program_the_message_says_how_to_get_it(start, script: Path) -> None:
    (script.parents[1] / "bin" / "maxtext-nvfp4").unlink()
    process = start("config.yml")
    assert "neither in" in process.communicate(timeout=60)[1]
    assert process.returncode == 2


def test_the_programs_of_a_virtual_environment_win(start, script: Path) -> None:
    program = script.parents[1] / ".venv" / "bin" / "maxtext-nvfp4"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho that of .venv\n")
    program.chmod(0o755)
    assert start("config.yml").communicate(timeout=60)[0] == "that of .venv\n"


def told(process: subprocess.Popen[str], count: int) -> list[int]:
    """Waits for processes to say who they are; returns their ids in the system, which BEHAVIOUR prints next."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2 * count)]
    return [int(line) for line in lines if line.strip().isdigit()]


def gone(pids: list[int], timeout: float = 5) -> bool:
    """Whether the processes end in a moment: the kernel takes one for it."""
    deadline = time.monotonic() + timeout
    while left := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]:
        if time.monotonic() > deadline:
            return not left
        time.sleep(0.02)
    return True


SLEEPS = "import time; print(os.getpid(), flush=True); time.sleep(600)"
SAVES = """
import signal, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print(os.getpid(), flush=True)
while not stop: time.sleep(0.02)
print("saved", flush=True)
"""


def test_when_one_process_dies_the_others_are_ended_at_once(start) -> None:
    ignores = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
    process = start("config.yml", CUDA_VISIBLE_DEVICES="0,1,2", BEHAVIOUR=ignores)
    pids = told(process, 3)
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait(30) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 5
    assert gone(pids)


def test_the_status_is_that_of_the_process_that_failed(start) -> None:
    one_fails = f"""if os.environ["JAX_PROCESS_ID"] == "1": sys.exit(3)\n{SLEEPS}"""
    process = start("config.yml", CUDA_VISIBLE_DEVICES="0,1", BEHAVIOUR=one_fails)
    process.communicate(timeout=30)
    assert process.returncode == 3


def test_a_process_that_is_done_first_ends_no_other(start) -> None:
    one_waits = """import time\nif os.environ["JAX_PROCESS_ID"] == "1": time.sleep(0.5); print("done")"""
    process = start("config.yml", CUDA_VISIBLE_DEVICES="0,1", BEHAVIOUR=one_waits)
    assert process.communicate(timeout=30)[0].endswith("done\n")
    assert process.returncode == 0


def test_sigterm_reaches_the_processes_and_the_status_tells_it_from_a_complete_run(start) -> None:
    process = start("config.yml", CUDA_VISIBLE_DEVICES="0,1", BEHAVIOUR=SAVES)
    told(process, 2)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "saved\nsaved\n"
    assert process.returncode == 128 + signal.SIGTERM


def test_a_run_that_was_stopped_elsewhere_is_not_complete(start) -> None:
    """As when only one pod of a job is evicted: all processes save and end, and the others' pods must come again."""
    stopped = """sys.exit(int(os.environ["MAXTEXT_NVFP4_STOPPED_STATUS"]))"""
    process = start("config.yml", CUDA_VISIBLE_DEVICES="0,1", BEHAVIOUR=stopped)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_failure_after_sigterm_is_a_failure(start) -> None:
    process = start("config.yml", BEHAVIOUR=f"{SAVES}sys.exit(5)")
    told(process, 1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupted_it_leaves_no_process(start, number: signal.Signals) -> None:
    # Under nohup the tests, and what they start, would ignore SIGHUP.
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    process = start("config.yml", CUDA_VISIBLE_DEVICES="0,1", BEHAVIOUR=SLEEPS)
    signal.signal(number, before)
    pids = told(process, 2)
    process.send_signal(number)
    process.wait(30)
    assert process.returncode != 0
    assert gone(pids)


# The flags of env/gb200.sh, known to the XLA that is installed: it aborts at others.
STEP = "import jax; print(jax.jit(lambda x: x + 1)(1.0))"


def sourced(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f". {ROOT}/scripts/env/gb200.sh; {command}"],
        env={"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_xla_knows_the_flags_of_gb200() -> None:
    compiles = f'exec {sys.executable} -c "{STEP}"'
    done = sourced(compiles)
    assert done.stdout == "2.0\n", done.stderr
    assert (
        "Unknown flag in XLA_FLAGS: --xla_gpu_mistake"
        in sourced(compiles, XLA_FLAGS="--xla_gpu_mistake=1").stderr
    )


def test_what_the_user_set_wins_over_gb200() -> None:
    done = sourced(
        'echo "$XLA_FLAGS $XLA_PYTHON_CLIENT_MEM_FRACTION ${xla-unset}"',
        XLA_FLAGS="--xla_gpu_enable_triton_gemm=true",
        XLA_PYTHON_CLIENT_MEM_FRACTION=".8",
    )
    words = done.stdout.split()
    ours, users = (words.index(f"--xla_gpu_enable_triton_gemm={value}") for value in ("false", "true"))
    assert ours < users  # XLA takes the later one
    assert words[-2:] == [".8", "unset"]


def test_xla_takes_the_later_of_two_equal_flags() -> None:
    count = "--xla_force_host_platform_device_count"
    program = "import jax; print(jax.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{count}=2 {count}=3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "3\n"


@pytest.mark.slow
def test_pods_train_as_processes_that_maxtext_finds_itself(tmp_path: Path) -> None:
    data = runs.make_corpus(tmp_path / "corpus")
    settings = {**runs.keys(data), "steps": 5, "ici_fsdp_parallelism": 2}
    settings["jax_cache_dir"] = str(tmp_path / "cache")
    _, expected = runs.train(tmp_path / "maxtext", settings, "maxtext", processes=2)

    folder = tmp_path / "launched"
    folder.mkdir()
    config = folder / "config.yml"
    settings |= {
        "base_output_directory": str(folder),
        "run_name": "run",
        "skip_jax_distributed_system": False,
    }
    config.write_text(yaml.safe_dump(settings))
    pods = runs.start_pods(
        ROOT / "scripts" / "launch.sh",
        folder,
        lambda pod: [config, f"metrics_file={folder}/{pod}.losses"],
        XLA_FLAGS="--xla_force_host_platform_device_count=1",  # part of the key of the compilation cache
    )
    job = runs.Job(pods, folder / "pod-0.log", folder / "0.losses")
    assert "process 0 of 2; coordinator localhost:" in job.wait()
    assert sorted(expected) == list(range(5))
    assert job.losses() == expected == runs.read_losses(folder / "1.losses")
