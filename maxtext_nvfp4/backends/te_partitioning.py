"""Corrects how XLA partitions Transformer Engine's calls over several devices.

Two faults of its 2.20 in the programs that MaxText makes, both shown in tests/te/test_partitioning.py:

- The state of stochastic rounding has one row for each device, but where a tensor is split along two of its
  axes, the second one splits the four words of a row. Devices then share words, or get none.
- What a device does is traced under MaxText's mesh, so that the reductions of `psum` and `pmax` hold sharding
  annotations, which XLA refuses once the program is partitioned.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

_RNG_STATE = 3
"""Place of the state of stochastic rounding among the operands of a quantization."""


def sharded_axes(spec: tuple[Any, ...]) -> tuple[str, ...]:
    """The mesh axes in a partition spec."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None)
    return tuple(axis for entry in entries for axis in entry)


def correct() -> None:
    """Registers the calls anew, with corrected partitioning."""
    from transformer_engine.jax.cpp_extensions import amax, base, quantization

    gemm = base._primitive_registry["GemmPrimitive"]  # the module is hidden by the function of its name
    for primitive in (quantization.BaseDBiasQuantizePrimitive, amax.RHTAmaxCalculationPrimitive, gemm):
        is_quantization = primitive is quantization.BaseDBiasQuantizePrimitive
        primitive.partition = staticmethod(_corrected(primitive.partition, is_quantization))
        base.register_primitive(primitive)


def _corrected(partition: Callable[..., Any], is_quantization: bool) -> Callable[..., Any]:
    @functools.wraps(partition)
    def corrected(*arguments: Any) -> tuple[Any, Callable[..., Any], Any, tuple[Any, ...]]:
        *_, operands, _ = arguments
        mesh, on_shard, results, shardings = partition(*arguments)
        shardings = list(shardings)
        if is_quantization and len(operands[_RNG_STATE].shape) == 2:
            axes = sharded_axes(tuple(operands[0].sharding.spec))
            shardings[_RNG_STATE] = NamedSharding(mesh, PartitionSpec(axes or None, None))

        def without_mesh(*shards: Any) -> Any:
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return on_shard(*shards)

        return mesh, without_mesh, results, tuple(shardings)

    return corrected
