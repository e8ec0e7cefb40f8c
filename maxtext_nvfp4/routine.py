"""What one linear layer runs, for all the decoder layers that share its traced body.

Under a layer scan one traced body serves every layer: the plans are a static table, the layer's entry an
integer, and a `lax.switch` inside the matrix multiply picks the branch. Branching there, and not around
the layer, saves residuals once whatever the branch.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from jax import Array, lax
from jax import numpy as jnp

from maxtext_nvfp4.plan import LayerPlan


@dataclasses.dataclass(frozen=True)
class Routine:
    """The static part of a matrix multiply: which plan each layer follows.

    Attributes:
      choices: Distinct plans.
      table: Index into `choices` for each value of the call's `entry`.
      precision: XLA matmul precision of the GEMMs that stay in high precision.
    """

    choices: tuple[LayerPlan, ...]
    table: tuple[int, ...]
    precision: lax.Precision = lax.Precision.DEFAULT

    @property
    def stochastic(self) -> bool:
        """Whether a GEMM of the backward pass rounds stochastically in some layer."""
        return any(
            operand is not None and operand.stochastic
            for plan in self.choices
            for gemm in (plan.dgrad, plan.wgrad)
            for operand in (gemm.a, gemm.b)
        )

    def check_key(self, key: Array | None) -> None:
        """Raises ValueError if the backward pass rounds stochastically and there is no key."""
        if key is None and self.stochastic:
            raise ValueError(
                "gradients are rounded stochastically, which needs a key: pass key= to dot_general, run the "
                "model inside maxtext_nvfp4.training_step(step), or set nvfp4.stochastic_rounding: none"
            )

    def switch[Part: Hashable](
        self,
        part: Callable[[LayerPlan], Part],
        run: Callable[[Part], Callable[..., Any]],
        entry: Array | None,
        *operands: Any,
    ) -> Any:
        """Calls `run(part(plan))(*operands)` with the plan that the table gives to `entry`.

        Args:
          part: What of a plan decides; plans that agree in it share a branch.
          run: Makes the branch of a part. All branches return arrays of the same shapes and dtypes.
          entry: int32 scalar, the layer's place in `table`; may be None if all plans agree.
          *operands: Arguments of the branches, trees of arrays.
        """
        by_choice = [part(plan) for plan in self.choices]
        parts = list(dict.fromkeys(by_choice))
        branches = [run(one) for one in parts]
        if len(branches) == 1:
            return branches[0](*operands)
        assert entry is not None, "plans differ between layers, so the call must say which layer it is"
        index = jnp.asarray([parts.index(by_choice[choice]) for choice in self.table], jnp.int32)[entry]
        return lax.switch(index, branches, *operands)
