"""What is to be computed, said in frozen, hashable values: sites, operands and GEMMs.

Nothing here knows a recipe, an array or MaxText. The policy produces these values and the backends
consume them; being hashable, they are static arguments of a traced computation.

Notation: M tokens (all leading axes of the activation), K contraction features and N output features
of the forward GEMM `y[M, N] = x[M, K] @ w[K, N]`.
"""

import dataclasses
from typing import Literal

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")

Precision = Literal["nvfp4", "mxfp4", "bf16"]

MEASURED = ("amax", "rounded_to_zero", "saturated", "zero_scales", "relative_mse", "nonfinite")
"""Statistics of a GEMM that its program computes, see `telemetry`."""

DERIVED = ("sqnr_db", "gradient_to_noise")
"""Those that follow from relative_mse."""

STATS = (*MEASURED, *DERIVED)

BLOCK = {"nvfp4": 16, "mxfp4": 32}
"""Elements that share one block scale along the contraction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandPlan:
    """How one GEMM operand is quantized.

    Attributes:
      block: Elements sharing one scale, as (across the contraction, along the contraction); (1, 16) for
        activations and gradients, (16, 16) for 2D-scaled weights.
      stochastic: Round E2M1 codes stochastically instead of to nearest even.
      hadamard: Apply the 16-point random Hadamard transform along the contraction before quantizing.
    """

    block: tuple[int, int]
    stochastic: bool = False
    hadamard: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """One GEMM: its precision and its two operands (None when the GEMM stays in high precision).

    `precision="bf16"` means MaxText's own compute dtype, untouched. Operand order: fprop (activation,
    weight), dgrad (output gradient, weight), wgrad (activation, output gradient).
    """

    precision: Precision
    a: OperandPlan | None = None
    b: OperandPlan | None = None

    @property
    def quantized(self) -> bool:
        """Whether the operands are 4-bit."""
        return self.precision != "bf16"


BF16 = GemmPlan(precision="bf16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The three GEMMs of one linear layer in one decoder layer."""

    fprop: GemmPlan
    dgrad: GemmPlan
    wgrad: GemmPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A linear layer of the model, seen once for all the decoder layers that repeat it.

    Attributes:
      path: Module path without layer numbers, the same with and without `scan_layers`, such as
        `decoder/layers/mlp/wi_0`.
      layers: Decoder layers that contain it, ascending; empty for a module outside the layer stack.
      k: Contraction size of the forward GEMM.
      n: Output features of the forward GEMM.
      protected: Why the site is never quantized (`output head`, `router gate`); empty when the policy
        may choose.
    """

    path: str
    layers: tuple[int, ...]
    k: int
    n: int
    protected: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SitePlan:
    """A site with the plan of every decoder layer it occurs in.

    Attributes:
      site: The site.
      choices: Distinct plans, each with the reason a GEMM of it stays in high precision ("" if none does).
      table: For each entry of `site.layers` the index into `choices`; a single entry for a site outside
        the layer stack.
    """

    site: Site
    choices: tuple[tuple[LayerPlan, str], ...]
    table: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.table) == max(1, len(self.site.layers))
        assert set(self.table) == set(range(len(self.choices)))

    @property
    def quantized(self) -> bool:
        """Whether any GEMM in any layer is 4-bit."""
        return any(getattr(plan, gemm).quantized for plan, _ in self.choices for gemm in GEMMS)

    def ranges(self) -> list[tuple[tuple[int, ...], LayerPlan, str]]:
        """Maximal runs of consecutive layers with one plan, as (layers, plan, reason)."""
        if not self.site.layers:
            plan, reason = self.choices[0]
            return [((), plan, reason)]
        runs: list[tuple[list[int], int]] = []
        for layer, choice in zip(self.site.layers, self.table, strict=True):
            if runs and runs[-1][1] == choice and runs[-1][0][-1] == layer - 1:
                runs[-1][0].append(layer)
            else:
                runs.append(([layer], choice))
        return [(tuple(layers), *self.choices[choice]) for layers, choice in runs]
