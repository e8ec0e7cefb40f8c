"""Statistics of the 4-bit GEMMs out of MaxText's train step: probes in the model, read in the backward pass.

A probe is a variable whose cotangent is not a gradient but what its layer measured, which a layer scan stacks
like any other. MaxText differentiates and keeps variables of the type `_overwrite_with_gradient`, made for
such use, except where it accumulates gradients: there the probes go as parameters among parameters, and come
out before anything looks at the gradients. The train state of a run never holds a probe.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx
from flax.nnx import variablelib
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext_nvfp4.integration.attach import Nvfp4DotGeneral
from maxtext_nvfp4.telemetry import PROBE_SHAPE

PROBES = "nvfp4_probes"
"""Entry of a sampled step's metrics for the host: what each module measured, by its path in the model."""

_PROBE = "probe"

_Probe = variablelib.variable_type_from_name("_overwrite_with_gradient", allow_register=True)

_measuring: contextvars.ContextVar[bool] = contextvars.ContextVar("nvfp4_measuring", default=False)


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Within it train steps are traced as sampled ones."""
    token = _measuring.set(True)
    try:
        yield
    finally:
        _measuring.reset(token)


def probed(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps MaxText's own `train.train_step`: a sampled one returns what its layers measured in its metrics."""

    @functools.wraps(train_step)
    def step(
        model: Any, config: Any, state_shardings: Any, params_shardings: Any, state: Any, *rest: Any
    ) -> Any:
        arguments = (config, state_shardings, params_shardings)
        if not _measuring.get():
            return train_step(model, *arguments, state, *rest)
        train_state = nnx.merge(model, state)
        for module in _modules(train_state.model).values():
            layers = module.layer.shape if isinstance(module.layer, nnx.Variable) else ()
            module.probe = _Probe(jnp.zeros((*layers, *PROBE_SHAPE)))
        graphdef, with_probes = nnx.split(train_state)
        after, metrics = train_step(graphdef, *arguments, with_probes, *rest)
        readings, after = _without_probes(after)
        metrics[PROBES] = {
            "/".join(map(str, path[1:-2])): lax.with_sharding_constraint(value, PartitionSpec())
            for path, value in readings.items()
        }
        return after, metrics

    return step


def probing_accumulation(accumulate: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train.gradient_accumulation_loss_and_grad`, which differentiates parameters alone."""

    @functools.wraps(accumulate)
    def wrapped(
        loss_fn: Any, config: Any, model: Any, params: Any, shardings: Any, *rest: Any
    ) -> tuple[Any, Any, Any]:
        if not _measuring.get():
            result: tuple[Any, Any, Any] = accumulate(loss_fn, config, model, params, shardings, *rest)
            return result
        modules = _modules(model)
        axis = config.param_scan_axis  # along which MaxText stacks parameters, and the first one all else
        for module in modules.values():
            stacked = isinstance(module.layer, nnx.Variable)
            module.probe = nnx.Param(jnp.moveaxis(_value(module), 0, axis) if stacked else _value(module))
        mesh = jax.tree.leaves(shardings)[0].mesh
        everywhere = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), _probes_of(model))
        shardings = nnx.merge_state(shardings, everywhere)
        loss, aux, gradients = accumulate(loss_fn, config, model, params, shardings, *rest)
        readings, gradients = _without_probes(gradients)
        for path, value in readings.items():
            stacked = isinstance(modules[path[:-1]].layer, nnx.Variable)
            modules[path[:-1]].probe = _Probe(jnp.moveaxis(value, axis, 0) if stacked else value)
        return loss, aux, gradients

    return wrapped


def first_microbatch_only(model: nnx.Module, index: Array) -> None:
    """What the layers of any later microbatch measure is replaced by zeros, in place while they are traced."""
    if _measuring.get():
        for module in _modules(model).values():
            value = _value(module)
            assert module.probe is not None
            module.probe.set_value(jnp.where(index == 0, value, lax.stop_gradient(value)))


def _modules(model: nnx.Module) -> dict[tuple[Any, ...], Nvfp4DotGeneral]:
    return {path: node for path, node in nnx.iter_graph(model) if isinstance(node, Nvfp4DotGeneral)}


def _value(module: Nvfp4DotGeneral) -> Array:
    assert module.probe is not None
    value: Array = module.probe.get_value()
    return value


def _probes_of(model: nnx.Module) -> nnx.State:
    return nnx.state(model, lambda path, _: path[-1] == _PROBE)


def _without_probes(state: Any) -> tuple[dict[tuple[Any, ...], Array], Any]:
    """The values of the probes in a state by their paths, and the state without them."""
    flat = nnx.to_flat_state(state)
    found = {path: leaf.get_value() for path, leaf in flat if path[-1] == _PROBE}
    rest = nnx.from_flat_state([(path, leaf) for path, leaf in flat if path[-1] != _PROBE])
    return found, rest
