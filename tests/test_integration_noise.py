"""The random keys of stochastic rounding as they leave MaxText's compiled train step."""

from collections import Counter

import jax
import pytest
from flax import nnx
from jax import numpy as jnp
from maxtext_models import Trainer, named

from maxtext_nvfp4 import random_bits
from maxtext_nvfp4.integration.attach import LayerIndex
from maxtext_nvfp4.integration.loss_scaling import LossScaleVariable

STEPS = 3
LAYERS = 2
SITES = 4
GRADIENT_GEMMS = 2
RECIPE = {
    "recipe": "mlp_only",
    "rules": [
        {"module": "*", "layers": 2, "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"},
        {"module": "query", "fprop": "nvfp4", "dgrad": "nvfp4", "wgrad": "nvfp4"},
    ],
    "hadamard": "none",
}
"""Four sites in 4 bits in the first two of three layers."""


class Noise:
    """A trainer that tells the key of every use of random bits, in place of the bits themselves."""

    def __init__(self, monkeypatch, seed=0, **keys):
        self.trainer = Trainer(
            base_num_decoder_layers=LAYERS + 1,
            quantization="nvfp4",
            nvfp4={**RECIPE, "seed": seed},
            **keys,
        )
        self._seen = []
        self.uses = 0

        def reporting(key, shape):
            assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            self.uses += 1
            jax.debug.callback(
                lambda words: self._seen.append(tuple(map(int, words))), jax.random.key_data(key)
            )
            return jnp.full(shape, 0.5, jnp.float32)

        with monkeypatch.context() as patch:
            patch.setattr(random_bits, "uniform", reporting)
            self.trainer.trace()
        self.state = self.trainer.initial_state()

    def step(self, batch=0):
        """Keys used in one training step, with the number of uses of each."""
        self._seen.clear()
        train_step = self.trainer.train_step
        with self.trainer.context():
            self.state, _ = train_step(self.state, self.trainer.batch(batch))
            jax.effects_barrier()
        return Counter(self._seen)

    def restart(self, step):
        """A fresh state at another step, as after a resume."""
        self.state = self.trainer.initial_state()
        count = named(self.state)["optimizer/step"]
        count.set_value(jnp.full_like(count.get_value(), step))


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def reference(monkeypatch_module):
    """Keys by step of a scanned model with two microbatches and full rematerialization."""
    noise = Noise(monkeypatch_module, gradient_accumulation_steps=2)
    return noise, [noise.step(batch) for batch in range(STEPS)]


def test_every_use_has_a_key_of_its_own(reference):
    _, steps = reference
    for keys in steps:
        assert len(keys) == keys.total() == 2 * LAYERS * SITES * GRADIENT_GEMMS
    assert len(set().union(*steps)) == STEPS * 2 * LAYERS * SITES * GRADIENT_GEMMS


def test_keys_are_those_of_the_step_after_a_resume(reference):
    noise, steps = reference
    for step in (2, 0):
        noise.restart(step)
        assert noise.step(batch=7) == steps[step]


@pytest.mark.parametrize(
    "keys",
    [
        {"remat_policy": "minimal"},
        {"remat_policy": "none"},
        {"scan_layers": False, "remat_policy": "minimal_with_context"},
    ],
    ids=str,
)
def test_keys_do_not_depend_on_how_the_program_is_laid_out(keys, reference, monkeypatch):
    noise = Noise(monkeypatch, gradient_accumulation_steps=2, **keys)
    assert [noise.step() for _ in range(2)] == reference[1][:2]


def test_another_seed_has_other_keys(reference, monkeypatch):
    noise = Noise(monkeypatch, seed=1, gradient_accumulation_steps=2)
    keys = noise.step()
    assert len(keys) == len(reference[1][0])
    assert not keys.keys() & set().union(*reference[1])


def test_without_microbatches(monkeypatch):
    noise = Noise(monkeypatch, scan_layers=False, remat_policy="minimal")
    steps = [noise.step() for _ in range(STEPS)]
    for keys in steps:
        assert len(keys) == keys.total() == LAYERS * SITES * GRADIENT_GEMMS
    assert len(set().union(*steps)) == STEPS * LAYERS * SITES * GRADIENT_GEMMS


@pytest.mark.parametrize("scan", [True, False])
def test_evaluation_uses_no_random_bits(scan, monkeypatch):
    def refuse(key, shape):
        raise AssertionError("random bits in an evaluation")

    monkeypatch.setattr(random_bits, "uniform", refuse)
    trainer = Trainer(
        scan_layers=scan, quantization="nvfp4", nvfp4=RECIPE, base_num_decoder_layers=LAYERS + 1
    )
    trainer.trace(evaluation=True)
    with pytest.raises(AssertionError, match="random bits in an evaluation"):
        trainer.trace()


@pytest.mark.parametrize("scan", [True, False])
def test_the_model_holds_no_random_state(scan):
    """Nothing random is added to stock MaxText's variables, so no state of it can be sliced, copied or repeated."""

    def kinds(**keys):
        variables = named(Trainer(scan_layers=scan, **keys).abstract_state)
        return {path: type(leaf) for path, leaf in variables.items()}

    stock, ours = kinds(), kinds(quantization="nvfp4", nvfp4={"recipe": "all_layers"})
    added = {path: kind for path, kind in ours.items() if path not in stock}
    assert {path: kind for path, kind in ours.items() if path not in added} == stock
    count = Counter(added.values())
    assert count.pop(LossScaleVariable) == 4
    assert count == ({LayerIndex: 7} if scan else {})
    assert not issubclass(LayerIndex, nnx.RngState)
    assert not issubclass(LossScaleVariable, nnx.RngState)
