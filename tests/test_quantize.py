"""Two-level quantization against the oracle, bit for bit, and the properties that need no oracle.

XLA on CPU reads and writes float32 subnormals as zeros in arithmetic. So the comparison asks the oracle to do
the same (`flush=True`) where it can matter: where the input holds subnormals, where a value times its block's
factor underflows (its code is 0 either way), or where amax < 2688 * 2^-126, so that 1/S underflows.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from maxtext_nvfp4.quantize import dequantize, quantize

F32 = np.float32
BF16 = ml_dtypes.bfloat16
jitted = jax.jit(quantize, static_argnames="block")
with_values = jax.jit(lambda x, block: ((q := quantize(x, block)), dequantize(q)), static_argnames="block")
decoded = jax.jit(lambda x, block: dequantize(quantize(x, block)), static_argnames="block")


def assert_matches(q, want, *, varied=True):
    """All three parts of a `Quantized`, bit for bit."""
    assert q.codes.dtype == jnp.float4_e2m1fn
    assert q.block_scales.dtype == jnp.float8_e4m3fn
    assert q.tensor_scale.dtype == jnp.float32
    assert q.codes.shape == want.codes.shape
    assert q.block_scales.shape == want.block_scales.shape
    assert q.tensor_scale.shape == ()
    assert np.asarray(q.tensor_scale).view(np.uint32) == want.tensor_scale.view(np.uint32)
    np.testing.assert_array_equal(oracle.scale_bits(q.block_scales), oracle.scale_bits(want.block_scales))
    np.testing.assert_array_equal(oracle.code_bits(q.codes), oracle.code_bits(want.codes))
    if varied:
        assert len(np.unique(want.codes)) > 3, "the case does not exercise the codes"


def same_bits(a, b):
    """Whether two `Quantized` are equal in every bit."""
    return (
        np.array_equal(oracle.code_bits(a.codes), oracle.code_bits(b.codes))
        and np.array_equal(oracle.scale_bits(a.block_scales), oracle.scale_bits(b.block_scales))
        and np.array_equal(np.asarray(a.tensor_scale), np.asarray(b.tensor_scale), equal_nan=True)
    )


# Data. Every kind takes a generator, a shape and a block, and returns float32.


def block_values(rng, shape, block, values):
    """One of `values` per block, spread over its elements."""
    sizes = (1,) * (len(shape) - len(block)) + block
    counts = tuple(n // k for n, k in zip(shape, sizes, strict=True))
    return oracle.spread(rng.choice(values, counts), shape)


def normal(rng, shape, block):
    return rng.normal(size=shape)


def heavy_tailed(rng, shape, block):
    """Cauchy, so that most blocks lie far below the tensor's amax; clipped to what float16 holds."""
    return np.clip(rng.standard_cauchy(shape), -6e4, 6e4)


def scattered_blocks(rng, shape, block):
    """Block magnitudes over 30 binades: scales from 448 through the subnormals to 0; some blocks all zero."""
    factors = np.append(2.0 ** np.arange(-22, 8), [0.0, 0.0])
    return rng.normal(size=shape) * block_values(rng, shape, block, factors)


def one_hot_blocks(rng, shape, block):
    """Few elements are not zero, so most blocks that are not empty have one."""
    size = np.prod(block)
    return rng.normal(size=shape) * 2.0 ** rng.integers(-6, 6, shape) * (rng.random(shape) < 1.5 / size)


def lattice(rng, shape, block):
    """Multiples of 1/8 up to 6, times a power of two per block: many exact midpoints."""
    x = rng.integers(-48, 49, shape) / 8
    x.flat[0] = 2688
    return x * block_values(rng, shape, block, 2.0 ** np.arange(-3, 3))


KINDS = [normal, heavy_tailed, scattered_blocks, one_hot_blocks, lattice]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def random_config(seed):
    """A shape of rank 1 to 4 with a block for it."""
    rng = np.random.default_rng(1000 + seed)
    block = [(1, 16), (16, 1), (16, 16), (16,), (2, 1, 16), (1, 16, 1), (32, 8)][seed % 7]
    leading = rng.integers(1, 4, rng.integers(0, max(1, 5 - len(block))))
    counts = rng.integers(1, 6, len(block))
    return tuple(map(int, (*leading, *(counts * block)))), block


@pytest.mark.parametrize("seed", range(25))
def test_oracle_on_random_cases(seed):
    """25 shapes, dtypes and blocks, 5 kinds of data each, every kind drawn twice: 250 cases."""
    shape, block = random_config(seed)
    dtype = DTYPES[seed % 3]
    for i, kind in enumerate(KINDS * 2):
        x = jnp.asarray(kind(np.random.default_rng((seed, i)), shape, block), dtype)
        want = oracle.quantize(x, block, flush=True)
        q, values = with_values(x, block)
        assert_matches(q, want, varied=False)
        values = np.asarray(values)
        np.testing.assert_array_equal(values, oracle.dequantize(want, flush=True))
        if np.any(np.asarray(x) != 0):
            assert np.any(values != 0)
            assert kind is not normal or len(np.unique(values)) > 3


@pytest.mark.parametrize(
    ("block", "dtype"), [((1, 16), jnp.float32), ((16, 1), jnp.bfloat16), ((16, 16), jnp.float16)]
)
def test_oracle_on_a_larger_tensor(block, dtype):
    x = jnp.asarray(heavy_tailed(np.random.default_rng(5), (64, 96), block), dtype)
    want = oracle.quantize(x, block)
    q, values = with_values(x, block)
    assert_matches(q, want)
    np.testing.assert_array_equal(values, oracle.dequantize(want))


# The same bits in every kind of program.


@pytest.mark.parametrize(
    ("block", "with_key"), [((1, 16), False), ((16, 1), False), ((16, 16), False), ((1, 16), True)]
)
def test_jit_is_eager(block, with_key):
    x = jnp.asarray(heavy_tailed(np.random.default_rng(6), (32, 64), block), jnp.bfloat16)
    key = jax.random.key(3) if with_key else None
    with jax.disable_jit():
        step_by_step = quantize(x, block, key)
        values = dequantize(step_by_step)
    assert same_bits(quantize(x, block, key), step_by_step)
    assert same_bits(jitted(x, block, key), step_by_step)
    np.testing.assert_array_equal(jax.jit(lambda: dequantize(quantize(x, block, key)))(), values)
    np.testing.assert_array_equal(jax.jit(lambda v, k: dequantize(quantize(v, block, k)))(x, key), values)
    if not with_key:
        assert_matches(step_by_step, oracle.quantize(x, block))


def test_scale_is_rounded_inside_a_fusion_with_its_consumer():
    """XLA may drop f32 -> f8 -> f32. Only the product leaves the program; times the identity it is exact."""
    rng = np.random.default_rng(7)
    a = jnp.asarray(scattered_blocks(rng, (32, 64), (1, 16)), jnp.bfloat16)
    b = jnp.asarray(heavy_tailed(rng, (64, 32), (16, 16)), jnp.bfloat16)

    @jax.jit
    def program(a, b):
        def dot(x, y):
            return jnp.matmul(x, y, precision="highest")

        qa, qb = quantize(a * 1, (1, 16)), quantize(b * 1, (16, 16))
        return (
            dot(dequantize(qa), jnp.eye(64)),
            dot(jnp.eye(64), dequantize(qb)),
            dot(dequantize(qa), dequantize(qb)),
            dequantize(qa, jnp.bfloat16),
            dequantize(qb) + 0.0,
        )

    da, db = (oracle.dequantize(oracle.quantize(v, s)) for v, s in [(a, (1, 16)), (b, (16, 16))])
    out = [np.asarray(v) for v in program(a, b)]
    np.testing.assert_array_equal(out[0], da)
    np.testing.assert_array_equal(out[1], db)
    np.testing.assert_array_equal(out[3], da.astype(BF16))
    np.testing.assert_array_equal(out[4], db)
    exact = da.astype(np.float64) @ db.astype(np.float64)
    bound = 64 * 2.0**-24 * (np.abs(da).astype(np.float64) @ np.abs(db))
    assert np.all(np.abs(out[2] - exact) <= bound)
    assert np.std(exact) > 0


def test_vmap_and_scan():
    """One tensor per slice: each has its own tensor scale."""
    rng = np.random.default_rng(8)
    x = jnp.asarray(rng.normal(size=(5, 16, 32)) * 2.0 ** np.arange(0, 25, 5)[:, None, None], jnp.bfloat16)
    mapped = jax.jit(jax.vmap(quantize))(x)
    _, scanned = jax.lax.scan(lambda c, v: (c, quantize(v)), 0, x)
    assert len(np.unique(mapped.tensor_scale)) == 5
    for i in range(5):
        want = oracle.quantize(x[i])
        assert_matches(jax.tree.map(lambda v: v[i], mapped), want)  # noqa: B023
        assert_matches(jax.tree.map(lambda v: v[i], scanned), want)  # noqa: B023


def test_one_tensor_scale_for_all_leading_axes():
    x = np.random.default_rng(9).normal(size=(3, 16, 32)).astype(F32)
    x[1] *= 1000
    assert_matches(jitted(x, (1, 16)), oracle.quantize(x))
    codes = oracle.code_bits(jitted(x, (1, 16)).codes)
    flat = oracle.code_bits(jitted(x.reshape(48, 32), (1, 16)).codes)
    np.testing.assert_array_equal(flat.reshape(x.shape), codes)


def test_scales_of_another_tensor_are_not_reused():
    """A second call with other data and the same shape: nothing is cached."""
    rng = np.random.default_rng(10)
    for factor in (1, 1e-4, 1e4):
        x = (rng.normal(size=(16, 32)) * factor).astype(F32)
        assert_matches(jitted(x), oracle.quantize(x))


# Equivariance, symmetry, permutation, transposition.


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("with_key", [False, True])
def test_equivariant_under_powers_of_two(block, with_key):
    """x * 2^k: same codes, same block scales, tensor scale times 2^k, for k from -60 to 60.

    Inputs lie within 2^-30 and 2^12, so that x * 2^k, S and 1/S are normal. Beyond |k| of about 90 they are
    not, and rounding (or flushing) subnormals breaks the law.
    """
    rng = np.random.default_rng(11)
    x = jnp.asarray(scattered_blocks(rng, (32, 64), block), jnp.bfloat16)
    magnitude = np.abs(np.asarray(x, F32))
    x = jnp.where(magnitude < 2.0**-30, 0, x)
    assert magnitude.max() < 2.0**12
    key = jax.random.key(4) if with_key else None
    base = jitted(x, block, key)
    for k in range(-60, 61):
        q = jitted(x * jnp.bfloat16(2.0**k), block, key)
        np.testing.assert_array_equal(oracle.code_bits(q.codes), oracle.code_bits(base.codes))
        np.testing.assert_array_equal(oracle.scale_bits(q.block_scales), oracle.scale_bits(base.block_scales))
        assert float(q.tensor_scale) == float(base.tensor_scale) * 2.0**k
    assert len(np.unique(oracle.code_bits(base.codes))) == 16
    assert np.std(np.asarray(base.block_scales, F32)) > 0


def test_transposed():
    """(16, 1) blocks of x^T are (1, 16) blocks of x; square blocks transpose: fprop and dgrad share codes."""
    x = heavy_tailed(np.random.default_rng(12), (48, 80), (1, 16)).astype(F32)
    for block in [(1, 16), (16, 16)]:
        a, b = jitted(x, block), jitted(x.T, block[::-1])
        np.testing.assert_array_equal(oracle.code_bits(a.codes), oracle.code_bits(b.codes).T)
        np.testing.assert_array_equal(oracle.scale_bits(a.block_scales), oracle.scale_bits(b.block_scales).T)
    rows, columns = oracle.code_bits(jitted(x, (1, 16)).codes), oracle.code_bits(jitted(x, (16, 1)).codes)
    assert np.mean(rows != columns) > 0.1


SHAPE = (4, 64)
half_floats = arrays(F32, SHAPE, elements=st.floats(-65504, 65504, width=16).map(F32))


@st.composite
def tensors(draw):
    """Random data of some kind, or values straight from hypothesis: float32, exact in float16."""
    if draw(st.booleans()):
        return draw(half_floats)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(KINDS))
    x = np.clip(kind(rng, SHAPE, (1, 16)), -65504, 65504)
    return x.astype(np.float16).astype(F32)


properties = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@properties
@given(tensors())
def test_property_matches_oracle(x):
    want = oracle.quantize(x)
    assert_matches(jitted(x, (1, 16)), want, varied=False)


@properties
@given(tensors())
def test_property_sign_symmetry(x):
    """Nearest even does not prefer a sign."""
    a, b = jitted(x, (1, 16)), jitted(-x, (1, 16))
    np.testing.assert_array_equal(oracle.code_bits(a.codes) ^ 8, oracle.code_bits(b.codes))
    np.testing.assert_array_equal(oracle.scale_bits(a.block_scales), oracle.scale_bits(b.block_scales))
    np.testing.assert_array_equal(dequantize(a), -np.asarray(dequantize(b)))


@properties
@given(tensors())
def test_property_error_bound(x):
    """|x^ - x| <= max(s_b, 3 * 2^-9) / S, up to float32 rounding, and zeros stay zeros.

    Below 6 the largest step of E2M1 is 2, so the error is at most s_b / S. Above, saturation costs 6 times
    the rounding of s_b: at most 6/16 of a normal s_b, at most 6 half steps of 2^-9 for a subnormal one. For
    a normal s_b the bound is therefore within a sixteenth of amax_b / 6.
    """
    q = jitted(x, (1, 16))
    values = np.asarray(dequantize(q), np.float64)
    s_b = oracle.spread(np.asarray(q.block_scales, np.float64), x.shape)
    bound = np.maximum(s_b, 3 * 2.0**-9) * float(q.tensor_scale) * (1 + 2.0**-20)
    assert np.all(np.abs(values - x) <= bound)
    amax_b = np.abs(x).reshape(4, 4, 16).max(-1)
    normal_scale = np.asarray(q.block_scales, np.float64) >= 2.0**-6
    worst = np.abs(values - x).reshape(4, 4, 16).max(-1)
    assert np.all(worst[normal_scale] <= (amax_b / 6 * (17 / 16 + 2.0**-20))[normal_scale])
    assert np.all(values[x == 0] == 0)
    assert np.all((values == 0) | (np.sign(values) == np.sign(x)))


@properties
@given(tensors())
def test_property_monotone_in_a_block(x):
    values = np.asarray(decoded(x, (1, 16))).reshape(-1, 16)
    order = np.argsort(x.reshape(-1, 16), axis=-1, kind="stable")
    assert np.all(np.diff(np.take_along_axis(values, order, -1), axis=-1) >= 0)


@properties
@given(tensors(), st.randoms(use_true_random=False))
def test_property_permuting_blocks_and_elements(x, random):
    """Blocks know each other only through the tensor's amax, elements only through the block's."""
    blocks = x.reshape(16, 16)
    rows, columns = random.sample(range(16), 16), random.sample(range(16), 16)
    a, b = jitted(blocks, (1, 16)), jitted(blocks[rows][:, columns], (1, 16))
    np.testing.assert_array_equal(oracle.code_bits(a.codes)[rows][:, columns], oracle.code_bits(b.codes))
    np.testing.assert_array_equal(oracle.scale_bits(a.block_scales)[rows], oracle.scale_bits(b.block_scales))


@properties
@given(tensors())
def test_property_idempotent_above_the_smallest_scales(x):
    """Quantizing a dequantized tensor again, in the same blocks, keeps codes and scales where s_b >= 2^-7.

    There the block's largest code is 6, so amax_b comes back within a few float32 roundings. For the scales
    2^-9 to 3 * 2^-9 the largest code can be 3 or 4, and the scale shrinks: it is not a law there. Nor is it
    one for the tensor scale's last bits, or for other blocks (16x1 after 1x16).
    """
    a = jitted(x, (1, 16))
    b = jitted(dequantize(a), (1, 16))
    kept = np.asarray(a.block_scales, F32) >= 2.0**-7
    np.testing.assert_array_equal(np.asarray(a.block_scales)[kept], np.asarray(b.block_scales)[kept])
    kept = oracle.spread(kept, x.shape)
    np.testing.assert_array_equal(np.asarray(a.codes)[kept], np.asarray(b.codes)[kept])
    np.testing.assert_allclose(b.tensor_scale, a.tensor_scale, rtol=2.0**-21)


# Edge cases.


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
@pytest.mark.parametrize("with_key", [False, True])
def test_zero_tensor(block, with_key):
    q = jitted(jnp.zeros((32, 64), jnp.bfloat16), block, jax.random.key(0) if with_key else None)
    assert float(q.tensor_scale) == 1.0
    assert np.all(oracle.code_bits(q.codes) == 0)
    assert np.all(oracle.scale_bits(q.block_scales) == 0)
    assert np.all(np.asarray(dequantize(q)) == 0)


@pytest.mark.parametrize("with_key", [False, True])
def test_zero_block_decodes_to_zeros(with_key):
    x = np.random.default_rng(13).normal(size=(32, 64)).astype(F32)
    x[1, 16:32] = 0
    x[3] = 0
    q = jitted(x, (1, 16), jax.random.key(0) if with_key else None)
    values = np.asarray(dequantize(q))
    assert np.all(values[1, 16:32] == 0)
    assert np.all(values[3] == 0)
    assert np.all(np.asarray(q.block_scales, F32)[3] == 0)
    assert np.count_nonzero(values[[0, 2]]) > 100


def test_block_far_below_the_tensor_decodes_to_zeros():
    """Its scale rounds to 0: 1/0 is capped at FLT_MAX, the codes saturate, and 6 * 0 is still 0."""
    x = np.ones((2, 16), F32)
    x[1] = np.linspace(-1, 1, 16) * 1e-10
    q = jitted(x, (1, 16))
    assert_matches(q, oracle.quantize(x), varied=False)
    values = np.asarray(dequantize(q))
    assert np.all(values[0] == 1)
    assert np.all(values[1] == 0)


@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
def test_one_hot_blocks_are_kept_to_scale_precision(block):
    """One element per block: its code is 6, and only the rounding of s_b is lost."""
    x = np.zeros((64, 64), F32)
    rng = np.random.default_rng(14)
    for i in range(0, 64, 16):
        for j in range(0, 64, 16):
            x[i + rng.integers(16), j + rng.integers(16)] = rng.normal() * 8
    q = jitted(x, block)
    assert_matches(q, oracle.quantize(x, block), varied=False)
    values = np.asarray(dequantize(q))
    assert np.all((values != 0) == (x != 0))
    np.testing.assert_allclose(values, x, rtol=1 / 16 + 1e-6)
    assert np.all(np.abs(np.asarray(q.codes, F32)[x != 0]) == 6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_key", [False, True])
def test_not_finite_in_is_not_finite_out(bad, dtype, with_key):
    """E2M1 holds neither: one bad element makes the tensor scale NaN, hence the whole tensor."""
    key = jax.random.key(0) if with_key else None
    for where in [(0, 0), (17, 31), (31, 63)]:
        x = np.random.default_rng(15).normal(size=(32, 64))
        x[where] = bad
        for block in [(1, 16), (16, 16)]:
            q = jitted(jnp.asarray(x, dtype), block, key)
            assert np.isnan(q.tensor_scale)
            assert np.isnan(np.asarray(dequantize(q))).all()
            assert np.isnan(np.asarray(dequantize(q, jnp.bfloat16), F32)).all()
    zeros = jnp.zeros((16, 16), dtype).at[3, 3].set(bad)
    assert np.isnan(np.asarray(dequantize(quantize(zeros, (1, 16), key)))).all()


def test_not_finite_stays_in_its_own_tensor():
    x = np.random.default_rng(16).normal(size=(3, 16, 32)).astype(F32)
    x[1, 5, 5] = np.inf
    q = jax.vmap(quantize)(x)
    np.testing.assert_array_equal(np.isnan(q.tensor_scale), [False, True, False])
    assert_matches(jax.tree.map(lambda v: v[2], q), oracle.quantize(x[2]))


@pytest.mark.parametrize(
    "amax", [2.0**-110, 1e-30, 2.0**-100 * 1.9, 1e30, 2.0**127, 3.3e38, float(oracle.FLT_MAX)]
)
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_tiny_and_huge_amax(amax, block):
    x = np.random.default_rng(17).uniform(-1, 1, (32, 64))
    x = (x / np.abs(x).max() * amax).astype(F32)
    want = oracle.quantize(x, block, flush=True)
    assert_matches(jitted(x, block), want)
    values = np.asarray(decoded(x, block))
    np.testing.assert_array_equal(values, oracle.dequantize(want, flush=True))
    error = np.abs(values.astype(np.float64) - x)
    assert np.all(error <= amax / 5)


def test_values_just_above_the_tensor_scale_cap():
    """amax below 2688 / FLT_MAX: S is capped at FLT_MAX. On CPU 1/S is then a subnormal, and flushed.

    What holds everywhere: nothing becomes NaN or infinite, and no value moves by more than amax. What holds
    on CPU: the tensor decodes to zeros. The codes are the oracle's with the same flushing.
    """
    x = (np.random.default_rng(18).uniform(-1, 1, (32, 64)) * 2.0**-117).astype(F32)
    q = jitted(x, (1, 16))
    values = np.asarray(dequantize(q))
    assert np.isfinite(values).all()
    assert np.abs(values - x).max() <= np.abs(x).max()
    if jax.default_backend() == "cpu":
        assert np.all(values == 0)
        assert_matches(q, oracle.quantize(x, flush=True), varied=False)
    gradual = oracle.dequantize(oracle.quantize(x))
    assert np.any(gradual != 0), "with gradual underflow the chain itself is fine"


def test_subnormal_inputs():
    """Subnormals beside normal values decode to zeros: exact underflow of their blocks, flushed or not."""
    x = np.random.default_rng(19).normal(size=(32, 64)).astype(F32)
    x[1] = np.linspace(-1e-39, 1e-39, 64)
    x[2, :7] = 1e-41
    q = jitted(x, (1, 16))
    want = oracle.quantize(x)
    values = np.asarray(dequantize(q))
    np.testing.assert_array_equal(values, oracle.dequantize(want))
    assert np.all(values[1] == 0)
    assert np.all(values[2, :7] == 0)
    assert np.count_nonzero(values[0]) > 20
    np.testing.assert_array_equal(oracle.scale_bits(q.block_scales), oracle.scale_bits(want.block_scales))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_subnormal_tensor(dtype):
    """Finite, and off by no more than the input; float32 arithmetic on CPU sees zeros."""
    x = jnp.asarray(np.linspace(-1e-39, 1e-39, 2048).reshape(32, 64), dtype)
    q = jitted(x, (1, 16))
    values = np.asarray(dequantize(q))
    assert np.isfinite(q.tensor_scale)
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= 1.1e-39
    with jax.disable_jit():
        np.testing.assert_array_equal(dequantize(quantize(x, (1, 16))), values)


def test_float16_subnormals_are_ordinary_numbers():
    """Float16's subnormals are normal in float32, where the chain runs."""
    x = jnp.asarray(np.arange(-256, 256).reshape(16, 32) * 2.0**-24, jnp.float16)
    want = oracle.quantize(x)
    assert_matches(jitted(x, (1, 16)), want)
    assert np.count_nonzero(oracle.dequantize(want)) > 400


@pytest.mark.parametrize(
    ("shape", "block", "axis", "size"),
    [
        ((4, 40), (1, 16), 1, 40),
        ((40, 32), (16, 16), 0, 40),
        ((40, 4), (16, 1), 0, 40),
        ((2, 24, 32), (16, 16), 1, 24),
        ((8,), (16,), 0, 8),
    ],
)
def test_refuses_sizes_that_blocks_do_not_divide(shape, block, axis, size):
    """The message names the axis and its size, and the rule to write."""
    with pytest.raises(ValueError, match=r"(?is)rule|exclude") as error:
        quantize(jnp.ones(shape), block)
    message = str(error.value)
    assert str(size) in message
    assert f"axis {axis}" in message or f"axis {axis - len(shape)}" in message
    with pytest.raises(ValueError, match=str(size)):
        jax.jit(quantize, static_argnames="block").trace(jnp.ones(shape), block)


def test_two_levels_keep_small_gradients():
    """On gradient-like data the relative squared error is about 0.009, whatever the magnitude."""
    rng = np.random.default_rng(20)
    x = rng.normal(size=(64, 256)) * np.exp(rng.normal(size=(64, 1)) * 2)
    for factor in (1.0, 1e-6, 1e-12):
        v = (x * factor).astype(BF16).astype(F32)
        both = np.asarray(decoded(v, (1, 16)), np.float64), np.asarray(oracle.mxfp4(v), np.float64)
        error, mxfp4 = (np.sum((y - v) ** 2) / np.sum(v.astype(np.float64) ** 2) for y in both)
        assert 0.006 < error < 0.012
        assert error < 0.8 * mxfp4


def test_mxfp4_for_comparison():
    """Power-of-two block scales and no tensor scale: blocks saturate, and 2^k shifts only the scales."""
    rng = np.random.default_rng(22)
    x = (rng.normal(size=(16, 128)) * 2.0 ** rng.integers(-30, 30, (16, 1))).astype(F32)
    x[3, 32:64] = 0
    x[5] = rng.integers(-48, 49, 128) / 8  # midpoints, and amaxes both above and below 6
    q = quantize(x, (1, 32), precision="mxfp4")
    assert q.block_scales.dtype == jnp.float8_e8m0fnu
    assert float(q.tensor_scale) == 1.0
    want = oracle.mxfp4(x)
    np.testing.assert_array_equal(dequantize(q), want)
    assert np.any(np.abs(want) < np.abs(x) * 0.9)
    assert np.count_nonzero(want) > 1000


def test_dequantize_dtype():
    x = np.random.default_rng(21).normal(size=(16, 32)).astype(F32)
    want = oracle.dequantize(oracle.quantize(x))
    q = jitted(x, (1, 16))
    for dtype in DTYPES:
        values = np.asarray(dequantize(q, dtype))
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, want.astype(dtype))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_non_finite_value_shows_everywhere_in_a_large_tensor(value, block, dtype):
    """Large enough for the reductions that XLA's CPU library takes over, which lose NaN."""
    x = jax.random.normal(jax.random.key(0), (256, 512), dtype).at[3, 7].set(value)
    assert np.isnan(np.asarray(dequantize(quantize(x, block)))).all()
