"""What `quantize_throughput.py` measures, and how this package and the peers written in JAX do it.

A case is one thing that a linear layer asks of a quantizer. An implementation answers with arrays as it would store
them: 4-bit codes and 8-bit scales. `stored` brings them to one form, in which implementations are compared.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

import maxtext_nvfp4
from maxtext_nvfp4 import backends
from maxtext_nvfp4.backends.operands import encode_operand
from maxtext_nvfp4.plan import OperandPlan

CASES: dict[str, str] = {
    "nearest": "1x16 blocks along the features, to nearest: an activation in fprop",
    "stochastic": "the same, rounded stochastically: an output gradient in dgrad",
    "square": "16x16 blocks, to nearest: a weight",
    "hadamard": "1x16 blocks along the tokens, transformed, to nearest: an activation in wgrad",
    "hadamard_stochastic": "the same, rounded stochastically: an output gradient in wgrad",
    "both": "`nearest` and `hadamard`, one after the other: all that a layer needs of an activation",
}

OURS = "maxtext-nvfp4"
OPERAND = "maxtext-nvfp4, operand"


class Stored(NamedTuple):
    """A quantized matrix, blocks along its second axis.

    Attributes:
      codes: uint8, an E2M1 code in the lower four bits of each.
      scales: float32 block scales, one for 16 codes.
    """

    codes: np.ndarray
    scales: np.ndarray


class Implementation(NamedTuple):
    """One way to do one case.

    Attributes:
      run: From x, bfloat16 [tokens, features], to arrays.
      stored: What it returned as matrices that can be compared; empty where it does something else.
    """

    run: Callable[[Array], Any]
    stored: Callable[[Any], tuple[Stored, ...]]


def ours() -> dict[str, Implementation]:
    """This package's `quantize`, for every case."""
    key = jax.random.key(0)

    @jax.jit
    def hadamard(x: Array, key: Array | None = None) -> maxtext_nvfp4.Quantized:
        # As in training: without the barrier the transform would be computed twice.
        transformed = jax.lax.optimization_barrier(maxtext_nvfp4.random_hadamard(x, 0))
        return maxtext_nvfp4.quantize(transformed, (16, 1), key)

    both = jax.jit(lambda x: (maxtext_nvfp4.quantize(x), hadamard(x)))
    runs: dict[str, Callable[[Array], Any]] = {
        "nearest": maxtext_nvfp4.quantize,
        "stochastic": lambda x: maxtext_nvfp4.quantize(x, key=key),
        "square": lambda x: maxtext_nvfp4.quantize(x, (16, 16)),
        "hadamard": hadamard,
        "hadamard_stochastic": lambda x: hadamard(x, key),
        "both": both,
    }

    def stored(result: Any) -> tuple[Stored, ...]:
        quantized = result if type(result) is tuple else (result,)
        return tuple(_stored(q.codes, q.block_scales, along=0 if q.block[1] == 1 else 1) for q in quantized)

    return {case: Implementation(run, stored) for case, run in runs.items()}


def operands() -> dict[str, Implementation]:
    """What the emulated GEMM takes: `codes * block_scales` in its dtype, nothing stored."""
    key, dtype = jax.random.key(0), backends.create("emulated", jax.default_backend()).operand_dtype
    plans = {
        "nearest": (OperandPlan(block=(1, 16)), 1),
        "stochastic": (OperandPlan(block=(1, 16), stochastic=True), 1),
        "square": (OperandPlan(block=(16, 16)), 1),
        "hadamard": (OperandPlan(block=(1, 16), hadamard=True), 0),
        "hadamard_stochastic": (OperandPlan(block=(1, 16), hadamard=True, stochastic=True), 0),
    }

    def operand(case: str, x: Array) -> Array:
        plan, contract = plans[case]
        return encode_operand(plan, x, contract, key, "nvfp4").encoded.scaled_codes().astype(dtype)

    def runs(*cases: str) -> Implementation:
        return Implementation(jax.jit(lambda x: tuple(operand(case, x) for case in cases)), lambda _: ())

    return {**{case: runs(case) for case in plans}, "both": runs("nearest", "hadamard")}


def qwix() -> dict[str, Implementation]:
    """Qwix's `nvfp4`: one level of scales."""
    from qwix._src.core import qarray

    tiles = {"nearest": {1: 16}, "square": {0: 16, 1: 16}}

    def run(case: str) -> Callable[[Array], Any]:
        channels = [axis for axis in (0, 1) if axis not in tiles[case]]
        how = qarray.HowToQuantize(qtype="nvfp4", channelwise_axes=channels, tiled_axes=tiles[case])

        def quantized(x: Array) -> tuple[Array, Array]:
            q = qarray.quantize(x, how)
            return q.qvalue, q.scale.astype(jnp.float8_e4m3fn)

        return jax.jit(quantized)

    return {case: Implementation(run(case), lambda result: (_stored(*result),)) for case in tiles}


@contextlib.contextmanager
def transformer_engine() -> Iterator[dict[str, Implementation]]:
    """Transformer Engine's own JAX code, which runs where its kernels do not.

    It is traced while this context is open. The corrections without which it gives NaN on a CPU are those of its tests here.
    """
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "te"))
    import harness
    from transformer_engine.jax.quantize import ScalingMode, quantizer
    from transformer_engine.jax.quantize.misc import QuantizeLayout

    def run(
        layout: QuantizeLayout, square: bool = False, hadamard: bool = False, stochastic: bool = False
    ) -> Callable[[Array], Any]:
        def quantized(x: Array) -> Any:
            made = quantizer.NVFP4Quantizer(
                q_dtype=jnp.float4_e2m1fn,
                scaling_mode=ScalingMode.NVFP4_2D_SCALING if square else ScalingMode.NVFP4_1D_SCALING,
                q_layout=layout,
                use_rht=hadamard,
                stochastic_rounding_rng_state=jnp.ones((1, 4), jnp.uint32) if stochastic else None,
            ).quantize(x)
            parts = (made.rowwise_tensor, made.colwise_tensor) if layout.is_rowwise_colwise else (made,)
            return tuple((part.data, part.scale_inv) for part in parts)

        return jax.jit(quantized)

    rows, columns, both = QuantizeLayout.ROWWISE, QuantizeLayout.COLWISE, QuantizeLayout.ROWWISE_COLWISE
    runs = {
        "nearest": run(rows),
        "stochastic": run(rows, stochastic=True),
        "square": run(rows, square=True),
        "hadamard": run(columns, hadamard=True),
        "hadamard_stochastic": run(columns, hadamard=True, stochastic=True),
        "both": run(both, hadamard=True),
    }

    def stored(result: Any) -> tuple[Stored, ...]:
        return tuple(_stored(*part) for part in result)

    def stored_square(result: Any) -> tuple[Stored, ...]:
        # Each of the 16 rows has the scale.
        return tuple(Stored(part.codes, part.scales[::16]) for part in stored(result))

    with harness.corrected_fallback():
        yield {
            case: Implementation(function, stored_square if case == "square" else stored)
            for case, function in runs.items()
        }


def _stored(codes: Array, scales: Array, along: int = 1) -> Stored:
    """Brings codes and scales, blocks along the axis `along`, to one form."""
    nibbles = np.asarray(jax.lax.bitcast_convert_type(codes, jnp.uint4)).astype(np.uint8)
    values = np.asarray(scales.astype(jnp.float32))
    return Stored(nibbles, values) if along == 1 else Stored(nibbles.T, values.T)
