"""NVFP4 numerics written a second time, slowly, in NumPy and ml_dtypes.

Nothing of the package is imported here: a mistake made in both places has to be made twice. Each function
is the formula and a loop; speed is bought only where an exhaustive enumeration needs it (the scalar chain).

What can be asserted against it: codes, block scales, tensor scale and dequantized values, all bit for bit,
since every step is one float32 operation. Products of GEMMs cannot be: their accumulation order is free.

    S     = 2688 / amax(x)                  amax = 0 -> S = 1; capped at FLT_MAX
    s_b   = e4m3(amax_b * (S * (1/6)))
    enc_b = min(1 / (s_b * (1/S)), FLT_MAX)
    code  = e2m1(x * enc_b)
    x^    = (code * s_b) * (1/S)
"""

import dataclasses
import itertools

import ml_dtypes
import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
FLT_TINY = np.finfo(np.float32).tiny
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E4M3_GRID = tuple(float(v) for v in np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn))
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def round_to_grid(x, grid):
    """Nearest value of an ascending grid of magnitudes, ties to the even index, saturating, sign kept.

    A grid listed in the order of its codes has its mantissa parity in the index: even index is IEEE's even.
    """
    x = np.asarray(x, np.float64)
    magnitude = np.minimum(np.abs(x), grid[-1])
    distance = np.abs(magnitude[..., None] - np.asarray(grid, np.float64))
    tied = distance == distance.min(axis=-1, keepdims=True)
    # At most two neighbours tie, and their indices are consecutive: exactly one of them is even.
    even_first = np.where(np.arange(len(grid)) % 2 == 0, 2, 1)
    index = np.argmax(tied * even_first, axis=-1)
    return np.copysign(np.asarray(grid, np.float64)[index], x).astype(F32)


def round_e2m1(x):
    """E2M1 nearest even by searching the eight magnitudes."""
    return round_to_grid(x, E2M1_GRID)


def round_e2m1_stochastic(x, u):
    """The step below |x| or the one above: floor(|x| / step + u) steps, for u in [0, 1).

    The sum is taken in float64; in float32 |x| / step + u can round up to the next integer.
    """
    x = np.asarray(x, np.float64)
    magnitude = np.minimum(np.abs(x), 6.0)
    step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0))
    rounded = np.floor(magnitude / step + np.asarray(u, np.float64)) * step
    return np.copysign(np.minimum(rounded, 6.0), x).astype(F32)


def e2m1_neighbours(x):
    """The grid values at or next to |x| from below and from above, saturating at 6, with the sign of x."""
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), 6.0)
    grid = np.asarray(E2M1_GRID)
    below = grid[np.searchsorted(grid, magnitude, side="right") - 1]
    above = grid[np.searchsorted(grid, magnitude, side="left")]
    return np.copysign(below, x).astype(F32), np.copysign(above, x).astype(F32)


def round_e4m3(x):
    """E4M3 nearest even: ml_dtypes' cast, after the clamp that hardware does and the cast does not."""
    clamped = np.clip(np.asarray(x, F32), F32(-448), F32(448))
    return clamped.astype(ml_dtypes.float8_e4m3fn).astype(F32)


def flush_subnormals(x):
    """What XLA on CPU does to the operands and results of float32 arithmetic: subnormals are signed zeros."""
    x = np.asarray(x, F32)
    return np.where(np.abs(x) < FLT_TINY, np.copysign(F32(0), x), x)


def encode_scale(amax, flush=False):
    """S, float32: 2688 / amax, 1 for amax = 0, at most FLT_MAX."""
    ftz = flush_subnormals if flush else np.asarray
    amax = ftz(np.asarray(amax, F32))
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        scale = ftz(np.minimum(F32(2688) / amax, FLT_MAX))
    return np.where(amax == 0, F32(1), scale)


def block_scale(amax_b, scale, flush=False):
    """s_b as float32 on the E4M3 grid, in the canonical order: amax_b * (S * (1/6))."""
    ftz = flush_subnormals if flush else np.asarray
    with np.errstate(over="ignore", under="ignore"):
        sixth = ftz(np.asarray(scale, F32) * (F32(1) / F32(6)))
        return round_e4m3(ftz(ftz(np.asarray(amax_b, F32)) * sixth))


def decode_scale(scale, flush=False):
    """1/S, float32."""
    with np.errstate(under="ignore"):
        inverse = F32(1) / np.asarray(scale, F32)
    return flush_subnormals(inverse) if flush else inverse


def block_encode(s_b, scale, flush=False):
    """enc_b, float32: the factor that brings a block onto the E2M1 range."""
    ftz = flush_subnormals if flush else np.asarray
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        decode = ftz(np.asarray(s_b, F32) * decode_scale(scale, flush))
        return ftz(np.minimum(F32(1) / decode, FLT_MAX))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """Codes and block scales as float32 values on their grids; `tensor_scale` is the decode scale 1/S.

    `scaled` is what was rounded to the codes, x * enc_b.
    """

    codes: np.ndarray
    block_scales: np.ndarray
    tensor_scale: np.float32
    scaled: np.ndarray


def quantize(x, block=(1, 16), u=None, flush=False):
    """Two-level NVFP4, block by block; `u` (shaped like x) turns on stochastic rounding."""
    ftz = flush_subnormals if flush else np.asarray
    x = ftz(np.asarray(x).astype(F32))
    sizes = (1,) * (x.ndim - len(block)) + tuple(block)
    counts = tuple(n // k for n, k in zip(x.shape, sizes, strict=True))
    assert tuple(c * k for c, k in zip(counts, sizes, strict=True)) == x.shape
    codes, scaled, scales = np.zeros_like(x), np.zeros_like(x), np.zeros(counts, F32)
    if not np.isfinite(x).all():
        return Quantized(codes=codes, block_scales=scales, tensor_scale=F32(np.nan), scaled=scaled)

    scale = encode_scale(np.max(np.abs(x)), flush)
    for index in itertools.product(*map(range, counts)):
        where = tuple(slice(i * k, (i + 1) * k) for i, k in zip(index, sizes, strict=True))
        s_b = block_scale(np.max(np.abs(x[where])), scale, flush)
        with np.errstate(under="ignore"):
            v = ftz(x[where] * block_encode(s_b, scale, flush))
        scales[index] = s_b
        scaled[where] = v
        codes[where] = round_e2m1(v) if u is None else round_e2m1_stochastic(v, u[where])
    decode = F32(decode_scale(scale, flush))
    return Quantized(codes=codes, block_scales=scales, tensor_scale=decode, scaled=scaled)


def spread(block_scales, shape):
    """One value per block -> one value per element."""
    for axis, size in enumerate(shape):
        block_scales = np.repeat(block_scales, size // block_scales.shape[axis], axis=axis)
    return block_scales


def dequantize(q, flush=False):
    """x^ = (code * s_b) * (1/S), float32."""
    with np.errstate(under="ignore"):
        values = (q.codes * spread(q.block_scales, q.codes.shape)) * q.tensor_scale
    return flush_subnormals(values) if flush else values


def code_bits(codes):
    """Four-bit patterns of E2M1 values (float32 or float4), sign of zero included."""
    return np.asarray(codes).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def scale_bits(block_scales):
    """Eight-bit patterns of E4M3 values (float32 or float8)."""
    return np.asarray(block_scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def mxfp4(x):
    """MXFP4 along the last axis, dequantized: 32 elements, scale 2^(floor(log2(amax_b)) - 2)."""
    x = np.asarray(x).astype(F32)
    out = np.zeros_like(x)
    for row in np.ndindex(*x.shape[:-1]):
        for start in range(0, x.shape[-1], 32):
            values = x[row][start : start + 32].astype(np.float64)
            amax = np.max(np.abs(values))
            if amax == 0:
                continue
            exponent = np.frexp(amax)[1] - 1  # floor(log2(amax)), exact
            scale = 2.0 ** np.clip(exponent - 2, -127, 127)
            out[row][start : start + 32] = round_e2m1(values / scale) * scale
    return out


def hadamard_matrix():
    """H = diag(signs) @ Had16 / 4 in float64, Had16[i, j] = (-1)^popcount(i & j)."""
    matrix = np.zeros((16, 16))
    for i, j in np.ndindex(16, 16):
        matrix[i, j] = SIGNS[i] * (-1) ** (i & j).bit_count() / 4
    return matrix


def random_hadamard(x, axis=-1):
    """y = g @ H for every group g of 16 along the axis, in float64."""
    x = np.moveaxis(np.asarray(x).astype(np.float64), axis, -1)
    y = np.zeros_like(x)
    for start in range(0, x.shape[-1], 16):
        y[..., start : start + 16] = x[..., start : start + 16] @ hadamard_matrix()
    return np.moveaxis(y, -1, axis)
