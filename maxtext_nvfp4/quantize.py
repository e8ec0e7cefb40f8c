"""The one place where values become 4-bit codes and scales.

The chain, in Transformer Engine's order of operations, every step in float32:

    S        = 2688 / amax(x)               2688 = 6 * 448; S = 1 for amax = 0; capped at FLT_MAX
    s_b      = e4m3(amax_b * (S * (1/6)))   nearest even, saturating at 448
    enc_b    = min(1 / (s_b * (1/S)), FLT_MAX)
    code     = e2m1(x * enc_b)              nearest even or stochastic, saturating at 6
    decoded  = (code * s_b) * (1/S)

Two-level scaling makes the codes equivariant under powers of two. Any other order of these products
gives other block scales for a few hundred of the 286,784 pairs of BF16 (tensor amax, block amax), which
random tensors rarely show (docs/numerics.md).
"""

import functools
from typing import NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4 import formats, random_bits
from maxtext_nvfp4.plan import BLOCK, Precision

_FLT_MAX = float(jnp.finfo(jnp.float32).max)


class Encoded(NamedTuple):
    """A quantized tensor before it is stored: float32 arrays whose values lie on the narrow grids.

    `codes * block_scales` has at most 6 significant bits and an exponent within [-10, 12), so the product
    is exact in bfloat16 too: matrix units may take it at full speed.

    Attributes:
      codes: E2M1 values, shaped like x.
      block_scales: E4M3 or E8M0 values, of shape x.shape / block.
      tensor_scale: Scalar decode scale 1/S; NaN when x holds a non-finite value.
      block: Elements per block along each axis of x.
    """

    codes: Array
    block_scales: Array
    tensor_scale: Array
    block: tuple[int, ...]

    def scaled_codes(self) -> Array:
        """`codes * block_scales`, float32, shaped like x."""
        blocked = _blocked(self.codes, self.block)
        return (blocked * _expand(self.block_scales)).reshape(self.codes.shape)

    def limits(self) -> Array:
        """The largest of `scaled_codes` that the block of each element could hold, float32, shaped like x."""
        blocked = _blocked(self.codes, self.block)
        return jnp.broadcast_to(formats.E2M1_MAX * _expand(self.block_scales), blocked.shape).reshape(
            self.codes.shape
        )


@jax.tree_util.register_pytree_node_class
class Quantized:
    """A tensor in NVFP4 storage.

    Attributes:
      codes: float4_e2m1fn, shaped like the original.
      block_scales: float8_e4m3fn (float8_e8m0fnu for mxfp4), of the original's shape / block.
      tensor_scale: float32 scalar decode scale.
      block: Elements per block along each axis.
    """

    def __init__(self, codes: Array, block_scales: Array, tensor_scale: Array, block: tuple[int, ...]):
        self.codes = codes
        self.block_scales = block_scales
        self.tensor_scale = tensor_scale
        self.block = block

    def __repr__(self) -> str:
        return f"Quantized(shape={self.codes.shape}, block={self.block}, scales={self.block_scales.dtype})"

    def tree_flatten(self) -> tuple[tuple[Array, Array, Array], tuple[int, ...]]:
        """Splits into arrays and the static block, for JAX transformations."""
        return (self.codes, self.block_scales, self.tensor_scale), self.block

    @classmethod
    def tree_unflatten(cls, block: tuple[int, ...], arrays: tuple[Array, Array, Array]) -> "Quantized":
        """Rebuilds from what `tree_flatten` returned."""
        return cls(*arrays, block)


def full_block(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Extends a block over the trailing axes to all axes, and checks that it divides the shape.

    Raises:
      ValueError: More block axes than array axes, or a size that is not a multiple of its block.
    """
    if len(block) > len(shape):
        raise ValueError(
            f"block {block} has {len(block)} axes but the array of shape {shape} has {len(shape)}; give the "
            "array as many axes, or the block one size for each trailing axis"
        )
    full = (1,) * (len(shape) - len(block)) + tuple(block)
    for axis, (size, step) in enumerate(zip(shape, full, strict=True)):
        if step < 1 or size % step:
            raise ValueError(
                f"axis {axis} of shape {shape} has {size} elements, not a multiple of its block of {step}; "
                "keep this layer in BF16 with a rule such as "
                "nvfp4.rules: [{module: <its path>, fprop: bf16, dgrad: bf16, wgrad: bf16}]"
            )
    return full


def _blocked(x: Array, block: tuple[int, ...]) -> Array:
    """Views each axis as (blocks, elements within the block)."""
    return x.reshape(*(d for size, step in zip(x.shape, block, strict=True) for d in (size // step, step)))


def _expand(scales: Array) -> Array:
    """Views one scale per block so that it broadcasts against `_blocked` values."""
    return scales.reshape(*(d for size in scales.shape for d in (size, 1)))


def _block_amax(blocked: Array) -> Array:
    """Largest magnitude in each block, float32; NaN where a block holds a NaN, Inf where it holds an Inf.

    Without the sign bit, floating-point numbers order like their bits, NaN above Inf above all else. The
    integer reduction reads x in its own dtype; a float32 copy of |x| would cost as much as all the rest.
    """
    dtype, inner = blocked.dtype, tuple(range(1, blocked.ndim, 2))
    bits = lax.bitcast_convert_type(blocked, f"uint{dtype.itemsize * 8}")
    unsigned = jnp.array(jnp.iinfo(bits.dtype).max >> 1, bits.dtype)
    across = tuple(axis for axis in inner[:-1] if blocked.shape[axis] > 1)
    if across:
        # Whole rows first, and apart: a CPU takes many columns at once, but not together with what follows.
        bits = lax.optimization_barrier(jnp.max(bits & unsigned, axis=across, keepdims=True))
    # A short reduction along the last axis alone is not vectorized on CPUs, hence an elementwise step before it.
    if dtype == jnp.bfloat16 and bits.shape[-1] % 2 == 0:
        # Two neighbours in one word. Each is a float32 when it stands in the upper half.
        words = lax.bitcast_convert_type(bits.reshape(*bits.shape[:-1], -1, 2), jnp.uint32)
        upper = jnp.uint32(0x7FFF_0000)
        largest = jnp.max(jnp.maximum(words & upper, (words << 16) & upper), axis=inner)
        return lax.bitcast_convert_type(largest, jnp.float32)
    magnitude = bits & unsigned
    if magnitude.shape[-1] % 2 == 0:
        magnitude = jnp.maximum(*jnp.split(magnitude, 2, axis=-1))
    return lax.bitcast_convert_type(jnp.max(magnitude, axis=inner), dtype).astype(jnp.float32)


def _largest(amax: Array) -> Array:
    """The largest of non-negative float32 numbers, NaN if there is one: XLA's CPU reduction loses NaN."""
    return lax.bitcast_convert_type(jnp.max(lax.bitcast_convert_type(amax, jnp.int32)), jnp.float32)


def tensor_amax(x: Array, block: tuple[int, ...]) -> Array:
    """The largest magnitude in x, float32 scalar; Inf or NaN if x holds one. Any block of `encode` will do."""
    return _largest(_block_amax(_blocked(x, block)))


def encode(
    x: Array, block: tuple[int, ...], key: Array | None = None, precision: Precision = "nvfp4"
) -> Encoded:
    """Runs the scale chain and leaves the result in float32.

    Args:
      x: Floating-point array.
      block: Elements per block for every axis of x (see `full_block`).
      key: Rounds the codes stochastically with this key; None rounds to nearest even.
      precision: `nvfp4`, or `mxfp4` for power-of-two block scales and no tensor scale.
    """
    blocked = _blocked(x, block)
    block_amax = _block_amax(blocked)
    amax = _largest(block_amax)
    if precision == "mxfp4":
        decode = jnp.float32(1.0)
        scales = formats.e8m0_scale(block_amax)
        inverse = 1.0 / scales
    else:
        encode_scale = jnp.minimum(2688.0 / jnp.where(amax > 0, amax, 2688.0), _FLT_MAX).astype(jnp.float32)
        # The cap between the two divisions also keeps XLA from turning them into one multiplication by
        # amax, which would round differently.
        decode = 1.0 / encode_scale
        scales = formats.round_e4m3(block_amax * (encode_scale * jnp.float32(1.0 / 6.0)))
        inverse = jnp.minimum(1.0 / (scales * decode), _FLT_MAX)
    # One for each block; without the barrier they would be worked out anew within the loop over elements.
    scales, inverse = lax.optimization_barrier((scales, inverse))
    scaled = (blocked.astype(jnp.float32) * _expand(inverse)).reshape(x.shape)
    if key is None:
        codes = formats.round_e2m1(scaled)
    else:
        codes = formats.round_e2m1_stochastic(scaled, random_bits.uniform(key, x.shape))
    return Encoded(codes, scales, jnp.where(jnp.isfinite(amax), decode, jnp.nan), block)


@functools.partial(jax.jit, static_argnames=("block", "precision"))
def quantize(
    x: Array, block: tuple[int, ...] = (1, 16), key: Array | None = None, precision: Precision = "nvfp4"
) -> Quantized:
    """Quantizes to E2M1 codes with one E4M3 scale per block and one float32 scale per tensor.

    >>> q = quantize(jnp.linspace(-1.0, 1.0, 64).reshape(2, 32))
    >>> q.codes.dtype, q.block_scales.shape, q.tensor_scale.shape
    (dtype(float4_e2m1fn), (2, 2), ())

    Args:
      x: Floating-point array of any rank >= len(block).
      block: Elements per block along the trailing axes: (1, 16) or (16, 1) for activations and gradients,
        (16, 16) for weights.
      key: A `jax.random.key`; rounds stochastically when given (gradients), to nearest even otherwise.
      precision: `nvfp4`, or `mxfp4` with blocks of 32 and E8M0 scales, for comparison.

    Returns:
      Codes shaped like x, block scales of shape x.shape / block, and the scalar decode scale. The decode
      scale is NaN when x holds an Inf or a NaN, which E2M1 cannot express.

    Raises:
      ValueError: A size along a blocked axis is not a multiple of its block.

    Source: arXiv 2509.25149, appendix B.
    """
    if precision not in BLOCK:
        raise ValueError(f"precision must be one of {sorted(BLOCK)}, got {precision!r}")
    encoded = encode(x, full_block(x.shape, block), key, precision)
    scale_dtype = jnp.float8_e8m0fnu if precision == "mxfp4" else jnp.float8_e4m3fn
    return Quantized(
        formats.store_e2m1(encoded.codes),
        encoded.block_scales.astype(scale_dtype),
        encoded.tensor_scale,
        encoded.block,
    )


@functools.partial(jax.jit, static_argnames=("dtype",))
def dequantize(q: Quantized, dtype: jax.typing.DTypeLike = jnp.float32) -> Array:
    """Decodes to `(codes * block_scales) * tensor_scale`, float32 before the final cast to `dtype`."""
    codes = q.codes.astype(jnp.float32)
    encoded = Encoded(codes, q.block_scales.astype(jnp.float32), q.tensor_scale, q.block)
    return (encoded.scaled_codes() * q.tensor_scale).astype(dtype)
