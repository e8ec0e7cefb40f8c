"""Shared memory, locked memory, the clock and the way to the coordinator."""

from maxtext_nvfp4.doctor.facts import Situation
from maxtext_nvfp4.doctor.findings import Finding, note, ok, problem, size

_SHARED_MEMORY = 2**30
"""What NCCL's documentation gives containers, whose 64 MB are too little for it."""

_CLOCK_SECONDS = 1.0
"""Beyond this, logs of several nodes cannot be put in order."""


def shared_memory(situation: Situation) -> Finding | None:
    """/dev/shm holds what NCCL and the data workers put there."""
    have = situation.machine.shared_memory
    if not situation.on_gpus:
        return None
    fix = "docker: --shm-size=16g; Kubernetes: an emptyDir with medium Memory at /dev/shm; a host has half its memory"
    if have is None:
        return problem("there is no /dev/shm", fix)
    if have < _SHARED_MEMORY:
        return problem(f"/dev/shm holds {size(have)}: NCCL fails to initialize in less than 1 GiB", fix)
    return ok(f"/dev/shm holds {size(have)}")


def locked_memory(situation: Situation) -> Finding | None:
    """Network adapters may lock the memory that they read and write."""
    limit = situation.machine.locked_memory
    if not situation.on_gpus or situation.cluster.nodes == 1:
        return None
    if limit is not None:
        return note(
            f"ulimit -l is {size(limit)}: RDMA between nodes needs to lock more",
            "ulimit -l unlimited; docker: --ulimit memlock=-1; Kubernetes: capability IPC_LOCK",
        )
    return ok("ulimit -l is unlimited")


def clock(situation: Situation) -> Finding | None:
    """Something keeps the clock right."""
    clock, nodes = situation.machine.clock, situation.cluster.nodes
    if clock is None:
        return None
    if not clock.synchronized or clock.error_seconds > _CLOCK_SECONDS:
        found = "the kernel's clock is not synchronized"
        if clock.synchronized:
            found = f"the clock may be off by {clock.error_seconds:.3g} s"
        if nodes == 1:
            return ok(f"{found}; one node does without")
        return note(
            f"{found}: logs and TLS of {nodes} nodes may disagree", "start chronyd or systemd-timesyncd"
        )
    return ok(f"synchronized, off by {clock.error_seconds * 1000:.3g} ms at most")


def coordinator(situation: Situation) -> Finding | None:
    """The coordinator's name resolves, and its host can be reached."""
    launch, reached = situation.launch, situation.machine.coordinator
    if reached is None:
        return None
    where = f"{launch.host}:{launch.port}" if launch.port else launch.host
    if not reached.address:
        return problem(
            f"{launch.host} does not resolve: {reached.outcome}",
            "Slurm: srun, not ssh; Kubernetes: a headless Service and the pod's full name in JAX_COORDINATOR_ADDRESS",
        )
    found = f"coordinator {where} is {reached.address}"
    if reached.outcome == "taken":
        return problem(
            f"{found}: this process is to listen there, and another one does",
            "another port in JAX_COORDINATOR_ADDRESS, or end the other process",
        )
    words = {
        "connected": "and answers",
        "free": "this process, and its port is free",
        "refused": "and its host answers; the port opens when process 0 starts",
        "resolved": "by its name; no port is given to try",
    }
    if reached.outcome in words:
        return ok(f"{found}, {words[reached.outcome]}")
    return problem(
        f"{found}, and cannot be reached: {reached.outcome}",
        f"let TCP port {launch.port} through between the nodes",
    )
