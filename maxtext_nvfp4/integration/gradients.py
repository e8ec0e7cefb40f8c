"""Which gradients of a MaxText model are not finite, and which of them was first.

A backward pass begins at the loss. The first parameter on its way whose gradient is not finite is where the
trouble began; whatever lies below it may only have inherited it.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx
from jax import Array
from jax import numpy as jnp

from maxtext_nvfp4.integration.sites import find_linears

Path = tuple[str, ...]

_LAST = ("embed",)
"""Parts of names outside the decoder layers that a backward pass reaches after them, not before."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """Decoder layers of the parameters below a path: several where one array stacks them."""

    numbers: tuple[int, ...]
    stacked: bool


_OUTSIDE = Layers((), stacked=False)


def find_layers(model: nnx.Module) -> dict[Path, Layers]:
    """The decoder layers of each part of a model that belongs to some, by the path of the part."""
    return {
        linear.layer_path: Layers(linear.layers, linear.stacked)
        for linear in find_linears(model)
        if linear.layers
    }


def backward_order(params: Any, layers: Mapping[Path, Layers]) -> tuple[str, ...]:
    """Names each parameter in each decoder layer, in the order of a backward pass.

    Args:
      params: nnx state of the parameters or their gradients, by the parameters' paths in the model.
      layers: As `find_layers` found them.
    """
    return tuple(name for _, name in sorted(_places(params, layers)))


def finite(grads: Any, layers: Mapping[Path, Layers], scan_axis: int) -> Array:
    """Looks at every gradient.

    Args:
      grads: nnx state of the gradients, by the parameters' paths in the model.
      layers: As `find_layers` found them.
      scan_axis: The axis along which MaxText stacks layers, `param_scan_axis`.

    Returns:
      bool [names], whether each gradient is finite, in the order of `backward_order`. The program that
      computes it does not grow with the number of stacked layers.
    """
    flags = []
    for _, here, value in _floating(grads, layers):
        kept = min(scan_axis, value.ndim - 1) if here.stacked else None
        assert kept is None or value.shape[kept] == len(here.numbers)
        reduced = tuple(axis for axis in range(value.ndim) if axis != kept)
        flags.append(jnp.all(jnp.isfinite(value), axis=reduced).reshape(-1))
    places = _places(grads, layers)
    order = sorted(range(len(places)), key=places.__getitem__)
    return jnp.concatenate(flags)[np.array(order)]


def _places(params: Any, layers: Mapping[Path, Layers]) -> list[tuple[tuple[int, int], str]]:
    """Rank in a backward pass and name of each flag, in the order of the state's leaves."""
    places = []
    for name, here, _ in _floating(params, layers):
        if here is _OUTSIDE:
            places.append(((2 if any(part in name for part in _LAST) else 0, 0), name))
        places += [((1, -number), f"{name} of decoder layer {number}") for number in here.numbers]
    return places


def _floating(tree: Any, layers: Mapping[Path, Layers]) -> Iterator[tuple[str, Layers, Any]]:
    """Name, decoder layers and value of each floating-point leaf."""
    for path, leaf in nnx.to_flat_state(tree):
        parts, value = tuple(map(str, path)), leaf.get_value()
        if jnp.issubdtype(value.dtype, jnp.floating):
            prefixes = (parts[:length] for length in range(len(parts), 0, -1))
            here = next((layers[prefix] for prefix in prefixes if prefix in layers), _OUTSIDE)
            yield "/".join(parts), here, value
