"""Where 4-bit GEMMs run: the protocol, the registry and the selection.

A backend computes a differentiable matrix multiply as a `Routine` says. It sees no recipe, no site and no
MaxText. What it cannot do it states in words; an explicit request that cannot be met raises with those
words, and `auto` reports whom it passed over and why. Adding a backend is one module and one line in
`_REGISTRY`.
"""

import dataclasses
import importlib
from typing import Protocol

from jax import Array

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.extent import Extent
from maxtext_nvfp4.plan import Gemm, LayerPlan, Precision
from maxtext_nvfp4.recipe import problem
from maxtext_nvfp4.routine import Routine


class Backend(Protocol):
    """One way to run 4-bit GEMMs. Instances are hashable: they are static in a traced program."""

    @property
    def name(self) -> str:
        """Name as written in `nvfp4.backend`."""

    def unavailable(self, precision: Precision) -> str | None:
        """The reason in words why it cannot run a 4-bit format on this machine, or None if it can."""

    def unsupported(self, plan: LayerPlan, extent: Extent) -> dict[Gemm, str]:
        """The GEMMs of a plan that it cannot run on any machine, each with the reason in words."""

    def dot(
        self,
        routine: Routine,
        x: Array,
        w: Array,
        contracted: int,
        entry: Array | None,
        key: Array | None,
        probe: Array | None = None,
    ) -> Array:
        """The differentiable matrix multiply of the last axes of x with the first axes of w.

        Args:
          routine: Plans.
          x: Activation, its free axes first.
          w: Weight of x's dtype, its contracted axes first.
          contracted: How many axes of each are contracted.
          entry: int32 scalar, the layer's place in `routine.table`.
          key: uint32 words of a threefry key for stochastic rounding.
          probe: float32 of `telemetry.PROBE_SHAPE`, whose cotangent are the statistics of the three GEMMs;
            None measures nothing.

        Returns:
          Free axes of x, then free axes of w, in x's dtype.
        """


_REGISTRY = {
    "transformer_engine": "maxtext_nvfp4.backends.transformer_engine",
    "xla": "maxtext_nvfp4.backends.xla",
    "emulated": "maxtext_nvfp4.backends.emulated",
}
_AUTO_ORDER = ("transformer_engine", "emulated")

NAMES = tuple(_REGISTRY)


@dataclasses.dataclass(frozen=True)
class Selection:
    """A chosen backend and the sentence that says why."""

    backend: Backend
    why: str


def select(name: str, precision: Precision, platform: str, *, elsewhere: bool = False) -> Selection:
    """Chooses a backend for a 4-bit format on this machine.

    Args:
      name: A backend's name, or `auto`.
      precision: The 4-bit format.
      platform: JAX platform: `cpu`, `gpu` or `tpu`.
      elsewhere: The run will be on another machine: a backend asked for by name is chosen even if this
        machine cannot run it.

    Raises:
      ConfigError: The named backend does not exist, or cannot run here.
    """
    if name != "auto":
        backend = create(name, platform)
        reason = backend.unavailable(precision)
        if reason and not elsewhere:
            raise ConfigError(problem("nvfp4.backend", name, reason, "emulated, which runs everywhere"))
        return Selection(backend, f"backend {name}" + (f", not on this machine: {reason}" if reason else ""))
    notes: list[str] = []
    for candidate in _AUTO_ORDER:
        backend = create(candidate, platform)
        reason = backend.unavailable(precision)
        if reason is None:
            return Selection(backend, f"backend {candidate} on {platform} (auto{''.join(notes)})")
        notes.append(f"; not {candidate}: {reason}")
    raise AssertionError("the last candidate runs everything")


def create(name: str, platform: str) -> Backend:
    """Makes a backend for a platform by name."""
    if name not in _REGISTRY:
        write = f"one of {', '.join(NAMES)} or auto"
        raise ConfigError(problem("nvfp4.backend", name, "no such backend", write))
    backend: Backend = importlib.import_module(_REGISTRY[name]).create(platform)
    return backend
