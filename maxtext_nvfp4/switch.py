"""The late switch: what a layer runs from the switch on, and which share of a run's compute it takes.

The switch changes plans and nothing else: what follows it is a program of its own, whose high-precision
GEMMs hold no branch and quantize nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxtext_nvfp4.plan import BF16, GEMMS, Gemm, LayerPlan, SitePlan
from maxtext_nvfp4.recipe import Switch
from maxtext_nvfp4.routine import Routine


def switched_gemms(switch: Switch) -> tuple[Gemm, ...]:
    """The GEMMs of each 4-bit layer that are in high precision after the switch."""
    return GEMMS if switch.gemms == "all" else ("fprop",)


def switched_plan(plan: LayerPlan, switch: Switch) -> LayerPlan:
    """The plan of a layer after the switch; GEMMs that the switch does not name keep theirs."""
    return dataclasses.replace(plan, **dict.fromkeys(switched_gemms(switch), BF16))


def switched_routine(routine: Routine, switch: Switch) -> Routine:
    """The routine of a layer after the switch."""
    plans = [switched_plan(plan, switch) for plan in routine.choices]
    choices = tuple(dict.fromkeys(plans))
    table = tuple(choices.index(plans[choice]) for choice in routine.table)
    return dataclasses.replace(routine, choices=choices, table=table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchShares:
    """Shares of the FLOPs of all linear layers' GEMMs, forward and backward.

    Attributes:
      step: First step after the switch.
      steps: Steps of the run.
      switch: The recipe's switch.
      nvfp4_before: Share in 4 bits of a step before the switch.
      nvfp4_after: Share in 4 bits of a step after it.
    """

    step: int
    steps: int
    switch: Switch
    nvfp4_before: float
    nvfp4_after: float

    @property
    def switched_of_run(self) -> float:
        """Share of the run that is in high precision because of the switch."""
        return (self.nvfp4_before - self.nvfp4_after) * (self.steps - self.step) / self.steps

    @property
    def nvfp4_of_run(self) -> float:
        """Share of the run in 4 bits."""
        return self.nvfp4_before - self.switched_of_run

    def to_json(self) -> dict[str, Any]:
        """The shares as JSON-ready values; what is not in 4 bits is in high precision."""
        return {
            "step": self.step,
            "gemms": self.switch.gemms,
            "to": self.switch.to,
            "bf16_share_before": 1 - self.nvfp4_before,
            "bf16_share_after": 1 - self.nvfp4_after,
            "bf16_share_of_run": 1 - self.nvfp4_of_run,
            "switched_share_of_run": self.switched_of_run,
            "nvfp4_share_of_run": self.nvfp4_of_run,
        }

    def what(self) -> str:
        """What happens and when, in words."""
        return f"{describe(self.switch)} from step {self.step} of {self.steps} on"

    def to_text(self) -> str:
        """The shares in one line."""
        return (
            f"{self.what()}: {self.switched_of_run:.1%} of the run's linear-layer FLOPs, which leaves "
            f"{self.nvfp4_of_run:.1%} of them in 4 bits instead of {self.nvfp4_before:.1%}"
        )


def describe(switch: Switch) -> str:
    """What the switch does, in words."""
    return f"{'all' if switch.gemms == 'all' else 'forward'} GEMMs in {switch.to}"


def shares(plans: Sequence[SitePlan], switch: Switch, step: int, steps: int) -> SwitchShares:
    """Counts what a switch changes in a model.

    Args:
      plans: The plan of every site before the switch.
      switch: The recipe's switch.
      step: First step after it.
      steps: Steps of the run.
    """
    # Every GEMM of a site has 2 M K N FLOPs; 2 M is common to all sites.
    total = before = after = 0
    for site_plan in plans:
        for layers, plan, _ in site_plan.ranges():
            size = max(1, len(layers)) * site_plan.site.k * site_plan.site.n
            total += len(GEMMS) * size
            before += _quantized(plan) * size
            after += _quantized(switched_plan(plan, switch)) * size
    return SwitchShares(
        step=step, steps=steps, switch=switch, nvfp4_before=before / total, nvfp4_after=after / total
    )


def _quantized(plan: LayerPlan) -> int:
    return sum(getattr(plan, gemm).quantized for gemm in GEMMS)
