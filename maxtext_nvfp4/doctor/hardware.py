"""GPUs, driver and CUDA libraries."""

from maxtext_nvfp4.backends.te_library import CAPABILITIES
from maxtext_nvfp4.doctor.facts import Gpu, Situation
from maxtext_nvfp4.doctor.findings import Finding, note, ok, problem, size

OLDEST_DRIVER = 580
"""First branch of NVIDIA's driver that runs CUDA 13, for which JAX and Transformer Engine are built here.

Source: docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility.
"""

OLDEST_LIBRARIES = {"cuBLASLt": "12.8", "cuDNN": "9.3"}
"""What Transformer Engine needs on Blackwell: the libraries of CUDA 12.8, and cuDNN 9.3.

Source: prerequisites in Transformer Engine's installation guide.
"""

_BLACKWELL = "B200, GB200, B300 or GB300"


def nvfp4(situation: Situation) -> Finding:
    """The GPUs have NVFP4: compute capability 10.0 or 10.3."""
    gpus, run = situation.machine.gpus, situation.run
    have = next((gpu for gpu in gpus if gpu.capability not in CAPABILITIES), None)
    if gpus and have is None:
        return ok(f"{len(gpus)} x {gpus[0].name}, compute capability {gpus[0].capability}")
    found = "NVFP4 hardware is missing: " + (_without(have) if have else "there is no NVIDIA GPU here")
    if run is not None and run.backend_wanted == "transformer_engine":
        return problem(
            f"{found}; nvfp4.backend is transformer_engine",
            f"nvfp4.backend: emulated, which works on any machine, or {_BLACKWELL}",
        )
    return note(
        found,
        "nothing to try a recipe: backend emulated works here, with the same codes, and auto chooses it; for "
        f"NVFP4's speed {_BLACKWELL}, or --target gb200 to check a config as if there",
    )


def _without(gpu: Gpu) -> str:
    text = f"{gpu.name} has compute capability {gpu.capability}, not {' or '.join(CAPABILITIES)}"
    if gpu.capability.startswith("12."):
        # Reported against Transformer Engine, which lets these GPUs pass its own check.
        text += ", and stochastic rounding would return zeros there without saying so"
    return text


def key(situation: Situation) -> Finding | None:
    """`hardware` names the kind of device that is there."""
    run, gpus = situation.run, situation.machine.gpus
    if run is None:
        return None
    hardware = str(run.keys["hardware"])
    if hardware.startswith("tpu") and situation.machine.jax.platform != "tpu":
        return problem(
            f"hardware: {hardware}, which is MaxText's default, and there is no TPU",
            f"hardware: {'gpu_multiprocess' if gpus else 'cpu'}",
        )
    if hardware == "cpu" and gpus:
        return note(f"hardware: cpu leaves {len(gpus)} x {gpus[0].name} idle", "hardware: gpu_multiprocess")
    return ok(f"hardware: {hardware}")


def start(situation: Situation) -> Finding:
    """JAX starts in this environment."""
    jax = situation.machine.jax
    if jax.error:
        return problem(
            f"JAX does not start: {jax.error}", "what the message says; XLA_FLAGS and JAX_* are read then"
        )
    return ok(f"JAX has {jax.devices} x {jax.platform}")


def platform(situation: Situation) -> Finding | None:
    """JAX has the kind of device that the config asks for."""
    jax, run = situation.machine.jax, situation.run
    if run is None or jax.error:
        return None
    found = f"JAX has {jax.devices} x {jax.platform}"
    hardware = str(run.keys["hardware"])
    if situation.on_gpus and jax.platform != "gpu":
        write = "hardware: cpu and skip_jax_distributed_system: true to try it here"
        if situation.machine.gpus:
            write = "./scripts/install_te.sh, which adds JAX's CUDA packages, and no JAX_PLATFORMS"
        return problem(
            f"hardware: {hardware}, but {found}", f"{write}, or --target gb200 to check it as if there"
        )
    return ok(f"{found}, hardware: {hardware}")


def visible(situation: Situation) -> Finding | None:
    """JAX sees every GPU of the machine."""
    machine = situation.machine
    if not machine.gpus or machine.jax.platform != "gpu":
        return None
    environment = machine.environment
    seen, there = machine.jax.devices, len(machine.gpus)
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    per_task = environment.get("SLURM_GPUS_PER_TASK")
    if per_task or (on_node.isdigit() and int(on_node) > seen) or seen < there:
        cause = f"SLURM_GPUS_PER_TASK={per_task}, and " if per_task else ""
        return problem(
            f"{cause}JAX sees {seen} of {max(there, int(on_node) if on_node.isdigit() else 0)} GPUs: a process "
            "picks its GPU by its number on the node, and does not find it",
            "no --gpus-per-task but --gpus-per-node, and no CUDA_VISIBLE_DEVICES: each process must see all GPUs",
        )
    return ok(f"JAX sees all {there} GPUs")


def driver(situation: Situation) -> Finding | None:
    """NVIDIA's driver runs CUDA 13."""
    version = situation.machine.driver
    if not version:
        return None
    if int(version.split(".")[0]) < OLDEST_DRIVER:
        return problem(
            f"NVIDIA driver {version}; CUDA 13 needs {OLDEST_DRIVER} or newer",
            f"a driver of the {OLDEST_DRIVER} branch or newer on the host; a container cannot bring one",
        )
    return ok(f"NVIDIA driver {version}")


def libraries(situation: Situation) -> Finding | None:
    """CUDA's runtime, cuBLASLt, cuDNN and NCCL load, and are new enough for NVFP4."""
    machine = situation.machine
    if not machine.gpus:
        return None
    found = ", ".join(f"{name} {version}" for name, version in machine.libraries.items())
    if absent := [name for name in OLDEST_LIBRARIES if name not in machine.libraries]:
        return problem(
            f"not found: {', '.join(absent)}", "./scripts/install_te.sh, or a container with CUDA 13"
        )
    old = [
        f"{name} {machine.libraries[name]} is older than {oldest}"
        for name, oldest in OLDEST_LIBRARIES.items()
        if _numbers(machine.libraries[name]) < _numbers(oldest)
    ]
    if old:
        return problem("; ".join(old), "./scripts/install_te.sh, or a container with CUDA 13")
    return ok(found)


def fabric(situation: Situation) -> Finding | None:
    """Over several nodes of a rack, the GPUs have joined the NVLink fabric, and memory can be shared by IMEX."""
    machine, cluster = situation.machine, situation.cluster
    spans_nodes = cluster.rack_gpus > cluster.gpus_per_node and cluster.nodes > 1
    if not machine.gpus or not spans_nodes:
        return None
    states = sorted({gpu.fabric for gpu in machine.gpus})
    if states != ["Completed"]:
        return problem(
            f"NVLink fabric state {', '.join(states)}, not Completed: the GPUs of a rack do not reach each other",
            "restart nvidia-fabricmanager or look at NMX-C on the switch trays; nvidia-smi -q shows the state",
        )
    if not machine.imex_channels:
        return problem(
            "no IMEX channel in /dev/nvidia-caps-imex-channels: NCCL cannot use NVLink between nodes",
            "Slurm: SwitchType=switch/nvidia_imex; Kubernetes: a ComputeDomain and its channel claim",
        )
    return ok("NVLink fabric Completed, IMEX channel there")


def memory(situation: Situation) -> Finding | None:
    """Parameters, moments and gradients fit into a GPU's memory."""
    gpus, run = situation.machine.gpus, situation.run
    if run is None or not situation.on_gpus or not gpus or not run.device_bytes:
        return None
    have = gpus[0].memory
    found = (
        f"parameters, moments and gradients are {size(run.device_bytes)} a GPU of {size(have)}"
        f" ({run.parameters / 1e9:.3g} billion parameters)"
    )
    if run.device_bytes > 0.9 * have:
        return problem(
            found,
            "more GPUs, or more of them in ici_fsdp_parallelism; dcn_fsdp_parallelism shards over racks too",
        )
    if run.device_bytes > 0.6 * have:
        return note(found, "little is left for activations: more FSDP, or remat_policy: full")
    return ok(found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
