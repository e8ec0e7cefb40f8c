"""How this process was started: by Slurm, by Kubernetes, by hand, or alone. As scripts/launch.sh reads it."""

import dataclasses
import re
from collections.abc import Mapping

from maxtext_nvfp4.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of a process in a job.

    Attributes:
      by: `slurm`, `kubernetes`, `environment` or `alone`.
      process: Its number, counted from 0.
      count: Processes of the job.
      nodes: Machines of the job; 0 if that is not known.
      host: Name of the coordinator's host; empty without one.
      port: The coordinator's port; 0 if it is not named.
      fault: What in the environment contradicts itself, and what to write; empty if nothing does.
    """

    by: str
    process: int = 0
    count: int = 1
    nodes: int = 0
    host: str = ""
    port: int = 0
    fault: str = ""


_PORT = 61440
"""The port that scripts/launch.sh takes where none is named."""

_BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_PROCESS_COUNT")


def read(environment: Mapping[str, str], gpus: int) -> Launch:
    """The place that environment variables give this process, on a machine with so many GPUs or none and 1."""
    try:
        if {"SLURM_PROCID", "SLURM_NTASKS"} <= environment.keys():
            return _slurm(environment)
        if "JOB_COMPLETION_INDEX" in environment:
            return _kubernetes(environment, gpus)
        if environment.keys() & set(_BY_HAND):
            return _by_hand(environment)
    except ConfigError as error:
        return Launch(by="environment", fault=str(error))
    return Launch(by="alone")


def _slurm(environment: Mapping[str, str]) -> Launch:
    process, count = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
    _check(process, count, "SLURM_PROCID", "SLURM_NTASKS")
    there = _number(environment, "SLURM_JOB_NUM_NODES", 0)
    hosts = environment.get("SLURM_STEP_NODELIST", "")
    if not hosts:  # in the batch script itself, outside srun
        return Launch(by="slurm", process=process, count=count, nodes=there)
    # JAX's own rule: the first host of the step, and a port made of the job's number.
    port = 61440 + _number(environment, "SLURM_JOB_ID") % 4096
    host = _first_host(hosts)
    return Launch(by="slurm", process=process, count=count, nodes=there, host=host, port=port)


def _first_host(hosts: str) -> str:
    """The first of a list such as `tray[001-018,020],x1`."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", hosts)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={hosts}: names no host; start it with srun")
    return "".join(filter(None, match.groups()))


def _kubernetes(environment: Mapping[str, str], gpus: int) -> Launch:
    _need(environment, ("JOB_COMPLETION_INDEX", "JAX_COORDINATOR_ADDRESS", "PODS_IN_JOB"))
    pod, pods = _number(environment, "JOB_COMPLETION_INDEX"), _number(environment, "PODS_IN_JOB")
    job, jobs = _number(environment, "JOB_INDEX", 0), _number(environment, "JOBS", 1)
    each = _number(environment, "PROCESSES_PER_POD", gpus)
    _check(pod, pods, "JOB_COMPLETION_INDEX", "PODS_IN_JOB")
    _check(job, jobs, "JOB_INDEX", "JOBS")
    host, port = _address(environment)
    return Launch(
        by="kubernetes",
        process=(job * pods + pod) * each,
        count=jobs * pods * each,
        nodes=jobs * pods,
        host=host,
        port=port,
    )


def _by_hand(environment: Mapping[str, str]) -> Launch:
    _need(environment, _BY_HAND)
    process, count = _number(environment, "JAX_PROCESS_ID"), _number(environment, "JAX_PROCESS_COUNT")
    _check(process, count, "JAX_PROCESS_ID", "JAX_PROCESS_COUNT")
    host, port = _address(environment)
    return Launch(by="environment", process=process, count=count, host=host, port=port)


def _address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and port of JAX_COORDINATOR_ADDRESS, which has `host` or `host:port`, an IPv6 address in brackets."""
    text = environment.get("JAX_COORDINATOR_ADDRESS", "")
    match = re.fullmatch(r"(\[[^]]+\]|[^:]+)(?::([0-9]+))?", text)
    if match is None:
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS: got {text!r}: not an address; write host:{_PORT}")
    host, port = match[1].strip("[]"), match[2] or environment.get("JAX_COORDINATOR_PORT", "") or "0"
    if not re.fullmatch("[0-9]+", port) or int(port) >= 2**16:
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS: got port {port}: not a port; write {match[1]}:{_PORT}")
    return host, int(port)


def _need(environment: Mapping[str, str], names: tuple[str, ...]) -> None:
    """Raises ConfigError unless the environment has all of these variables."""
    if missing := [name for name in names if name not in environment]:
        there = [name for name in names if name in environment]
        raise ConfigError(
            f"{' and '.join(there)} without {' and '.join(missing)}: a job needs all {len(names)}; write them "
            "all, or none"
        )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not re.fullmatch("[0-9]+", text):
        raise ConfigError(f"{name}: got {text!r}: not a number; write an integer of 0 or more")
    return int(text)


def _check(process: int, count: int, name: str, names: str) -> None:
    if process >= count:
        raise ConfigError(
            f"{name}={process}: there are {count} by {names}, counted from 0; write at most {count - 1}"
        )
