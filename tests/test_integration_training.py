"""Whole training runs: equal to stock where nothing is quantized, resumable, and open to one's own script."""

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

STOCK = {"quantization": ""}
PAPER = {"quantization": "nvfp4", "nvfp4": {"recipe": "all_layers"}}


def test_recipe_bf16_is_bit_identical_to_stock_over_20_steps():
    bf16 = {"quantization": "nvfp4", "nvfp4": {"recipe": "bf16"}}
    stock_state, stock = Trainer(**STOCK).run(20)
    ours_state, ours = Trainer(**bf16).run(20)
    losses = [step["learning/loss"] for step in stock]
    assert losses == [step["learning/loss"] for step in ours]
    assert len(set(losses)) == 20
    for a, b in zip(jax.tree.leaves(stock_state), jax.tree.leaves(ours_state), strict=True):
        np.testing.assert_array_equal(values(a), values(b))


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


def test_state_has_the_structure_of_stock_but_for_layer_numbers(quantized):
    state, stock = quantized.initial_state(), Trainer(**STOCK).initial_state()
    ours = {path: leaf for path, leaf in named(state).items() if not isinstance(leaf, LayerIndex)}
    assert len(named(state)) > len(ours)
    assert ours.keys() == named(stock).keys()
    assert {p: leaf.get_value().shape for p, leaf in ours.items()} == {
        p: leaf.get_value().shape for p, leaf in named(stock).items()
    }
    saved, plain = (train_state_nnx.to_checkpoint_dict(tree) for tree in (state, stock))
    assert jax.tree.structure(saved) == jax.tree.structure(plain)
    random_state = [sum(isinstance(v, nnx.RngState) for v in named(tree).values()) for tree in (state, stock)]
    assert random_state[0] == random_state[1]


def run(tmp_path, *arguments):
    """Trains through the command line in a process of its own; returns what it printed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_nvfp4", "train", str(tmp_path / "tiny.yml"), *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def losses(text):
    found = {}
    for line in text.splitlines():
        if "completed step: " in line:
            step = int(line.split("completed step: ")[1].split(",")[0])
            found[step] = line.split(" loss: ")[1].split(",")[0]
    return found


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path, scan):
    keys = {
        **TINY,
        **PAPER,
        "base_config": BASE,
        "steps": 6,
        "checkpoint_period": 3,
        "enable_checkpointing": True,
        "enable_tensorboard": True,
        "scan_layers": scan,
    }
    lines = [
        f"{key}: {value!r}".replace("True", "true").replace("False", "false") for key, value in keys.items()
    ]
    (tmp_path / "tiny.yml").write_text("\n".join(lines).replace("'", '"'))
    whole = run(tmp_path, "base_output_directory=whole")
    run(tmp_path, "base_output_directory=parts", "steps=3")
    rest = run(tmp_path, "base_output_directory=parts")
    assert "restoring from this run's directory step 2" in rest
    assert list(losses(rest)) == [3, 4, 5]
    # Synthetic data is one batch repeated, so only state and noise can tell the runs apart.
    assert losses(rest) == {step: losses(whole)[step] for step in (3, 4, 5)}
    assert len(set(losses(whole).values())) > 3
    assert " at step 0, " in rest  # the summary covers all restarts
    assert "GEMMs in 4 bits" in rest


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
