"""MaxText's training with Transformer Engine's JAX fallback: as good as the emulation, and resumable."""

import functools

import harness as h
import jax
import maxtext_models
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp

STEPS = 20


def trainer(backend, microbatches=1):
    return maxtext_models.Trainer(
        **h.LEGAL,
        nvfp4={"backend": backend, "recipe": "paper"},
        scan_layers=True,
        gradient_accumulation_steps=microbatches,
    )


def train(trainer, steps, state):
    """The state and the losses after these steps, all on one batch."""
    losses, batch = [], trainer.batch()
    for _ in steps:
        with trainer.context():
            state, metrics = trainer.train_step(state, batch)
        losses.append(float(metrics["scalar"]["learning/loss"]))
    return state, losses


@functools.cache
def run(backend, microbatches):
    """A trainer, a copy of its state at step 8, its last state and all its losses."""
    with h.corrected_fallback():
        built = trainer(backend, microbatches)
        middle, before = train(built, range(8), built.initial_state())
        saved = jax.tree.map(copied, middle)
        last, after = train(built, range(8, STEPS), middle)
    return built, saved, last, before + after


def copied(leaf):
    """A copy of an array out of the reach of the train step, which consumes its argument."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jnp.array(jax.random.key_data(leaf), copy=True)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    return jnp.array(leaf, copy=True)


def bits(leaf):
    keys = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if keys else leaf)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_both_backends_learn_alike(microbatches):
    """20 steps of the whole recipe: within half a percent of each other, falling, but not the same run."""
    (_, _, _, ours), (_, _, _, emulated) = (
        run(name, microbatches) for name in ("transformer_engine", "emulated")
    )
    for losses in (ours, emulated):
        assert np.isfinite(losses).all()
        assert len(set(losses)) >= STEPS - 1  # the first step's learning rate is 0
        assert losses[-1] < losses[0] - 0.2
        assert losses[-1] < losses[STEPS // 2] < losses[0]
    assert ours[-1] == pytest.approx(emulated[-1], rel=0.005)
    assert all(a != b for a, b in zip(ours, emulated, strict=True))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_run_from_its_own_state_repeats_itself(microbatches):
    """Bit for bit: parameters, optimizer, and the noise, which is no part of the state (TE #2418)."""
    built, saved, last, losses = run("transformer_engine", microbatches)
    state = jax.tree.map(copied, saved)
    again, found = train(built, range(8, STEPS), state)
    assert found == losses[8:]
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(last), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_the_noise_follows_the_step():
    """A state put back by one step trains otherwise: the comparison above sees the noise."""
    built, saved, last, _ = run("transformer_engine", 1)
    state = jax.tree.map(copied, saved)
    count = maxtext_models.named(state)["optimizer/step"]
    count.set_value(count.get_value() + 1)
    again, _ = train(built, range(8, STEPS), state)
    weights = [
        np.concatenate([bits(leaf).ravel() for leaf in jax.tree.leaves(nnx.filter_state(part, nnx.Param))])
        for part in (again, last)
    ]
    assert np.mean(weights[0] != weights[1]) > 0.5
