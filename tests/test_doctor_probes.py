"""What `doctor` reads from a machine and an environment, on this machine and from recorded text."""

import ctypes
import os
import re
import socket
import tomllib
from pathlib import Path

import pytest

from maxtext_nvfp4.doctor import launch, probes
from maxtext_nvfp4.doctor.launch import Launch
from maxtext_nvfp4.doctor.targets import TARGETS, domain_of

ROOT = Path(__file__).parents[1]

TABLE = """\
NVIDIA GB200, 10.0, 189471, 580.95.05
NVIDIA GB200, 10.0, 189471, 580.95.05
"""

REPORT = """\
GPU 00000008:01:00.0
    Product Name                          : NVIDIA GB200
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 0
GPU 00000009:01:00.0
    Product Name                          : NVIDIA GB200
    Fabric
        State                             : In Progress
        Status                            : N/A
"""


def test_gpus_as_the_driver_lists_them():
    gpus, driver = probes.parse_gpus(TABLE, REPORT)
    assert driver == "580.95.05"
    assert [(gpu.name, gpu.capability, gpu.fabric) for gpu in gpus] == [
        ("NVIDIA GB200", "10.0", "Completed"),
        ("NVIDIA GB200", "10.0", "In Progress"),
    ]
    assert gpus[0].memory == 189471 * 2**20


def test_no_driver_is_no_gpus():
    assert probes.parse_gpus("", "") == ((), "")
    assert probes.parse_gpus("NVIDIA-SMI has failed, because it could not, communicate.\n", "") == ((), "")


def test_versions_are_those_of_the_package():
    """One source of truth: pyproject.toml, and for what it leaves open, the lock that the tests ran with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = probes.needed_versions()
    for requirement in project["dependencies"]:
        name, _, version = requirement.partition("==")
        if version:
            assert needed[name] == version
        else:
            assert name in needed
    assert needed["transformer-engine"] == "2.20.*"
    assert needed["python"] == "3.12.*"
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    for requirement in project["optional-dependencies"]["tested"]:
        name, _, version = requirement.partition("==")
        assert needed[name] == version
        assert re.search(rf"^{name}=={re.escape(version)} ", lock, re.M), requirement


def test_what_jax_gives_this_environment(monkeypatch):
    view = probes._jax({**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""})
    assert (view.platform, view.devices, view.error) == ("cpu", 1, "")
    broken = probes._jax({**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_magic=true"})
    assert broken.devices == 0
    assert broken.engine
    assert "xla_gpu_magic" in broken.error
    assert "\n" not in broken.error


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        ("F1201 12:00:00.1 77 parse_flags.cc:252] Unknown flag in XLA_FLAGS: --x\n*** Check failure stack trace: ***\n",
         "Unknown flag in XLA_FLAGS: --x"),
        ("Traceback\n  File x\nRuntimeError: Unable to initialize backend 'cuda'\n",
         "RuntimeError: Unable to initialize backend 'cuda'"),
        ("", "it ended with status 134"),
    ],
)  # fmt: skip
def test_last_words_of_a_process(stderr, says):
    assert probes.last_words(stderr, 134) == says


def test_versions_of_libraries():
    assert probes.dotted(131000) == "13.10.0"
    assert probes.dotted(92801) == "9.28.1"
    written = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(
        lambda place: place.__setitem__(0, 23203) or 0
    )
    assert probes._version(written) == 23203
    returned = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)(lambda place: 92801)
    assert probes._version(returned) == 92801


def test_this_machine():
    clock = probes._clock()
    assert clock is None or clock.error_seconds >= 0
    assert probes._shared_memory() is None or probes._shared_memory() > 0
    assert probes._installed("pytest")
    assert not probes._installed("no-such-distribution")


def test_a_folder_that_is_yet_to_be_made(tmp_path):
    place = probes.folder(str(tmp_path / "run" / "checkpoints"))
    assert (place.nearest, place.writable, place.saved) == (str(tmp_path), True, 0)
    assert place.free > 0
    assert place.kind != "unknown"
    made = tmp_path / "run" / "checkpoints"
    for name in ("5", "10", "10.orbax-checkpoint-tmp-3"):
        (made / name).mkdir(parents=True)
    assert probes.folder(str(made)).saved == 2


def test_a_file_in_the_way_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    assert not probes.folder(str(tmp_path / "file" / "checkpoints")).writable


def test_a_bucket_is_not_looked_at():
    assert probes.folder("gs://bucket/run/checkpoints").nearest == ""


@pytest.fixture
def listening():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_the_coordinator_is_tried(listening):
    def outcome(**place):
        return probes.reach(Launch(by="environment", host="localhost", **place))

    assert outcome(process=1, count=2, port=listening).outcome == "connected"
    assert outcome(process=0, count=2, port=listening).outcome == "taken"
    assert outcome(process=1, count=2).outcome == "resolved"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    assert outcome(process=1, count=2, port=free).outcome == "refused"
    assert outcome(process=0, count=2, port=free) == probes.Reached(address="127.0.0.1", outcome="free")


def test_a_name_that_does_not_resolve():
    nowhere = probes.reach(Launch(by="environment", host="tray1.invalid", port=1234, process=1, count=2))
    assert nowhere.address == ""
    assert nowhere.outcome


SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "tray[017-018],x1",
}
POD = {
    "JOB_COMPLETION_INDEX": "3",
    "PODS_IN_JOB": "18",
    "JOB_INDEX": "1",
    "JOBS": "2",
    "JAX_COORDINATOR_ADDRESS": "run-0-0.run:1234",
}
PLAIN = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_PROCESS_ID": "1", "JAX_PROCESS_COUNT": "2"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Launch(by="alone")),
        (SLURM, Launch(by="slurm", process=5, count=8, nodes=2, host="tray017", port=61440 + 904)),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "tray2,tray3"},
            Launch(by="slurm", process=5, count=8, nodes=2, host="tray2", port=62344),
        ),
        (
            {key: SLURM[key] for key in ("SLURM_NTASKS", "SLURM_PROCID")},
            Launch(by="slurm", process=5, count=8),
        ),
        (
            POD,
            Launch(by="kubernetes", process=(18 + 3) * 4, count=144, nodes=36, host="run-0-0.run", port=1234),
        ),
        (
            {
                "JOB_COMPLETION_INDEX": "1",
                "PODS_IN_JOB": "2",
                "PROCESSES_PER_POD": "1",
                "JAX_COORDINATOR_ADDRESS": "[::1]:61440",
            },
            Launch(by="kubernetes", process=1, count=2, nodes=2, host="::1", port=61440),
        ),
        (PLAIN, Launch(by="environment", process=1, count=2, host="10.0.0.1", port=1234)),
        # Slurm's word counts, whatever else is left in the environment.
        ({**PLAIN, **SLURM}, Launch(by="slurm", process=5, count=8, nodes=2, host="tray017", port=62344)),
    ],
)
def test_the_place_of_a_process(environment, place):
    assert launch.read(environment, 4) == place


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({**SLURM, "SLURM_PROCID": "8"}, "SLURM_PROCID=8: there are 8 by SLURM_NTASKS"),
        ({**SLURM, "SLURM_NTASKS": "many"}, "SLURM_NTASKS: got 'many': not a number"),
        ({**POD, "JOB_COMPLETION_INDEX": "18"}, "JOB_COMPLETION_INDEX=18"),
        ({**POD, "JOB_INDEX": "2"}, "JOB_INDEX=2: there are 2 by JOBS"),
        ({"JAX_PROCESS_COUNT": "2"}, "without JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID"),
        ({**PLAIN, "JAX_PROCESS_ID": "2"}, "write at most 1"),
        ({**PLAIN, "JAX_COORDINATOR_ADDRESS": "host:port"}, "got 'host:port': not an address"),
        ({**PLAIN, "JAX_COORDINATOR_ADDRESS": ":61440"}, "got ':61440': not an address"),
        ({**PLAIN, "JAX_COORDINATOR_ADDRESS": "host:99999"}, "got port 99999: not a port"),
        ({**SLURM, "SLURM_NTASKS": "\u00b2"}, "SLURM_NTASKS: got '\u00b2': not a number"),
        ({"JOB_COMPLETION_INDEX": "0"}, "without JAX_COORDINATOR_ADDRESS and PODS_IN_JOB"),
        ({"JOB_COMPLETION_INDEX": "0", "PODS_IN_JOB": "2"}, "without JAX_COORDINATOR_ADDRESS"),
    ],
)
def test_a_place_that_contradicts_itself(environment, says):
    assert says in launch.read(environment, 4).fault


def test_the_domain_of_a_gpu():
    assert domain_of("NVIDIA GB200", 4) == 72
    assert domain_of("NVIDIA B200", 8) == 8
    assert domain_of("NVIDIA H100 80GB HBM3", 8) == 8
    assert all(target.domain % target.gpus_per_node == 0 for target in TARGETS.values())
