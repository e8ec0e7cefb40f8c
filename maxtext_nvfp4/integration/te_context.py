"""What Transformer Engine must know of MaxText: which mesh axis plays which role."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

_ROLES = {
    "dp_resource": "data",
    "fsdp_resource": "fsdp",
    "tp_resource": "tensor",
    "tpsp_resource": "tensor_sequence",
    "cp_resource": "context",
    "ep_resource": "expert",
}

_process = contextlib.ExitStack()
"""Closed with the process: a context that nothing refers to is left at once."""


def _guard() -> Any:
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    return global_shard_guard(MeshResource(**_ROLES))


@contextlib.contextmanager
def transformer_engine_context() -> Iterator[None]:
    """Takes the place of MaxText's context of this name around its training loop on GPUs.

    MaxText's catches whatever is raised inside it and goes on, so that every error of a run, whatever its
    cause, ends as `generator didn't stop after throw()`.
    """
    try:
        guard = _guard()
    except (
        ImportError,
        OSError,
    ):  # not installed, or not for this machine: for `unavailable` to say, if it is needed
        guard = contextlib.nullcontext()
    with guard:
        yield


@functools.cache
def name_mesh_axes() -> None:
    """Names the roles for the rest of the process, so that they hold however a run was launched.

    Transformer Engine asks for them when XLA partitions its calls, which is after tracing.
    """
    _process.enter_context(_guard())
