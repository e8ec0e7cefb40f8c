"""Stand-ins for Transformer Engine's CUDA kernels on CPUs, below its own primitives.

The primitives, their partitioning rules and their collectives are Transformer Engine's; only what one device does in
a kernel is written here, literally, after the scale chain of docs/numerics.md. That makes its sharding testable on
host devices, which its JAX fallback does not reach: there XLA partitions plain operations.
"""

import contextlib
import importlib
import math
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from harness import blackwell, load
from jax import numpy as jnp
from jax.interpreters import mlir

from maxtext_nvfp4 import formats
from maxtext_nvfp4.hadamard import random_hadamard

te = load()
te_amax, te_base, te_gemm, te_quantization = (
    importlib.import_module(f"transformer_engine.jax.cpp_extensions.{name}")
    for name in ("amax", "base", "gemm", "quantization")
)

FLT_MAX = float(jnp.finfo(jnp.float32).max)


def matrix(x: jax.Array, flatten_axis: int) -> jax.Array:
    return x.reshape(math.prod(x.shape[:flatten_axis]), -1)


def encode(
    x: jax.Array, amax: jax.Array, square: bool, state: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Codes and one scale for every 16 elements of a row of a matrix, under a given tensor amax."""
    rows, columns = x.shape
    x = x.astype(jnp.float32)
    step = 16 if square else 1
    blocks = x.reshape(rows // step, step, columns // 16, 16)
    amax = amax.reshape(())
    encode_scale = jnp.minimum(2688.0 / jnp.where(amax > 0, amax, 2688.0), FLT_MAX)
    block_amax = jnp.max(jnp.abs(blocks), axis=(1, 3))
    scales = formats.round_e4m3(block_amax * (encode_scale * jnp.float32(1 / 6)))
    inverse = jnp.minimum(1 / (scales * (1 / encode_scale)), FLT_MAX)
    scaled = (blocks * inverse[:, None, :, None]).reshape(rows, columns)
    if state is None:
        codes = formats.round_e2m1(scaled)
    else:
        key = jax.random.wrap_key_data(state[:2], impl="threefry2x32")
        for word in state[2:]:
            key = jax.random.fold_in(key, word)
        codes = formats.round_e2m1_stochastic(scaled, jax.random.uniform(key, scaled.shape))
    return codes.astype(jnp.float4_e2m1fn), jnp.repeat(scales, step, axis=0).astype(jnp.float8_e4m3fn)


def padded(scales: jax.Array, aval: Any, rows: int) -> jax.Array:
    """The scales in the shape of an output, whose first `rows` axes are the rows of the matrix.

    Matrices of few rows or columns do not fill it.
    """
    full = jnp.zeros((math.prod(aval.shape[:rows]), math.prod(aval.shape[rows:])), aval.dtype)
    return full.at[: scales.shape[0], : scales.shape[1]].set(scales).reshape(aval.shape)


def quantize(
    x: jax.Array, scale: Any, amax: Any, state: Any, post_rht_amax: Any, rht: Any, **params: Any
) -> list[Any]:
    """`te_dbias_quantize_ffi` on one device."""
    operands = (x, scale, amax, state, post_rht_amax, rht)
    avals = te_quantization.QuantizePrimitive.abstract(
        *(jax.core.ShapedArray(value.shape, value.dtype) for value in operands), **params
    )
    square = params["scaling_mode"] == te.ScalingMode.NVFP4_2D_SCALING.value
    rows = params["flatten_axis"] % x.ndim
    flat = matrix(x, rows)
    state = state.reshape(-1)[:4] if params["stochastic_rounding"] else None
    outputs = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
    outputs[4] = amax
    codes, scales = encode(flat, amax, square, state)
    outputs[0], outputs[2] = codes.reshape(avals[0].shape), padded(scales, avals[2], rows)
    if params["q_layout"].has_colwise:
        if params["use_rht"]:
            flat, amax = random_hadamard(flat, 0), post_rht_amax
        other = None if state is None else state ^ jnp.uint32(0x9E3779B9)  # other noise than along rows
        codes, scales = encode(flat.T, amax, square, other)
        outputs[1], outputs[3] = codes.reshape(avals[1].shape), padded(scales, avals[3], x.ndim - rows)
    return outputs


def rht_amax(x: jax.Array, *, produce_regular_amax: bool, flatten_axis: int, **_: Any) -> list[jax.Array]:
    """`te_rht_amax_ffi` on one device."""
    assert produce_regular_amax
    flat = matrix(x, flatten_axis % x.ndim)
    return [jnp.max(jnp.abs(v.astype(jnp.float32))).reshape(1) for v in (flat, random_hadamard(flat, 0))]


def gemm(
    lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any, bias: Any, alpha: Any, beta: Any, **params: Any
) -> list[jax.Array]:
    """`te_gemm_v2_ffi` on one device: both operands contract their last axes."""
    output, workspace = te_gemm.GemmPrimitive.abstract(
        *(
            jax.core.ShapedArray(v.shape, v.dtype)
            for v in (lhs, lhs_scale, rhs, rhs_scale, bias, alpha, beta)
        ),
        **params,
    )

    def decoded(values: jax.Array, scales: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        codes = matrix(values.astype(jnp.float32), min(axes))
        scales = matrix(scales, min(axes))[: codes.shape[0], : codes.shape[1] // 16]
        return codes * jnp.repeat(scales.astype(jnp.float32), 16, axis=1)

    lhs_axes, rhs_axes = params["contracting_dims"]
    product = decoded(lhs, lhs_scale, lhs_axes) @ decoded(rhs, rhs_scale, rhs_axes).T
    product = (product * alpha).astype(output.dtype).reshape(output.shape)
    return [product, jnp.zeros(workspace.shape, workspace.dtype)]


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Runs Transformer Engine's calls on CPUs."""
    lowerings = (
        (te_quantization.QuantizePrimitive, quantize),
        (te_amax.RHTAmaxCalculationPrimitive, rht_amax),
        (te_gemm.GemmPrimitive, gemm),
    )
    for primitive, kernel in lowerings:
        lowering = mlir.lower_fun(kernel, multiple_results=True)
        mlir.register_lowering(primitive.inner_primitive, lowering, platform="cpu")
    # XLA's CPU compiler stops at a sum of bfloat16 over devices; this is Transformer Engine's own switch.
    with blackwell(), mock.patch.dict(os.environ, {"NVTE_JAX_ALL_REDUCE_IN_FP32": "1"}):
        yield
