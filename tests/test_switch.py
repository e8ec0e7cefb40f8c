"""The switch as plain values: plans and routines after it, the step it falls on, shares of a run."""

import types

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from maxtext.configs.types import LearningRateScheduleType
from maxtext.utils import maxtext_utils

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.switch_step import check_switch, switch_step
from maxtext_nvfp4.plan import BF16, Site
from maxtext_nvfp4.policy import layer_plan, resolve
from maxtext_nvfp4.recipe import Switch, load_recipe
from maxtext_nvfp4.routine import Routine
from maxtext_nvfp4.switch import shares, switched_plan, switched_routine

FORWARD, ALL = Switch(at=0.5), Switch(at=0.5, gemms="all")
FULL = layer_plan(load_recipe(None))


def test_the_forward_gemm_alone_leaves_4_bits():
    plan = switched_plan(FULL, FORWARD)
    assert (plan.fprop, plan.dgrad, plan.wgrad) == (BF16, FULL.dgrad, FULL.wgrad)


def test_all_gemms_leave_4_bits_and_need_no_key():
    routine = switched_routine(Routine((FULL,), (0, 0)), ALL)
    assert {routine.choices[0].fprop, routine.choices[0].dgrad, routine.choices[0].wgrad} == {BF16}
    assert Routine((FULL,), (0,)).stochastic
    assert not routine.stochastic
    assert switched_routine(Routine((FULL,), (0,)), FORWARD).stochastic


def test_plans_that_a_switch_makes_equal_become_one():
    backward_only = switched_plan(FULL, FORWARD)
    none = switched_plan(FULL, ALL)
    routine = Routine((FULL, none, backward_only), (0, 2, 1, 0), jax.lax.Precision.HIGHEST)
    after = switched_routine(routine, FORWARD)
    assert after == Routine((backward_only, none), (0, 0, 1, 0), jax.lax.Precision.HIGHEST)
    assert switched_routine(after, FORWARD) == after


def config(steps=100, **keys):
    schedule = {
        "lr_schedule_type": LearningRateScheduleType.WSD,
        "learning_rate_schedule_steps": steps,
        "wsd_decay_steps_fraction": 0.1,
        "wsd_decay_style": "linear",
        "warmup_steps_fraction": 0.1,
        "learning_rate": 1.0,
        "learning_rate_final_fraction": 0.1,
        "compiled_trainstep_file": "",
    }
    return types.SimpleNamespace(**{"steps": steps, **schedule, **keys})


@given(st.integers(2, 10**6), st.integers(1, 99))
def test_a_fraction_is_rounded_down_in_decimal(steps, percent):
    exact = steps * percent // 100
    switch = Switch(at=percent / 100)
    if exact:
        assert switch_step(switch, config(steps)) == exact
    else:
        with pytest.raises(ConfigError, match="step 0"):
            switch_step(switch, config(steps))


@pytest.mark.parametrize("at", [1, 99])
def test_a_step_is_itself(at):
    assert switch_step(Switch(at=at), config()) == at


@pytest.mark.parametrize(("length", "decay"), [(100, 0.1), (90, 0.25), (57, 0.3)])
def test_the_decay_is_that_of_maxtext_s_schedule(length, decay):
    keys = config(120, learning_rate_schedule_steps=length, wsd_decay_steps_fraction=decay)
    schedule = maxtext_utils.create_learning_rate_schedule(keys)
    step = switch_step(Switch(at="lr_decay"), keys)
    assert schedule(step - 1) == schedule(step) == 1
    assert schedule(step + 1) < 1


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"lr_schedule_type": LearningRateScheduleType.COSINE}, "lr_schedule_type is cosine"),
        ({"wsd_decay_steps_fraction": 0.9}, "no constant phase"),
        ({"wsd_decay_steps_fraction": 0.001}, "no decay"),
        ({"learning_rate_schedule_steps": 1000}, "step 900 is not in a run of steps: 100"),
    ],
)
def test_a_schedule_without_such_a_decay_is_refused(keys, why):
    with pytest.raises(ConfigError, match=f"^nvfp4.switch.at: got lr_decay: .*{why}.*; write a .*"):
        switch_step(Switch(at="lr_decay"), config(**keys))


SITES = (
    Site(path="decoder/layers/mlp/wi", layers=(0, 1, 2, 3), k=64, n=192),
    Site(path="decoder/layers/mlp/wo", layers=(0, 1, 2, 3), k=192, n=64),
    Site(path="decoder/logits_dense", layers=(), k=64, n=256, protected="output head"),
)


def plans(**section):
    return resolve(load_recipe({"recipe": "all_layers", **section}), SITES, 4)


def test_a_switch_that_changes_nothing_is_refused():
    backward_only = plans(rules=[{"module": "*", "fprop": "bf16"}])
    check_switch(ALL, backward_only, config())
    with pytest.raises(ConfigError, match=r"^nvfp4\.switch: .*no fprop GEMM in 4 bits"):
        check_switch(FORWARD, backward_only, config())
    with pytest.raises(ConfigError, match="no fprop or dgrad or wgrad GEMM in 4 bits"):
        check_switch(
            ALL, plans(rules=[{"module": "*", "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}]), config()
        )


def test_shares_of_the_run():
    # The head is 1/7 of the linear layers' weights; layer 3, a quarter of the rest, is in BF16 from the start.
    found = shares(plans(bf16_last_layers=1), FORWARD, 75, 100)
    before = 6 / 7 * 3 / 4
    assert found.nvfp4_before == pytest.approx(before)
    assert found.nvfp4_after == pytest.approx(before * 2 / 3)
    assert found.switched_of_run == pytest.approx(before / 3 / 4)
    assert found.nvfp4_of_run == pytest.approx(before * 11 / 12)
    assert shares(plans(), ALL, 75, 100).nvfp4_after == 0
    json = found.to_json()
    assert json["bf16_share_of_run"] + json["nvfp4_share_of_run"] == pytest.approx(1)
    assert found.to_text().startswith("forward GEMMs in bf16 from step 75 of 100 on: ")
