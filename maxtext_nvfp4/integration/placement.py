"""Where the arrays of a train state lie: MaxText may shard them and keep them in the host's memory."""

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def on_device(value: Array) -> Array:
    """The value in device memory, for arithmetic in a jitted program, which takes nothing from the host's.

    Parameters and moments lie there between steps with MaxText's `parameter_memory_host_offload` and
    `optimizer_memory_host_offload`.
    """
    if jax.typeof(value).memory_space == jax.memory.Space.Device:
        return value
    return jax.device_put(value, jax.memory.Space.Device)


def replicated(value: Array) -> NamedSharding | None:
    """The sharding that gives every process all of what is computed from a value; None if the value has no mesh."""
    sharding = value.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
