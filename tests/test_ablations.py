"""The paper's two ablations that go beyond its recipe: transformed operands everywhere, noisy activations."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from maxtext_nvfp4 import dequantize, dot_general, quantize, random_hadamard
from maxtext_nvfp4.backends.operands import encode_operands
from maxtext_nvfp4.policy import layer_plan
from maxtext_nvfp4.recipe import load_recipe

DIMENSIONS = (((1,), (0,)), ((), ()))
NOISY = {"stochastic_rounding": "gradients_and_activations"}


def operands(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(
        jax.random.normal(key, shape, jnp.float32)
        for key, shape in zip(keys, ((64, 32), (32, 48), (64, 48)), strict=True)
    )


def in_four_bits(x, axis, block):
    """What a GEMM that contracts `axis` multiplies, after the transform."""
    moved = random_hadamard(x, axis)
    return np.asarray(dequantize(quantize(moved, block if axis == 1 else block[::-1])))


def test_transformed_operands_are_multiplied_in_all_three_gemms():
    x, w, dy = operands()
    recipe = {"hadamard": "all", "stochastic_rounding": "none"}
    y, vjp = jax.jit(lambda x, w: jax.vjp(lambda x, w: dot_general(x, w, DIMENSIONS, recipe=recipe), x, w))(
        x, w
    )
    dx, dw = vjp(dy)
    expected = {
        "y": in_four_bits(x, 1, (1, 16)) @ in_four_bits(w, 0, (16, 16)),
        "dx": in_four_bits(dy, 1, (1, 16)) @ in_four_bits(w, 1, (16, 16)).T,
        "dw": in_four_bits(x, 0, (1, 16)).T @ in_four_bits(dy, 0, (1, 16)),
    }
    for name, found in (("y", y), ("dx", dx), ("dw", dw)):
        np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    plain = dot_general(x, w, DIMENSIONS, recipe={**recipe, "hadamard": "wgrad"})
    assert np.abs(np.asarray(y - plain)).max() > 0.01
    # The transform is orthogonal: the product stays that of x and w.
    error, scale = np.linalg.norm(y - x @ w), np.linalg.norm(x @ w)
    assert 0.01 < error / scale < 0.2


def test_activations_are_rounded_by_the_key_in_forward_and_to_nearest_without_one():
    x, w, _ = operands()

    @jax.jit
    def forward(x, w, key):
        return jax.vjp(lambda x, w: dot_general(x, w, DIMENSIONS, recipe=NOISY, key=key), x, w)[0]

    one, same, other = (forward(x, w, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert np.abs(np.asarray(one - other)).max() > 0.01
    nearest = dot_general(x, w, DIMENSIONS, recipe={})
    np.testing.assert_array_equal(dot_general(x, w, DIMENSIONS, recipe=NOISY), nearest)
    # Unbiased in x but where a block's largest element saturates: the mean over keys comes close to what the quantized
    # weight gives with x itself, and no single draw does.
    exact = np.asarray(x) @ np.asarray(dequantize(quantize(w, (16, 16))))
    mean = np.mean([forward(x, w, jax.random.key(seed)) for seed in range(400)], axis=0)
    assert rms(mean - exact) < 0.25 * rms(nearest - exact) < 0.25 * rms(one - exact)


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


def test_the_noise_of_two_operands_is_not_the_same():
    plan = layer_plan(load_recipe({**NOISY, "hadamard": "none"})).wgrad
    # Halfway between two codes, where the noise alone decides; 6 in each block keeps its scale.
    values = jnp.full((256, 256), 2.5).at[::16].set(6.0)
    a, b = encode_operands(plan, values, values, (0, 0), jax.random.key(0))
    up_a, up_b = (np.asarray(one.encoded.scaled_codes() * one.encoded.tensor_scale) > 2.5 for one in (a, b))
    agreement = np.mean(up_a[np.asarray(values) == 2.5] == up_b[np.asarray(values) == 2.5])
    assert 0.47 < agreement < 0.53


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("hadamard", ("wgrad", "all", "none")),
        ("stochastic_rounding", ("gradients", "gradients_and_activations", "none")),
    ],
)
def test_the_values_make_recipes_of_their_own(key, values):
    assert len({load_recipe({key: value}).fingerprint for value in values}) == len(values)
