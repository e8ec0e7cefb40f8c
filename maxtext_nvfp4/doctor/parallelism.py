"""The run's mesh, processes and batch on its cluster."""

from maxtext_nvfp4.doctor.cluster import counted
from maxtext_nvfp4.doctor.facts import Situation
from maxtext_nvfp4.doctor.findings import Finding, ok, problem


def racks(situation: Situation) -> Finding:
    """Every NVLink domain has as many GPUs of the run as the others."""
    cluster = situation.cluster
    if fault := cluster.fault():
        return problem(fault[0], fault[1])
    return ok(cluster.describe())


def mesh(situation: Situation) -> Finding | None:
    """The `ici_*` axes make up an NVLink domain, the `dcn_*` axes their number: 1 within a rack."""
    run = situation.run
    if run is None:
        return None
    if run.mesh_fault:
        return problem(run.mesh_fault, run.mesh_fix)
    if run.plan is None:  # the cluster is at fault
        return None
    return ok(run.plan.arguments())


def processes(situation: Situation) -> Finding | None:
    """The processes that the launcher makes are those that the config expects."""
    launch, run, cluster = situation.launch, situation.run, situation.cluster
    if launch.fault:
        return problem(launch.fault, "an environment as in docs/clusters.md")
    if run is None:
        return ok(_place(situation))
    hardware, alone = run.keys["hardware"], bool(run.keys["skip_jax_distributed_system"])
    if launch.count > 1 and alone:
        return problem(
            f"{launch.count} processes, and skip_jax_distributed_system: true: each would train by itself",
            "skip_jax_distributed_system: false",
        )
    if alone and cluster.nodes > 1:
        return problem(
            f"{cluster.nodes} nodes, and skip_jax_distributed_system: true: each would train by itself",
            "skip_jax_distributed_system: false",
        )
    if launch.count > 1 and hardware == "gpu":
        return problem(
            f"{launch.count} processes by {launch.by}, and hardware: gpu, which does not look there for its place",
            "hardware: gpu_multiprocess",
        )
    if (
        launch.by == "alone"
        and hardware in ("cpu", "gpu_multiprocess")
        and cluster.devices == 1
        and not alone
    ):
        return problem(
            f"hardware: {hardware} joins a job of several processes, and this one was started alone",
            "skip_jax_distributed_system: true",
        )
    counts = hardware == "gpu_multiprocess" and launch.count > 1 and not situation.cluster_given
    if counts and launch.count != cluster.devices:
        found = f"{launch.count} processes by {launch.by} for {cluster.devices} GPUs"
        if launch.count == cluster.nodes:
            found += ": each would see one GPU of its node, and the others idle"
        return problem(
            found,
            f"one process per GPU, that is {cluster.gpus_per_node} tasks a node; before a job, give --nodes and "
            "--gpus-per-node",
        )
    return ok(_place(situation))


def _place(situation: Situation) -> str:
    launch, devices = situation.launch, situation.cluster.devices
    if launch.by == "alone":
        return "started alone" + ("; scripts/launch.sh starts a process for each GPU" if devices > 1 else "")
    return f"process {launch.process} of {launch.count} by {launch.by}"


def batch(situation: Situation) -> Finding | None:
    """The rows of a microbatch divide over the devices that split them."""
    run = situation.run
    if run is None or run.plan is None:
        return None
    rows, parts = run.rows, run.row_parts
    if rows % parts:
        return problem(
            f"a microbatch of {counted(rows, 'row')} does not divide over {parts} devices",
            f"a larger per_device_batch_size than {run.keys['per_device_batch_size']}, or fewer data and FSDP parts",
        )
    return ok(f"{counted(rows, 'row')} over {counted(parts, 'device')}")
