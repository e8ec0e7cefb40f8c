"""Telemetry in MaxText's training loop: which steps are sampled, and where their statistics go.

A sampled step is another program than the rest of them, compiled at the first sample, so that steps between
samples run exactly what a run without telemetry does.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath
from flax import nnx

from maxtext_nvfp4.integration.attach import Nvfp4DotGeneral
from maxtext_nvfp4.integration.config import enabled, recipe_of
from maxtext_nvfp4.integration.probes import PROBES, measuring
from maxtext_nvfp4.integration.switch_step import switch_step
from maxtext_nvfp4.recipe import Telemetry
from maxtext_nvfp4.samples import FOLDER, Reading, alarms, to_readings, write_sample
from maxtext_nvfp4.telemetry import PROBE_SHAPE

SAMPLED = "nvfp4_sampled"
"""Where a jitted train step keeps the program of a sampled one."""


def keep_sampled(jit_train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train_utils.jit_train_step`: its programs know the one that also measures."""

    @functools.wraps(jit_train_step)
    def wrapped(config: Any, *args: Any, **kwargs: Any) -> Any:
        program = jit_train_step(config, *args, **kwargs)
        if enabled(config) and recipe_of(config).telemetry:
            *before, train_step, params_shardings = args
            sampled = jit_train_step(config, *before, _measured(train_step), params_shardings, **kwargs)
            setattr(program, SAMPLED, sampled)
        return program

    return wrapped


def _measured(train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        with measuring():
            return train_step(*args, **kwargs)

    return step


def sample_on_time(iteration: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train.training_loop_iteration`: every so many steps the program that measures runs instead."""

    @functools.wraps(iteration)
    def wrapped(jax_device_state: dict[str, Any], python_vars: dict[str, Any], immutable_data: Any) -> Any:
        config, step = immutable_data["config"], python_vars["step"]
        telemetry = _due(config, step)
        if telemetry is None:
            return iteration(jax_device_state, python_vars, immutable_data)
        program = jax_device_state["p_train_step"]

        def sampled_step(*args: Any, **kwargs: Any) -> Any:
            state, metrics = getattr(program, SAMPLED)(*args, **kwargs)
            # The iteration writes a step's metrics itself where an evaluation follows the step.
            if probes := metrics.pop(PROBES, None):
                readings = read_probes(jax_device_state["model"], step, jax.device_get(probes), telemetry)
                metrics["scalar"] |= {tag: value for reading in readings for tag, value in reading.scalars()}
                _keep(config, step, readings)
            return state, metrics

        jax_device_state["p_train_step"] = sampled_step
        try:
            return iteration(jax_device_state, python_vars, immutable_data)
        finally:
            jax_device_state["p_train_step"] = program

    return wrapped


def _due(config: Any, step: int) -> Telemetry | None:
    """What to measure in a step; None between samples, and where a late switch has left no GEMM in 4 bits."""
    recipe = recipe_of(config) if enabled(config) else None
    if recipe is None or recipe.telemetry is None or (step + 1) % recipe.telemetry.every:
        return None
    switch = recipe.switch
    if switch and switch.gemms == "all" and step >= switch_step(switch, config):
        return None
    return recipe.telemetry


def read_probes(
    model: nnx.Module, step: int, probes: dict[str, np.ndarray], telemetry: Telemetry
) -> list[Reading]:
    """What all layers measured, by site, in the order of the decoder layers."""
    by_site: dict[str, dict[int, np.ndarray]] = {}
    for path, module in nnx.iter_graph(model):
        if isinstance(module, Nvfp4DotGeneral):
            values = probes["/".join(map(str, path[:-1]))].reshape(len(module.layers), *PROBE_SHAPE)
            by_site.setdefault(module.site, {}).update(zip(module.layers, values, strict=True))
    readings = []
    for site, by_layer in sorted(by_site.items()):
        layers = sorted(layer for layer in by_layer if telemetry.covers(layer))
        if layers:
            stacked = np.stack([by_layer[layer] for layer in layers])
            readings += to_readings(step, site, layers, stacked, telemetry.stats)
    return readings


def _keep(config: Any, step: int, readings: list[Reading]) -> None:
    from maxtext.utils import max_logging

    if jax.process_index() != 0:
        return
    if config.base_output_directory:
        folder = epath.Path(config.base_output_directory) / config.run_name / FOLDER
        write_sample(folder, step, readings)
    for alarm in alarms(readings):
        max_logging.log(f"nvfp4: step {step}: {alarm}")
