"""What the host does about skipped steps: it says which and why, and stops a run that only skips."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx

from maxtext_nvfp4.errors import TrainingError
from maxtext_nvfp4.integration.config import recipe_of
from maxtext_nvfp4.integration.gradients import backward_order, find_layers
from maxtext_nvfp4.integration.loss_scaling import SKIPS
from maxtext_nvfp4.integration.saves import save_now

_UNSEEN = "nvfp4_unseen"
"""Entry of the loop's variables: the last step, whose metrics the device may still be computing."""


def wrap_training_loop_iteration(iteration: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train.training_loop_iteration`: the metrics of the step before it are looked at after each.

    MaxText has fetched those by then, so that the device never waits for the host.
    """

    @functools.wraps(iteration)
    def wrapped(jax_device_state: Any, python_vars: Any, immutable_data: Any) -> Any:
        metrics = iteration(jax_device_state, python_vars, immutable_data)
        if SKIPS in metrics:
            look = functools.partial(_look, jax_device_state, python_vars, immutable_data["config"])
            step = python_vars["step"]
            if unseen := python_vars.get(_UNSEEN):
                look(*unseen)
            python_vars[_UNSEEN] = (step, metrics)
            if step + 1 == immutable_data["steps"]:
                look(step, metrics)
        return metrics

    return wrapped


def _look(jax_device_state: Any, python_vars: Any, config: Any, step: int, metrics: Any) -> None:
    from maxtext.utils import max_logging

    first = int(metrics[SKIPS]["first"])
    if first < 0:
        return
    settings = recipe_of(config).loss_scale
    in_a_row = int(metrics[SKIPS]["in_a_row"])
    model = jax_device_state["model"]
    if first == 0:
        what = "the loss"
    else:
        names = backward_order(nnx.state(model, nnx.Param), find_layers(model))
        what = f"the gradient of {names[first - 1]}"
    scale = float(metrics["scalar"]["nvfp4/loss_scale"])
    max_logging.log(
        f"nvfp4: skipped step {step}: {what} was not finite at loss scale {scale:.15g}; parameters and "
        f"moments keep their values ({in_a_row} in a row, {int(metrics['scalar']['nvfp4/skipped_steps'])} in all)"
    )
    if in_a_row >= settings.max_consecutive_skips:
        saved = "nothing was saved, as enable_checkpointing is false"
        if save_now(jax_device_state, python_vars, config):
            saved = f"a checkpoint with the parameters from before them is in {config.checkpoint_dir}"
        raise TrainingError(
            f"stopped after step {step}: the last {in_a_row} steps were not finite, in the last of them {what} "
            f"first, down to a loss scale of {scale:.15g}; {saved}. Look at the data and the learning rate of "
            "these steps; write nvfp4.loss_scale.max_consecutive_skips to allow more"
        )
