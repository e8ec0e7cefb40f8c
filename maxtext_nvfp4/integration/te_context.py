"""What Transformer Engine must know of MaxText: which mesh axis plays which role."""

import contextlib
import functools
from collections.abc import Iterator

from maxtext_nvfp4.backends import te_library

_ROLES = {
    "dp_resource": "data",
    "fsdp_resource": "fsdp",
    "tp_resource": "tensor",
    "tpsp_resource": "tensor_sequence",
    "cp_resource": "context",
    "ep_resource": "expert",
}


@contextlib.contextmanager
def transformer_engine_context() -> Iterator[None]:
    """Takes the place of MaxText's context of this name around its training loop on GPUs.

    MaxText's catches whatever is raised inside it and goes on, so that every error of a run, whatever its
    cause, ends as `generator didn't stop after throw()`. Where the library cannot be imported, this does
    nothing: it is for those who need it to say so.
    """
    with contextlib.nullcontext() if te_library.absent() else te_library.mesh_axes(**_ROLES):
        yield


@functools.cache
def name_mesh_axes() -> None:
    """Names the roles for the rest of the process, so that they hold however a run was launched."""
    te_library.name_mesh_axes(**_ROLES)
