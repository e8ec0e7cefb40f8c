"""A checksum of every array in a checkpoint, kept in the checkpoint's own metadata.

OCDBT guards its manifest and its index with checksums, but not the arrays: a bit that flips in one of those
is restored without a word. A sum over the arrays in device memory costs one pass over the state at a save and one
at a restore, needs no file to be read again, and does not depend on how the state is sharded.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath
from jax import Array, lax
from jax import numpy as jnp
from jax.sharding import NamedSharding

from maxtext_nvfp4.integration.placement import on_device, replicated

RECORD = "nvfp4_checksums"
"""Key of the record in a checkpoint's custom metadata."""

Record = Mapping[str, tuple[str, int]]
"""Type and checksum by the name of the array in the checkpoint."""


def recording(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `save_checkpointables_async` of a checkpointer: it keeps the checksums with what it saves."""

    @functools.wraps(save)
    def wrapped(
        step: int,
        checkpointables: dict[str, Any],
        *,
        custom_metadata: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        metadata = {**(custom_metadata or {}), RECORD: checksums(checkpointables["items"])}
        return save(step, checkpointables, custom_metadata=metadata, **options)

    return wrapped


def recorded(checkpoint: epath.Path) -> Record:
    """The record in a checkpoint's folder; empty in a checkpoint of stock MaxText."""
    try:
        metadata = json.loads((checkpoint / "_CHECKPOINT_METADATA").read_text())
        record = (metadata["custom_metadata"] or {}).get(RECORD, {})
    except (OSError, ValueError, KeyError):  # Orbax goes on without this file, too
        return {}
    return {name: (kind, value) for name, (kind, value) in record.items()}


def mismatches(tree: Any, record: Record) -> list[str]:
    """Names of the arrays that are not what was saved.

    Args:
      tree: Restored arrays in the layout of a checkpoint.
      record: Of that checkpoint. An array that it does not know, or that was restored as another type, is passed.
    """
    return [
        name
        for name, (kind, value) in checksums(tree).items()
        if name in record and record[name][0] == kind and record[name][1] != value
    ]


def checksums(tree: Any) -> dict[str, tuple[str, int]]:
    """Type and checksum of each array, by its name in a checkpoint; anything else is left out."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, Array)
    }
    sums = jax.device_get({name: _sum(replicated(leaf))(leaf) for name, leaf in leaves.items()})
    return {name: (str(leaf.dtype), int(sums[name])) for name, leaf in leaves.items()}


@functools.cache
def _sum(sharding: NamedSharding | None) -> Callable[[Array], Array]:
    """The jitted checksum: small programs, one for each shape and not one for each layer."""
    return jax.jit(checksum, out_shardings=sharding)


def checksum(leaf: Array) -> Array:
    """uint32 sum over the words of an array, each times an odd number that its position gives, modulo 2**32.

    An odd factor loses no bit, so any change to one word shows; the factors tell words apart that have changed places.
    """
    leaf = on_device(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = jnp.dtype(f"uint{min(32, jax.dtypes.itemsize_bits(leaf.dtype))}")
    words = lax.bitcast_convert_type(leaf, bits).astype(jnp.uint32)
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        position = position * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(words * (2 * position + 1), dtype=jnp.uint32)
