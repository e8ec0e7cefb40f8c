"""E2M1 and E4M3 rounding, exhaustively: grids, midpoints, their float32 neighbours, every BF16 value."""

import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

from maxtext_nvfp4 import formats

E2M1 = np.array(oracle.E2M1_GRID, np.float32)
E4M3 = np.array(oracle.E4M3_GRID, np.float32)
MIDPOINTS = {"e2m1": (E2M1[1:] + E2M1[:-1]) / 2, "e4m3": (E4M3[1:] + E4M3[:-1]) / 2}
GRIDS = {"e2m1": E2M1, "e4m3": E4M3}
ROUND = {"e2m1": formats.round_e2m1, "e4m3": formats.round_e4m3}
ORACLE = {"e2m1": oracle.round_e2m1, "e4m3": oracle.round_e4m3}

both = pytest.mark.parametrize("name", ["e2m1", "e4m3"])


def with_neighbours(values):
    """Each value, one float32 below and one above, both signs, no subnormals (XLA on CPU drops them)."""
    values = np.asarray(values, np.float32)
    up, down = np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(-np.inf))
    values = np.concatenate([values, up, down])
    values = values[(values == 0) | (np.abs(values) >= oracle.FLT_TINY)]
    return np.concatenate([values, -values])


def all_bf16():
    values = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    return values[np.isfinite(values)]


def assert_same_bits(got, want):
    """Float32 bit patterns, so that -0 is not 0."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype == np.float32
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_limits():
    assert formats.E2M1_MAX == E2M1[-1] == 6.0
    assert formats.E4M3_MAX == E4M3[-1] == 448.0


def test_oracle_agrees_with_ml_dtypes():
    """The grid search and the library's casts are two derivations of one rounding."""
    x = np.concatenate([all_bf16(), with_neighbours(E2M1), with_neighbours(MIDPOINTS["e2m1"])])
    casted = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_same_bits(oracle.round_e2m1(x), casted)
    x = np.concatenate([all_bf16(), with_neighbours(E4M3), with_neighbours(MIDPOINTS["e4m3"])])
    assert_same_bits(oracle.round_to_grid(x, oracle.E4M3_GRID), oracle.round_e4m3(x))


def test_oracle_by_hand():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 7.0, -2.5], np.float32)
    np.testing.assert_array_equal(oracle.round_e2m1(x), [0, 1, 1, 2, 2, 4, 4, 6, 6, -2])
    # amax 7 -> exponent 2 -> scale 1: 7 saturates at 6, 0.25 ties to 0.
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = [7, 0.25, -0.75, 3]
    np.testing.assert_array_equal(oracle.mxfp4(x)[0, :4], [6, 0, -1, 3])
    tiny = np.float32(2.0**-20)
    np.testing.assert_array_equal(oracle.mxfp4(tiny * x), tiny * oracle.mxfp4(x))
    h = oracle.hadamard_matrix()
    np.testing.assert_array_equal(h @ h.T, np.eye(16))
    np.testing.assert_array_equal(h[0], np.full(16, 0.25))


@both
def test_grid_values_are_kept(name):
    x = np.concatenate([GRIDS[name], -GRIDS[name]])
    assert_same_bits(ROUND[name](x), x)


def test_all_256_e4m3_codes():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = codes[np.isfinite(codes)]
    assert len(finite) == 254
    assert_same_bits(formats.round_e4m3(finite), finite)


@both
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_midpoints_and_neighbours(name, wrap):
    x = with_neighbours(np.concatenate([GRIDS[name], MIDPOINTS[name]]))
    got = np.asarray(wrap(ROUND[name])(x))
    assert_same_bits(got, ORACLE[name](x))
    assert len(np.unique(np.abs(got))) == len(GRIDS[name])


@both
def test_midpoints_go_to_even_and_neighbours_do_not(name):
    """Without the oracle: at a midpoint the even index wins, one float32 away the nearer value does."""
    grid, middle = GRIDS[name], MIDPOINTS[name]
    lower, upper = grid[:-1], grid[1:]
    even = np.where(np.arange(len(lower)) % 2 == 0, lower, upper)
    assert_same_bits(ROUND[name](middle), even)
    assert_same_bits(ROUND[name](np.nextafter(middle, np.float32(0))), lower)
    assert_same_bits(ROUND[name](np.nextafter(middle, np.float32(np.inf))), upper)


@both
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_all_bf16_values(name, wrap):
    x = all_bf16()
    got, want = np.asarray(wrap(ROUND[name])(x)), ORACLE[name](x)
    subnormal = (x != 0) & (np.abs(x) < oracle.FLT_TINY)
    assert_same_bits(got[~subnormal], want[~subnormal])
    assert np.all(got[subnormal] == 0)  # The sign of their zero is XLA's affair.
    assert len(np.unique(got)) == 2 * len(GRIDS[name]) - 1


@both
def test_saturates(name):
    top = GRIDS[name][-1]
    above = np.nextafter(top, np.float32(np.inf))
    x = np.array([above, 464, 464.5, 480, 1e4, oracle.FLT_MAX, np.inf], np.float32)
    assert_same_bits(ROUND[name](x), np.full_like(x, top))
    assert_same_bits(ROUND[name](-x), np.full_like(x, -top))


def test_e4m3_subnormals():
    step = np.float32(2.0**-9)
    x = np.array([0.5, 0.5000001, 1, 1.5, 2.5, 3.49, 7, 7.5, 7.51, 8], np.float32) * step
    assert_same_bits(formats.round_e4m3(x), np.array([0, 1, 1, 2, 2, 3, 7, 8, 8, 8], np.float32) * step)


@both
def test_random_float32_of_every_magnitude(name):
    rng = np.random.default_rng(0)
    exponent = rng.integers(-40, 40, 100_000) * (rng.random(100_000) < 0.1) + rng.integers(-11, 10, 100_000)
    x = (rng.normal(size=100_000) * 2.0**exponent).astype(np.float32)
    assert_same_bits(ROUND[name](x), ORACLE[name](x))


@both
def test_rounding_is_arithmetic(name):
    """No narrow dtype on the way: where XLA drops a float32 -> float8 -> float32 pair, values stay unrounded."""
    text = jax.jit(ROUND[name]).lower(jnp.float32(1)).as_text()
    assert "tensor<f32>" in text
    assert not re.search(r"f4E|f8E|f16", text)


@both
def test_dtype_and_shape(name):
    for shape in [(), (0,), (3,), (2, 3, 4)]:
        out = ROUND[name](jnp.ones(shape, jnp.float32))
        assert out.dtype == jnp.float32
        assert out.shape == shape


# Stochastic rounding, with the random number handed in.

UNIFORM_STEPS = np.array([0, 1, 2**22, 2**23 - 1, 2**23, 2**23 + 1, 3 * 2**22, 2**24 - 2, 2**24 - 1])
UNIFORM = (UNIFORM_STEPS * 2.0**-24).astype(np.float32)


def test_stochastic_never_moves_grid_values():
    """Even for the largest u, with which |x| / step + u taken in float32 rounds up to the next integer."""
    x = np.concatenate([E2M1, -E2M1])
    x, u = (a.ravel() for a in np.meshgrid(x, UNIFORM))
    for f in (formats.round_e2m1_stochastic, jax.jit(formats.round_e2m1_stochastic)):
        assert_same_bits(f(x, u), x)


def test_stochastic_follows_the_threshold():
    """Up exactly when fraction + u >= 1, on fractions in 64ths of each step."""
    fraction = np.arange(64) / 64
    x = np.concatenate([lo + fraction * (hi - lo) for lo, hi in itertools.pairwise(E2M1)])
    x = np.concatenate([x, -x]).astype(np.float32)
    u = np.concatenate([UNIFORM, (np.arange(64) / 64).astype(np.float32)])
    x, u = (a.ravel() for a in np.meshgrid(x, u))
    for f in (formats.round_e2m1_stochastic, jax.jit(formats.round_e2m1_stochastic)):
        got = np.asarray(f(x, u))
        assert_same_bits(got, oracle.round_e2m1_stochastic(x, u))
    assert len(np.unique(got)) == 15


def test_stochastic_on_random_inputs():
    """Always a neighbour; the oracle's one except where fraction + u is within float32 rounding of 1."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=200_000) * 2.0 ** rng.integers(-3, 4, 200_000)).astype(np.float32)
    u = (rng.integers(0, 2**24, x.shape) * 2.0**-24).astype(np.float32)
    got = np.asarray(formats.round_e2m1_stochastic(x, u))
    below, above = oracle.e2m1_neighbours(x)
    assert np.all((got == below) | (got == above))
    assert np.all(np.signbit(got) == np.signbit(x))

    magnitude = np.minimum(np.abs(x.astype(np.float64)), 6)
    step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1, 2))
    distance = np.abs((magnitude / step) % 1 + u - 1)
    clear = distance > 2.0**-22
    assert clear.mean() > 0.999
    assert_same_bits(got[clear], oracle.round_e2m1_stochastic(x, u)[clear])
    assert 0.3 < np.mean(got[below != above] == above[below != above]) < 0.7


def test_stochastic_saturates():
    x = np.array([6, 6.0000005, 6.4, 100, oracle.FLT_MAX, np.inf], np.float32)
    x, u = (a.ravel() for a in np.meshgrid(np.concatenate([x, -x]), UNIFORM))
    assert_same_bits(formats.round_e2m1_stochastic(x, u), np.copysign(np.float32(6), x))


@pytest.mark.parametrize("columns", [2, 15, 18])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_storing_gives_the_bits_of_a_cast(columns, transform):
    """Every code beside every code in a byte, zeros of both signs and NaN too, with even and odd row lengths."""
    grid = np.concatenate([E2M1, -E2M1, [np.float32(np.nan), np.float32(-np.nan)]])
    pairs = np.array(list(itertools.product(grid, grid)), np.float32)
    x = np.resize(pairs, (-(-pairs.size // columns), columns))
    stored = transform(formats.store_e2m1)(jnp.asarray(x))
    assert stored.shape == x.shape
    assert stored.dtype == jnp.float4_e2m1fn
    want = oracle.code_bits(jnp.asarray(x).astype(jnp.float4_e2m1fn))
    np.testing.assert_array_equal(oracle.code_bits(stored), want)
