"""SIGTERM, as schedulers send it: the step is finished, its checkpoint saved, and the run ends.

MaxText leaves a distributed run at the next step that all processes agree on, without a checkpoint unless
`enable_autocheckpoint` is set; a single process it lets die.
"""

import contextlib
import dataclasses
import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils
from maxtext.common import checkpointing
from maxtext.trainers.pre_train import train
from maxtext.utils import exceptions

from maxtext_nvfp4.integration.saves import save_now


@dataclasses.dataclass
class Stop:
    """Whether the run was asked to stop, and where it did.

    Attributes:
      asked: A signal has come to this process.
      step: The last step that was trained; None if the run was not stopped.
    """

    asked: bool = False
    step: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether to stop after this step, the same on every process."""
        if jax.process_count() == 1:
            return self.asked
        return bool(multihost_utils.reached_preemption_sync_point(step))


@contextlib.contextmanager
def stopping_at_sigterm() -> Iterator[Stop]:
    """Ends training inside it in good order once SIGTERM comes; a second one changes nothing.

    A single process handles the signal itself. In a distributed job JAX does, and agrees with all
    processes on the step.
    """
    stop = Stop()
    iteration, reached = train.training_loop_iteration, checkpointing.reached_preemption
    alone = jax.process_count() == 1
    handler = signal.signal(signal.SIGTERM, lambda *_: setattr(stop, "asked", True)) if alone else None
    train.training_loop_iteration = _stopping(iteration, stop)
    # Else MaxText leaves in the middle of an iteration, before its state and its metrics are at hand.
    checkpointing.reached_preemption = lambda manager, step: False
    try:
        yield stop
    finally:
        train.training_loop_iteration, checkpointing.reached_preemption = iteration, reached
        if alone:
            signal.signal(signal.SIGTERM, handler)


def _stopping(iteration: Callable[..., Any], stop: Stop) -> Callable[..., Any]:
    @functools.wraps(iteration)
    def wrapped(device_state: dict[str, Any], variables: dict[str, Any], constants: dict[str, Any]) -> Any:
        metrics = iteration(device_state, variables, constants)
        step = variables["step"]
        if stop.is_due(step) and step + 1 < constants["steps"]:
            save_now(device_state, variables, constants["config"])
            stop.step = step
            raise exceptions.StopTraining(f"SIGTERM came; step {step} was the last")
        return metrics

    return wrapped
