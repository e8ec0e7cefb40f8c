"""Reads the facts of this machine. The only part of `doctor` that runs programs and looks at the system."""

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from maxtext_nvfp4.doctor.facts import Clock, Folder, Gpu, JaxView, Machine, Reached
from maxtext_nvfp4.doctor.launch import Launch
from maxtext_nvfp4.doctor.targets import Target

_PACKAGE = "maxtext-nvfp4"
_IMEX = Path("/dev/nvidia-caps-imex-channels")
_SHARED_MEMORY = "/dev/shm"

_LIBRARIES = {
    "CUDA": ("libcudart.so.13", "cudaRuntimeGetVersion"),
    "cuBLASLt": ("libcublasLt.so.13", "cublasLtGetVersion"),
    "cuDNN": ("libcudnn.so.9", "cudnnGetVersion"),
    "NCCL": ("libnccl.so.2", "ncclGetVersion"),
}
"""By name: its file, and the function that says its version."""


def machine(environment: Mapping[str, str], launch: Launch, gpus: tuple[Gpu, ...], driver: str) -> Machine:
    """This machine with its GPUs, and what a process with these environment variables gets from JAX on it."""
    needed = needed_versions()
    return Machine(
        python=platform.python_version(),
        packages={name: version for name in needed if (version := _installed(name))},
        needed=needed,
        gpus=gpus,
        driver=driver,
        libraries=_libraries() if gpus else {},
        jax=_jax(environment),
        environment=environment,
        shared_memory=_shared_memory(),
        locked_memory=_locked_memory(),
        clock=_clock(),
        imex_channels=len(list(_IMEX.glob("channel*"))),
        coordinator=reach(launch) if launch.host else None,
    )


def as_target(machine: Machine, target: Target) -> Machine:
    """The machine with the GPUs of a node of the target in place of its own."""
    gpu = Gpu(name=target.gpu, capability=target.capability, memory=target.memory, fabric="Completed")
    return dataclasses.replace(machine, gpus=(gpu,) * target.gpus_per_node)


def needed_versions() -> dict[str, str]:
    """What this package's own metadata asks for, by distribution: a version, one ending in `.*`, or `any`.

    Of Transformer Engine and Orbax it is what the tests ran with: the extras `te` and `tested` pin them.
    """
    metadata = importlib.metadata.metadata(_PACKAGE)
    [oldest] = re.findall(r">=(\d+\.\d+)", metadata["Requires-Python"])
    needed = {"python": f"{oldest}.*"}
    for requirement in importlib.metadata.requires(_PACKAGE) or ():
        name, version, extra = re.fullmatch(  # type: ignore[union-attr]
            r"([\w-]+)(?:\[\w+\])?(?:==([\w.]+))?(?:; extra == '([\w-]+)')?", requirement
        ).groups()
        if extra is None or extra == "tested":
            needed[name] = version or "any"
        elif extra == "te" and name == "transformer-engine":
            needed[name] = ".".join(version.split(".")[:2]) + ".*"
    return needed


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """What a program prints; nothing if it is not there, fails, or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that NVIDIA's driver lists, and its version."""
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    return parse_gpus(
        _output("nvidia-smi", query, "--format=csv,noheader,nounits"), _output("nvidia-smi", "-q")
    )


def parse_gpus(table: str, report: str) -> tuple[tuple[Gpu, ...], str]:
    """GPUs and driver from nvidia-smi's table, and the states of their fabric from its report."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.count(",") == 3]
    states = re.findall(r"^\s+Fabric\s*\n\s+State\s*: (.+)$", report, re.M)
    gpus = tuple(
        Gpu(
            name=name,
            capability=capability,
            memory=int(mebibytes) * 2**20 if mebibytes.isdigit() else 0,
            fabric=states[index].strip() if index < len(states) else "N/A",
        )
        for index, (name, capability, mebibytes, _) in enumerate(rows)
    )
    return gpus, rows[0][3] if rows else ""


def _libraries() -> dict[str, str]:
    """Versions of the CUDA libraries that load, from their wheels or the loader's path."""
    found = {}
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    for name, (file, function) in _LIBRARIES.items():
        for path in (*(str(path) for root in roots for path in root.glob(f"*/lib/{file}")), file):
            with contextlib.suppress(OSError):
                number = _version(getattr(ctypes.CDLL(path), function))
                # CUDA's own numbers are in thousands: 13050 is 13.5.
                found[name] = f"{number // 1000}.{number % 1000 // 10}" if name == "CUDA" else dotted(number)
                break
    return found


def _version(function: Callable[..., int]) -> int:
    """The version that a library's function returns, or writes where its argument points."""
    function.restype = ctypes.c_size_t  # type: ignore[attr-defined]
    number = ctypes.c_int(0)
    returned = function(ctypes.byref(number))
    return number.value or returned


def dotted(number: int) -> str:
    """A version such as 23203 as 2.32.3, and 91002 as 9.10.2."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _jax(environment: Mapping[str, str]) -> JaxView:
    """What `jax_probe` says, in a process with the given environment that takes no memory ahead."""
    environment = {**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", "maxtext_nvfp4.doctor.jax_probe"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        return _no_jax("it did not answer within 300 s")
    if done.returncode:
        return _no_jax(last_words(done.stderr, done.returncode))
    return JaxView(**json.loads(done.stdout.splitlines()[-1]))


def _no_jax(error: str) -> JaxView:
    return JaxView(error=error, engine="JAX does not start, so Transformer Engine could not be tried")


def last_words(stderr: str, status: int) -> str:
    """The line of a failed process that says why: XLA's fatal message, or else the last one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
    return (fatal or lines or [f"it ended with status {status}"])[-1].rpartition("] ")[2]


def _shared_memory() -> int | None:
    try:
        usage = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return usage.f_frsize * usage.f_blocks


def _locked_memory() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _clock() -> Clock | None:
    """What adjtimex(2) says; state 5 is TIME_ERROR, an unsynchronized clock."""
    buffer = ctypes.create_string_buffer(512)
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (AttributeError, OSError):
        return None
    if state < 0:
        return None
    *_, microseconds, _, _ = struct.unpack_from("@Illlli", buffer)
    return Clock(synchronized=state != 5, error_seconds=microseconds / 1e6)


def reach(launch: Launch) -> Reached:
    """Tries the coordinator: process 0 whether it could listen, the others whether they get an answer."""
    try:
        address = socket.gethostbyname(launch.host)
    except OSError as error:
        return Reached(address="", outcome=error.strerror or str(error))
    if not launch.port:
        return Reached(address=address, outcome="resolved")
    if launch.process == 0:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", launch.port))
            except OSError:
                return Reached(address=address, outcome="taken")
        return Reached(address=address, outcome="free")
    try:
        socket.create_connection((address, launch.port), timeout=5).close()
    except ConnectionRefusedError:
        return Reached(address=address, outcome="refused")
    except OSError as error:
        return Reached(address=address, outcome=error.strerror or str(error))
    return Reached(address=address, outcome="connected")


def folder(path: str) -> Folder:
    """A folder for checkpoints, as it is or as it could be made."""
    if "://" in path:
        return Folder(path=path, nearest="", writable=False, free=0, kind="", saved=0)
    place = Path(path).absolute()
    nearest = next(parent for parent in (place, *place.parents) if parent.exists())
    usage = os.statvfs(nearest)
    saved = [child for child in place.glob("*") if child.name.isdigit()] if nearest == place else []
    return Folder(
        path=path,
        nearest=str(nearest),
        writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        free=usage.f_frsize * usage.f_bavail,
        kind=_file_system(nearest),
        saved=len(saved),
    )


def _file_system(path: Path) -> str:
    """Type of the file system that holds a path: that of the longest mount point above it."""
    kinds = {}
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split()
        kinds[Path(mount.replace("\\040", " "))] = kind
    real = path.resolve()
    return next((kinds[parent] for parent in (real, *real.parents) if parent in kinds), "unknown")
