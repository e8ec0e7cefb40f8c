"""Whether the arrays of a checkpoint have the shapes of the model and its optimizer, before any is read.

Orbax finds an array of another shape while it reads others, and drops those reads with a traceback each.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp

from maxtext_nvfp4.errors import ConfigError

_SHOWN = 3


def checking_shapes(manager: Any) -> Callable[..., Any]:
    """Wraps `load_checkpointables` of a checkpointer.

    Raises:
      ConfigError: An array of the step was saved with another shape than the one asked for.
    """
    load = manager.load_checkpointables

    @functools.wraps(load)
    def wrapped(step: int, abstract: dict[str, Any]) -> Any:
        saved = _shapes(manager.checkpointables_metadata(step).metadata["items"])
        wanted = _shapes(abstract["items"])
        others = [
            f"{name} was saved as {saved[name]}, and is {shape} here"
            for name, shape in wanted.items()
            if saved.get(name, shape) != shape
        ]
        if others:
            more = [f"and {len(others) - _SHOWN} more"] * (len(others) > _SHOWN)
            raise ConfigError(
                of_another_model(manager.directory / str(step), "; ".join(others[:_SHOWN] + more))
            )
        return load(step, abstract)

    return wrapped


def of_another_model(checkpoint: Any, why: str) -> str:
    """The message that refuses a checkpoint whose tree or arrays are not those of the run."""
    return (
        f"checkpoint {checkpoint} is of another model or optimizer: {why}\nwrite the keys of the run that "
        "saved it, such as opt_type, base_mlp_dim and scan_layers, or another run_name"
    )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """By the array's name in a checkpoint; without random keys, which are saved as arrays of words."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(leaf, "shape") and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }
