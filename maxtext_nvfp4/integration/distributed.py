"""The processes that train together, as `scripts/launch.sh` describes them: JAX is told before MaxText asks.

MaxText looks for its processes in other variables on each kind of hardware, on CPUs at a fixed port, and
leaves GPUs to what JAX detects. It takes a job that is initialized already as it is.
"""

import dataclasses
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.recipe import problem

_COORDINATOR, _ID, _COUNT = "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_PROCESS_COUNT"

_MAXTEXT_CPU_JOB = ("JOB_INDEX", "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB", _COUNT)
"""Variables without which MaxText itself cannot start a distributed job on CPUs."""

_RETRY_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Place of this process among those that train together.

    Attributes:
      coordinator: Host and port where process 0 listens.
      process: Number of this process, from 0.
      processes: How many there are.
    """

    coordinator: str
    process: int
    processes: int


def job_of(environment: Mapping[str, str]) -> Job | None:
    """The job that the environment describes; None if it numbers no process.

    Raises:
      ConfigError: The description is incomplete or contradicts itself.
    """
    if _ID not in environment:
        return None
    for name in (_COORDINATOR, _COUNT):
        if name not in environment:
            why = f"it is a process of a job, but the environment has no {name}"
            raise ConfigError(problem(_ID, environment[_ID], why, f"{name} too, or start scripts/launch.sh"))
    coordinator = environment[_COORDINATOR]
    if not re.fullmatch(r"(\[[^]]+\]|[^:]+):\d+", coordinator):
        raise ConfigError(problem(_COORDINATOR, coordinator, "not host:port", f"{_COORDINATOR}=host:61440"))
    if int(coordinator.rpartition(":")[2]) >= 2**16:
        raise ConfigError(problem(_COORDINATOR, coordinator, "not a port", "a port from 1 to 65535"))
    for name in (_ID, _COUNT):
        if not re.fullmatch(r"\d+", environment[name]):
            raise ConfigError(problem(name, environment[name], "not a whole number", f"{name}=1, say"))
    job = Job(coordinator=coordinator, process=int(environment[_ID]), processes=int(environment[_COUNT]))
    if job.process >= job.processes:
        why = f"processes are numbered from 0, and {_COUNT} is {job.processes}"
        raise ConfigError(problem(_ID, job.process, why, f"a number below {job.processes}"))
    return job


def check_job(raw: Mapping[str, Any]) -> None:
    """Checks that a config and the environment agree on whether this process trains alone.

    Args:
      raw: All keys of the run.

    Raises:
      ConfigError: They do not, or a distributed job has no environment for one.
    """
    job = job_of(os.environ)
    if _trains_alone(raw):
        if job is not None and job.processes > 1:
            why = f"this is process {job.process} of {job.processes}, and each would train by itself"
            write = "skip_jax_distributed_system: false"
            raise ConfigError(problem("skip_jax_distributed_system", True, why, write))
        return
    if jax.distributed.is_initialized():
        return
    hardware = raw.get("hardware")
    if job is not None and job.processes > 1 and hardware == "tpu":
        why = f"this is process {job.process} of {job.processes} on GPUs or CPUs; TPUs find theirs by themselves"
        raise ConfigError(problem("hardware", hardware, why, "hardware: gpu_multiprocess, or hardware: cpu"))
    missing = [name for name in _MAXTEXT_CPU_JOB if name not in os.environ]
    if hardware == "cpu" and job is None and missing:
        why = f"hardware: cpu joins a distributed job, but the environment has no {', '.join(missing)}"
        write = "skip_jax_distributed_system: true, to run in one process, or start scripts/launch.sh"
        raise ConfigError(problem("skip_jax_distributed_system", False, why, write))


def join_job(raw: Mapping[str, Any]) -> None:
    """Joins the job that the environment describes, if it does and the config does not train alone.

    JAX takes from JAX_LOCAL_DEVICE_IDS which of the GPUs that CUDA shows it this process uses.

    Args:
      raw: All keys of the run, which `check_job` has accepted.

    Raises:
      ConfigError: The coordinator cannot be reached, or its port is taken.
    """
    job = job_of(os.environ)
    if job is None or raw.get("hardware") == "tpu" or _trains_alone(raw) or jax.distributed.is_initialized():
        return
    timeout = int(raw["jax_distributed_initialization_timeout"])
    logging.info("process %d of %d; coordinator %s", job.process, job.processes, job.coordinator)
    if job.process > 0:
        _wait_for_coordinator(job, timeout)
    else:
        _wait_for_name(job, timeout)
        _check_port(job)
    jax.distributed.initialize(
        job.coordinator,
        job.processes,
        job.process,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout,
    )
    if raw.get("enable_emergency_checkpoint"):  # what MaxText does when it initializes by itself
        ocp.multihost.initialize_runtime_to_distributed_ids()
        ocp.multihost.initialize_distributed_to_device_ids()


def _trains_alone(raw: Mapping[str, Any]) -> bool:
    return bool(raw.get("skip_jax_distributed_system") or raw.get("enable_single_controller"))


def _wait_for_coordinator(job: Job, timeout: float) -> None:
    """Waits until something listens there; JAX would abort with a stack trace once the time is over.

    A name that does not resolve yet is waited for too: Kubernetes makes it when the pod starts.
    """
    _wait(
        job,
        timeout,
        lambda address: socket.create_connection(address, timeout=_RETRY_SECONDS).close(),
        f"process {job.process} of {job.processes} did not reach it",
        "the host of process 0 and a port that is open between the hosts; is process 0 running?",
    )


def _wait_for_name(job: Job, timeout: float) -> None:
    """Waits until the coordinator's name resolves on its own host; JAX would abort."""
    _wait(
        job,
        timeout,
        lambda address: socket.getaddrinfo(*address),
        "its name did not resolve",
        "a name or address of the host of process 0",
    )


def _wait(
    job: Job, timeout: float, attempt: Callable[[tuple[str, int]], object], failed: str, write: str
) -> None:
    """Repeats an attempt on the coordinator's host and port until it raises no OSError."""
    host, _, port = job.coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            attempt((host.strip("[]"), int(port)))
            return
        except OSError as error:
            if time.monotonic() > deadline:
                why = f"{failed} within {timeout:g} s ({error})"
                raise ConfigError(problem(_COORDINATOR, job.coordinator, why, write)) from None
        time.sleep(_RETRY_SECONDS)


def _check_port(job: Job) -> None:
    """Checks that the coordinator can listen; JAX would crash."""
    port = int(job.coordinator.rpartition(":")[2])
    family, anywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((anywhere, port))
        except OSError as error:
            why = f"process 0 of {job.processes} cannot listen there ({error.strerror})"
            raise ConfigError(problem(_COORDINATOR, job.coordinator, why, "another port")) from None
