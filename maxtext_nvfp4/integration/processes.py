"""Decisions that all processes of a run must take alike, or some wait for others that have stopped."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxtext_nvfp4.errors import ConfigError


def from_first(text: str) -> str:
    """The text that the first process has, on every process."""
    if jax.process_count() == 1:
        return text
    data = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    padded = np.resize(data, size) if data.size else np.zeros(size, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode() if size else ""


def on_first(action: Callable[[], None]) -> None:
    """Runs an action on the first process only; the others wait for it.

    Raises:
      ConfigError: On every process, if the action raised it.
    """
    refusal = ""
    if jax.process_index() == 0:
        try:
            action()
        except ConfigError as error:
            refusal = str(error)
    if refusal := from_first(refusal):
        raise ConfigError(refusal)
