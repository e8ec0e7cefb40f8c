"""Transformer Engine on a machine without a GPU: imported, lowered for CUDA, and run by its JAX fallback.

Nothing of Transformer Engine is replaced but the answer to "which GPU is this", and, for its fallback, what is
listed in `corrected_fallback`.
"""

import contextlib
import ctypes
import ctypes.util
import os
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from maxtext_nvfp4.backends import te_library

TESTS = str(pathlib.Path(__file__).parents[1])
if TESTS not in sys.path:  # in the processes of `on_devices`
    sys.path.append(TESTS)

import oracle  # noqa: E402


def load() -> Any:
    """The real library; scripts/install_te.sh put a stub of NVIDIA's driver beside it where there is no driver."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        stub = pathlib.Path(sys.prefix) / "lib" / "cuda-stub" / "libcuda.so.1"
        ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
    return te_library.load()


load()

import transformer_engine_jax  # noqa: E402
from transformer_engine.jax.quantize import device_utils, helper, quantizer  # noqa: E402

_GEMM_MODULE = sys.modules["transformer_engine.jax.cpp_extensions.gemm"]


@contextlib.contextmanager
def blackwell() -> Iterator[None]:
    """Answers every question for the GPU as a B200 would; `unavailable` finds nothing missing."""
    caches = (device_utils.get_device_compute_capability, device_utils.is_fp8_gemm_with_all_layouts_supported)

    def forget() -> None:
        for cached in caches:
            cached.cache_clear()
        helper._is_scaling_mode_supported = None

    capability = lambda *_: 100  # noqa: E731
    with (
        mock.patch.object(transformer_engine_jax, "get_device_compute_capability", capability),
        mock.patch.object(_GEMM_MODULE, "get_device_compute_capability", capability),
        mock.patch.object(te_library, "unavailable", return_value=None),
    ):
        forget()
        try:
            yield
        finally:
            forget()


@contextlib.contextmanager
def fallback() -> Iterator[None]:
    """Traces Transformer Engine's JAX implementation instead of its CUDA calls, as it is."""
    with blackwell(), mock.patch.dict(os.environ, {"NVTE_JAX_CUSTOM_CALLS": "false"}):
        yield


CORRECTIONS = ("block scales above 240", "square blocks repeated", "threefry keys")


@contextlib.contextmanager
def corrected_fallback(corrections: tuple[str, ...] = CORRECTIONS) -> Iterator[None]:
    """The fallback with its three defects on CPUs corrected; tests/te/test_fallback.py shows each is needed.

    - Block scales above 240 become NaN: `lax.reduce_precision(f8e4m3fn, 4, 3)` is IEEE-like on CPUs.
    - The scales of square blocks are tiled where they must be repeated.
    - The key of stochastic rounding is wrapped with the default generator, which MaxText sets to one that takes four
      words.
    """

    class Lax:
        def __getattr__(self, name: str) -> Any:
            return getattr(lax, name)

        @staticmethod
        def reduce_precision(x: jax.Array, exponent_bits: int, mantissa_bits: int) -> jax.Array:
            if x.dtype == jnp.float8_e4m3fn and CORRECTIONS[0] in corrections:
                return lax.optimization_barrier(x)
            return lax.reduce_precision(x, exponent_bits, mantissa_bits)

    class Random:
        def __getattr__(self, name: str) -> Any:
            return getattr(jax.random, name)

        @staticmethod
        def wrap_key_data(bits: jax.Array) -> jax.Array:
            if CORRECTIONS[2] in corrections:
                return jax.random.wrap_key_data(bits, impl="threefry2x32")
            return jax.random.wrap_key_data(bits)

    class Jax:
        lax, random = Lax(), Random()

        def __getattr__(self, name: str) -> Any:
            return getattr(jax, name)

    class Numpy:
        def __getattr__(self, name: str) -> Any:
            return getattr(jnp, name)

        @staticmethod
        def tile(x: jax.Array, repeats: list[int]) -> jax.Array:
            if x.dtype == jnp.float8_e4m3fn and CORRECTIONS[1] in corrections:
                for axis, count in enumerate(repeats):
                    x = jnp.repeat(x, count, axis=axis)
                return x
            return jnp.tile(x, repeats)

    with (
        fallback(),
        mock.patch.object(quantizer, "jax", Jax()),
        mock.patch.object(quantizer, "jnp", Numpy()),
    ):
        yield


def lower_for_cuda(function: Any, *arguments: Any) -> str:
    """The StableHLO of a jitted function, lowered for a CUDA device that need not be there."""
    return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


CALL = re.compile(
    r"stablehlo\.custom_call @(te_\w+)\((?P<operands>[^)]*)\) \{(?P<attributes>.*)\} : (?P<types>.*)$"
)


def te_calls(program: str) -> list[dict[str, Any]]:
    """The custom calls to Transformer Engine in a program: target, attributes and types, in order."""
    calls = []
    for line in program.splitlines():
        if found := CALL.search(line.strip()):
            arguments, _, results = found["types"].partition(" -> ")
            calls.append(
                {
                    "target": found[1],
                    "attributes": found["attributes"],
                    "arguments": re.findall(r"tensor<([^>]*)>", arguments),
                    "results": re.findall(r"tensor<([^>]*)>", results),
                }
            )
    return calls


def counts(program: str) -> Counter[str]:
    """How many custom calls of each target a program contains."""
    return Counter(call["target"] for call in te_calls(program))


LEGAL: dict[str, Any] = {
    "quantization": "nvfp4",
    "base_emb_dim": 128,
    "head_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 256,
    "max_target_length": 64,
    "per_device_batch_size": 2,
    "base_num_decoder_layers": 2,
}
"""Keys of a small MaxText model whose every linear layer Transformer Engine takes."""

BARE: dict[str, Any] = {"backend": "transformer_engine", "loss_scale": {"mode": "off"}}
"""Section `nvfp4` of a run with nothing around its GEMMs."""


def stored(tensor: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Bits of codes and of block scales of a quantized tensor, as matrices, and its largest magnitude.

    Blocks lie along the second axis: what is quantized along columns is transposed.
    """
    shape = (int(np.prod(tensor.data.shape[: tensor.flatten_axis])), -1)
    codes, scales = oracle.code_bits(tensor.data), oracle.scale_bits(tensor.scale_inv)
    return codes.reshape(shape), scales.reshape(shape), float(tensor.amax[0])
