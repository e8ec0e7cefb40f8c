"""Checkpoints at the end of a run: however it ends, it finishes the one that it is writing.

MaxText waits for an asynchronous save only when a run comes to its last step. After an error, or where it stops early,
Python shuts down the threads that write, and what would have been the last checkpoint stays half-written.
"""

import functools
from collections.abc import Callable
from typing import Any

_managers: list[Any] = []


def save_now(jax_device_state: dict[str, Any], python_vars: dict[str, Any], config: Any) -> bool:
    """Saves the state of MaxText's loop after the step that it has just done.

    Args:
      jax_device_state: As `train.training_loop_iteration` has it.
      python_vars: The same.
      config: Of the run.

    Returns:
      Whether the run keeps checkpoints at all. The checkpoint is complete then.
    """
    from maxtext.common import checkpointing

    manager = python_vars["checkpoint_manager"]
    if manager is None:
        return False
    checkpointing.maybe_save_checkpoint(
        manager, jax_device_state["state"], config, python_vars["data_iterator"]
    )
    checkpointing.wait_until_finished(manager)
    return True


def remembered(create_checkpoint_manager: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train_utils.create_checkpoint_manager`: `finishing_saves` knows what it returns."""

    @functools.wraps(create_checkpoint_manager)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        manager = create_checkpoint_manager(*args, **kwargs)
        if manager is not None:
            _managers.append(manager)
        return manager

    return wrapped


def finishing_saves(train_loop: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `train.train_loop`: its saves are complete when it returns or raises."""
    from maxtext.common import checkpointing

    @functools.wraps(train_loop)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return train_loop(*args, **kwargs)
        finally:
            while _managers:
                checkpointing.wait_until_finished(_managers.pop())

    return wrapped
