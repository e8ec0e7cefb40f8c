"""The number grids of NVFP4: E2M1 codes and E4M3 or E8M0 block scales, in plain float32 arithmetic.

Rounding never goes through a narrow dtype. A float32 -> float8 -> float32 pair may be dropped by XLA
inside a fusion, which silently leaves an unrounded scale; and `lax.reduce_precision` cannot express
E4M3FN. Here every step is an exact scaling by a power of two around one round-to-nearest-even, so a
jitted program, an eager one and a fused one give the same bits; the conversion to the storage dtype
afterwards is exact.
"""

import jax.numpy as jnp
from jax import Array, lax

E2M1_MAX = 6.0
"""Largest magnitude of float4_e2m1fn; the grid is 0, 0.5, 1, 1.5, 2, 3, 4, 6."""

E4M3_MAX = 448.0
"""Largest finite magnitude of float8_e4m3fn."""

_E4M3_MIN_NORMAL = 2.0**-6
_E2M1_EMAX = 2  # exponent of E2M1's largest binade, [4, 6]


def _exp2_floor(x: Array) -> Array:
    """2**floor(log2|x|) by masking the exponent bits; 0 for zero and for float32 subnormals."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F80_0000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _e2m1_step(magnitude: Array) -> tuple[Array, Array]:
    """Spacing of the E2M1 grid at a magnitude in [0, 6], and its reciprocal: 0.5, 1 or 2.

    By exponent bits, not by selects: a scan over layers keeps the constants of a select as arrays of the operand's size.
    """
    binade = _exp2_floor(jnp.maximum(magnitude, 1.0))  # 1, 2 or 4
    # Two over a power of two: exponents have a bias of 127, and 23 bits of mantissa below them.
    bits = jnp.uint32(0x7F80_0000) - lax.bitcast_convert_type(binade, jnp.uint32)
    return binade * 0.5, lax.bitcast_convert_type(bits, jnp.float32)


def round_e2m1(x: Array) -> Array:
    """Rounds float32 values to the E2M1 grid, to nearest with ties to even, saturating at 6.

    NaN has no code; callers look for non-finite values before quantizing.
    """
    magnitude = jnp.minimum(jnp.abs(x), E2M1_MAX)
    step, inverse = _e2m1_step(magnitude)
    return jnp.copysign(lax.round(magnitude * inverse, lax.RoundingMethod.TO_NEAREST_EVEN) * step, x)


def round_e2m1_stochastic(x: Array, u: Array) -> Array:
    """Rounds float32 values to a neighbouring E2M1 grid point, up with probability of the remainder.

    The magnitude becomes `floor(|x| / step + u) * step`, so the mean over uniform `u` in [0, 1) is x
    for |x| <= 6, grid points stay, and signs are kept (arXiv 2509.25149, section 4.3).

    Args:
      x: float32 values.
      u: float32 uniform numbers in [0, 1), of x's shape.
    """
    magnitude = jnp.minimum(jnp.abs(x), E2M1_MAX)
    step, inverse = _e2m1_step(magnitude)
    # `steps + u` itself would round, and could lift a grid point; the remainder is exact.
    steps = magnitude * inverse
    whole = jnp.floor(steps)
    up = (u >= 1.0 - (steps - whole)).astype(jnp.float32)
    return jnp.copysign((whole + up) * step, x)


def round_e4m3(x: Array) -> Array:
    """Rounds float32 values to the E4M3FN grid, to nearest with ties to even, saturating at 448."""
    magnitude = jnp.minimum(jnp.abs(x), E4M3_MAX)
    step = jnp.maximum(_exp2_floor(magnitude), _E4M3_MIN_NORMAL) * jnp.float32(2.0**-3)
    return jnp.copysign(lax.round(magnitude / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step, x)


def store_e2m1(codes: Array) -> Array:
    """Converts float32 values on the E2M1 grid to float4_e2m1fn: the bits of `codes.astype`, NaN to -0 included."""
    if codes.shape[-1] % 2:
        return codes.astype(jnp.float4_e2m1fn)
    # XLA's own conversion on CPUs takes ten times as long as all of the quantization before it.
    return lax.platform_dependent(
        codes, cpu=_pack_e2m1, default=lambda codes: codes.astype(jnp.float4_e2m1fn)
    )


def _pack_e2m1(codes: Array) -> Array:
    """`store_e2m1` by integer arithmetic, for an even number of columns."""
    bits = lax.bitcast_convert_type(codes, jnp.uint32)
    # Exponent and highest bit of the mantissa number the grid: 252 is 0.5, 254 is 1, 255 is 1.5, ..., 259 is 6.
    place = (bits >> 22) & jnp.uint32(0x1FF)
    magnitude = jnp.where(place >= 254, place - 252, (place == 252).astype(jnp.uint32))
    nibbles = jnp.where(jnp.isnan(codes), 8, ((bits >> 28) & 8) | magnitude).astype(jnp.uint8)
    # Two codes lie in a byte, the first one lower. The barriers keep the gathering of neighbours out of the loops
    # before and after it, which would not be vectorized with it.
    pairs = lax.optimization_barrier(nibbles).reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    words = lax.bitcast_convert_type(pairs, jnp.uint16)
    packed = lax.optimization_barrier((words | (words >> 4)).astype(jnp.uint8))
    return lax.bitcast_convert_type(packed, jnp.float4_e2m1fn).reshape(codes.shape)


def e8m0_scale(amax: Array) -> Array:
    """Power-of-two block scale of the OCP MX formats, 2**(floor(log2 amax) - 2); 1 for a zero block.

    Values above 6 times the scale saturate, as the MX specification has it (OCP MX v1.0, section 6.3).
    """
    scale = _exp2_floor(amax) * jnp.float32(2.0**-_E2M1_EMAX)
    return jnp.where(scale > 0, scale, 1.0).astype(jnp.float32)
