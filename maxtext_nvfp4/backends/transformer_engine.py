"""4-bit GEMMs by Transformer Engine's CUDA kernels, on Blackwell.

Each operand is quantized once, row-wise and column-wise in one call, and the forward pass keeps the
orientation that the backward pass multiplies:

    fprop   y  = rows(x)  @ columns(w)
    dgrad   dx = rows(dy) @ rows(w)
    wgrad   dw = columns(x) @ columns(dy)     with the random Hadamard transform in columns(.)

What is kept carries the checkpoint name `quantization`, which MaxText's `..._and_quantization` remat
policies save: then the backward pass quantizes nothing again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext_nvfp4.backends import operands, te_library
from maxtext_nvfp4.extent import Extent, not_multiple
from maxtext_nvfp4.plan import BF16, GEMMS, Gemm, GemmPlan, LayerPlan, OperandPlan, Precision
from maxtext_nvfp4.routine import Routine
from maxtext_nvfp4.telemetry import reading

CHECKPOINT_NAME = "quantization"
"""The name by which MaxText's remat policies know quantized tensors."""

type _Axes = tuple[tuple[int, ...], tuple[int, ...]]

_ROW, _SQUARE = (1, 16), (16, 16)
_BLOCK, _TILE, _PADDING = 16, 32, 128
_HADAMARD_TILE = {"M": 64, "K": 128, "N": 128}
"""What the sizes of an array must be multiples of for the fused transform and quantization."""


@dataclasses.dataclass(frozen=True)
class TransformerEngine:
    """NVFP4 on compute capability 10.0 and 10.3."""

    name: str = "transformer_engine"

    def unavailable(self, precision: Precision) -> str | None:
        """Names what the machine or its installation lacks."""
        if precision != "nvfp4":
            return f"it multiplies nvfp4 only, not {precision}"
        return te_library.unavailable()

    def unsupported(self, plan: LayerPlan, extent: Extent) -> dict[Gemm, str]:
        """What Transformer Engine would ignore, or would stop at with an assertion, by GEMM."""
        return _unsupported(plan, extent)

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
        rows, inputs, features = x.shape[: x.ndim - contracted], w.shape[:contracted], w.shape[contracted:]
        m, k, n = map(_blockable, (rows, inputs, features))
        y: Array = _dot(
            _Matmul(routine, len(m), len(k), len(n)), x.reshape(*m, *k), w.reshape(*k, *n), entry, key, probe
        )
        return y.reshape(*rows, *features)


def _unsupported(plan: LayerPlan, extent: Extent) -> dict[Gemm, str]:
    faults: dict[Gemm, str] = {}
    for gemm in GEMMS:
        if getattr(plan, gemm).quantized:
            reasons = [*_ignored(gemm, plan), *_misshapen(gemm, plan, extent)]
            if reasons:
                faults[gemm] = " and ".join(dict.fromkeys(reasons))
    return faults


def _blockable(axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes themselves, or all of them as one where Transformer Engine could not lay out their scales.

    Separate axes are easier to shard.
    """
    return axes if axes and axes[-1] % _BLOCK == 0 and _fits_padding(axes[1:]) else (math.prod(axes),)


def _fits_padding(axes: tuple[int, ...]) -> bool:
    """Whether scales padded to 128 rows and 4 columns can be shaped like axes of which these are not the first."""
    inner = math.prod(axes)
    return inner % _PADDING == 0 or _PADDING % inner == 0


def _ignored(gemm: Gemm, plan: LayerPlan) -> list[str]:
    """What of a plan Transformer Engine has no way to say."""
    chosen: GemmPlan = getattr(plan, gemm)
    assert chosen.a is not None
    assert chosen.b is not None
    if chosen.precision != "nvfp4":
        return [f"it multiplies nvfp4 only, not {chosen.precision}"]
    weights = [OperandPlan(block=_SQUARE), OperandPlan(block=_ROW)]
    vary = dataclasses.replace
    row = OperandPlan(block=_ROW)
    known = {
        "fprop": chosen.a == row and chosen.b in weights,
        "dgrad": vary(chosen.a, stochastic=False) == row and chosen.b in weights,
        "wgrad": vary(chosen.a, hadamard=False) == row
        and vary(chosen.b, hadamard=chosen.a.hadamard, stochastic=False) == chosen.a
        and chosen.b.hadamard == chosen.a.hadamard,
    }
    if not known[gemm]:
        return [f"it cannot quantize the operands of {gemm} as planned ({chosen.a} and {chosen.b})"]
    if gemm == "dgrad" and plan.fprop.quantized and plan.fprop.b != chosen.b:
        return ["it quantizes the weight once, for fprop and dgrad alike"]
    if gemm == "wgrad" and plan.dgrad.quantized and _stochastic(plan.dgrad.a) != _stochastic(chosen.b):
        return ["it quantizes the gradient once, for dgrad and wgrad alike"]
    return []


def _misshapen(gemm: Gemm, plan: LayerPlan, extent: Extent) -> list[str]:
    """Sizes on one device, and types, that the kernels of a GEMM do not take."""
    tiles = _HADAMARD_TILE if gemm == "wgrad" and _hadamard(plan.wgrad) else dict.fromkeys("MKN", _TILE)
    found = [not_multiple(extent.shard, axis, tile, " on one device") for axis, tile in tiles.items()]
    sequence, part = extent.whole.get("S", 1), extent.shard.get("S", 1)
    if _blockable((1, sequence)) == (1, sequence) and _blockable((1, part)) != (1, part):
        found.append(f"S={part} (tokens of a sequence on one device) is not 16, 32, 64 or a multiple of 128")
    if gemm != "wgrad":
        found += [not_multiple(extent.weight_shard, axis, _BLOCK, " of a weight shard") for axis in "KN"]
    if extent.dtype != "bfloat16":
        found.append(f"it quantizes bfloat16 only, and dtype is {extent.dtype}")
    return [reason for reason in found if reason]


def _stochastic(operand: OperandPlan | None) -> bool:
    return operand is not None and operand.stochastic


def _hadamard(wgrad: GemmPlan) -> bool:
    return wgrad.a is not None and wgrad.a.hadamard


class _Kept(NamedTuple):
    """Quantized operands that the backward pass multiplies; None where no plan of the routine has them."""

    x_columns: Any
    w_rows: Any


@dataclasses.dataclass(frozen=True)
class _Matmul:
    """One matrix multiply of x [M..., K...] and w [K..., N...].

    Attributes:
      routine: Its plans.
      rows: Number of the axes M.
      contracted: Number of the axes K.
      features: Number of the axes N.
    """

    routine: Routine
    rows: int
    contracted: int
    features: int

    def evaluate(self, x: Array, w: Array, entry: Array | None) -> Array:
        """Y alone, where there is no backward pass to quantize for."""

        def branch(fprop: GemmPlan) -> Callable[[Array, Array], Array]:
            plan = LayerPlan(fprop=fprop, dgrad=BF16, wgrad=BF16)
            return lambda x, w: self._forward(plan, x, w)[0]

        y: Array = self.routine.switch(lambda plan: plan.fprop, branch, entry, x, w)
        return y

    def forward(self, x: Array, w: Array, entry: Array | None) -> tuple[Array, _Kept]:
        """y, and what the backward pass multiplies."""
        plans = self.routine.choices
        x_plan = next((plan for plan in plans if plan.wgrad.quantized), None)
        w_plan = next((plan for plan in plans if plan.dgrad.quantized), None)

        def branch(plan: LayerPlan) -> Callable[[Array, Array], tuple[Array, _Kept]]:
            def run(x: Array, w: Array) -> tuple[Array, _Kept]:
                y, kept = self._forward(plan, x, w)
                # All branches return the same arrays: what only other plans keep is zeros here.
                x_columns, w_rows = kept
                if x_plan and not plan.wgrad.quantized:
                    x_columns = _zeros_like(lambda: self._quantize_x(x_plan, x).columns)
                if w_plan and not plan.dgrad.quantized:
                    w_rows = _zeros_like(lambda: self._quantize_w(w_plan, w).rows)
                return y, _Kept(x_columns, w_rows)

            return run

        y, kept = self.routine.switch(lambda plan: plan, branch, entry, x, w)
        return y, jax.tree.map(functools.partial(checkpoint_name, name=CHECKPOINT_NAME), kept)

    def backward(
        self, kept: _Kept, x: Array, w: Array, dy: Array, entry: Array | None, key: Array | None
    ) -> tuple[Array, Array]:
        """The gradients dx and dw; x and w themselves are read where a GEMM stays in high precision."""
        self.routine.check_key(key)
        rng_state = None
        if key is not None and self.routine.stochastic:
            rng_state = te_library.rng_states(_gradient_key(key))

        def branch(gemms: tuple[GemmPlan, GemmPlan]) -> Callable[..., tuple[Array, Array]]:
            return functools.partial(self._backward, *gemms)

        gradients: tuple[Array, Array] = self.routine.switch(
            lambda plan: (plan.dgrad, plan.wgrad), branch, entry, kept, x, w, dy, rng_state
        )
        return gradients

    def measure(
        self, gemm: Gemm, a: Array, b: Array, entry: Array | None, key: Array | None, product: Array
    ) -> Array:
        """Statistics of one of the GEMMs, see `operands.measure`."""
        of_x = of_dy = of_y = of_dx = self.rows
        of_w = of_dw = self.contracted
        splits = {
            "fprop": (of_x, of_w, of_y),
            "dgrad": (of_dy, of_w, of_dx),
            "wgrad": (of_x, of_dy, of_dw),
        }[gemm]
        a, b, product = (
            array.reshape(math.prod(array.shape[:split]), -1)
            for array, split in zip((a, b, product), splits, strict=True)
        )
        return operands.measure(self.routine, gemm, a, b, entry, key, product)

    def _forward(self, plan: LayerPlan, x: Array, w: Array) -> tuple[Array, _Kept]:
        self._check(plan, x, w)
        x_columns = w_rows = None
        if plan.fprop.quantized or plan.wgrad.quantized:
            x_rows, x_columns = self._quantize_x(plan, x)
        if plan.fprop.quantized or plan.dgrad.quantized:
            w_rows, w_columns = self._quantize_w(plan, w)
        if plan.fprop == BF16:
            y = self._multiply(x, w, self._axes_y)
        else:
            with jax.named_scope("nvfp4_fprop"):
                y = te_library.gemm(x_rows, w_columns, self._axes_y)
        return y, _Kept(x_columns, w_rows if plan.dgrad.quantized else None)

    def _backward(
        self,
        dgrad: GemmPlan,
        wgrad: GemmPlan,
        kept: _Kept,
        x: Array,
        w: Array,
        dy: Array,
        rng_state: Array | None,
    ) -> tuple[Array, Array]:
        if dgrad.quantized or wgrad.quantized:
            stochastic = _stochastic(dgrad.a) or _stochastic(wgrad.b)
            dy_rows, dy_columns = te_library.quantize(
                dy,
                self.rows,
                square=False,
                hadamard=wgrad.quantized and _hadamard(wgrad),
                columns=wgrad.quantized,
                rng_state=rng_state if stochastic else None,
            )
        if dgrad == BF16:
            dx = self._multiply(dy, w, self._axes_dx)
        else:
            with jax.named_scope("nvfp4_dgrad"):
                dx = te_library.gemm(dy_rows, kept.w_rows, self._axes_dx)
        if wgrad == BF16:
            dw = self._multiply(x, dy, self._axes_dw)
        else:
            with jax.named_scope("nvfp4_wgrad"):
                dw = te_library.gemm(kept.x_columns, dy_columns, self._axes_dw)
        return dx, dw

    def _check(self, plan: LayerPlan, x: Array, w: Array) -> None:
        """Refuses in words what was not fitted to the sizes at hand, such as those of an evaluation."""
        m, k, n = (
            math.prod(axes)
            for axes in (x.shape[: self.rows], w.shape[: self.contracted], w.shape[self.contracted :])
        )
        sizes = {"M": m, "K": k, "N": n}
        if faults := _unsupported(plan, Extent.on_one_device(sizes, x.dtype.name)):
            why = "; ".join(f"{gemm}: {reason}" for gemm, reason in faults.items())
            raise ValueError(f"Transformer Engine cannot run in 4 bits: {why}")

    def _quantize_x(self, plan: LayerPlan, x: Array) -> te_library.Quantized:
        return te_library.quantize(
            x,
            self.rows,
            square=False,
            hadamard=_hadamard(plan.wgrad),
            columns=plan.wgrad.quantized,
            rng_state=None,
        )

    def _quantize_w(self, plan: LayerPlan, w: Array) -> te_library.Quantized:
        operand = plan.fprop.b or plan.dgrad.b
        assert operand is not None
        square = operand.block == _SQUARE
        return te_library.quantize(
            w, self.contracted, square=square, hadamard=False, columns=plan.fprop.quantized, rng_state=None
        )

    def _multiply(self, a: Array, b: Array, contracting: _Axes) -> Array:
        return lax.dot_general(a, b, (contracting, ((), ())), precision=self.routine.precision)

    @property
    def _axes_y(self) -> _Axes:
        return _span(self.rows, self.contracted), _span(0, self.contracted)

    @property
    def _axes_dx(self) -> _Axes:
        return _span(self.rows, self.features), _span(self.contracted, self.features)

    @property
    def _axes_dw(self) -> _Axes:
        return _span(0, self.rows), _span(0, self.rows)


def _span(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def _zeros_like(function: Callable[[], Any]) -> Any:
    """Zeros in the shape of a function's result, without calling it."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function))


def _gradient_key(key: Array) -> Array:
    """Key of the one quantization of the gradient, which serves dgrad and wgrad."""
    return jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(
    matmul: _Matmul, x: Array, w: Array, entry: Array | None, key: Array | None, probe: Array | None
) -> Array:
    del key, probe
    return matmul.evaluate(x, w, entry)


def _dot_fwd(
    matmul: _Matmul, x: Array, w: Array, entry: Array | None, key: Array | None, probe: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    y, kept = matmul.forward(x, w, entry)
    statistics = None if probe is None else matmul.measure("fprop", x, w, entry, None, y)
    return y, (kept, x, w, entry, key, statistics)


def _dot_bwd(
    matmul: _Matmul, residuals: tuple[Any, ...], dy: Array
) -> tuple[Array, Array, None, None, Array | None]:
    kept, x, w, entry, key, fprop = residuals
    dx, dw = matmul.backward(kept, x, w, dy, entry, key)
    dgrad = wgrad = None
    if fprop is not None:
        dgrad = matmul.measure("dgrad", dy, w, entry, key, dx)
        wgrad = matmul.measure("wgrad", x, dy, entry, key, dw)
    return dx.astype(x.dtype), dw.astype(w.dtype), None, None, reading(fprop, dgrad, wgrad)


_dot.defvjp(_dot_fwd, _dot_bwd)


def create(platform: str) -> TransformerEngine:
    """The same on every platform; where it runs is for `unavailable` to say."""
    del platform
    return TransformerEngine()
