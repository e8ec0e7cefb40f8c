"""Weights and moments of a restored state that are not finite, by name and decoder layer."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax import numpy as jnp
from jax.sharding import NamedSharding

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.gradients import Layers, Path, find_layers
from maxtext_nvfp4.integration.placement import on_device, replicated

_SHOWN = 20


def check_finite(state: Any, scan_axis: int, where: str) -> None:
    """Looks at every float of a train state: one reduction for each array, on the devices that hold it.

    Args:
      state: MaxText's `TrainStateNNX`.
      scan_axis: The axis along which MaxText stacks layers, `param_scan_axis`.
      where: What was restored, for the message.

    Raises:
      ConfigError: Some are not finite, with their names, their decoder layers and their number.
    """
    layers = find_layers(state.model)
    counts, sizes, owners = {}, {}, {}
    for path, variable in nnx.to_flat_state(nnx.state(state)):
        leaf = variable.get_value()
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        parts = tuple(map(str, path))
        name = "/".join(parts)
        owners[name] = owner = _owner(parts, layers)
        axis = min(scan_axis, leaf.ndim - 1) if owner and owner.stacked else None
        counts[name] = _count(axis, replicated(leaf))(leaf)
        sizes[name] = leaf.size // counts[name].size
    found = [
        line
        for name, count in jax.device_get(counts).items()
        for line in _describe(name, count, sizes[name], owners[name])
    ]
    if found:
        more = [f"  and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
        raise ConfigError(
            "\n".join([f"{where} holds values that are not finite:", *found[:_SHOWN], *more])
            + "\ntraining cannot go on from there, and nothing was changed; move that checkpoint away to go on "
            "from an earlier one"
        )


def _describe(name: str, count: Any, size: int, owner: Layers | None) -> Iterator[str]:
    numbers: Sequence[int | None] = owner.numbers if owner else (None,)
    for number, bad in zip(numbers, np.reshape(count, -1), strict=True):
        if bad:
            layer = "" if number is None else f" of decoder layer {number}"
            yield f"  {name}{layer}: {bad} of {size} elements"


def _owner(parts: Path, layers: Mapping[Path, Layers]) -> Layers | None:
    """The decoder layers of a parameter or of its moments, whose paths end in the parameter's."""
    ranges = ((start, stop) for start in range(len(parts)) for stop in range(len(parts), start, -1))
    return next((layers[parts[start:stop]] for start, stop in ranges if parts[start:stop] in layers), None)


@functools.cache
def _count(axis: int | None, sharding: NamedSharding | None) -> Callable[[Array], Array]:
    """The jitted count along all axes but `axis`: small programs, one for each shape and not for each layer."""

    def count(leaf: Array) -> Array:
        others = tuple(i for i in range(leaf.ndim) if i != axis)
        return jnp.sum(~jnp.isfinite(on_device(leaf)), axis=others, dtype=jnp.uint32)

    return jax.jit(count, out_shardings=sharding)
