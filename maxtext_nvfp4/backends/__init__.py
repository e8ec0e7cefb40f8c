"""Where 4-bit GEMMs run: the protocol, the registry and the selection.

A backend multiplies two operands as a `GemmPlan` says. It sees no recipe, no layer and no MaxText. What
it cannot do it states in words through `unsupported`; an explicit request that cannot be met raises with
those words, and `auto` reports whom it passed over and why. Adding a backend is one module and one line
in `_REGISTRY`.
"""

import dataclasses
import importlib
from collections.abc import Iterable
from typing import Protocol

from jax import Array

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.plan import GemmPlan


class Backend(Protocol):
    """One way to run a 4-bit GEMM. Instances are hashable: they are static in a traced program."""

    @property
    def name(self) -> str:
        """Name as written in `nvfp4.backend`."""

    def unsupported(self, plan: GemmPlan) -> str | None:
        """The reason in words why this backend cannot run the plan, or None if it can."""

    def matmul(
        self, plan: GemmPlan, a: Array, b: Array, contract: tuple[int, int], key: Array | None
    ) -> Array:
        """Quantizes both operands and multiplies them.

        Args:
          plan: A plan with 4-bit operands.
          a: First operand, of rank 2.
          b: Second operand, of rank 2.
          contract: The contracted axis of a and of b.
          key: Key for the operand that rounds stochastically; None if the plan has none.

        Returns:
          float32, of shape (free size of a, free size of b).
        """


_REGISTRY = {
    "xla": "maxtext_nvfp4.backends.xla",
    "emulated": "maxtext_nvfp4.backends.emulated",
}
_AUTO_ORDER = ("emulated",)

NAMES = tuple(_REGISTRY)


@dataclasses.dataclass(frozen=True)
class Selection:
    """A chosen backend and the sentence that says why."""

    backend: Backend
    why: str


def select(name: str, plans: Iterable[GemmPlan], platform: str) -> Selection:
    """Chooses a backend that can run every plan on a platform.

    Args:
      name: A backend's name, or `auto`.
      plans: All 4-bit plans that will run.
      platform: JAX platform: `cpu`, `gpu` or `tpu`.

    Raises:
      ConfigError: The named backend cannot run one of the plans.
    """
    plans = [plan for plan in dict.fromkeys(plans) if plan.quantized]
    passed_over: list[str] = []
    for candidate in _AUTO_ORDER if name == "auto" else (name,):
        backend = create(candidate, platform)
        reasons = [reason for plan in plans if (reason := backend.unsupported(plan))]
        if not reasons:
            why = f"backend {candidate} on {platform}"
            if name == "auto":
                why += " (auto: " + "; ".join([*passed_over, _AUTO_NOTE[platform]]) + ")"
            return Selection(backend, why)
        passed_over.append(f"{candidate} cannot: {reasons[0]}")
    raise ConfigError(
        f"nvfp4.backend: got {name}: {'; '.join(passed_over)}; write nvfp4.backend: emulated, which runs every plan"
    )


_AUTO_NOTE = {
    "cpu": "4-bit values are emulated exactly; a CPU has no FP4 units",
    "tpu": "4-bit values are emulated exactly; a TPU has no FP4 units",
    "gpu": "4-bit values are emulated exactly in BF16; this shows NVFP4's numerics, not its speed",
}


def create(name: str, platform: str) -> Backend:
    """Makes a backend for a platform by name."""
    if name not in _REGISTRY:
        raise ConfigError(
            f"nvfp4.backend: got {name}: no such backend; write one of {', '.join(NAMES)} or auto"
        )
    backend: Backend = importlib.import_module(_REGISTRY[name]).create(platform)
    return backend
