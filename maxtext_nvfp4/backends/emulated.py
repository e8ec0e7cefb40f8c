"""4-bit GEMMs on any hardware: quantize, decode, multiply in higher precision. The definition of correct.

The operands `codes * block_scales` are exact in bfloat16, so every product is exact whether the matrix
unit takes bfloat16 or float32; only the order of the float32 accumulation is the platform's.
"""

import dataclasses
import functools
import pathlib

import jax
from jax import Array, lax
from jax import numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from maxtext_nvfp4.backends.composed import Composed
from maxtext_nvfp4.hadamard import GROUP
from maxtext_nvfp4.quantize import Encoded


@dataclasses.dataclass(frozen=True)
class Emulated(Composed):
    """Runs every plan on every platform.

    Attributes:
      operand_dtype: What the matrix unit is fed; exact either way, chosen for speed.
      contract_last: Lay the first operand out with its contraction last before multiplying. XLA's CPU
        matrix multiply has its fast bfloat16 path for that layout alone.
      row_major: Have the activation in memory row by row. XLA lets a producer choose the layout (an RMSNorm
        scales by an einsum, whose result has the features first), and a CPU then reads it with a stride in
        each pass of each quantization.
    """

    operand_dtype: str
    contract_last: bool
    row_major: bool
    name: str = "emulated"

    def laid_out(self, x: Array) -> Array:
        """See `Composed.laid_out`."""
        return _row_major(x) if self.row_major else x

    def multiply(self, a: Encoded, b: Encoded, contract: tuple[int, int]) -> Array:
        """See `Composed.multiply`."""
        lhs = a.scaled_codes().astype(self.operand_dtype)
        rhs = b.scaled_codes().astype(self.operand_dtype)
        contract_a = contract[0]
        if self.contract_last and contract_a == 0:
            lhs, contract_a = _transposed(lhs), 1
        product = lax.dot_general(
            lhs, rhs, (((contract_a,), (contract[1],)), ((), ())), preferred_element_type=jnp.float32
        )
        return (product * a.tensor_scale) * b.tensor_scale


@functools.partial(jax.jit, inline=True)
def _row_major(x: Array) -> Array:
    """x, laid out with its last axis contiguous. Jitted, as JAX constrains no layout of a NumPy array eagerly."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _transposed(x: Array) -> Array:
    """The transpose of a rank-2 array, laid out in memory.

    XLA would fold a plain transpose into the matrix multiply, and fuse it into the quantization, which
    then writes with a stride. The detour over rank 3 prevents the one, the barrier the other.
    """
    rows, columns = x.shape
    tiles = lax.optimization_barrier(x).reshape(rows // GROUP, GROUP, columns)
    return tiles.transpose(2, 0, 1).reshape(columns, rows)


def _cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32, with instructions that XLA then uses."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "amx_bf16" in flags or "avx512_bf16" in flags


def create(platform: str) -> Emulated:
    """The emulation that is fastest on a platform."""
    on_cpu = platform == "cpu"
    bfloat16 = not on_cpu or _cpu_multiplies_bfloat16()
    dtype = jax.dtypes.canonicalize_dtype(jnp.bfloat16 if bfloat16 else jnp.float32)
    return Emulated(operand_dtype=dtype.name, contract_last=on_cpu and bfloat16, row_major=on_cpu)
