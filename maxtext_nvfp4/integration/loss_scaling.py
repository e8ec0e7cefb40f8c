"""Loss scaling inside MaxText's own train step, and the steps it skips.

The scale lives in the model as variables of their own type, which MaxText's checkpoints carry beside the
parameters and which a checkpoint may lack. MaxText's loss, gradient norms and clipping see unscaled values.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import nnx
from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4.integration.gradients import Layers, Path, finite
from maxtext_nvfp4.integration.placement import on_device
from maxtext_nvfp4.loss_scale import State, initial, scale_cotangent, update
from maxtext_nvfp4.recipe import LossScale

ATTRIBUTE = "nvfp4_loss_scale"
"""Where the state hangs on the model."""

SKIPS = "nvfp4_skips"
"""Entry of a step's metrics for the host alone: `in_a_row`, and `first`, 0 if the loss was not finite, i + 1 if
the gradient of the i-th parameter of `gradients.backward_order` was the first, -1 if all were finite."""


class LossScaleVariable(nnx.BatchStat):
    """One scalar of the state.

    MaxText saves a batch statistic under `nnx_aux`, and does not look for it where only parameters are loaded
    (`load_parameters_path`); a variable of no known kind it would miss there, and refuse the checkpoint.
    """


class LossScaleState(nnx.Module):
    """The state as a part of the model."""

    def __init__(self, settings: LossScale):
        for name, value in initial(settings)._asdict().items():
            setattr(self, name, LossScaleVariable(value))


@dataclasses.dataclass
class _Step:
    """What is known of a step while it is traced."""

    scale: Array
    layers: Mapping[Path, Layers]
    scan_axis: int
    finite: Array | None = None


_step: contextvars.ContextVar[_Step | None] = contextvars.ContextVar("nvfp4_loss_scaling", default=None)


@contextlib.contextmanager
def scaled(state: Any, layers: Mapping[Path, Layers], scan_axis: int) -> Iterator[_Step]:
    """Scales the losses traced inside it and looks at their gradients.

    Args:
      state: MaxText's train state at the start of the step.
      layers: Decoder layers of the model's parameters.
      scan_axis: MaxText's `param_scan_axis`.
    """
    step = _Step(state["model"][ATTRIBUTE]["scale"].get_value(), layers, scan_axis)
    token = _step.set(step)
    try:
        yield step
    finally:
        _step.reset(token)


def scale_loss(
    loss_fn: Callable[..., tuple[Array, Any]], model: nnx.Module, *args: Any, **kwargs: Any
) -> Any:
    """Calls a loss function so that only what lies between its loss and its parameters is scaled."""
    step = _step.get()
    if step is None:
        return loss_fn(model, *args, **kwargs)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param) and jnp.issubdtype(variable.get_value().dtype, jnp.floating):
            variable.set_value(scale_cotangent(variable.get_value(), 1.0 / step.scale))
    loss, aux = loss_fn(model, *args, **kwargs)
    return scale_cotangent(loss, step.scale), aux


def looking_at_gradients(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Wraps a function of MaxText's step that is given the gradients, of which the first sees them as they came."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        step = _step.get()
        if step is not None and step.finite is None:
            step.finite = finite(args[position], step.layers, step.scan_axis)
        return function(*args, **kwargs)

    return wrapped


def conclude(
    settings: LossScale, step: _Step, before: nnx.State, after: nnx.State, metrics: dict[str, Any]
) -> None:
    """Skips the step if it was not finite, moves the scale, and reports, all in place in `after` and `metrics`."""
    assert step.finite is not None
    flags = jnp.append(jnp.isfinite(metrics["scalar"]["learning/loss"]), step.finite)
    finite = jnp.all(flags)
    _keep(before, after, finite)

    variables = after["model"][ATTRIBUTE]
    old = State(*(variables[name].get_value() for name in State._fields))
    new = update(settings, old, finite)
    for name, value in new._asdict().items():
        variables[name].set_value(value)
    metrics["scalar"] |= {"nvfp4/loss_scale": old.scale, "nvfp4/skipped_steps": new.skipped}
    metrics[SKIPS] = {"in_a_row": new.skipped_in_a_row, "first": jnp.where(finite, -1, jnp.argmin(flags))}
    if "learning/param_norm" in metrics["scalar"]:
        from maxtext.utils.max_utils import l2norm_pytree

        params = nnx.filter_state(after["model"], nnx.Param)
        metrics["scalar"]["learning/param_norm"] = l2norm_pytree(params)


def _keep(before: nnx.State, after: nnx.State, finite: Array) -> None:
    """Gives parameters and moments back their values unless the step was finite; the step counts either way.

    An optimizer's integers that lie beside its moments or above them, such as Adam's count of updates or the
    place in a history of losses, go with the moments; a counter by itself, such as a schedule's, goes with
    the step.

    The barrier keeps the choice out of the update's arithmetic, which a compiler would otherwise contract in
    another way than without loss scaling.
    """
    old = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(before)}
    # Optimizers also hold what is no array, such as optax's MaskedNode.
    new = {path: leaf for path, leaf in nnx.to_flat_state(after) if isinstance(leaf.get_value(), Array)}
    moments = [path for path, leaf in new.items() if path[0] == "optimizer" and _floating(leaf)]
    holders = {path[:length] for path in moments for length in range(2, len(path))}
    for path, leaf in new.items():
        if ATTRIBUTE not in path and (_floating(leaf) or path[:-1] in holders):
            value = lax.optimization_barrier(leaf.get_value())
            leaf.set_value(jnp.where(finite, value, on_device(old[path])))


def _floating(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.get_value().dtype, jnp.floating))
