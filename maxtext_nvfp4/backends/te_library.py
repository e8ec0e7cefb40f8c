"""The Transformer Engine library: whether it can be used here, and the calls that are made to it.

It is imported by the functions that need it, never by importing this module.
"""

import contextlib
import ctypes
import enum
import functools
import importlib.metadata
import importlib.util
import pathlib
import types
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4.backends import te_partitioning

OLDEST = (2, 20)
"""First version whose JAX calls are the ones made here; it also has the fix of a race between RHT amax kernels."""

_NEEDED = f"it needs Transformer Engine {'.'.join(map(str, OLDEST))} or newer"
_HOW = "see docs/transformer-engine.md"

CAPABILITIES = ("10.0", "10.3")
"""Compute capabilities with stochastic rounding and transform in hardware: B200 and GB200, B300 and GB300.

Others pass Transformer Engine's own check and then round to zero or fall back silently (12.0, 12.1).
"""

_process = contextlib.ExitStack()
"""Closed with the process: a context that nothing refers to is left at once."""


def unavailable() -> str | None:
    """What is missing to run it on this machine, in words; None if nothing is."""
    return _wrong_device() or missing()


def missing() -> str | None:
    """What the installed one lacks for the calls made here, in words; None if nothing."""
    found = _installed()
    if found and tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return f"{_NEEDED}, and {found} is installed ({_HOW})"
    return absent()


def absent() -> str | None:
    """Why none can be imported, of whatever version, in words; None if one can be."""
    found = _installed()
    if found is None:
        return f"{_NEEDED}, which is not installed ({_HOW})"
    try:
        _import()
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine {found} is installed but does not import: {error}"
    return None


def _installed() -> str | None:
    """The installed version; a container may have built all of it as one package."""
    for package in ("transformer_engine_jax", "transformer_engine"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def _wrong_device() -> str | None:
    needed = f"it needs a GPU of compute capability {' or '.join(CAPABILITIES)} (B200, GB200, B300, GB300)"
    if jax.default_backend() != "gpu":
        return f"{needed}, and JAX runs on {jax.default_backend()} here"
    device = jax.local_devices()[0]
    capability = str(device.compute_capability)
    if capability not in CAPABILITIES:
        return f"{needed}, and {device.device_kind} has {capability}"
    return None


def _import() -> types.ModuleType:
    _preload_nccl()
    return importlib.import_module("transformer_engine.jax.sharding")


@functools.cache
def load() -> types.SimpleNamespace:
    """Imports it and corrects its partitioning.

    Raises:
      ImportError, OSError, RuntimeError: As its import does; NVIDIA's driver library is missing, say.
    """
    sharding = _import()
    from transformer_engine.jax import cpp_extensions
    from transformer_engine.jax.quantize import NoScaleTensor, QuantizeLayout, ScalingMode
    from transformer_engine.jax.quantize.quantizer import NVFP4Quantizer

    te_partitioning.correct()
    if sharding._GLOBAL_MESH_RESOURCE is None:
        name_mesh_axes()
    return types.SimpleNamespace(
        calls=cpp_extensions,
        sharding=sharding,
        NVFP4Quantizer=NVFP4Quantizer,
        NoScaleTensor=NoScaleTensor,
        ScalingMode=ScalingMode,
        QuantizeLayout=QuantizeLayout,
    )


def mesh_axes(**roles: str) -> contextlib.AbstractContextManager[None]:
    """A context in which mesh axes play roles, named as the fields of its `MeshResource`."""
    sharding = _import()
    guard: contextlib.AbstractContextManager[None] = sharding.global_shard_guard(
        sharding.MeshResource(**roles)
    )
    return guard


def name_mesh_axes(**roles: str) -> None:
    """Gives mesh axes roles for the rest of the process.

    It asks for them when XLA partitions its calls, which is after tracing and outside any context of a caller.
    """
    _process.enter_context(mesh_axes(**roles))


def _preload_nccl() -> None:
    """Makes NCCL from its Python package known to the loader, which does not look there by itself."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in pathlib.Path(folder).glob("nccl/lib/libnccl.so.2"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class Quantized(NamedTuple):
    """A tensor quantized along its last axes (rows), and transposed along its first axes (columns)."""

    rows: Any
    columns: Any


class AmaxScope(enum.Enum):
    """Whose largest magnitude the tensor scale is made of; takes the place of Transformer Engine's own.

    Its scopes reduce over one named axis at most, so that a shard of a tensor gets a scale of its own.
    """

    WHOLE_TENSOR = enum.auto()

    def all_reduce_amax_along_TPSP_and_FSDP(  # noqa: N802
        self, amax: Array, data_spec: tuple[Any, ...], transpose_batch_sequence: bool, mesh: Any
    ) -> Array:
        """The largest amax over all mesh axes that shard the tensor."""
        del transpose_batch_sequence, mesh
        axes = te_partitioning.sharded_axes(data_spec)
        return lax.pmax(amax, axes) if axes else amax


def quantize(
    x: Array, first: int, *, square: bool, hadamard: bool, columns: bool, rng_state: Array | None
) -> Quantized:
    """Quantizes a tensor in one call.

    Args:
      x: bfloat16, seen as a matrix whose columns begin at axis `first`.
      first: Number of the axes that count as rows.
      square: Blocks of 16x16 instead of 1x16.
      hadamard: Transform what is quantized along columns.
      columns: Quantize along columns too; along rows it always is.
      rng_state: uint32 of shape (devices of the mesh, 4), rounds stochastically; None rounds to nearest.
    """
    te = load()
    modes, layouts = te.ScalingMode, te.QuantizeLayout
    quantizer = te.NVFP4Quantizer(
        q_dtype=jnp.float4_e2m1fn,
        scaling_mode=modes.NVFP4_2D_SCALING if square else modes.NVFP4_1D_SCALING,
        # Columns alone would be quantized by JAX operations, unless they are transformed.
        q_layout=layouts.ROWWISE_COLWISE if columns else layouts.ROWWISE,
        use_rht=hadamard and columns,
        stochastic_rounding_rng_state=rng_state,
    )
    # The kernel that transforms finds both amax by itself; the other takes this one.
    amax = None if hadamard and columns else jnp.max(jnp.abs(x)).astype(jnp.float32).reshape(1)
    tensor = te.NoScaleTensor(x, amax)
    both = te.calls.quantize(tensor, quantizer, flatten_axis=first, amax_scope=AmaxScope.WHOLE_TENSOR)
    if not columns:
        return Quantized(both, None)
    return Quantized(both.rowwise_tensor, both.colwise_tensor)


def gemm(a: Any, b: Any, contracting: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """Multiplies two quantized tensors, contracting these axes of the tensors as they were.

    Accumulates in float32; the result is bfloat16.
    """
    product: Array = load().calls.gemm(a, b, contracting_dims=contracting)
    return product


def rng_states(key: Array) -> Array:
    """States for `quantize`, one for each device of the mesh: uint32 (devices, 4).

    A device's state depends on the key and its number alone. Transformer Engine reads each pair of words
    as an int64, seed and offset of Philox, and fills them below 2**31 itself.
    """
    devices = jnp.arange(load().sharding.get_num_devices_in_mesh())
    words = jax.vmap(lambda device: jax.random.bits(jax.random.fold_in(key, device), (4,), "uint32"))
    return words(devices) >> 1
