"""MaxText's own training loop, with the step and microbatch made visible to the quantized layers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jax import numpy as jnp

from maxtext_nvfp4.integration.config import enabled, recipe_of
from maxtext_nvfp4.integration.step import microbatch, training_step

_ROW = "nvfp4_row"
"""Batch entry that numbers the rows, so that each microbatch of an accumulation scan knows which it is.

MaxText deals row r to microbatch r mod gradient_accumulation_steps; the first row of microbatch i is row i.
"""


def wrap_train_step(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train.train_step` so that layers can derive keys of the step."""

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
        if config.gradient_accumulation_steps > 1:
            rows = jnp.arange(data["inputs"].shape[0], dtype=jnp.int32)
            data = {**data, _ROW: rows[:, None]}
        with training_step(state["optimizer"]["step"].get_value(), seed=recipe_of(config).seed):
            return train_step(*arguments, data, *rest)

    return step


def wrap_loss_fn(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train.loss_fn` so that layers can derive keys of the microbatch."""
    position = list(inspect.signature(loss_fn).parameters).index("data")

    @functools.wraps(loss_fn)
    def loss(*args: Any, **kwargs: Any) -> Any:
        data = args[position]
        if _ROW not in data:
            return loss_fn(*args, **kwargs)
        rest = {name: value for name, value in data.items() if name != _ROW}
        with microbatch(data[_ROW][0, 0]):
            return loss_fn(*args[:position], rest, *args[position + 1 :], **kwargs)

    return loss
