"""Uniform numbers for stochastic rounding from a cheap counter-based hash.

A threefry block per element costs several times the GEMM it feeds. Stochastic rounding needs only that
the numbers are uniform, uncorrelated between neighbours, operands, layers and steps, and reproducible.
Each element hashes its own position with a 64-bit key, so the numbers do not depend on how the array is
sharded, tiled or traced, and no state is carried.
"""

import jax
from jax import Array, lax
from jax import numpy as jnp


def _mix(h: Array) -> Array:
    """A 32-bit finalizer of two multiplications with low avalanche bias (Wellons' `lowbias32` family)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x21F0AAAD)
    h = (h ^ (h >> 15)) * jnp.uint32(0xD35A2D97)
    return h ^ (h >> 15)


_SALTS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)  # digits of pi: any four distinct words would do


def _absorb(key: Array, salt: int) -> Array:
    """Hashes all words of a key into one; a generator's own bits may depend on batching (`rbg`)."""
    h = jnp.uint32(salt)
    for word in jax.random.key_data(key).reshape(-1):
        h = _mix(h ^ word)
    return h


def uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform float32 numbers in [0, 1), multiples of 2**-24.

    Args:
      key: A `jax.random.key` of any implementation.
      shape: Shape of the result; at least one axis.
    """
    words = [_absorb(key, salt) for salt in _SALTS]
    # Rows and columns are hashed apart, each within 32 bits for any array, so that only the last mix is
    # paid per element; the barrier keeps XLA from fusing the first ones into it.
    rows = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(shape[:-1]):
        rows = rows * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, (*shape[:-1], 1), axis)
    columns = lax.broadcasted_iota(jnp.uint32, (*(1 for _ in shape[:-1]), shape[-1]), len(shape) - 1)
    row_hash = _mix(_mix(rows ^ words[0]) + words[1])
    column_hash = _mix(_mix(columns ^ words[2]) + words[3])
    row_hash, column_hash = lax.optimization_barrier((row_hash, column_hash))
    return (_mix(row_hash ^ column_hash) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
