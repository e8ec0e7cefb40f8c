"""The 16-point random Hadamard transform that spreads outliers of the wgrad operands.

Each group g of 16 consecutive elements along the contraction becomes `g @ diag(SIGNS) @ H16 / 4`, an
orthogonal map, so a product of two transformed operands is the product of the originals
(arXiv 2509.25149, section 4.2). One fixed sign vector serves every layer and step, as in Transformer
Engine.
"""

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

GROUP = 16
"""Elements transformed together."""

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine's sign vector, its mask 55272 read from the lowest bit."""


def random_hadamard(x: Array, axis: int = -1) -> Array:
    """Transforms groups of 16 elements along one axis, in float32; the result has x's dtype.

    Butterfly stages of additions, then an exact division by 4: the order of operations is fixed, so
    the bits do not depend on the platform's matrix multiply.

    Args:
      x: Floating-point array whose size along `axis` is a multiple of 16.
      axis: The axis to transform.

    Raises:
      ValueError: The size along `axis` is not a multiple of 16.
    """
    axis %= x.ndim
    size = x.shape[axis]
    if size % GROUP:
        raise ValueError(
            f"the random Hadamard transform works on groups of {GROUP}, but axis {axis} of shape {x.shape} "
            f"has {size} elements; pad it to {-(-size // GROUP) * GROUP} or set nvfp4.hadamard: none"
        )
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    groups = (*before, size // GROUP, GROUP)
    signs = jnp.asarray(np.array(SIGNS, np.float32).reshape(GROUP, *(1 for _ in after)))
    y = x.astype(jnp.float32).reshape(*groups, *after) * signs
    for stride in (1, 4):
        # Two butterfly stages at a time halve the trips through memory.
        quads = y.reshape(*before, size // GROUP, GROUP // (4 * stride), 4, stride, *after)
        a, b, c, d = (lax.slice_in_dim(quads, i, i + 1, axis=len(before) + 2) for i in range(4))
        sums = [(a + b) + (c + d), (a - b) + (c - d), (a + b) - (c + d), (a - b) - (c - d)]
        y = jnp.concatenate(sums, axis=len(before) + 2).reshape(*groups, *after)
    return (y * 0.25).reshape(x.shape).astype(x.dtype)
