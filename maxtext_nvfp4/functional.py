"""The quantized matrix multiply for use outside MaxText."""

import math
from collections.abc import Mapping

import jax
from jax import Array, lax

from maxtext_nvfp4 import backends, policy
from maxtext_nvfp4.dot_general import DimensionNumbers, routed_dot_general
from maxtext_nvfp4.extent import Extent
from maxtext_nvfp4.recipe import load_recipe
from maxtext_nvfp4.routine import Routine


def dot_general(
    x: Array,
    w: Array,
    dimension_numbers: DimensionNumbers,
    *,
    recipe: Mapping[str, object] | None = None,
    key: Array | None = None,
    precision: lax.PrecisionLike = None,
) -> Array:
    """`lax.dot_general` of an activation and a weight with its forward and backward GEMMs in 4 bits.

    >>> x, w = jax.numpy.ones((4, 16, 64)), jax.numpy.ones((64, 32))
    >>> dot_general(x, w, (((2,), (0,)), ((), ()))).shape
    (4, 16, 32)

    Args:
      x: Activation; its free axes together are the tokens, its contracted axes K.
      w: Weight, of x's dtype; its free axes together are the N output features.
      dimension_numbers: As in `lax.dot_general`, without batch dimensions.
      recipe: Keys of a config's `nvfp4` section. Choices of layers and modules play no part in one multiply.
      key: A `jax.random.key`; needed to differentiate unless `stochastic_rounding` is `none`. Give every
        call of every step its own.
      precision: XLA matmul precision of GEMMs that are not in 4 bits.

    Returns:
      Free axes of x, then free axes of w, in x's dtype.

    Raises:
      ConfigError: The recipe cannot be honoured.
      ValueError: Sizes that are not multiples of the block, batch dimensions, or mixed dtypes.

    Source: arXiv 2509.25149, figure 5.
    """
    resolved = load_recipe(recipe)
    plan = policy.layer_plan(resolved)
    backend = backends.select(resolved.backend, resolved.format, jax.default_backend()).backend
    (contract_x, contract_w), _ = dimension_numbers
    k = math.prod(x.shape[axis] for axis in contract_x)
    sizes = {"M": x.size // k, "K": k, "N": w.size // math.prod(w.shape[axis] for axis in contract_w)}
    if faults := backend.unsupported(plan, Extent.on_one_device(sizes, x.dtype.name)):
        raise ValueError(f"backend {backend.name}: " + "; ".join(dict.fromkeys(faults.values())))
    words = None if key is None else jax.random.bits(key, (2,), "uint32")
    routine = Routine((plan,), (0,), lax.Precision(precision) if precision else lax.Precision.DEFAULT)
    return routed_dot_general(backend, routine, x, w, dimension_numbers, key=words)
