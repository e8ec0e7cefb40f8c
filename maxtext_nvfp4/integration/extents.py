"""Sizes of each site's arrays, whole and as one device of the run holds them.

They follow from the config, so that they are the same before a run, on any machine, as in it; but for a
parallelism of -1, which takes what devices there are, or those that the config is compiled for.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from maxtext_nvfp4.extent import Extent
from maxtext_nvfp4.integration.sites import Linear

TOKENS = ("activation_batch", "activation_length", "activation_norm_length")
_FEATURES = ("activation_mlp", "activation_heads", "activation_embed")
"""Logical axes of activations whose mesh axes split tokens, and features."""


def find_extents(linears: Iterable[Linear], config: Any) -> dict[str, Extent]:
    """Sizes of a microbatch's GEMMs by site path.

    An activation's features are taken to be split over every mesh axis that MaxText's rules split some
    activation's features over, which is the finest split that occurs.
    """
    mesh, parts = mesh_sizes(config), parts_of(config)
    # One device's share of the batch is per_device_batch_size, times the devices that share its tokens.
    sharing = math.prod(mesh.values()) // parts(TOKENS)
    length = config.max_target_length
    tokens = int(config.micro_batch_size_to_train_on * length)
    local_tokens = int(config.per_device_batch_size * length * sharing)
    extents = {}
    for linear in linears:
        module = linear.module
        inputs = len(module.in_features_shape)
        k, n = math.prod(module.in_features_shape), math.prod(module.out_features_shape)
        extents[linear.site] = Extent(
            whole={"M": tokens, "S": length, "K": k, "N": n},
            shard={
                "M": local_tokens,
                "S": _split(length, parts(TOKENS[1:])),
                "K": _split(k, parts(_FEATURES)),
                "N": _split(n, parts(_FEATURES)),
            },
            weight_shard={
                "K": _split(k, parts(module.kernel_axes[:inputs])),
                "N": _split(n, parts(module.kernel_axes[inputs:])),
            },
            dtype=config.dtype.name if hasattr(config.dtype, "name") else str(config.dtype),
        )
    return extents


def parts_of(config: Any) -> Callable[[Iterable[str]], int]:
    """A function: into how many parts MaxText's rules split what has these logical axes."""
    mesh = mesh_sizes(config)
    rules: dict[str, tuple[str, ...]] = {}
    for name, axes in config.logical_axis_rules:
        rules.setdefault(name, (axes,) if isinstance(axes, str) else tuple(axes))

    def parts(names: Iterable[str]) -> int:
        return math.prod(
            mesh.get(axis, 1) for axis in {axis for name in names for axis in rules.get(name, ())}
        )

    return parts


def _split(size: int, parts: int) -> int:
    """What a device holds of a size; all of it where it does not divide, as XLA then leaves it whole."""
    return size if size % parts else size // parts


def mesh_sizes(config: Any) -> Mapping[str, int]:
    """Size of each mesh axis; -1 is filled from the devices that the config is for."""
    inside, across = network_sizes(config)
    return {axis: inside[axis] * across[axis] for axis in config.mesh_axes}


def network_sizes(config: Any) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The part of each mesh axis that lies within a slice, and that over slices."""
    slices = max(1, config.num_slices)
    inside = _filled(config.ici_parallelism, max(1, config.num_target_devices // slices))
    across = _filled(config.dcn_parallelism, slices)
    axes = config.mesh_axes
    return dict(zip(axes, inside, strict=True)), dict(zip(axes, across, strict=True))


def _filled(sizes: Sequence[int], devices: int) -> list[int]:
    rest = max(1, devices // math.prod(size for size in sizes if size > 0))
    return [rest if size == -1 else size for size in sizes]
