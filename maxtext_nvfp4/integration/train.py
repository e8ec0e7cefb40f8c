"""MaxText's own train step: the layers see which step and microbatch they are traced for, the loss is scaled."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from maxtext_nvfp4.integration.config import enabled, recipe_of
from maxtext_nvfp4.integration.gradients import find_layers
from maxtext_nvfp4.integration.loss_scaling import conclude, scale_loss, scaled
from maxtext_nvfp4.integration.probes import first_microbatch_only
from maxtext_nvfp4.integration.step import microbatch, training_step

_ROW = "nvfp4_row"
"""Batch entry that numbers the rows, so that each microbatch of an accumulation scan knows which it is.

MaxText deals row r to microbatch r mod gradient_accumulation_steps; the first row of microbatch i is row i.
"""


def wrap_train_step(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train.train_step`: layers can derive keys of the step, and its loss is scaled."""

    @functools.wraps(train_step)
    def step(
        model: Any,
        config: Any,
        state_shardings: Any,
        params_shardings: Any,
        state: Any,
        data: Any,
        *rest: Any,
    ) -> Any:
        arguments = (model, config, state_shardings, params_shardings, state)
        if not enabled(config):
            return train_step(*arguments, data, *rest)
        recipe = recipe_of(config)
        if config.gradient_accumulation_steps > 1:
            rows = jnp.arange(data["inputs"].shape[0], dtype=jnp.int32)
            data = {**data, _ROW: rows[:, None]}
        with training_step(state["optimizer"]["step"].get_value(), seed=recipe.seed):
            if recipe.loss_scale.mode == "off":
                return train_step(*arguments, data, *rest)
            before = jax.tree.map(lambda leaf: leaf, state)
            layers = find_layers(nnx.merge(model, state).model)
            with scaled(state, layers, config.param_scan_axis) as looked:
                after, metrics = train_step(*arguments, data, *rest)
            conclude(recipe.loss_scale, looked, before, after, metrics)
            return after, metrics

    return step


def wrap_loss_fn(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train.loss_fn`: layers can derive keys of the microbatch, and its loss is scaled."""
    position = list(inspect.signature(loss_fn).parameters).index("data")

    @functools.wraps(loss_fn)
    def loss(*args: Any, **kwargs: Any) -> Any:
        data = args[position]
        if _ROW not in data:
            return scale_loss(loss_fn, *args, **kwargs)
        rest = {name: value for name, value in data.items() if name != _ROW}
        first_microbatch_only(args[0], data[_ROW][0, 0])
        with microbatch(data[_ROW][0, 0]):
            return scale_loss(loss_fn, *args[:position], rest, *args[position + 1 :], **kwargs)

    return loss
