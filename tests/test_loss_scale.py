"""The dynamic loss scale: its moves, its bounds, and that scaling and unscaling cost no bit."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

from maxtext_nvfp4.loss_scale import State, initial, scale_cotangent, update
from maxtext_nvfp4.recipe import LossScale

QUICK = LossScale(init=4, growth_interval=3, max=16)


def walk(recipe, finite, state=None):
    """States after each step."""
    state, states = state or initial(recipe), []
    step = jax.jit(lambda state, flag: update(recipe, state, flag))
    for flag in finite:
        state = step(state, jnp.asarray(flag))
        states.append(State(*map(float, state)))
    return states


def test_defaults_are_those_of_the_section():
    assert LossScale().model_dump() == {
        "mode": "dynamic",
        "init": 32768,
        "growth_interval": 2000,
        "growth": 2,
        "backoff": 0.5,
        "max": 16777216,
        "max_consecutive_skips": 20,
    }


def test_it_grows_after_finite_steps_in_a_row_up_to_its_maximum():
    scales = [state.scale for state in walk(QUICK, [True] * 12)]
    assert scales == [4, 4, 8, 8, 8, 16, 16, 16, 16, 16, 16, 16]


def test_it_backs_off_down_to_one_and_begins_to_count_anew():
    states = walk(QUICK, [True, True, False, True, True, True, False, False, False, False, True])
    assert [state.scale for state in states] == [4, 4, 2, 2, 2, 4, 2, 1, 1, 1, 1]
    assert [state.skipped for state in states] == [0, 0, 1, 1, 1, 1, 2, 3, 4, 5, 5]
    assert [state.skipped_in_a_row for state in states] == [0, 0, 1, 0, 0, 0, 1, 2, 3, 4, 0]


def test_a_static_scale_only_counts():
    states = walk(LossScale(mode="static", init=64, growth_interval=1), [True, False, False, True])
    assert [state.scale for state in states] == [64] * 4
    assert states[-1].skipped == 2
    assert states[2].skipped_in_a_row == 2


def test_the_largest_settings_that_the_section_takes():
    largest = 2**100
    recipe = LossScale(init=2**99, growth=largest, max=largest, growth_interval=2**31 - 1)
    state = initial(recipe)._replace(good_steps=jnp.int32(2**31 - 3))
    assert [state.scale for state in walk(recipe, [True, True, False], state)] == [2**99, 2**100, 2**99]


def test_a_static_scale_may_lie_above_the_dynamic_ones_maximum():
    assert walk(LossScale(mode="static", init=2**30), [True])[0].scale == 2**30


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.sampled_from([2, 4]), st.sampled_from([0.5, 0.25]))
def test_it_stays_a_power_of_two_within_its_bounds(finite, growth, backoff):
    recipe = LossScale(init=8, growth_interval=2, growth=growth, backoff=backoff, max=32)
    for state in walk(recipe, finite):
        assert 1 <= state.scale <= 32
        assert np.log2(state.scale) % 1 == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaling_there_and_back_is_the_identity(dtype):
    x = jax.random.normal(jax.random.key(0), (4, 8), dtype)

    def loss(x, scale):
        return scale_cotangent(jnp.sum(jnp.sin(scale_cotangent(x, 1 / scale)).astype(jnp.float32)), scale)

    plain, plain_grad = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x).astype(jnp.float32))))(x)
    for scale in (1.0, 1024.0, 2.0**24):
        value, grad = jax.jit(jax.value_and_grad(loss))(x, scale)
        assert value == plain
        assert grad.dtype == x.dtype
        np.testing.assert_array_equal(grad, plain_grad)


def test_what_lies_between_is_scaled():
    seen = []

    @jax.custom_vjp
    def tap(x):
        return x

    tap.defvjp(lambda x: (x, None), lambda _, cotangent: (seen.append(cotangent) or cotangent,))
    x, scale = jnp.ones(3), jnp.float32(8)
    grad = jax.grad(lambda x: scale_cotangent(jnp.sum(tap(scale_cotangent(x, 1 / scale))), scale))(x)
    np.testing.assert_array_equal(seen[0], 8 * np.ones(3))
    np.testing.assert_array_equal(grad, np.ones(3))
