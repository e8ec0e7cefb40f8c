"""4-bit GEMMs through `jax.lax.scaled_dot`, which leaves the choice of kernel to XLA.

The program contains float4_e2m1fn operands with float8_e4m3fn block scales. Where XLA has no kernel for
them it decodes and multiplies, with the values of `emulated`.
"""

import dataclasses

import jax
from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4.backends.composed import Composed
from maxtext_nvfp4.plan import Precision
from maxtext_nvfp4.quantize import Encoded


@dataclasses.dataclass(frozen=True)
class Xla(Composed):
    """NVFP4 as an XLA scaled dot product."""

    name: str = "xla"

    def unavailable(self, precision: Precision) -> str | None:
        """XLA's block scales are used for NVFP4 only."""
        return None if precision == "nvfp4" else f"it multiplies nvfp4 only, not {precision}"

    def multiply(self, a: Encoded, b: Encoded, contract: tuple[int, int]) -> Array:
        """See `Composed.multiply`."""
        product = jax.lax.scaled_dot(
            a.codes.astype(jnp.float4_e2m1fn),
            b.codes.astype(jnp.float4_e2m1fn),
            lhs_scale=_scales(a, contract[0]),
            rhs_scale=_scales(b, contract[1]),
            dimension_numbers=(((contract[0],), (contract[1],)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return (product * a.tensor_scale) * b.tensor_scale


def _scales(encoded: Encoded, contract: int) -> Array:
    """E4M3 scales with one row per row of codes: a 2D block repeats its scale across the contraction."""
    free = 1 - contract
    scales = encoded.block_scales.astype(jnp.float8_e4m3fn)
    return lax.stop_gradient(jnp.repeat(scales, encoded.block[free], axis=free))


def create(platform: str) -> Xla:
    """The same on every platform."""
    del platform
    return Xla()
