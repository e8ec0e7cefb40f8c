"""Sizes of a linear layer's arrays, and what in them does not divide into blocks."""

import dataclasses
from collections.abc import Iterator, Mapping

from maxtext_nvfp4.plan import GEMMS, Gemm, GemmPlan, LayerPlan

MEANING = {"K": "input features", "N": "output features", "M": "tokens"}

_AXES: dict[Gemm, tuple[str, str, str]] = {
    "fprop": ("K", "M", "N"),
    "dgrad": ("N", "M", "K"),
    "wgrad": ("M", "K", "N"),
}
"""The contraction of each GEMM, and the other axis of its first and of its second operand."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """Sizes along M, K and N of a linear layer's arrays.

    Attributes:
      whole: Sizes of the whole arrays; without M where the tokens of a microbatch are not known.
      shard: Sizes of the parts of activation [M, K] and gradient [M, N] on one device; S, where known, of the
        part of a sequence.
      weight_shard: Sizes K and N of the part of the weight on one device.
      dtype: Of all three.
    """

    whole: Mapping[str, int]
    shard: Mapping[str, int]
    weight_shard: Mapping[str, int]
    dtype: str

    @classmethod
    def on_one_device(cls, sizes: Mapping[str, int], dtype: str) -> "Extent":
        """Of arrays that are not sharded."""
        return cls(whole=sizes, shard=sizes, weight_shard=sizes, dtype=dtype)


def not_multiple(sizes: Mapping[str, int], axis: str, step: int, where: str = "") -> str | None:
    """Says that a size is not a multiple of `step`; None if it is, or is not known."""
    if axis not in sizes or sizes[axis] % step == 0:
        return None
    return f"{axis}={sizes[axis]} ({MEANING[axis]}{where}) is not a multiple of {step}"


def block_faults(plan: LayerPlan, extent: Extent) -> dict[Gemm, str]:
    """The 4-bit GEMMs whose blocked axes do not divide into blocks, each with the reason."""
    faults: dict[Gemm, str] = {}
    for gemm in GEMMS:
        found = (not_multiple(extent.whole, axis, block) for axis, block in _blocked_axes(gemm, plan))
        if reasons := list(dict.fromkeys(reason for reason in found if reason)):
            faults[gemm] = " and ".join(reasons)
    return faults


def _blocked_axes(gemm: Gemm, layer: LayerPlan) -> Iterator[tuple[str, int]]:
    """The axes of a 4-bit GEMM with the number of elements that share a scale along them."""
    contraction, *others = _AXES[gemm]
    plan: GemmPlan = getattr(layer, gemm)
    for operand, other in zip((plan.a, plan.b), others, strict=True):
        if operand is not None:
            across, along = operand.block
            yield contraction, along
            yield other, across
