"""What a run does when its data fail or end."""

import contextlib
from collections.abc import Iterator
from typing import Any

from maxtext_nvfp4.errors import ConfigError


@contextlib.contextmanager
def loader_exception_guard(config: Any) -> Iterator[None]:
    """Takes the place of MaxText's guard of this name around the reading of a batch.

    MaxText's ends a run whose data cannot be read, or are at an end, as if it were complete: with a line in the
    log and exit status 0.

    Raises:
      ConfigError: There are no more data.
    """
    try:
        yield
    except StopIteration:
        raise ConfigError(
            f"num_epoch: got {config.num_epoch}, and the data end before step {config.steps}; write a larger "
            "num_epoch, or fewer steps. The run goes on from its last checkpoint"
        ) from None
