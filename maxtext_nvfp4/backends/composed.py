"""The custom VJP for backends that are one GEMM: quantize both operands, multiply.

    y  [M, N] = x  [M, K] @ w [K, N]
    dx [M, K] = dy [M, N] @ w^T
    dw [K, N] = x^T @ dy

The residuals are x and w themselves, in high precision; each GEMM quantizes its own operands.
"""

import abc
import functools
import math
import operator
from collections.abc import Callable

import jax
from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4.backends.operands import CONTRACT, encode_operands, gemm_key, gemm_statistics
from maxtext_nvfp4.extent import Extent, block_faults
from maxtext_nvfp4.plan import BF16, Gemm, GemmPlan, LayerPlan, Precision
from maxtext_nvfp4.quantize import Encoded
from maxtext_nvfp4.routine import Routine
from maxtext_nvfp4.telemetry import UNMEASURED, reading


class Composed(abc.ABC):
    """A backend made of `matmul`. Instances are hashable: they are static in a traced program."""

    def unavailable(self, precision: Precision) -> str | None:
        """It runs wherever JAX does."""
        del precision
        return None

    def unsupported(self, plan: LayerPlan, extent: Extent) -> dict[Gemm, str]:
        """Sizes that do not divide into blocks are all that it cannot run."""
        return block_faults(plan, extent)

    def laid_out(self, x: Array) -> Array:
        """The activation, in the order in memory that the three GEMMs are to read."""
        return x

    @abc.abstractmethod
    def multiply(self, a: Encoded, b: Encoded, contract: tuple[int, int]) -> Array:
        """Multiplies two quantized operands of rank 2.

        Args:
          a: First operand.
          b: Second operand.
          contract: The contracted axis of a and of b.

        Returns:
          float32, of shape (free size of a, free size of b).
        """

    def dot(
        self,
        routine: Routine,
        x: Array,
        w: Array,
        contracted: int,
        entry: Array | None,
        key: Array | None,
        probe: Array | None = None,
    ) -> Array:
        """See `Backend.dot`."""
        features = math.prod(w.shape[:contracted])
        x = self.laid_out(x)
        y = _matmul(self, routine, x.reshape(-1, features), w.reshape(features, -1), entry, key, probe)
        return y.reshape(*x.shape[: x.ndim - contracted], *w.shape[contracted:])

    def gemm(
        self,
        routine: Routine,
        gemm: Gemm,
        a: Array,
        b: Array,
        entry: Array | None,
        key: Array | None,
        measured: bool,
    ) -> tuple[Array, Array | None]:
        """Runs one of the three GEMMs in the precision that the routine gives to `entry`.

        Returns:
          The product in a's dtype, and its statistics if it is `measured`.
        """
        contract, key = CONTRACT[gemm], gemm_key(gemm, key)

        def branch(plan: GemmPlan) -> Callable[[Array, Array], tuple[Array, Array | None]]:
            return functools.partial(run, plan)

        def run(plan: GemmPlan, a: Array, b: Array) -> tuple[Array, Array | None]:
            if plan == BF16:
                dimensions = (((contract[0],), (contract[1],)), ((), ()))
                product = lax.dot_general(a, b, dimensions, precision=routine.precision)
                return product, jnp.asarray(UNMEASURED) if measured else None
            # The name shows in profiles, and tells a reader of the program which GEMMs are in 4 bits.
            with jax.named_scope(f"{plan.precision}_{gemm}"):
                operands = encode_operands(plan, a, b, contract, key)
                product = self.multiply(operands[0].encoded, operands[1].encoded, contract).astype(a.dtype)
            return product, gemm_statistics(operands, a, b, contract, product) if measured else None

        result: tuple[Array, Array | None] = routine.switch(operator.attrgetter(gemm), branch, entry, a, b)
        return result


type _Residuals = tuple[Array, Array, Array | None, Array | None, Array | None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(
    backend: Composed,
    routine: Routine,
    x: Array,
    w: Array,
    entry: Array | None,
    key: Array | None,
    probe: Array | None,
) -> Array:
    del probe
    return backend.gemm(routine, "fprop", x, w, entry, key, measured=False)[0]


def _matmul_fwd(
    backend: Composed,
    routine: Routine,
    x: Array,
    w: Array,
    entry: Array | None,
    key: Array | None,
    probe: Array | None,
) -> tuple[Array, _Residuals]:
    y, statistics = backend.gemm(routine, "fprop", x, w, entry, key, measured=probe is not None)
    return y, (x, w, entry, key, statistics)


def _matmul_bwd(
    backend: Composed, routine: Routine, residuals: _Residuals, dy: Array
) -> tuple[Array, Array, None, None, Array | None]:
    x, w, entry, key, fprop = residuals
    routine.check_key(key)
    dx, dgrad = backend.gemm(routine, "dgrad", dy, w, entry, key, measured=fprop is not None)
    dw, wgrad = backend.gemm(routine, "wgrad", x, dy, entry, key, measured=fprop is not None)
    return dx.astype(x.dtype), dw.astype(w.dtype), None, None, reading(fprop, dgrad, wgrad)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)
