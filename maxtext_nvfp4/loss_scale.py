"""Dynamic loss scaling by powers of two: the state, its update, and the two identities that apply it.

The loss's cotangent is multiplied by the scale and each parameter's cotangent divided by it, so that the loss,
its gradients and whatever is computed from them are unscaled, and only what lies between is scaled. A power of two
changes no significand, and two-level NVFP4 scales are equivariant under it: as long as nothing overflows
or underflows, every code and every parameter has the same bits under any scale (docs/numerics.md).

Source: arXiv 1710.03740, section 3.2; the growth and backoff of Megatron-LM's `DynamicGradScaler`.
"""

from typing import NamedTuple

import jax
from jax import Array
from jax import numpy as jnp

from maxtext_nvfp4.recipe import LossScale

SMALLEST = 1.0
"""Below it a scale would only make gradients underflow."""


class State(NamedTuple):
    """Scalars that survive from step to step.

    Attributes:
      scale: float32, the power of two that the next step's loss is multiplied by.
      good_steps: int32, finite steps since the scale last changed.
      skipped: int32, steps of the run whose update was skipped.
      skipped_in_a_row: int32, those among them that came last, without a finite step after them.
    """

    scale: Array
    good_steps: Array
    skipped: Array
    skipped_in_a_row: Array


def initial(settings: LossScale) -> State:
    """The state before the first step."""
    # Three arrays, not one: a jitted step that donates its state may not be given a buffer twice.
    counts = (jnp.zeros((), jnp.int32) for _ in State._fields[1:])
    return State(jnp.asarray(float(settings.init), jnp.float32), *counts)


def update(settings: LossScale, state: State, finite: Array) -> State:
    """The state after a step.

    Args:
      settings: The recipe's `loss_scale`.
      state: The state before it.
      finite: Whether its loss and all its gradients were finite.
    """
    skipped = jnp.logical_not(finite).astype(jnp.int32)
    counts = (state.skipped + skipped, (state.skipped_in_a_row + 1) * skipped)
    if settings.mode != "dynamic":
        return State(state.scale, state.good_steps, *counts)
    good = jnp.where(finite, state.good_steps + 1, 0)
    grows = good >= settings.growth_interval
    larger = jnp.minimum(state.scale * float(settings.growth), float(settings.max))
    smaller = jnp.maximum(state.scale * float(settings.backoff), SMALLEST)
    scale = jnp.where(finite, jnp.where(grows, larger, state.scale), smaller)
    return State(scale, jnp.where(grows, 0, good), *counts)


@jax.custom_vjp
def scale_cotangent(x: Array, factor: Array) -> Array:
    """`x` itself, whose cotangent is multiplied by `factor` on its way back."""
    del factor
    return x


def _forward(x: Array, factor: Array) -> tuple[Array, Array]:
    return x, factor


def _backward(factor: Array, cotangent: Array) -> tuple[Array, None]:
    return cotangent * factor.astype(cotangent.dtype), None


scale_cotangent.defvjp(_forward, _backward)
