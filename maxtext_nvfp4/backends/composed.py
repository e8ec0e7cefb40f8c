"""The custom VJP for backends that are one GEMM: quantize both operands, multiply.

    y  [M, N] = x  [M, K] @ w [K, N]
    dx [M, K] = dy [M, N] @ w^T
    dw [K, N] = x^T @ dy

The residuals are x and w themselves, in high precision; each GEMM quantizes its own operands.
"""

import abc
import functools
import math
from collections.abc import Callable

import jax
from jax import Array, lax

from maxtext_nvfp4.extent import Extent, block_faults
from maxtext_nvfp4.plan import BF16, Gemm, GemmPlan, LayerPlan, Precision
from maxtext_nvfp4.routine import Routine

_KEY_FOLD = {"dgrad": 1, "wgrad": 2}


class Composed(abc.ABC):
    """A backend made of `matmul`. Instances are hashable: they are static in a traced program."""

    def unavailable(self, precision: Precision) -> str | None:
        """It runs wherever JAX does."""
        del precision
        return None

    def unsupported(self, plan: LayerPlan, extent: Extent) -> dict[Gemm, str]:
        """Sizes that do not divide into blocks are all that it cannot run."""
        return block_faults(plan, extent)

    @abc.abstractmethod
    def matmul(
        self, plan: GemmPlan, a: Array, b: Array, contract: tuple[int, int], key: Array | None
    ) -> Array:
        """Quantizes both operands and multiplies them.

        Args:
          plan: A plan with 4-bit operands.
          a: First operand, of rank 2.
          b: Second operand, of rank 2.
          contract: The contracted axis of a and of b.
          key: Key for the operand that rounds stochastically; None if the plan has none.

        Returns:
          float32, of shape (free size of a, free size of b).
        """

    def dot(
        self, routine: Routine, x: Array, w: Array, contracted: int, entry: Array | None, key: Array | None
    ) -> Array:
        """See `Backend.dot`."""
        features = math.prod(w.shape[:contracted])
        y = _matmul(self, routine, x.reshape(-1, features), w.reshape(features, -1), entry, key)
        return y.reshape(*x.shape[: x.ndim - contracted], *w.shape[contracted:])

    def gemm(
        self,
        routine: Routine,
        gemm: Gemm,
        a: Array,
        b: Array,
        contract: tuple[int, int],
        entry: Array | None,
        key: Array | None,
    ) -> Array:
        """Runs one of the three GEMMs in the precision that the routine gives to `entry`."""
        if key is not None:
            key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), _KEY_FOLD[gemm])

        def branch(plan: GemmPlan) -> Callable[[Array, Array], Array]:
            return functools.partial(run, plan)

        def run(plan: GemmPlan, a: Array, b: Array) -> Array:
            if plan == BF16:
                dimensions = (((contract[0],), (contract[1],)), ((), ()))
                return lax.dot_general(a, b, dimensions, precision=routine.precision)
            # The name shows in profiles, and tells a reader of the program which GEMMs are in 4 bits.
            with jax.named_scope(f"{plan.precision}_{gemm}"):
                return self.matmul(plan, a, b, contract, key).astype(a.dtype)

        def part(plan: LayerPlan) -> GemmPlan:
            chosen: GemmPlan = getattr(plan, gemm)
            return chosen

        product: Array = routine.switch(part, branch, entry, a, b)
        return product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(
    backend: Composed, routine: Routine, x: Array, w: Array, entry: Array | None, key: Array | None
) -> Array:
    return backend.gemm(routine, "fprop", x, w, (1, 0), entry, None)


def _matmul_fwd(
    backend: Composed, routine: Routine, x: Array, w: Array, entry: Array | None, key: Array | None
) -> tuple[Array, tuple[Array, Array, Array | None, Array | None]]:
    return _matmul(backend, routine, x, w, entry, key), (x, w, entry, key)


def _matmul_bwd(
    backend: Composed,
    routine: Routine,
    residuals: tuple[Array, Array, Array | None, Array | None],
    dy: Array,
) -> tuple[Array, Array, None, None]:
    x, w, entry, key = residuals
    routine.check_key(key)
    dx = backend.gemm(routine, "dgrad", dy, w, (1, 1), entry, key)
    dw = backend.gemm(routine, "wgrad", x, dy, (0, 0), entry, key)
    return dx.astype(x.dtype), dw.astype(w.dtype), None, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
