"""The differentiable matrix multiply in canonical form.

    y  [M..., N...] = x  [M..., K...] @ w [K..., N...]     fprop
    dx [M..., K...] = dy [M..., N...] @ w^T                dgrad
    dw [K..., N...] = x^T @ dy                             wgrad

Each of the three is a GEMM of its own precision; how it is differentiated is the backend's.
"""

from collections.abc import Sequence

from jax import Array

from maxtext_nvfp4.backends import Backend
from maxtext_nvfp4.routine import Routine

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def routed_dot_general(
    backend: Backend,
    routine: Routine,
    x: Array,
    w: Array,
    dimension_numbers: DimensionNumbers,
    *,
    entry: Array | None = None,
    key: Array | None = None,
    probe: Array | None = None,
) -> Array:
    """`lax.dot_general` whose forward and backward GEMMs follow a routine.

    Args:
      backend: Runs the 4-bit GEMMs.
      routine: Plans.
      x: Activation.
      w: Weight, of x's dtype.
      dimension_numbers: As in `lax.dot_general`, without batch dimensions.
      entry: int32 scalar, the layer's place in `routine.table`; needed when its plans differ.
      key: uint32 words of a threefry key for stochastic rounding; needed to differentiate a plan that
        rounds stochastically.
      probe: As in `Backend.dot`.

    Returns:
      Free axes of x, then free axes of w, in x's dtype.

    Raises:
      ValueError: Batch dimensions, contracted sizes that differ, or operands of different dtypes.
    """
    (contract_x, contract_w), batch = dimension_numbers
    if any(len(axes) for axes in batch):
        raise ValueError(f"batch dimensions are not supported, got {batch}")
    if x.dtype != w.dtype:
        raise ValueError(f"operands must have one dtype, got {x.dtype} and {w.dtype}; cast the weight first")
    sizes = [[operand.shape[axis] for axis in axes] for operand, axes in ((x, contract_x), (w, contract_w))]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"contracted sizes must agree, got {sizes[0]} of {x.shape} and {sizes[1]} of {w.shape}"
        )
    last_x = [axis % x.ndim for axis in contract_x]
    first_w = [axis % w.ndim for axis in contract_w]
    x = x.transpose(*(axis for axis in range(x.ndim) if axis not in last_x), *last_x)
    w = w.transpose(*first_w, *(axis for axis in range(w.ndim) if axis not in first_w))
    return backend.dot(routine, x, w, len(last_x), entry, key, probe)
