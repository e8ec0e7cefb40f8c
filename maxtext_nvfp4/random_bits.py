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


def uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform float32 numbers in [0, 1), multiples of 2**-24.

    Args:
      key: A `jax.random.key` of any implementation, or its uint32 words; at least two words.
      shape: Shape of the result; at least one axis.
    """
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    words = words.astype(jnp.uint32).reshape(-1)
    # Row and column are hashed apart: their keys differ, each part stays within 32 bits for any array,
    # and only the last mix is paid per element.
    rows = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(shape[:-1]):
        rows = rows * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, (*shape[:-1], 1), axis)
    columns = lax.broadcasted_iota(jnp.uint32, (*(1 for _ in shape[:-1]), shape[-1]), len(shape) - 1)
    h = _mix(_mix(rows ^ words[0]) + words[1]) ^ _mix(columns + words[-1] ^ jnp.uint32(0x9E3779B9))
    return (_mix(h) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
