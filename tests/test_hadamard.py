"""The 16-point random Hadamard transform."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from maxtext_nvfp4 import hadamard

H = oracle.hadamard_matrix()


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_signs():
    assert tuple(hadamard.SIGNS) == oracle.SIGNS
    # Transformer Engine packs the same signs, least significant bit first, 1 for minus.
    assert sum((s < 0) << i for i, s in enumerate(hadamard.SIGNS)) == 55272 % 2**16


def test_matrix_is_the_oracles():
    """The identity comes out as H itself, exactly: every entry is +-1/4."""
    got = np.asarray(hadamard.random_hadamard(jnp.eye(16, dtype=jnp.float32)))
    np.testing.assert_array_equal(got, H.astype(np.float32))
    assert set(np.unique(got)) == {-0.25, 0.25}


def test_orthogonal_and_inverse():
    got = np.asarray(hadamard.random_hadamard(jnp.eye(16, dtype=jnp.float32)), np.float64)
    np.testing.assert_array_equal(got @ got.T, np.eye(16))
    np.testing.assert_array_equal(got.T @ got, np.eye(16))
    x = normal((8, 64))
    y = np.asarray(hadamard.random_hadamard(x), np.float64).reshape(8, 4, 16)
    np.testing.assert_allclose((y @ H.T).reshape(8, 64), x, atol=1e-6)
    np.testing.assert_allclose(np.sum(y**2), np.sum(x.astype(np.float64) ** 2), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((16,), 0, jnp.float32),
        ((4, 48), 1, jnp.bfloat16),
        ((4, 48), -1, jnp.float16),
        ((32, 5), 0, jnp.bfloat16),
        ((32, 5), -2, jnp.float32),
        ((2, 32, 3), 1, jnp.float32),
        ((16, 2, 3), 0, jnp.bfloat16),
    ],
)
def test_any_axis_and_dtype(shape, axis, dtype):
    x = jnp.asarray(normal(shape), dtype)
    want = oracle.random_hadamard(x, axis)
    # 16 products and 15 additions in float32, then one rounding to the dtype.
    bound = 16 * 2.0**-24 * oracle_abs(x, axis)
    bound = bound + (jnp.finfo(dtype).eps / 2) * (np.abs(want) + bound)
    for f in (hadamard.random_hadamard, jax.jit(hadamard.random_hadamard, static_argnames="axis")):
        y = f(x, axis=axis)
        assert y.dtype == dtype
        assert y.shape == shape
        assert np.all(np.abs(np.asarray(y, np.float64) - want) <= bound)
    assert np.std(want) > 0.1


def oracle_abs(x, axis):
    """Sum of |x_i H_ij| over a group: what a rounding error bound is relative to."""
    x = np.moveaxis(np.abs(np.asarray(x).astype(np.float64)), axis, -1)
    sums = np.repeat(x.reshape(*x.shape[:-1], -1, 16).sum(-1) / 4, 16, axis=-1)
    return np.moveaxis(sums, -1, axis)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exact_on_small_integers(dtype):
    """Sums that float32 holds exactly come out exact, jitted or not: no bfloat16 or TF32 products."""
    x = np.random.default_rng(3).integers(-128, 129, (64, 32))
    want = oracle.random_hadamard(x)
    for f in (hadamard.random_hadamard, jax.jit(hadamard.random_hadamard)):
        y = np.asarray(f(jnp.asarray(x, dtype)))
        np.testing.assert_array_equal(y, want.astype(np.float32).astype(y.dtype))


def test_accumulates_in_float32():
    """In bfloat16, 256 + 1 is 256: a bfloat16 accumulator loses the fifteen ones."""
    x = np.ones((1, 16), np.float32)
    x[0, 0] = 256
    y = np.asarray(hadamard.random_hadamard(jnp.asarray(x, jnp.bfloat16)))
    want = oracle.random_hadamard(x)
    np.testing.assert_array_equal(y, want.astype(np.float32).astype(y.dtype))
    assert np.any(want != np.round(want / 64) * 64)


def test_spreads_a_one_hot_evenly():
    x = np.zeros((16, 16), np.float32)
    np.fill_diagonal(x, 12.0)
    y = np.asarray(hadamard.random_hadamard(x))
    np.testing.assert_array_equal(np.abs(y), np.full((16, 16), 3.0))
    assert np.linalg.matrix_rank(y) == 16


def test_groups_do_not_mix():
    x = normal((2, 64))
    y = np.asarray(hadamard.random_hadamard(x))
    x[:, 16:32] = 0
    z = np.asarray(hadamard.random_hadamard(x))
    assert np.all(z[:, 16:32] == 0)
    np.testing.assert_array_equal(np.delete(z, np.s_[16:32], 1), np.delete(y, np.s_[16:32], 1))


def test_leaves_a_gemm_unchanged():
    """(A H)(B H)^T = A B^T when both operands are transformed along the contraction."""
    a, b = normal((24, 96), 1), normal((40, 96), 2)
    ah, bh = (np.asarray(hadamard.random_hadamard(v), np.float64) for v in (a, b))
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(ah @ bh.T, exact, atol=2e-5)
    assert np.abs(ah @ b.T - exact).max() > 1, "one transformed operand alone must not do"
    # The same for the axis that wgrad uses: tokens first.
    ah, bh = (np.asarray(hadamard.random_hadamard(v.T, axis=0), np.float64) for v in (a, b))
    np.testing.assert_allclose(ah.T @ bh, exact, atol=2e-5)


def test_linear():
    a, b = normal((4, 32), 4), normal((4, 32), 5)
    f = hadamard.random_hadamard
    np.testing.assert_allclose(f(a + 2 * b), f(a) + 2 * f(b), atol=5e-6)


def test_inside_jit_vmap_and_scan():
    x = normal((3, 8, 32))
    plain = np.asarray(hadamard.random_hadamard(x))
    np.testing.assert_allclose(jax.vmap(hadamard.random_hadamard)(x), plain, atol=1e-6)
    _, scanned = jax.lax.scan(lambda c, v: (c, hadamard.random_hadamard(v)), 0, x)
    np.testing.assert_allclose(scanned, plain, atol=1e-6)


@pytest.mark.parametrize(("shape", "axis", "size"), [((4, 24), -1, 24), ((40, 16), 0, 40), ((2, 8, 3), 1, 8)])
def test_refuses_other_sizes(shape, axis, size):
    with pytest.raises(ValueError, match=rf"axis -?\d.*\b{size}\b|\b{size}\b.*axis -?\d"):
        hadamard.random_hadamard(jnp.ones(shape), axis=axis)
