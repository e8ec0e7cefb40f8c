"""The late switch in MaxText's training loop: at its step the programs are made once more, for switched layers.

What precision a layer has is static, so the program before the switch holds no branch, and the one after it
no 4-bit GEMM that was switched. The step's number is the host's: every process switches by itself, at the
same step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from maxtext_nvfp4.integration.attach import Nvfp4DotGeneral
from maxtext_nvfp4.integration.config import enabled, recipe_of
from maxtext_nvfp4.integration.switch_step import switch_step
from maxtext_nvfp4.recipe import Switch
from maxtext_nvfp4.switch import describe, switched_routine

_PROGRAMS = (
    "p_train_step",
    "p_train_step_dropless",
    "p_train_step_first_phase",
    "p_eval_step",
    "p_eval_step_dropless",
)
"""Where MaxText's loop keeps its jitted steps; absent ones are None."""

_ATTRIBUTE = "nvfp4_successor"


@dataclasses.dataclass(frozen=True)
class _Successor:
    """What takes a jitted step's place: from which step on, why, and how it is made from the train state."""

    step: int
    switch: Switch
    make: Callable[[Any], Any]


def keep_successor(jit_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train_utils.jit_train_step` or `jit_eval_step`: their programs know what follows them."""

    @functools.wraps(jit_step)
    def wrapped(config: Any, graphdef: Any, *args: Any, **kwargs: Any) -> Any:
        program = jit_step(config, graphdef, *args, **kwargs)
        if switch := _switch_of(config):

            def make(state: Any) -> Any:
                train_state = nnx.merge(graphdef, state)
                switch_layers(train_state, switch)
                return jit_step(config, nnx.graphdef(train_state), *args, **kwargs)

            setattr(program, _ATTRIBUTE, _Successor(switch_step(switch, config), switch, make))
        return program

    return wrapped


def switch_on_time(iteration: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train.training_loop_iteration`: at the step of the switch the successors take over."""

    @functools.wraps(iteration)
    def wrapped(jax_device_state: dict[str, Any], python_vars: dict[str, Any], immutable_data: Any) -> Any:
        step = python_vars["step"]
        successor = getattr(jax_device_state["p_train_step"], _ATTRIBUTE, None)
        # A run that starts at the switch was set up with switched layers.
        if successor and immutable_data["start_step"] < step == successor.step:
            _log(f"from step {step} on", successor.switch)
            for name in _PROGRAMS:
                if program := jax_device_state[name]:
                    jax_device_state[name] = getattr(program, _ATTRIBUTE).make(jax_device_state["state"])
        return iteration(jax_device_state, python_vars, immutable_data)

    return wrapped


def start_switched(setup_train_loop: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train_utils.setup_train_loop`: a run that resumes after the switch has switched layers at once."""

    @functools.wraps(setup_train_loop)
    def wrapped(config: Any, *args: Any, **kwargs: Any) -> Any:
        *rest, train_state = setup_train_loop(config, *args, **kwargs)
        switch = _switch_of(config)
        if switch and (first := switch_step(switch, config)) <= int(train_state.optimizer.step.get_value()):
            _log(f"since step {first}", switch)
            switch_layers(train_state, switch)
        return (*rest, train_state)

    return wrapped


def switch_layers(model: nnx.Module, switch: Switch) -> None:
    """Gives every 4-bit layer below a module, in place, what it runs after the switch."""
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Nvfp4DotGeneral):
            module.routine = switched_routine(module.routine, switch)


def _switch_of(config: Any) -> Switch | None:
    return recipe_of(config).switch if enabled(config) else None


def _log(when: str, switch: Switch) -> None:
    from maxtext.utils import max_logging

    if jax.process_index() == 0:
        max_logging.log(f"NVFP4: late switch, {when}: {describe(switch)}, to close the loss gap of 4 bits")
