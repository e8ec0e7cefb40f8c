"""The states of stochastic rounding as they reach Transformer Engine's quantizer, in MaxText's compiled train step.

They are recorded at the one entry that its quantizations go through, for this plugin and for MaxText's own te_nvfp4
alike. Public threads answered here: MaxText #5027 (RNG variables multiplied per layer), TE #2270 (stochastic rounding
silently off), TE #2487 (correlated noise), JAX #17982 #21046 (other random bits under remat).
"""

import contextlib
import sys
import zlib
from collections import Counter
from unittest import mock

import harness
import jax
import pytest
from flax import nnx
from jax import numpy as jnp
from maxtext.utils import max_utils
from maxtext_models import Trainer, named

from maxtext_nvfp4.integration.attach import LayerIndex

STEPS = 3
LAYERS = harness.LEGAL["base_num_decoder_layers"]
OUTPUTS = {
    "self_attention/query": (4, 64),
    "self_attention/key": (2, 64),
    "self_attention/value": (2, 64),
    "self_attention/out": (128,),
    "mlp/wi_0": (256,),
    "mlp/wi_1": (256,),
    "mlp/wo": (128,),
}
"""Features of every site's gradient."""
SITES = len(OUTPUTS)

_quantization = sys.modules["transformer_engine.jax.cpp_extensions.quantization"]


@contextlib.contextmanager
def recording(seen):
    """Programs traced inside append (state, features of the quantized gradient) to `seen` when they run."""
    quantize = _quantization._quantize_dbias_impl

    def recorded(x, quantizer, *args, **kwargs):
        state = getattr(quantizer, "stochastic_rounding_rng_state", None)
        if state is not None:
            assert state.shape == (1, 4)
            assert state.dtype == jnp.uint32
            features = getattr(x, "data", x).shape[2:]
            jax.debug.callback(lambda words: seen.append((tuple(map(int, words[0])), features)), state)
        return quantize(x, quantizer, *args, **kwargs)

    with mock.patch.object(_quantization, "_quantize_dbias_impl", recorded):
        yield


class Noise:
    """A trainer with a record of the states that each of its steps quantizes with."""

    def __init__(self, **keys):
        self._seen = []
        with harness.corrected_fallback(), max_utils.transformer_engine_context(), recording(self._seen):
            self.trainer = Trainer(**{**harness.LEGAL, **keys})
            self._step = self.trainer.train_step
        self.restart(0)

    def step(self, batch=0):
        """States used in one training step with the features they round, and how often."""
        self._seen.clear()
        with self.trainer.context():
            self.state, _ = self._step(self.state, self.trainer.batch(batch))
            jax.effects_barrier()
        return Counter(self._seen)

    def restart(self, step):
        """A fresh state at another step, as after a resume."""
        with harness.corrected_fallback(), max_utils.transformer_engine_context():
            self.state = self.trainer.initial_state()
        count = named(self.state)["optimizer/step"]
        count.set_value(jnp.full_like(count.get_value(), step))


def ours(recipe="all_layers", seed=0, **keys):
    return Noise(nvfp4={**harness.BARE, "recipe": recipe, "seed": seed}, **keys)


@pytest.fixture(scope="module")
def reference():
    """States by step of a scanned model with two microbatches, that quantizes again in the backward pass."""
    noise = ours(gradient_accumulation_steps=2, remat_policy="full")
    return noise, [noise.step(batch) for batch in range(STEPS)]


def documented(step, microbatch, layers=LAYERS, seed=0):
    """The states of a step as docs/architecture.md says: of (seed, step, microbatch, layer, site, GEMM)."""
    fold = jax.random.fold_in
    key = fold(jax.random.key(seed, impl="threefry2x32"), step)
    if microbatch is not None:
        key = fold(key, microbatch)
    states = Counter()
    for site, features in OUTPUTS.items():
        for layer in range(layers):
            own = fold(fold(key, zlib.crc32(f"decoder/layers/{site}".encode())), layer)
            gradient, device = 1, 0
            words = jax.random.bits(fold(fold(own, gradient), device), (4,), "uint32") >> 1
            states[tuple(map(int, words)), features] += 1
    return states


@pytest.mark.parametrize(("scan", "distinct"), [(True, 1), (False, STEPS)], ids=["scan", "unrolled"])
def test_stock_repeats_its_noise_in_every_step_under_a_scan(scan, distinct):
    """What this plugin must not do, by the same recorder: 14 states in 3 steps instead of 42."""
    noise = Noise(quantization="te_nvfp4", scan_layers=scan)
    steps = [noise.step(batch) for batch in range(STEPS)]
    for states in steps:
        assert len(states) == states.total() == LAYERS * SITES
    assert len(set().union(*steps)) == distinct * LAYERS * SITES


def test_every_gradient_has_a_state_of_its_own(reference):
    """In every step, microbatch, layer and site, though the same body computes them."""
    _, steps = reference
    for states in steps:
        assert len({words for words, _ in states}) == states.total() == 2 * LAYERS * SITES
    assert len({words for states in steps for words, _ in states}) == STEPS * 2 * LAYERS * SITES


def test_states_are_a_function_of_what_the_documents_say(reference):
    _, steps = reference
    for step, states in enumerate(steps):
        assert states == documented(step, 0) + documented(step, 1)


def test_words_fit_seed_and_offset_of_the_kernel(reference):
    """It reads each pair as an int64 and fills words below 2**31 itself; none is constant."""
    _, steps = reference
    words = [words for states in steps for words, _ in states]
    assert max(map(max, words)) < 2**31
    for place in zip(*words, strict=True):
        assert len(set(place)) == len(place)


def test_states_are_those_of_the_step_after_a_resume(reference):
    noise, steps = reference
    for step in (2, 0):
        noise.restart(step)
        assert noise.step(batch=7) == steps[step]


@pytest.mark.parametrize(
    "keys",
    [
        {"remat_policy": "minimal_with_context_and_quantization"},
        {"scan_layers": False, "remat_policy": "minimal_with_quantization"},
    ],
    ids=str,
)
def test_states_do_not_depend_on_how_the_program_is_laid_out(keys, reference):
    """The same states for the same step, layer and site; JAX #17982 #21046."""
    noise = ours(gradient_accumulation_steps=2, **keys)
    assert [noise.step() for _ in range(2)] == reference[1][:2]


@pytest.mark.parametrize(("recipe", "layers", "seed"), [("all_layers", LAYERS, 0), ("paper", LAYERS - 1, 7)])
def test_without_microbatches(recipe, layers, seed):
    """The state of a layer is the same whether other layers are in 4 bits or, as in `paper`, the last is not."""
    noise = ours(recipe, seed)
    for step in range(STEPS):
        states = noise.step(step)
        assert states == documented(step, None, layers, seed)
        assert states.total() == layers * SITES
    assert not states.keys() & documented(STEPS - 1, None, layers, seed + 1).keys()


def kinds(**keys):
    """The kind of each variable of the train state."""
    with harness.blackwell(), max_utils.transformer_engine_context():
        state = Trainer(**{**harness.LEGAL, **keys}).abstract_state
    return {path: type(leaf) for path, leaf in named(state).items()}


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_the_state_is_that_of_an_unquantized_model(scan):
    """MaxText #5027: no RNG variable is added, so none is multiplied, sliced or repeated; stock adds them to each site."""
    plain = kinds(scan_layers=scan, quantization="")
    nvfp4 = kinds(scan_layers=scan, nvfp4={**harness.BARE, "recipe": "all_layers"})
    added = {path: kind for path, kind in nvfp4.items() if path not in plain}
    assert {path: kind for path, kind in nvfp4.items() if path not in added} == plain
    assert list(added.values()) == [LayerIndex] * (SITES if scan else 0)
    stock = kinds(scan_layers=scan, quantization="te_nvfp4")
    random = [kind for path, kind in stock.items() if path not in plain and issubclass(kind, nnx.RngState)]
    assert len(random) >= SITES
