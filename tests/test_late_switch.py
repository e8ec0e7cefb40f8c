"""The late switch in MaxText's own loop: two programs, one more compile, the same run however it is resumed."""

import dataclasses
import math
import os
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.trainers.pre_train import train
from maxtext.utils import max_logging, maxtext_utils
from maxtext_models import BASE, QUICK_FLAGS, TINY, Trainer, load, train_loop
from traced_gemms import UNKNOWN, Walk, equations, four_bit, listed, merged, walked

from maxtext_nvfp4.integration.attach import LayerIndex
from maxtext_nvfp4.integration.late_switch import switch_layers
from maxtext_nvfp4.integration.report import of_config
from maxtext_nvfp4.recipe import Switch

AT, STEPS = 3, 5
RUN = {
    "quantization": "nvfp4",
    "steps": STEPS,
    "checkpoint_period": 1,
    "save_checkpoint_on_completion": False,
    "async_checkpointing": False,
}
"""A run that leaves a checkpoint after every step, from which it can be resumed as if it had stopped there."""

compiled: list[str] = []
"""Names of the programs that this process has compiled, in order."""


def _compiled(event, seconds, **details):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(details["fun_name"].removeprefix("jit(").removesuffix(")"))


jax.monitoring.register_event_duration_secs_listener(_compiled)


@dataclasses.dataclass
class Loop:
    """What MaxText's loop did.

    Attributes:
      config: Its config.
      metrics: Metrics of the model by step.
      programs: Jaxprs of the train step and the evaluation step around the switch, by step and name.
      state: The last state.
      compiles: How often each step was compiled.
    """

    config: object
    metrics: dict = dataclasses.field(default_factory=dict)
    programs: dict = dataclasses.field(default_factory=dict)
    state: object = None
    compiles: dict = dataclasses.field(default_factory=dict)

    @property
    def losses(self):
        return {step: metrics["learning/loss"] for step, metrics in self.metrics.items()}

    def walked(self, walk, step, name="p_train_step"):
        """What a walk finds in a program, with the layer numbers of the real model."""
        leaves = [leaf for _, leaf in nnx.to_flat_state(self.state)]
        numbers = [
            np.asarray(leaf.get_value()) if isinstance(leaf, LayerIndex) else UNKNOWN for leaf in leaves
        ]
        batch = [UNKNOWN for _ in maxtext_utils.get_shaped_batch(self.config)]
        walk.run(self.programs[step, name], [*numbers, *batch])
        return walk.gemms


def loop(switch=None, **keys):
    """Trains in this process, as `train.main` does once it has read the config."""
    section = {"recipe": "mlp_only"} | ({"switch": switch} if switch else {})
    config = load(**{**RUN, "nvfp4": section, "remat_policy": "minimal", **keys})
    result, iteration, start = Loop(config), train.training_loop_iteration, len(compiled)

    def recorded(device, python, immutable):
        step = python["step"]
        metrics = iteration(device, python, immutable)["scalar"]
        result.metrics[step] = {k: float(v) for k, v in metrics.items() if k.startswith("learning/")}
        for name in ("p_train_step", "p_eval_step"):
            if step in (AT - 1, AT, STEPS - 1) and device[name]:
                with jax.set_mesh(device["mesh"]), logical_axis_rules(config.logical_axis_rules):
                    traced = device[name].trace(device["state"], maxtext_utils.get_shaped_batch(config))
                result.programs[step, name] = traced.jaxpr
        return {"scalar": metrics}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "training_loop_iteration", recorded)
        result.state = train_loop(config)
    steps = compiled[start:]
    result.compiles = {name: steps.count(name) for name in ("train_step", "eval_step")}
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def switched(folder):
    """The run with a switch of its forward GEMMs, its evaluation after every step, and its log."""
    said = []
    log = max_logging.log
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(max_logging, "log", lambda line: (said.append(line), log(line)))
        run = loop(
            {"at": AT},
            enable_checkpointing=True,
            base_output_directory=str(folder),
            eval_interval=1,
            eval_steps=1,
        )
    return run, [line for line in said if "late switch, " in line]


@pytest.fixture(scope="module")
def plain():
    return loop()


def test_it_is_one_line_and_one_more_compile_in_a_run(switched, plain):
    run, said = switched
    assert said == [
        f"NVFP4: late switch, from step {AT} on: forward GEMMs in bf16, to close the loss gap of 4 bits"
    ]
    assert plain.compiles == {"train_step": 1, "eval_step": 0}
    assert run.compiles == {"train_step": 2, "eval_step": 2}


def test_losses_are_those_without_a_switch_before_it_and_go_on_smoothly(switched, plain):
    ours, theirs = switched[0].losses, plain.losses
    assert [ours[step] for step in range(AT)] == [theirs[step] for step in range(AT)]
    assert ours[AT] != theirs[AT]
    # Synthetic data is one batch repeated: a step changes its loss little, and so may the switch.
    for step in range(AT, STEPS):
        assert ours[step] == pytest.approx(theirs[step], rel=0.01)
        assert ours[step] == pytest.approx(ours[step - 1], rel=0.01)


def gemms(run, step, name="p_train_step"):
    return merged(run.walked(Walk(), step, name))


def only(counts, *kinds):
    return {key: count for key, count in counts.items() if key[0] in kinds}


def test_the_program_before_has_all_4_bit_gemms_and_the_one_after_no_forward_one(switched):
    run, _ = switched
    before, after = gemms(run, AT - 1), gemms(run, AT)
    assert before == listed(run.config)
    assert after == only(before, "dgrad", "wgrad")
    assert gemms(run, STEPS - 1) == after
    assert gemms(run, AT - 1, "p_eval_step") == only(before, "fprop")
    assert not any(map(four_bit, equations(run.programs[AT, "p_eval_step"])))


class Flops(Walk):
    """Counts the FLOPs of linear layers, in 4 bits and all of them: products without a batch axis."""

    def kind(self, equation):
        if equation.primitive.name != "dot_general":
            return ()
        (contracted, _), batch = equation.params["dimension_numbers"]
        if any(batch):
            return ()
        a, product = equation.invars[0].aval, equation.outvars[0].aval
        return bool(four_bit(equation)), 2 * product.size * math.prod(a.shape[axis] for axis in contracted)


def flops(run, step):
    """FLOPs of the train step's linear layers: (in 4 bits, all)."""
    pairs = [(kind, count) for (kind, _, _), count in run.walked(Flops(), step).items()]
    return [sum(n * count for (four, n), count in pairs if four or every) for every in (False, True)]


def test_shares_of_the_two_programs_are_those_that_explain_says(switched):
    run, _ = switched
    (before, total), (after, total_after) = flops(run, AT - 1), flops(run, AT)
    assert total == total_after
    said = of_config(run.config).to_json()["switch"]
    assert said["step"] == AT
    run_total = total * STEPS
    assert said["bf16_share_before"] == pytest.approx(1 - before / total)
    assert said["bf16_share_after"] == pytest.approx(1 - after / total)
    assert said["switched_share_of_run"] == pytest.approx((before - after) * (STEPS - AT) / run_total)
    four_bit_flops = before * AT + after * (STEPS - AT)
    assert said["nvfp4_share_of_run"] == pytest.approx(four_bit_flops / run_total)
    assert said["bf16_share_of_run"] == pytest.approx(1 - four_bit_flops / run_total)


def continued(folder, last):
    """A folder with a run that has stopped after a step."""
    parts = folder.parent / f"{folder.name}_{last}"
    shutil.copytree(folder, parts)
    for checkpoint in (parts / "tiny" / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > last:
            shutil.rmtree(checkpoint)
    return parts


@pytest.mark.parametrize(
    ("last", "compiles"),
    [(AT, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((AT - 1, 1), (AT - 2, 2)))],
)
def test_a_resumed_loop_compiles_what_it_runs_and_repeats_the_run(switched, folder, last, compiles):
    run, _ = switched
    directory = str(continued(folder, last))
    rest = loop({"at": AT}, enable_checkpointing=True, base_output_directory=directory)
    assert rest.compiles["train_step"] == compiles
    assert rest.metrics == {step: run.metrics[step] for step in range(last + 1, STEPS)}
    for ours, theirs in zip(jax.tree.leaves(rest.state), jax.tree.leaves(run.state), strict=True):
        np.testing.assert_array_equal(values(ours), values(theirs))


def values(leaf):
    keys = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if keys else leaf


@pytest.mark.parametrize(
    ("scan", "microbatches"),
    [
        (True, 2),
        (False, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 1), (False, 2))),
    ],
)
def test_all_gemms_leave_4_bits_whatever_the_layout(scan, microbatches):
    trainer = after_switch({"at": AT, "gemms": "all"}, scan, microbatches)
    assert not any(map(four_bit, equations(trainer.trace().jaxpr)))
    assert not any(map(four_bit, equations(trainer.trace(evaluation=True).jaxpr)))
    # The step's key is made from the seed; the layers, which would fold it, no longer do.
    assert count(trainer, "random_fold_in") < count(after_switch(None, scan, microbatches), "random_fold_in")


@pytest.mark.parametrize("scan", [True, False])
def test_backward_gemms_keep_their_plans_whatever_the_layout(scan):
    switch = {"at": AT, "gemms": "fprop"}
    expected = {
        key: 2 * number
        for key, number in listed(after_switch(None, scan, 2).config).items()
        if key[0] in ("dgrad", "wgrad")
    }
    assert merged(walked(after_switch(switch, scan, 2))) == expected


def after_switch(switch, scan, microbatches):
    """A trainer whose layers are as they are after a switch, if there is one."""
    trainer = Trainer(
        quantization="nvfp4",
        nvfp4={"recipe": "all_layers"},
        scan_layers=scan,
        gradient_accumulation_steps=microbatches,
        remat_policy="minimal",
    )
    if switch:
        with jax.default_prng_impl("unsafe_rbg"), logical_axis_rules(trainer.config.logical_axis_rules):
            state = nnx.eval_shape(trainer._init)
        switch_layers(state, Switch(**switch))
        trainer.graphdef = nnx.graphdef(state)
    return trainer


def count(trainer, primitive):
    return sum(equation.primitive.name == primitive for equation in equations(trainer.trace().jaxpr))


def train_from_the_command_line(folder, **keys):
    """Trains in a process of its own; returns what it printed."""
    path = folder.parent / f"{folder.name}.yml"
    path.write_text(
        yaml.safe_dump({**TINY, **RUN, "base_config": BASE, "enable_checkpointing": True, **keys})
    )
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_nvfp4", "train", str(path), f"base_output_directory={folder}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("lasts", "keys"),
    [
        ((AT - 2,), {}),
        pytest.param((AT - 2, AT - 1, AT), {"scan_layers": False}, marks=pytest.mark.slow),
        pytest.param((AT - 2, AT - 1, AT), {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumed_from_the_command_line_repeats_the_uninterrupted_one(tmp_path, lasts, keys):
    gemms = "all" if keys else "fprop"
    keys = {**keys, "nvfp4": {"recipe": "mlp_only", "switch": {"at": 0.6, "gemms": gemms}}}
    whole = train_from_the_command_line(tmp_path / "whole", **keys)
    assert whole.count("NVFP4: late switch, from step 3 on") == 1
    assert f"GEMMs in bf16 from step {AT} of {STEPS} on (recipe mlp_only)" in whole
    for last in lasts:
        rest = train_from_the_command_line(continued(tmp_path / "whole", last), **keys)
        assert steps(rest) == steps(whole)[last + 1 :]
        assert rest.count(f"NVFP4: late switch, {'from' if last + 1 < AT else 'since'} step 3") == 1


def steps(text):
    """Step and loss as MaxText logs them."""
    return re.findall(r"completed step: (\d+),.* loss: ([\d.]+),", text)


def check_sharded():
    mesh = {"ici_fsdp_parallelism": 2, "ici_data_parallelism": 2, "gradient_accumulation_steps": 2}
    keys = {**mesh, "eval_interval": 1, "eval_steps": 1}
    ours, theirs = loop({"at": AT}, **keys), loop(**keys)
    assert ours.compiles == {name: count + 1 for name, count in theirs.compiles.items()}
    assert [ours.losses[step] for step in range(AT)] == [theirs.losses[step] for step in range(AT)]
    assert ours.losses[AT] != theirs.losses[AT]
    assert ours.losses[STEPS - 1] == pytest.approx(theirs.losses[STEPS - 1], rel=0.01)


@pytest.mark.slow
def test_a_sharded_run_switches_too(on_devices):
    on_devices(4, check_sharded)


def check_growing_batch():
    keys = {
        "per_device_batch_size_start": 2,
        "per_device_batch_size_increment": 2,
        "per_device_batch_size": 4,
    }
    # The batch grows after step 2, and each program is compiled for the sizes that it meets.
    run = loop({"at": AT}, **keys, enable_rampup_batch_size=True, global_rampup_samples=24)
    assert list(run.losses) == list(range(STEPS))
    assert run.compiles["train_step"] == 3


@pytest.mark.slow
def test_a_run_whose_batch_grows_switches_too(on_devices):
    on_devices(4, check_growing_batch)
