"""The differentiable matrix multiply: canonical form and the one custom VJP.

    y  [M, N] = x  [M, K] @ w [K, N]          fprop
    dx [M, K] = dy [M, N] @ w^T               dgrad
    dw [K, N] = x^T @ dy                      wgrad

Each of the three is a GEMM of its own precision. Under a layer scan one traced body serves every layer:
the plans are a static table, the layer's entry an integer, and a `lax.switch` *inside* each GEMM picks the
branch. The residuals are x and w themselves, saved once whatever the branch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4.backends import Backend
from maxtext_nvfp4.plan import BF16, Gemm, GemmPlan, LayerPlan

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]

_KEY_FOLD = {"dgrad": 1, "wgrad": 2}


@dataclasses.dataclass(frozen=True)
class Routine:
    """The static part of a call: which plan each layer follows, and where 4-bit GEMMs run.

    Attributes:
      choices: Distinct plans.
      table: Index into `choices` for each value of the call's `entry`.
      backend: Runs the 4-bit GEMMs.
      precision: XLA matmul precision of the GEMMs that stay in high precision.
    """

    choices: tuple[LayerPlan, ...]
    table: tuple[int, ...]
    backend: Backend
    precision: lax.Precision = lax.Precision.DEFAULT

    def gemm(
        self,
        gemm: Gemm,
        a: Array,
        b: Array,
        contract: tuple[int, int],
        entry: Array | None,
        key: Array | None,
    ) -> Array:
        """Runs one of the three GEMMs in the precision that the table gives to `entry`."""
        per_choice: list[GemmPlan] = [getattr(plan, gemm) for plan in self.choices]
        plans = list(dict.fromkeys(per_choice))
        if key is not None:
            key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), _KEY_FOLD[gemm])

        def run(plan: GemmPlan, a: Array, b: Array) -> Array:
            if plan == BF16:
                dimensions = (((contract[0],), (contract[1],)), ((), ()))
                return lax.dot_general(a, b, dimensions, precision=self.precision)
            # The name shows in profiles, and tells a reader of the program which GEMMs are in 4 bits.
            with jax.named_scope(f"{plan.precision}_{gemm}"):
                return self.backend.matmul(plan, a, b, contract, key).astype(a.dtype)

        branches: list[Callable[[Array, Array], Array]] = [functools.partial(run, plan) for plan in plans]
        if len(branches) == 1:
            return branches[0](a, b)
        assert entry is not None, "plans differ between layers, so the call must say which layer it is"
        index = jnp.asarray([plans.index(per_choice[choice]) for choice in self.table], jnp.int32)[entry]
        return lax.switch(index, branches, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(routine: Routine, x: Array, w: Array, entry: Array | None, key: Array | None) -> Array:
    return routine.gemm("fprop", x, w, (1, 0), entry, None)


def _matmul_fwd(
    routine: Routine, x: Array, w: Array, entry: Array | None, key: Array | None
) -> tuple[Array, tuple[Array, Array, Array | None, Array | None]]:
    return _matmul(routine, x, w, entry, key), (x, w, entry, key)


def _matmul_bwd(
    routine: Routine, residuals: tuple[Array, Array, Array | None, Array | None], dy: Array
) -> tuple[Array, Array, None, None]:
    x, w, entry, key = residuals
    if key is None and any(
        operand.stochastic
        for plan in routine.choices
        for gemm in (plan.dgrad, plan.wgrad)
        for operand in (gemm.a, gemm.b)
        if operand is not None
    ):
        raise ValueError(
            "gradients are rounded stochastically, which needs a key: pass key= to dot_general, run the model "
            "inside maxtext_nvfp4.training_step(step), or set nvfp4.stochastic_rounding: none"
        )
    dx = routine.gemm("dgrad", dy, w, (1, 1), entry, key)
    dw = routine.gemm("wgrad", x, dy, (0, 0), entry, key)
    return dx.astype(x.dtype), dw.astype(w.dtype), None, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def routed_dot_general(
    routine: Routine,
    x: Array,
    w: Array,
    dimension_numbers: DimensionNumbers,
    *,
    entry: Array | None = None,
    key: Array | None = None,
) -> Array:
    """`lax.dot_general` whose forward and backward GEMMs follow a routine.

    Args:
      routine: Plans and backend.
      x: Activation.
      w: Weight, of x's dtype.
      dimension_numbers: As in `lax.dot_general`, without batch dimensions.
      entry: int32 scalar, the layer's place in `routine.table`; needed when its plans differ.
      key: uint32 words of a threefry key for stochastic rounding; needed to differentiate a plan that
        rounds stochastically.

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
    free_x = [axis for axis in range(x.ndim) if axis not in {c % x.ndim for c in contract_x}]
    free_w = [axis for axis in range(w.ndim) if axis not in {c % w.ndim for c in contract_w}]
    contraction = math.prod(x.shape[axis] for axis in contract_x)
    x2 = x.transpose(*free_x, *(c % x.ndim for c in contract_x)).reshape(-1, contraction)
    w2 = w.transpose(*(c % w.ndim for c in contract_w), *free_w).reshape(contraction, -1)
    y = _matmul(routine, x2, w2, entry, key)
    return y.reshape(*(x.shape[axis] for axis in free_x), *(w.shape[axis] for axis in free_w))
