"""What quantization does to the operands and the product of a GEMM, as numbers with names and units.

    amax               largest magnitude of the operand, after the Hadamard transform where there is one
    rounded_to_zero    share of elements that are not zero and whose code is
    saturated          share of elements beyond the largest code of their block, 6 times the block scale
    zero_scales        share of blocks whose scale is zero, so that all their codes decode to zero
    relative_mse       |decoded - x|^2 / |x|^2, sums over the tensor
    sqnr_db            signal to quantization noise, -10 log10(relative_mse), in dB
    gradient_to_noise  |x| / |decoded - x|, of gradients: the output gradient, and the product dw of wgrad
    nonfinite          number of elements that are Inf or NaN

Of a product there are relative_mse, sqnr_db and gradient_to_noise, against the product of the operands in
high precision.

Sources: arXiv 2505.19115 (FP4 All the Way) for the ratio of gradient to noise, below whose square root of 3
training no longer gains from 4 bits; arXiv 2509.25149 for the error of wgrad as a sign of sensitive layers.
"""

import math

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4.plan import MEASURED
from maxtext_nvfp4.quantize import Encoded, tensor_amax

PROBE_SHAPE = (10, len(MEASURED))
"""What `reading` returns for a linear layer: a, b and product of fprop, dgrad and wgrad, and a row of ones."""

UNMEASURED = np.full((3, len(MEASURED)), np.nan, np.float32)
"""Statistics of a GEMM that has no 4-bit operands."""

SKETCH = 16
"""Random vectors that a product is multiplied with, see `product_error`."""


def operand_statistics(x: Array, encoded: Encoded) -> Array:
    """Compares a rank-2 operand with its 4-bit form.

    Args:
      x: What was quantized, after the Hadamard transform.
      encoded: The result.

    Returns:
      float32 [len(MEASURED)]. Errors are NaN where x holds an Inf or a NaN.
    """
    # In units of the tensor scale values are at most 2688, so that squares neither overflow nor underflow.
    scaled = x.astype(jnp.float32) * (1.0 / encoded.tensor_scale)
    decoded = encoded.scaled_codes()
    error = scaled - decoded
    lost = (decoded == 0) & (scaled != 0)
    clipped = jnp.abs(scaled) > encoded.limits()
    amax = tensor_amax(x, encoded.block)
    power = _mean(scaled * scaled)
    mse = jnp.where(power > 0, _mean(error * error) / jnp.where(power > 0, power, 1.0), power)
    shares = _two_shares(lost, clipped)
    zero_scales = _mean((encoded.block_scales == 0).astype(jnp.float32))
    nonfinite = lax.cond(
        jnp.isfinite(amax),
        lambda _: jnp.float32(0.0),
        lambda x: jnp.sum(jnp.sum((~jnp.isfinite(x)).astype(jnp.float32), axis=-1)),
        x,
    )
    return jnp.stack([amax, *shares, zero_scales, mse, nonfinite])


def product_error(a: Array, b: Array, contract: tuple[int, int], product: Array) -> Array:
    """Estimates |product - a b|^2 / |a b|^2 without computing a b.

    Both are multiplied with `SKETCH` random vectors of signs, for which the mean square of a matrix times a
    vector is the square of its Frobenius norm. The relative error of the estimate is about
    sqrt(2 / (SKETCH rank)) for an error of that effective rank; quantization noise has a high one.

    Args:
      a: First operand, of rank 2.
      b: Second operand, of rank 2.
      contract: The contracted axis of a and of b.
      product: The 4-bit GEMM's result, [free size of a, free size of b].

    Returns:
      float32 scalar.
    """
    vectors = sketch_vectors(product.shape[1])
    # Signs are exact in any dtype, and in the matrix's own it need not be converted.
    exact = _matmul(a, _matmul(b, vectors.astype(b.dtype), 1 - contract[1]), contract[0])
    error = _matmul(product, vectors.astype(product.dtype), 1) - exact
    largest = jnp.max(jnp.abs(exact))
    unit = jnp.where(largest > 0, largest, 1.0)
    power = _mean((exact / unit) ** 2)
    return jnp.where(power > 0, _mean((error / unit) ** 2) / jnp.where(power > 0, power, 1.0), power)


def reading(fprop: Array | None, dgrad: Array | None, wgrad: Array | None) -> Array | None:
    """All statistics of a linear layer, float32 of `PROBE_SHAPE`; None if it is not measured.

    It leaves the backward pass as a cotangent, which whoever accumulates gradients may scale; the ones of the
    last row say by how much.
    """
    if fprop is None or dgrad is None or wgrad is None:
        return None
    return jnp.concatenate([fprop, dgrad, wgrad, jnp.ones((1, len(MEASURED)))])


def sketch_vectors(size: int) -> Array:
    """float32 [size, SKETCH] of signs, the same in every call."""
    return jax.random.rademacher(jax.random.key(0, impl="threefry2x32"), (size, SKETCH), jnp.float32)


def product_statistics(error: Array) -> Array:
    """float32 [len(MEASURED)] of a product: its relative_mse, zero for what only operands have."""
    return jnp.zeros(len(MEASURED)).at[MEASURED.index("relative_mse")].set(error)


def _matmul(matrix: Array, vectors: Array, contract: int) -> Array:
    return lax.dot_general(
        matrix,
        vectors,
        (((contract,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _mean(x: Array) -> Array:
    """The mean of a rank-2 array, row by row: a float32 sum of all elements would lose count at 2**24."""
    return jnp.mean(jnp.mean(x, axis=-1))


def _two_shares(first: Array, second: Array) -> tuple[Array, Array]:
    """Shares of true elements in two rank-2 arrays, counted together: one pass costs half of two."""
    width = 15  # bits of each count, hence elements of a row that are counted at once
    rows, columns = first.shape
    step = math.gcd(columns, 1 << (width - 1))
    both = first.astype(jnp.int32) + (second.astype(jnp.int32) << width)
    counts = jnp.sum(both.reshape(rows, columns // step, step), axis=-1)
    low, high = counts & ((1 << width) - 1), counts >> width
    return _mean(low.astype(jnp.float32)) / step, _mean(high.astype(jnp.float32)) / step
