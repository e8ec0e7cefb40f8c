"""Stand-ins for Transformer Engine's CUDA kernels on CPUs, below its own primitives.

The primitives, their partitioning rules and their collectives are Transformer Engine's; only what one device does in
a kernel is written here, literally, after the scale chain of docs/numerics.md. That makes its sharding testable on
host devices, which its JAX fallback does not reach: there XLA partitions plain operations.
"""

import importlib
import math
from typing import Any

import jax
from harness import load
from jax import numpy as jnp
from jax.interpreters import mlir

from maxtext_nvfp4 import formats
from maxtext_nvfp4.hadamard import random_hadamard

te = load()
te_amax, te_gemm, te_quantization = (
    importlib.import_module(f"transformer_engine.jax.cpp_extensions.{name}")
    for name in ("amax", "gemm", "quantization")
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


def padded(scales: jax.Array, aval: Any) -> jax.Array:
    """The scales in the shape of an output, which matrices of few rows or columns do not fill."""
    if scales.size == math.prod(aval.shape):
        return scales.reshape(aval.shape)
    return jnp.zeros(aval.shape, aval.dtype).at[: scales.shape[0], : scales.shape[1]].set(scales)


def quantize(
    x: jax.Array, scale: Any, amax: Any, state: Any, post_rht_amax: Any, rht: Any, **params: Any
) -> list[Any]:
    """`te_dbias_quantize_ffi` on one device."""
    operands = (x, scale, amax, state, post_rht_amax, rht)
    avals = te_quantization.QuantizePrimitive.abstract(
        *(jax.core.ShapedArray(value.shape, value.dtype) for value in operands), **params
    )
    square = params["scaling_mode"] == te.ScalingMode.NVFP4_2D_SCALING.value
    flat = matrix(x, params["flatten_axis"] % x.ndim)
    state = state.reshape(-1)[:4] if params["stochastic_rounding"] else None
    outputs = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
    outputs[4] = amax
    codes, scales = encode(flat, amax, square, state)
    outputs[0], outputs[2] = codes.reshape(avals[0].shape), padded(scales, avals[2])
    if params["q_layout"].has_colwise:
        if params["use_rht"]:
            flat, amax = random_hadamard(flat, 0), post_rht_amax
        other = None if state is None else state ^ jnp.uint32(0x9E3779B9)  # other noise than along rows
        codes, scales = encode(flat.T, amax, square, other)
        outputs[1], outputs[3] = codes.reshape(avals[1].shape), padded(scales, avals[3])
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
        rows, columns = codes.shape
        if scales.size != codes.size // 16:
            scales = scales[:rows, : columns // 16]
        return codes * jnp.repeat(scales.astype(jnp.float32).reshape(rows, -1), 16, axis=1)

    lhs_axes, rhs_axes = params["contracting_dims"]
    product = decoded(lhs, lhs_scale, lhs_axes) @ decoded(rhs, rhs_scale, rhs_axes).T
    product = (product * alpha).astype(output.dtype).reshape(output.shape)
    return [product, jnp.zeros(workspace.shape, workspace.dtype)]


for primitive, kernel in (
    (te_quantization.QuantizePrimitive, quantize),
    (te_amax.RHTAmaxCalculationPrimitive, rht_amax),
    (te_gemm.GemmPrimitive, gemm),
):
    lowering = mlir.lower_fun(kernel, multiple_results=True)
    mlir.register_lowering(primitive.inner_primitive, lowering, platform="cpu")
