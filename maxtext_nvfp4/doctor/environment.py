"""Environment variables that hurt on Blackwell, each with why."""

import dataclasses
import re
from collections.abc import Callable, Iterable

from maxtext_nvfp4.doctor.facts import Situation
from maxtext_nvfp4.doctor.findings import Finding, Status, note, ok

_LAUNCHER = "scripts/launch.sh sets it"


@dataclasses.dataclass(frozen=True)
class Rule:
    """A variable and what is wrong with a value of it.

    Attributes:
      name: The variable.
      bites: Whether its value hurts; the value is empty where the variable is not set.
      why: What it does.
      write: What to set instead; empty to unset it.
      status: Whether the run can start all the same.
    """

    name: str
    bites: Callable[[str], bool]
    why: str
    write: str = ""
    status: Status = "note"


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.lower() in values


def _set(value: str) -> bool:
    return bool(value)


_ON = _is("1", "true", "yes", "on")
_OFF = _is("0", "false", "no", "off")

CUDA = (
    Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _set,
        "a setting for Hopper: on Blackwell it keeps kernels and communication from running side by side",
    ),
    Rule("CUDA_LAUNCH_BLOCKING", _ON, "the host waits for every kernel"),
)

ENGINE = (
    Rule(
        "NVTE_JAX_CUSTOM_CALLS",
        lambda value: "false" in value.lower(),
        "Transformer Engine then computes with JAX operations, without NVFP4 kernels and with other rounding",
        status="problem",
    ),
    Rule(
        "NVTE_JAX_CUSTOM_CALLS_RE",
        _set,
        "it switches Transformer Engine's kernels off by name, and is deprecated",
    ),
    Rule("NVTE_FUSED_ATTN", _OFF, "attention: cudnn_flash_te then runs unfused, with the whole score matrix"),
    Rule(
        "NVTE_NVFP4_DISABLE_RHT",
        _ON,
        "only Transformer Engine's own recipes read it, so the Hadamard transform stays on; the recipe says it with "
        "nvfp4.hadamard: none",
    ),
    Rule(
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        _ON,
        "only Transformer Engine's own recipes read it, so rounding stays stochastic; the recipe says it with "
        "nvfp4.stochastic_rounding: none",
    ),
    Rule(
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
        _ON,
        "only Transformer Engine's own recipes read it, so blocks of weights stay square; the recipe says it with "
        "nvfp4.weight_scaling: 1d",
    ),
)

XLA = (
    Rule(
        "XLA_FLAGS",
        lambda value: not _xla(value, "xla_gpu_enable_latency_hiding_scheduler"),
        "without --xla_gpu_enable_latency_hiding_scheduler=true communication waits for compute",
        f"--xla_gpu_enable_latency_hiding_scheduler=true ({_LAUNCHER})",
    ),
    Rule(
        "XLA_FLAGS",
        lambda value: _xla(value, "xla_gpu_enable_triton_gemm", default=True),
        "without --xla_gpu_enable_triton_gemm=false XLA tunes Triton GEMMs for minutes, where cuBLAS is faster",
        f"--xla_gpu_enable_triton_gemm=false ({_LAUNCHER})",
    ),
    Rule(
        "XLA_FLAGS",
        lambda value: "--xla_dump_to" in value,
        "every process writes every program to disk",
        "no --xla_dump_to",
    ),
)

MEMORY = (
    Rule(
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        lambda value: not value,
        "JAX then takes 75% of a GPU's memory",
        f"0.9 ({_LAUNCHER})",
    ),
    Rule(
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        lambda value: bool(value) and not _fraction(value),
        "not a fraction between 0 and 1, and JAX does not start",
        "0.9",
        "problem",
    ),
    Rule(
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        lambda value: 0.95 < _fraction(value) <= 1,
        "NCCL, cuBLAS and cuDNN need memory of their own",
        "0.9",
    ),
    Rule(
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        lambda value: 0 < _fraction(value) < 0.75,
        "less than JAX would take by itself",
        "0.9",
    ),
    Rule(
        "XLA_PYTHON_CLIENT_PREALLOCATE", _is("false", "0"), "memory is then taken bit by bit, and fragments"
    ),
    Rule(
        "XLA_PYTHON_CLIENT_ALLOCATOR", _is("platform"), "each array is then allocated and freed by the driver"
    ),
)

NCCL = (
    Rule("NCCL_NVLS_ENABLE", _OFF, "reductions no longer happen in the NVLink switches"),
    Rule("NCCL_MNNVL_ENABLE", _OFF, "nodes of a rack then talk over the network instead of NVLink"),
    Rule("NCCL_CUMEM_ENABLE", _OFF, "NVLink between nodes and in-switch reductions need it"),
    Rule("NCCL_P2P_DISABLE", _ON, "GPUs of a node then copy through host memory"),
    Rule("NCCL_SHM_DISABLE", _ON, "processes of a node then talk over the network where NVLink is not used"),
    Rule("NCCL_IB_DISABLE", _ON, "racks then talk over TCP"),
    Rule("NCCL_ALGO", _set, "it fixes what NCCL would choose for each size and topology"),
    Rule("NCCL_PROTO", _set, "it fixes what NCCL would choose for each size and topology"),
    Rule("NCCL_SOCKET_IFNAME", _is("lo", "=lo"), "other nodes cannot be reached over the loopback interface"),
    Rule("NCCL_DEBUG", _is("info", "trace"), "every process writes a line for every communicator", "WARN"),
)

JAX = (
    Rule("JAX_DISABLE_JIT", _ON, "every operation then runs by itself", status="problem"),
    Rule(
        "JAX_ENABLE_X64",
        _ON,
        "constants become 64 bits wide, and programs others than those that were tested",
    ),
    Rule(
        "JAX_DEBUG_NANS",
        _ON,
        "a step that is not finite, which loss scaling would skip, ends the run; every step waits for a check",
    ),
    Rule(
        "DECOUPLE_GCLOUD", _ON, "MaxText 0.2.5 then writes its TensorBoard logs to a stub, that is, nowhere"
    ),
)

_PLATFORMS = Rule(
    "JAX_PLATFORMS",
    lambda value: bool(value) and not {"cuda", "gpu"} & set(value.lower().split(",")),
    "JAX then does not look for GPUs, and hardware: gpu_multiprocess has none",
    status="problem",
)


def cuda(situation: Situation) -> Finding | None:
    """`CUDA_*`: nothing serializes the GPU."""
    return _judge(situation, "CUDA_*", CUDA) if situation.on_gpus else None


def engine(situation: Situation) -> Finding | None:
    """`NVTE_*`: Transformer Engine's kernels are on, and nothing is set that this mode does not read."""
    return _judge(situation, "NVTE_*", ENGINE) if situation.on_gpus else None


def xla(situation: Situation) -> Finding | None:
    """`XLA_FLAGS`: communication hides behind compute, and GEMMs are cuBLAS's."""
    return _judge(situation, "XLA_FLAGS", XLA) if situation.on_gpus else None


def memory(situation: Situation) -> Finding | None:
    """`XLA_PYTHON_CLIENT_*`: JAX takes most of a GPU's memory, at once."""
    return _judge(situation, "XLA_PYTHON_CLIENT_*", MEMORY) if situation.on_gpus else None


def nccl(situation: Situation) -> Finding | None:
    """`NCCL_*`: NVLink, its switches and InfiniBand are used."""
    return _judge(situation, "NCCL_*", NCCL) if situation.on_gpus else None


def jax(situation: Situation) -> Finding:
    """`JAX_*`, `DECOUPLE_GCLOUD`: no leftovers of a debugging session."""
    return _judge(situation, "JAX_*", (*JAX, *([_PLATFORMS] if situation.on_gpus else ())))


def config(situation: Situation) -> Finding | None:
    """`M_*`: no variable changes a key of the config."""
    run = situation.run
    if run is None:
        return None
    if names := run.overridden:
        keys = " ".join(f"{name.removeprefix('M_').lower()}=VALUE" for name in names)
        return note(
            f"{', '.join(names)}: MaxText takes these over what the config says; they were not applied here",
            f"unset {' '.join(names)}, and write {keys} after the config",
        )
    return ok("M_*: nothing changes the config")


def _judge(situation: Situation, family: str, rules: Iterable[Rule]) -> Finding:
    """One finding for the variables of a family."""
    environment = situation.machine.environment
    hits = [rule for rule in rules if rule.bites(environment.get(rule.name, ""))]
    if not hits:
        return ok(f"{family}: nothing that hurts")
    status: Status = "problem" if any(rule.status == "problem" for rule in hits) else "note"
    found, fixes = [], []
    for name in dict.fromkeys(rule.name for rule in hits):
        whys = [rule.why for rule in hits if rule.name == name]
        writes = [rule.write for rule in hits if rule.name == name and rule.write]
        found.append(f"{_shown(name, environment.get(name))}: {', and '.join(whys)}")
        fixes.append(f"{name}: {' and '.join(writes)}" if writes else f"unset {name}")
    return Finding(status, "; ".join(found), "; ".join(fixes))


def _shown(name: str, value: str | None) -> str:
    if value is None:
        return f"{name} is not set"
    return f"{name}={value}" if len(value) <= 40 else name


def _xla(flags: str, name: str, default: bool = False) -> bool:
    """Whether a flag of XLA is on; the last one counts."""
    values = re.findall(rf"--{name}(?:=(\S+))?(?=\s|$)", flags)
    return values[-1].lower() in ("", "true", "1") if values else default


def _fraction(text: str) -> float:
    """A fraction above 0 and up to 1; 0 for anything else."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value <= 1 else 0.0
