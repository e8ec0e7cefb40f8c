"""From the plans of a GEMM's operands to what is multiplied, and to statistics of it."""

import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4.hadamard import random_hadamard
from maxtext_nvfp4.plan import BF16, Gemm, GemmPlan, OperandPlan, Precision
from maxtext_nvfp4.quantize import Encoded, encode, full_block
from maxtext_nvfp4.routine import Routine
from maxtext_nvfp4.telemetry import UNMEASURED, operand_statistics, product_error, product_statistics

CONTRACT: Mapping[Gemm, tuple[int, int]] = {"fprop": (1, 0), "dgrad": (1, 1), "wgrad": (0, 0)}
"""The contracted axis of each operand: x [M, K] w [K, N], dy [M, N] w and x dy."""

_KEY_FOLD: Mapping[Gemm, int] = {"fprop": 0, "dgrad": 1, "wgrad": 2}
_FIRST_OF_TWO = 1
"""Folded into the key of a GEMM's first operand where both are rounded stochastically, by noise of their own."""


class Operand(NamedTuple):
    """A rank-2 operand of a 4-bit GEMM.

    Attributes:
      values: What was quantized: the array, after the Hadamard transform where one is planned.
      encoded: Its 4-bit form.
    """

    values: Array
    encoded: Encoded


def gemm_key(gemm: Gemm, key: Array | None) -> Array | None:
    """The key of one GEMM, from the uint32 words that `Backend.dot` was given."""
    if key is None:
        return None
    return jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), _KEY_FOLD[gemm])


def encode_operand(
    plan: OperandPlan, x: Array, contract: int, key: Array | None, precision: Precision
) -> Operand:
    """Transforms and quantizes one rank-2 GEMM operand along its contracted axis."""
    if plan.hadamard:
        # The transform is read twice, for amax and for codes: without the barrier it would be fused into
        # both and computed twice.
        x = lax.optimization_barrier(random_hadamard(x, contract))
    block = plan.block if contract == 1 else plan.block[::-1]
    return Operand(x, encode(x, full_block(x.shape, block), key if plan.stochastic else None, precision))


def encode_operands(
    plan: GemmPlan, a: Array, b: Array, contract: tuple[int, int], key: Array | None
) -> tuple[Operand, Operand]:
    """Both operands of a 4-bit GEMM that contracts one axis of each."""
    assert plan.a is not None
    assert plan.b is not None
    both = plan.a.stochastic and plan.b.stochastic
    key_a = jax.random.fold_in(key, _FIRST_OF_TWO) if both and key is not None else key
    return (
        encode_operand(plan.a, a, contract[0], key_a, plan.precision),
        encode_operand(plan.b, b, contract[1], key, plan.precision),
    )


def gemm_statistics(
    operands: tuple[Operand, Operand], a: Array, b: Array, contract: tuple[int, int], product: Array
) -> Array:
    """Statistics of a 4-bit GEMM's operands and of its product, against those in high precision.

    Args:
      operands: As `encode_operands` made them of a and b.
      a: First operand in high precision, of rank 2.
      b: Second operand.
      contract: The contracted axis of a and of b.
      product: What the GEMM gave, of rank 2.

    Returns:
      float32 [3, statistics]: of a, of b and of the product.
    """
    return jnp.stack(
        [
            *(operand_statistics(operand.values, operand.encoded) for operand in operands),
            product_statistics(product_error(a, b, contract, product)),
        ]
    )


def measure(
    routine: Routine,
    gemm: Gemm,
    a: Array,
    b: Array,
    entry: Array | None,
    key: Array | None,
    product: Array,
) -> Array:
    """Quantizes the operands of a GEMM anew, for a backend that does not show what it multiplied.

    Args:
      routine: Plans.
      gemm: Which of a layer's GEMMs.
      a: First operand in high precision, of rank 2.
      b: Second operand.
      entry: int32 scalar, the layer's place in `routine.table`.
      key: uint32 words of the key; what is rounded stochastically is another draw than the backend's.
      product: What the backend's GEMM gave.

    Returns:
      As `gemm_statistics`; `UNMEASURED` where the routine leaves the GEMM in high precision.
    """
    contract, key = CONTRACT[gemm], gemm_key(gemm, key)

    def branch(plan: GemmPlan) -> Callable[..., Array]:
        if plan == BF16:
            return lambda *_: jnp.asarray(UNMEASURED)

        def run(a: Array, b: Array, product: Array) -> Array:
            return gemm_statistics(encode_operands(plan, a, b, contract, key), a, b, contract, product)

        return run

    statistics: Array = routine.switch(operator.attrgetter(gemm), branch, entry, a, b, product)
    return statistics
