"""Whole training runs: equal to stock where nothing is quantized, and open to one's own script."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from maxtext.common import train_state_nnx
from maxtext_models import BASE, TINY, Trainer, named

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import seams
from maxtext_nvfp4.integration.attach import LayerIndex
from maxtext_nvfp4.integration.loss_scaling import LossScaleVariable

STOCK = {"quantization": ""}
PAPER = {"quantization": "nvfp4", "nvfp4": {"recipe": "all_layers"}}


def test_recipe_bf16_is_bit_identical_to_stock_over_20_steps():
    bf16 = {"quantization": "nvfp4", "nvfp4": {"recipe": "bf16", "loss_scale": {"mode": "off"}}}
    stock_state, stock = Trainer(**STOCK).run(20)
    ours_state, ours = Trainer(**bf16).run(20)
    losses = [step["learning/loss"] for step in stock]
    assert losses == [step["learning/loss"] for step in ours]
    assert len(set(losses)) == 20
    assert_same_state(stock_state, ours_state)


def assert_same_state(stock, ours):
    stock, ours = named(stock), named(without_own_variables(ours))
    assert stock.keys() == ours.keys()
    for path, leaf in stock.items():
        np.testing.assert_array_equal(values(leaf.get_value()), values(ours[path].get_value()), err_msg=path)


def without_own_variables(state):
    own = (LayerIndex, LossScaleVariable)
    return nnx.State.from_flat_path([(p, v) for p, v in nnx.to_flat_state(state) if not isinstance(v, own)])


def values(leaf):
    keys = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if keys else leaf


@pytest.fixture(scope="module")
def quantized():
    return Trainer(**PAPER)


def test_training_in_4_bits_learns_and_differs_from_bf16(quantized):
    _, ours = quantized.run(4)
    _, stock = Trainer(**STOCK).run(4)
    for a, b in zip(ours, stock, strict=True):
        assert np.isfinite(a["learning/loss"])
        assert a["learning/loss"] != b["learning/loss"]
        assert a["learning/loss"] == pytest.approx(b["learning/loss"], rel=0.02)
        assert a["learning/grad_norm"] > 0


def test_state_has_the_structure_of_stock_but_for_layer_numbers_and_the_loss_scale(quantized):
    state, stock = quantized.initial_state(), Trainer(**STOCK).initial_state()
    ours = named(without_own_variables(state))
    assert len(named(state)) > len(ours)
    assert {p: leaf.get_value().shape for p, leaf in ours.items()} == {
        p: leaf.get_value().shape for p, leaf in named(stock).items()
    }
    saved, plain = (train_state_nnx.to_checkpoint_dict(tree) for tree in (state, stock))
    scale = saved["nnx_aux"]["model"].pop("nvfp4_loss_scale")
    assert set(scale) == {"scale", "good_steps", "skipped", "skipped_in_a_row"}
    assert jax.tree.structure(saved) == jax.tree.structure(plain)
    random_state = [sum(isinstance(v, nnx.RngState) for v in named(tree).values()) for tree in (state, stock)]
    assert random_state[0] == random_state[1]


def test_a_script_of_ones_own_gains_the_mode(tmp_path):
    keys = {**TINY, "quantization": "nvfp4", "base_output_directory": str(tmp_path), "steps": 2}
    arguments = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()
    ]
    script = f"""
import maxtext_nvfp4
maxtext_nvfp4.register()
maxtext_nvfp4.register()
from absl import logging
logging.set_verbosity(logging.INFO)
from maxtext.trainers.pre_train import train
train.main(["script", {BASE!r}, *{arguments!r}])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout + done.stderr
    assert "completed step: 1," in said
    assert said.count("NVFP4 recipe paper") == 1


def test_another_maxtext_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9")
    with pytest.raises(ConfigError, match=r"MaxText 9\.9\.9 is installed.*0\.2\.5"):
        seams.check_maxtext()


def test_a_missing_seam_is_named(monkeypatch):
    monkeypatch.setitem(seams.SEAMS, "maxtext.layers.linears", ("DenseGeneral", "Vanished"))
    with pytest.raises(ConfigError, match=r"lacks maxtext\.layers\.linears\.Vanished"):
        seams.check_maxtext()
