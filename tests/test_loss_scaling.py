"""Loss scaling in MaxText's train step: no bit changes, faults are skipped and named, hopeless runs stop."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from maxtext.trainers.pre_train import train
from maxtext_models import BASE, TINY, Trainer, named

from maxtext_nvfp4.integration.gradients import backward_order, find_layers, finite

NVFP4 = {"quantization": "nvfp4"}


def scaling(mode, **settings):
    return {**NVFP4, "nvfp4": {"recipe": "all_layers", "loss_scale": {"mode": mode, **settings}}}


def arrays(state):
    """Values of parameters and optimizer, by path."""
    return {
        path: np.asarray(leaf.get_value())
        for path, leaf in named(state).items()
        if "nvfp4_loss_scale" not in path and not isinstance(leaf, nnx.RngState)
    }


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


def trained(steps, **keys):
    """State and metrics after steps of a program compiled as MaxText compiles it."""
    trainer = Trainer(**keys)
    trainer.__dict__["train_step"] = trainer.compile()
    return trainer.run(steps)


OTHER = {"scan_layers": False, "gradient_accumulation_steps": 2, "opt_type": "adam_pax"}


@pytest.mark.parametrize("keys", [{}, pytest.param(OTHER, marks=pytest.mark.slow)])
def test_no_mode_changes_a_bit(keys):
    off, history = trained(30, **scaling("off"), **keys)
    for mode in (scaling("static", init=1024), scaling("dynamic", init=2**24, growth_interval=7)):
        state, ours = trained(30, **mode, **keys)
        assert_equal(arrays(state), arrays(off))
        for metric in (
            "learning/loss",
            "learning/grad_norm",
            "learning/raw_grad_norm",
            "learning/param_norm",
        ):
            assert [step[metric] for step in ours] == [step[metric] for step in history]


def test_clipping_sees_unscaled_gradients():
    """With a threshold near the norm, clipping a gradient 2**20 times as large would change every update."""
    keys = {"gradient_clipping_threshold": 0.5}
    off, history = trained(3, **scaling("off"), **keys)
    assert all(step["learning/raw_grad_norm"] > 0.5 for step in history)
    state, _ = trained(3, **scaling("static", init=2**20), **keys)
    assert_equal(arrays(state), arrays(off))


def test_the_scale_grows_and_shrinks_and_the_steps_are_counted(monkeypatch):
    plant(monkeypatch, steps=[2, 5])
    _, history = Trainer(**scaling("dynamic", init=8, growth_interval=2, max=16)).run(8)
    assert [step["nvfp4/loss_scale"] for step in history] == [8, 8, 16, 8, 8, 16, 8, 8]
    assert [step["nvfp4/skipped_steps"] for step in history] == [0, 0, 1, 1, 1, 2, 2, 2]


def plant(monkeypatch, **fault):
    """Plants a fault as `faulty_train` does, until the test ends."""
    import faulty_train

    monkeypatch.setattr(train, "train_step", train.train_step)
    monkeypatch.setattr(train, "loss_fn", train.loss_fn)
    faulty_train.plant(**{"value": "inf", "path": "decoder/layers/mlp/wi_0/kernel", "layer": 1} | fault)


GRADIENT, LOSS = "decoder/layers/mlp/wi_0/kernel", None
ADAMW = ({"opt_type": "adamw"}, ["2/count"])
ADAM_PAX = ({"opt_type": "adam_pax", "gradient_clipping_threshold": 0.0}, [])
SGD = ({"opt_type": "sgd"}, ["1/count"])
MUON = (
    {"opt_type": "muon", "gradient_accumulation_steps": 2},
    ["inner_states/adam/inner_state/2/count", "inner_states/muon/inner_state/3/count"],
)
SPIKES = {"skip_step_on_spikes": True}


@pytest.mark.parametrize(
    ("path", "keys", "schedules"),
    [
        (GRADIENT, *ADAMW),
        (GRADIENT, *MUON),
        (LOSS, {**ADAM_PAX[0], **SPIKES}, []),
        pytest.param(LOSS, *ADAMW, marks=pytest.mark.slow),
        pytest.param(GRADIENT, *ADAM_PAX, marks=pytest.mark.slow),
        pytest.param(GRADIENT, *SGD, marks=pytest.mark.slow),
        pytest.param(LOSS, *SGD, marks=pytest.mark.slow),
        pytest.param(LOSS, *MUON, marks=pytest.mark.slow),
        pytest.param(GRADIENT, {**ADAMW[0], **SPIKES}, ["inner_state/2/count"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_skipped_step_leaves_parameters_and_moments(monkeypatch, path, keys, schedules):
    plant(monkeypatch, steps=[2], path=path)
    trainer = Trainer(**scaling("dynamic"), **keys)
    before, _ = trainer.run(2)
    before = arrays(before)
    state, history = trainer.run(3)
    after = arrays(state)
    moved = {path for path in before if not np.array_equal(before[path], after[path])}
    # The step counts, and so does the count of a schedule that lies apart from moments.
    assert moved == {"optimizer/step", *(f"optimizer/opt_state/{name}" for name in schedules)}
    assert before["optimizer/step"] + 1 == after["optimizer/step"]
    assert history[2]["learning/param_norm"] == history[1]["learning/param_norm"]
    state, history = trainer.run(5)
    assert all(np.isfinite(step["learning/loss"]) for step in history[3:])
    assert any(
        not np.array_equal(before[path], value) for path, value in arrays(state).items() if "kernel" in path
    )
    assert history[-1]["nvfp4/skipped_steps"] == 1


@pytest.mark.parametrize("scan", [True, False])
def test_names_follow_the_backward_pass(scan):
    trainer = Trainer(**scaling("dynamic"), scan_layers=scan)
    state = trainer.abstract_state["model"]
    layers = find_layers(nnx.merge(trainer.graphdef, trainer.abstract_state).model)
    params = nnx.filter_state(state, nnx.Param)
    names = backward_order(params, layers)
    kinds = [
        "head" if "logits" in name else "norm" if "decoder_norm" in name else "embedding" if "embed" in name
        else int(name.rpartition(" ")[2])
        for name in names
    ]  # fmt: skip
    assert len(names) == len(set(names)) == 3 + 2 * 9
    assert set(kinds[:2]) == {"head", "norm"}
    assert kinds[2:] == [1] * 9 + [0] * 9 + ["embedding"]

    # Each planted value is found at the place that bears its name.
    axis = trainer.config.param_scan_axis
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)
    look = jax.jit(lambda grads: finite(grads, layers, axis))
    assert np.all(look(zeros))
    for place, name in enumerate(names):
        path, _, layer = name.partition(" of decoder layer ")
        grads = jax.tree.map(np.copy, zeros)
        leaf = named(grads)[path]
        value = np.array(leaf.get_value())
        stacked = bool(layer) and scan
        index = [-1] * value.ndim
        if stacked:
            index[min(axis, value.ndim - 1)] = int(layer)
        value[tuple(index)] = np.nan
        leaf.set_value(value)
        assert list(np.flatnonzero(~np.asarray(look(grads)))) == [place], name


def test_the_program_does_not_grow_with_depth():
    def operations(layers):
        trainer = Trainer(**scaling("dynamic"), base_num_decoder_layers=layers)
        return str(trainer.trace().jaxpr).count(" = ")

    assert operations(2) == operations(6)


KEYS = {
    **TINY,
    **NVFP4,
    "base_config": BASE,
    "steps": 6,
    "enable_checkpointing": True,
    "checkpoint_period": 50,
}
KEYS |= {"enable_tensorboard": True, "log_period": 1, "save_checkpoint_on_start": False}


def run(folder: Path, fault, *arguments: str) -> tuple[int, str]:
    """Trains through the command line in a process of its own, with a fault; returns status and output."""
    file = folder / "tiny.yml"
    file.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in KEYS.items()))
    script = str(Path(__file__).with_name("faulty_train.py"))
    done = subprocess.run(
        [
            sys.executable,
            script,
            json.dumps(fault),
            "train",
            str(file),
            "base_output_directory=out",
            *arguments,
        ],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def losses(text):
    return {int(step): loss for step, loss in re.findall(r"completed step: (\d+),.* loss: (\S+?),", text)}


def test_one_layers_infinite_gradient_is_skipped_named_and_trained_past(tmp_path):
    fault = {"steps": [2], "value": "inf", "path": "decoder/layers/mlp/wi_0/kernel", "layer": 1}
    status, said = run(tmp_path, fault, "nvfp4.loss_scale.init=1024")
    assert status == 0, said[-4000:]
    skipped = re.findall(r"nvfp4: skipped step .*", said)
    assert len(skipped) == 1
    assert "skipped step 2: the gradient of decoder/layers/mlp/wi_0/kernel of decoder layer 1" in skipped[0]
    assert "loss scale 1024" in skipped[0]
    found = losses(said)
    assert list(found) == [0, 1, 2, 3, 4, 5]
    assert all(np.isfinite(float(loss)) for loss in found.values())
    assert (
        found[2] == found[3]
    )  # the same batch and the same parameters; the noise of dgrad does not reach a loss
    scales = events(tmp_path, "nvfp4/loss_scale")
    assert scales == {0: 1024, 1: 1024, 2: 1024, 3: 512, 4: 512, 5: 512}
    assert events(tmp_path, "nvfp4/skipped_steps") == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 1}
    assert "  skipped      steps whose loss or gradients were not finite: 1" in said


def events(folder, tag):
    import tensorflow as tf

    (path,) = (folder / "out").rglob("*tfevents*")
    found = {}
    for record in tf.data.TFRecordDataset(str(path)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            if value.tag == tag:
                found[event.step] = value.simple_value
    return found


def test_a_run_that_only_skips_stops_with_a_checkpoint_that_loads(tmp_path):
    fault = {"steps": list(range(2, 100)), "value": "nan"}
    more = ("steps=30", "nvfp4.loss_scale.init=4")
    status, said = run(tmp_path, fault, *more)
    assert status == 3, said[-4000:]
    message = said.strip().splitlines()[-1]
    assert message.startswith("maxtext-nvfp4: stopped after step 21: the last 20 steps were not finite")
    assert "the loss first, down to a loss scale of 1;" in message
    assert "out/tiny/checkpoints" in message
    assert "Traceback" not in said
    status, said = run(tmp_path, {"steps": [], "value": "nan"}, "steps=26")
    assert status == 0, said[-4000:]
    first, *rest = losses(said).items()
    assert first[0] in (22, 23)  # one step of notice
    assert all(np.isfinite(float(loss)) for _, loss in (first, *rest))


@pytest.mark.slow
@pytest.mark.parametrize(("init", "after"), [("1", [1, 1, 1]), ("16777216", [2**24, 2**24, 2**23])])
def test_a_scale_at_either_end(tmp_path, init, after):
    fault = {"steps": [3], "value": "inf", "path": "decoder/layers/mlp/wo/kernel", "layer": 0}
    settings = (f"nvfp4.loss_scale.init={init}", "nvfp4.loss_scale.growth_interval=3" if init != "1" else "")
    status, said = run(tmp_path, fault, *filter(None, settings))
    assert status == 0, said[-4000:]
    scales = events(tmp_path, "nvfp4/loss_scale")
    assert [scales[step] for step in (2, 3, 4)] == after
    assert all(np.isfinite(float(loss)) for loss in losses(said).values())
