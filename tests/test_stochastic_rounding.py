"""Stochastic rounding through `quantize`, and the random bits behind it.

All seeds are fixed, so nothing here is flaky; each statistical bound is several standard deviations wide, and
what it catches (a reused, shifted or correlated stream) misses it by orders of magnitude.
"""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from maxtext_nvfp4.quantize import dequantize, quantize
from maxtext_nvfp4.random_bits import uniform

F32 = np.float32
IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]
draw = jax.jit(uniform, static_argnums=1)
nearest = jax.jit(quantize, static_argnames="block")
stochastic = jax.jit(quantize, static_argnames="block")


def draws(key, shape):
    """The 24-bit integers behind the uniforms."""
    return (np.asarray(draw(key, shape), np.float64) * 2**24).astype(np.int64)


def correlation(a, b):
    """Pearson's r times sqrt(n): standard normal for independent draws."""
    a, b = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
    return np.corrcoef(a, b)[0, 1] * np.sqrt(a.size)


def chi_square_z(values, bins):
    """Pearson's chi-square against uniform bins, in standard deviations from its mean."""
    counts = np.bincount(np.ravel(values), minlength=bins)
    assert counts.size == bins
    expected = counts.sum() / bins
    statistic = np.sum((counts - expected) ** 2) / expected
    return (statistic - (bins - 1)) / np.sqrt(2 * (bins - 1))


def one_bit_apart(key):
    """Every key whose data differs from the key's in exactly one bit."""
    data = np.asarray(jax.random.key_data(key))
    for word in range(data.size):
        for bit in range(32):
            flipped = data.copy()
            flipped[word] ^= np.uint32(1 << bit)
            yield jax.random.wrap_key_data(jnp.asarray(flipped), impl=jax.random.key_impl(key))


# The bits.


@pytest.mark.parametrize(
    ("impl", "shape"), [*((i, (33, 5)) for i in IMPLS), *((IMPLS[0], s) for s in [(1,), (7,), (2, 3, 4)])]
)
def test_uniform_shape_dtype_range(impl, shape):
    u = uniform(jax.random.key(0, impl=impl), shape)
    assert u.dtype == jnp.float32
    assert u.shape == shape
    u = np.asarray(u, np.float64)
    assert np.all((u >= 0) & (u < 1))
    np.testing.assert_array_equal(u * 2**24, np.round(u * 2**24))
    assert u.size < 5 or len(np.unique(u)) > 0.9 * u.size


@pytest.mark.parametrize("impl", IMPLS)
def test_same_key_same_bits_in_every_program(impl):
    """Jitted, eager, step by step, mapped, scanned, and recomputed under remat."""
    shape = (16, 32)
    keys = [jax.random.key(s, impl=impl) for s in (1, 2, 3)]
    want = np.stack([np.asarray(uniform(k, shape)) for k in keys])
    assert len({w.tobytes() for w in want}) == 3
    np.testing.assert_array_equal(np.stack([draw(k, shape) for k in keys]), want)
    with jax.disable_jit():
        np.testing.assert_array_equal(uniform(keys[0], shape), want[0])
    stacked = jnp.stack(keys)
    np.testing.assert_array_equal(jax.vmap(lambda k: uniform(k, shape))(stacked), want)
    _, scanned = jax.lax.scan(lambda c, k: (c, uniform(k, shape)), 0, stacked)
    np.testing.assert_array_equal(scanned, want)
    remat = jax.checkpoint(lambda x, k: jnp.sin(x) * uniform(k, shape))
    plain = jax.grad(lambda x: jnp.sum(jnp.sin(x) * uniform(keys[0], shape)))(jnp.ones(shape))
    again = jax.grad(lambda x: jnp.sum(remat(x, keys[0])))(jnp.ones(shape))
    np.testing.assert_allclose(again, plain, rtol=1e-6)


def test_mean_and_variance():
    u = draws(jax.random.key(1), (512, 512)) / 2**24
    n = u.size
    assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / n)


@pytest.mark.parametrize("seed", range(3))
def test_uniformity(seed):
    """Chi-square on 256 bins of the high, the middle and the lowest bits, and each single bit."""
    bits = draws(jax.random.key(seed), (512, 512))
    for shift in (16, 8, 0):
        assert abs(chi_square_z((bits >> shift) & 255, 256)) < 5
    for i in range(24):
        ones = np.count_nonzero(bits >> i & 1)
        assert abs(ones - bits.size / 2) < 5 * np.sqrt(bits.size / 4), f"bit {i}"


@pytest.mark.parametrize("shape", [(256, 512), (64, 2048), (131072,)])
def test_neighbours_are_independent_pairs(shape):
    """Chi-square of 16 x 16 joint bins for elements a lag apart: dependence beyond linear correlation."""
    bits = (draws(jax.random.key(7), shape) >> 20).ravel()
    low = (draws(jax.random.key(7), shape) & 15).ravel()
    for lag in (1, 2, 16, 32, 256, shape[-1] - 1, shape[-1]):
        if lag < bits.size // 2:
            assert abs(chi_square_z(bits[:-lag] * 16 + bits[lag:], 256)) < 5, lag
            assert abs(chi_square_z(low[:-lag] * 16 + low[lag:], 256)) < 5, lag


@pytest.mark.parametrize("shape", [(256, 256), (64, 1024)])
def test_lag_correlations(shape):
    """Serial correlation at every lag at once, through the FFT of the flat stream."""
    u = draws(jax.random.key(8), shape).ravel().astype(np.float64)
    spectrum = np.abs(np.fft.fft(u - u.mean())) ** 2
    z = np.fft.ifft(spectrum).real[1 : u.size // 2] / u.var() / np.sqrt(u.size)
    assert np.abs(z).max() < 6
    assert 0.97 < np.std(z) < 1.03


@pytest.mark.parametrize("seed", [0, 1])
def test_no_structure_in_two_dimensions(seed):
    """No wave stands out of the 2D power spectrum: lattices and repeated rows or columns would."""
    u = draws(jax.random.key(seed), (256, 512)).astype(np.float64)
    power = np.abs(np.fft.rfft2(u - u.mean())) ** 2
    power = power.ravel()[1:] / power.mean()
    # Exponentially distributed: the largest of 65,792 exceeds 25 with a probability of 1e-6.
    assert power.max() < 25
    for bit in (0, 12, 23):
        u = (draws(jax.random.key(seed), (256, 512)) >> bit & 1).astype(np.float64)
        power = np.abs(np.fft.rfft2(u - u.mean())) ** 2
        assert (power.ravel()[1:] / power.mean()).max() < 25


def test_rows_columns_and_slices_are_uncorrelated():
    u = draws(jax.random.key(9), (4, 128, 128)).astype(np.float64)
    rows = np.corrcoef(u[0]) * np.sqrt(128)
    columns = np.corrcoef(u[0].T) * np.sqrt(128)
    for z in (rows, columns):
        off = z[~np.eye(128, dtype=bool)]
        assert np.abs(off).max() < 6
        assert 0.97 < np.std(off) < 1.03
    for i in range(3):
        assert abs(correlation(u[i], u[i + 1])) < 5
        assert abs(correlation(u[i], u[i + 1].T)) < 5


def assert_independent(a, b):
    """Two streams share neither values nor, at any shift, their order, nor bits."""
    n = a.size
    assert abs(correlation(a, b)) < 5.5
    x, y = a.ravel() - a.mean(), b.ravel() - b.mean()
    z = np.fft.ifft(np.fft.fft(x) * np.conj(np.fft.fft(y))).real / (x.std() * y.std() * np.sqrt(n))
    assert np.abs(z).max() < 6.5, "one stream is the other, shifted"
    # A counter xor-ed or added to the key permutes the other's values. By chance n^2 / 2^24 of them agree.
    common = np.intersect1d(a, b).size
    expected = n * n / 2**24
    assert common < expected + 6 * np.sqrt(expected) + 6, "one stream is the other, permuted"
    flipped = np.bitwise_count((a ^ b).ravel()).mean()
    assert abs(flipped - 12) < 6 * np.sqrt(24 / 4 / n)


@pytest.mark.parametrize("impl", IMPLS)
def test_consecutive_keys_are_independent(impl):
    """Seeds 0 to 7, and fold_in 0 to 7 of one key: steps, layers and microbatches draw like this."""
    root = jax.random.key(42, impl=impl)
    seeds = [jax.random.key(s, impl=impl) for s in range(8)]
    folds = [jax.random.fold_in(root, i) for i in range(8)]
    for keys in (seeds, folds):
        streams = [draws(k, (64, 64)) for k in keys]
        for i in range(8):
            for j in range(i):
                assert_independent(streams[i], streams[j])


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_one_bit_apart_are_independent(impl):
    """Every bit of the key counts, and flipping one changes half of the bits drawn."""
    base = jax.random.key(1234, impl=impl)
    want = draws(base, (64, 64))
    flipped = list(one_bit_apart(base))
    assert len(flipped) in (64, 128)
    for key in flipped:
        assert_independent(draws(key, (64, 64)), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_key_words_are_not_interchangeable(impl):
    """Words in another order, or with the same sum or exclusive or, are another key."""
    size = jax.random.key_data(jax.random.key(0, impl=impl)).size
    words = np.arange(size, dtype=np.uint32) * 4 + 5
    variants = [words, words[::-1], np.roll(words, 1)]
    same_sum, same_xor = words.copy(), words.copy()
    same_sum[[0, -1]] += np.array([1, -1], np.int32).view(np.uint32)
    same_xor[[0, -1]] ^= 2
    variants += [same_sum, same_xor]
    variants = list({v.tobytes(): v for v in variants}.values())
    streams = [draws(jax.random.wrap_key_data(jnp.asarray(v), impl=impl), (64, 64)) for v in variants]
    assert len(streams) >= 4
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert_independent(a, b)


def test_sum_of_many_keys_is_flat():
    """Averaged over 256 keys no position stands out: no part of the pattern is the same for every key."""
    keys = jax.random.split(jax.random.key(10), 256)
    u = np.asarray(jax.vmap(lambda k: uniform(k, (32, 64)))(keys), np.float64)
    z = (u.mean(0) - 0.5) / np.sqrt(1 / 12 / 256)
    assert np.abs(z).max() < 5
    assert 0.95 < np.std(z) < 1.05


# Rounding, on inputs whose place between two grid values is known.

MIDPOINTS = np.array(oracle.E2M1_MIDPOINTS)
BELOW, ABOVE = np.array(oracle.E2M1_GRID[:-1]), np.array(oracle.E2M1_GRID[1:])
QUARTERS = BELOW + (ABOVE - BELOW) / 4
THREE_QUARTERS = BELOW + 3 * (ABOVE - BELOW) / 4


def known_tensor(values, blocks, seed=0):
    """(blocks, 16): x * enc_b is +-`values`, exactly.

    An amax of 2688 makes S = 1, and 6 * 2^8 in every other block gives it the scale 2^8 and the factor 2^-8.
    Row 0 and column 0 hold those two, and decode to themselves.
    """
    rng = np.random.default_rng(seed)
    v = rng.choice(values, (blocks, 16)) * rng.choice([-1.0, 1.0], (blocks, 16)) * 256
    v[:, 0] = 6 * 256
    v[0] = 0
    v[0, 0] = 2688
    return v.astype(F32)


def fraction_up(x):
    """Where x lies between its two neighbours, from 0 to 1; and the step, both for scaled magnitudes."""
    q = oracle.quantize(x)
    below, above = (np.abs(v) for v in oracle.e2m1_neighbours(q.scaled))
    step = above - below
    fraction = np.where(step > 0, (np.abs(q.scaled) - below) / np.where(step > 0, step, 1), 0)
    return fraction, step * oracle.spread(q.block_scales, x.shape) * q.tensor_scale


def test_known_tensor():
    x = known_tensor(MIDPOINTS, 64)
    fraction, _ = fraction_up(x)
    assert np.all(fraction[1:, 1:] == 0.5)
    assert np.all(fraction[0] == 0)
    assert np.all(fraction[:, 0] == 0)
    assert np.all(fraction_up(known_tensor(QUARTERS, 64))[0][1:, 1:] == 0.25)


@pytest.mark.parametrize("impl", IMPLS)
def test_two_keys_differ_and_one_key_repeats(impl):
    x = known_tensor(MIDPOINTS, 64)
    k1, k2 = (jax.random.key(s, impl=impl) for s in (0, 1))
    a, again, b = (oracle.code_bits(stochastic(x, (1, 16), k).codes) for k in (k1, k1, k2))
    np.testing.assert_array_equal(a, again)
    differ = np.mean((a != b)[1:, 1:])
    assert abs(differ - 0.5) < 5 * np.sqrt(0.25 / (63 * 15))
    np.testing.assert_array_equal(a, oracle.code_bits(quantize(x, (1, 16), k1).codes))


@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
def test_only_codes_are_stochastic(block):
    """Scales are those of nearest rounding, codes are a neighbour of x * enc_b, signs are kept."""
    x = np.random.default_rng(1).normal(size=(64, 64)).astype(F32)
    want = oracle.quantize(x, block)
    q = stochastic(x, block, jax.random.key(5))
    np.testing.assert_array_equal(oracle.scale_bits(q.block_scales), oracle.scale_bits(want.block_scales))
    assert np.asarray(q.tensor_scale) == want.tensor_scale
    codes = np.asarray(q.codes, F32)
    below, above = oracle.e2m1_neighbours(want.scaled)
    assert np.all((codes == below) | (codes == above))
    np.testing.assert_array_equal(np.signbit(codes), np.signbit(x))
    between = below != above
    assert 0.3 < np.mean(codes[between] == above[between]) < 0.7
    assert np.mean(codes[between] != want.codes[between]) > 0.1, "indistinguishable from nearest rounding"


def test_grid_values_never_move():
    x = known_tensor(np.array(oracle.E2M1_GRID), 256)
    keys = jax.random.split(jax.random.key(2), 64)
    values = jax.jit(jax.vmap(lambda k: dequantize(quantize(x, (1, 16), k))))(keys)
    np.testing.assert_array_equal(values, np.broadcast_to(x, values.shape))


@pytest.mark.parametrize("values", [MIDPOINTS, QUARTERS, THREE_QUARTERS, MIDPOINTS + 0.0625])
def test_mean_over_keys_is_the_input(values):
    """The central limit theorem per element and over all of them: no bias, and the right variance."""
    x, n = known_tensor(values, 9), 2000
    fraction, step = fraction_up(x)
    keys = jax.random.split(jax.random.key(3), n)
    y = np.asarray(jax.jit(jax.vmap(lambda k: dequantize(quantize(x, (1, 16), k))))(keys), np.float64)
    moving = fraction > 0
    assert moving.sum() == 8 * 15
    np.testing.assert_array_equal(y[:, ~moving], np.broadcast_to(x[~moving], y[:, ~moving].shape))
    deviation = step * np.sqrt(fraction * (1 - fraction) / n)
    z = (y.mean(0) - x)[moving] / deviation[moving]
    assert np.abs(z).max() < 4.5
    assert abs(z.mean()) < 4.5 / np.sqrt(z.size)
    assert 0.7 < np.mean(z**2) < 1.4


def test_mean_over_elements_is_the_input():
    """One key, many elements: what a gradient sees. Nearest even is off by half a step, always one way."""
    x = np.abs(known_tensor(np.array([1.25, 2.5, 5.0]), 2048))
    _, step = fraction_up(x)
    moving = step > 0
    values = np.asarray(dequantize(stochastic(x, (1, 16), jax.random.key(6))))
    error = (values - x)[moving] / step[moving]
    assert set(np.unique(error)) == {-0.5, 0.5}
    assert abs(error.mean()) < 5 * np.sqrt(0.25 / error.size)
    values = np.asarray(dequantize(nearest(x, (1, 16))))
    assert np.all((values - x)[moving] / step[moving] == -0.5)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((256, 256), (1, 16)), ((256, 256), (16, 1)), ((256, 256), (16, 16)), ((4, 64, 256), (1, 16))],
)
def test_decisions_are_independent_across_the_tensor(shape, block):
    """Up or down, on midpoints: rows, columns, blocks and slices draw their own bits."""
    x = np.full(shape, 2.5 * 256, F32)
    sizes = (1,) * (len(shape) - 2) + block
    x[tuple(np.s_[::k] for k in sizes)] = 6 * 256
    x[(0,) * len(shape)] = 2688  # its block's scale is 448, and its other values lie elsewhere
    codes = np.asarray(stochastic(x, block, jax.random.key(11)).codes, F32)
    up = np.where(codes == 6, np.nan, codes - 2.5).reshape(-1, shape[-1]) * 2
    up[:16, :16] = np.nan
    assert set(np.unique(up[~np.isnan(up)])) == {-1.0, 1.0}
    assert abs(np.nanmean(up)) * np.sqrt(up.size) < 5
    for axis in (0, 1):
        for lag in (1, 2, 3, 4, 8, 15, 16, 17, 32, 64, 128):
            a, b = (np.moveaxis(up, axis, 0)[s] for s in (np.s_[:-lag], np.s_[lag:]))
            product = (a * b)[~np.isnan(a * b)]
            assert abs(product.sum()) < 5 * np.sqrt(product.size), (axis, lag)
    mirrored = up[::-1, ::-1] * up
    assert abs(np.nansum(mirrored)) < 5 * np.sqrt(2 * up.size)


def test_mapped_over_keys_and_tensors():
    """Under vmap and scan, as for stacked layers, each slice gets what it gets alone with its key."""
    x = np.stack([known_tensor(MIDPOINTS, 32, s) for s in range(4)])
    keys = jax.random.split(jax.random.key(12), 4)
    alone = [oracle.code_bits(stochastic(v, (1, 16), k).codes) for v, k in zip(x, keys, strict=True)]
    mapped = jax.vmap(lambda v, k: quantize(v, (1, 16), k))(x, keys)
    _, scanned = jax.lax.scan(lambda c, a: (c, quantize(a[0], (1, 16), a[1])), 0, (x, keys))
    np.testing.assert_array_equal(oracle.code_bits(mapped.codes), np.stack(alone))
    np.testing.assert_array_equal(oracle.code_bits(scanned.codes), np.stack(alone))
    # One tensor under four keys: all differ.
    same = jax.vmap(lambda k: quantize(x[0], (1, 16), k))(keys)
    assert len({c.tobytes() for c in oracle.code_bits(same.codes)}) == 4


SHARDED = """
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from maxtext_nvfp4.quantize import quantize
    from maxtext_nvfp4.random_bits import uniform

    assert jax.device_count() == 8
    key = jax.random.key(3)
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    # The amax sits in the last shard, whichever axis is cut: a local amax would show everywhere else.
    x[-1, -1] = 16

    @jax.jit
    def program(x, key):
        cases = [((1, 16), None), ((1, 16), key), ((16, 16), key)]
        return uniform(key, x.shape), *(quantize(x, block, k) for block, k in cases)

    def bits(q):
        return [np.asarray(q.codes).view(np.uint8) & 15, np.asarray(q.block_scales).view(np.uint8),
                np.asarray(q.tensor_scale).view(np.uint32)]

    noise, *alone = program(x, key)
    assert all(len(np.unique(bits(q)[0])) >= 14 and len(np.unique(bits(q)[1])) > 3 for q in alone)
    compared = 0
    for shape, spec in [((8,), P("a")), ((8,), P(None, "a")), ((4,), P("a")), ((2,), P(None, "a")),
                        ((2, 4), P("b", "a")), ((4, 2), P(("a", "b")))]:
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        sharding = NamedSharding(Mesh(devices, ("a", "b")[: len(shape)]), spec)
        u, *sharded = program(jax.device_put(x, sharding), key)
        pinned = jax.jit(lambda k: uniform(k, (64, 64)), out_shardings=sharding)(key)
        assert not pinned.sharding.is_fully_replicated
        assert np.array_equal(np.asarray(u), np.asarray(noise)), spec
        assert np.array_equal(np.asarray(pinned), np.asarray(noise)), spec
        for one, many in zip(alone, sharded, strict=True):
            assert not many.codes.sharding.is_fully_replicated, spec
            for a, b in zip(bits(one), bits(many), strict=True):
                assert np.array_equal(a, b), spec
            compared += 1
    print("compared", compared)
"""


def test_sharded_is_unsharded():
    """2, 4 and 8 shards, along either axis or both: same noise, codes and scales as on one device."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(SHARDED)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split()[-2:] == ["compared", "18"]
