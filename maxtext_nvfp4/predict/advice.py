"""Which single change of a config would bring most."""

import dataclasses
from collections.abc import Iterator

from maxtext_nvfp4.predict.prediction import GIB, Prediction, predict
from maxtext_nvfp4.predict.remat import POLICIES, named
from maxtext_nvfp4.predict.workload import Workload

_WORTH = 1.01
"""Smallest gain that is worth a line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A change, and what it would bring.

    Attributes:
      change: `key=value` pairs to add to the config.
      why: What it does, and its price if it has another than memory.
      gain: Tokens a second over those without it.
      prediction: The step with it.
    """

    change: str
    why: str
    gain: float
    prediction: Prediction

    def to_json(self) -> dict[str, str | float]:
        """JSON-ready values."""
        return {
            "change": self.change,
            "why": self.why,
            "gain": self.gain,
            "memory_gib": self.prediction.memory.total / GIB,
        }


def advise(now: Prediction) -> list[Advice]:
    """Changes after which the step fits, best first; those that are faster, or all if it does not fit now."""
    found = []
    for change, why, workload in _changes(now.workload):
        then = predict(workload, now.hardware, now.precision)
        gain = then.over(now)
        if then.fits and (gain > _WORTH or not now.fits):
            found.append(Advice(change=change, why=why, gain=gain, prediction=then))
    return sorted(found, key=lambda advice: -advice.gain)


def _changes(workload: Workload) -> Iterator[tuple[str, str, Workload]]:
    replace, layout = dataclasses.replace, workload.layout
    formats = {gemm for linear in workload.linears for choice in linear.formats for gemm in choice}
    if {"nvfp4", "bf16"} <= formats:
        yield (
            "nvfp4.recipe=all_layers",
            "every linear layer in 4 bits, and no rules or layer counts beside it; the paper's models need some in BF16",
            workload.in_format("nvfp4"),
        )
    # Of policies that save the same one is named.
    for saved, policy in {saved: policy for policy, saved in list(POLICIES.items())[::-1]}.items():
        if saved != workload.remat.saved:
            yield (
                f"remat_policy={policy}",
                "keeps other tensors for the backward pass",
                replace(workload, remat=named(policy)),
            )
    # What MaxText calls a device's batch is a microbatch, except in a pipeline.
    batch = workload.tokens_per_device / workload.sequence
    batch /= workload.microbatches if layout.pipeline == 1 else 1
    for factor, why in ((2, "larger GEMMs, fewer gathers for each token"), (0.5, "smaller activations")):
        yield (
            f"per_device_batch_size={batch * factor:g}",
            f"{why}; the batch is another",
            replace(workload, sequences=workload.sequences * factor),
        )
    if workload.one_hot:
        yield (
            "use_iota_embed=false",
            "embeds by a lookup; its gradient is summed in an order that varies",
            replace(workload, one_hot=False),
        )
    if not workload.fused_attention:
        yield (
            "attention=cudnn_flash_te",
            "keeps attention's scores out of memory",
            replace(workload, fused_attention=True),
        )
    if layout.tensor > 1 and workload.sequences >= layout.tensor and layout.pipeline == 1:
        yield (
            f"ici_tensor_parallelism=1 ici_fsdp_parallelism={layout.fsdp * layout.tensor}",
            "gathers weights instead of activations",
            replace(
                workload,
                sequences=workload.sequences / layout.tensor,
                layout=replace(layout, tensor=1, fsdp=layout.fsdp * layout.tensor),
            ),
        )
    if layout.data > 1:
        yield (
            f"ici_data_parallelism=1 ici_fsdp_parallelism={layout.fsdp * layout.data}",
            "divides weights and moments instead of copying them",
            replace(workload, layout=replace(layout, data=1, fsdp=layout.fsdp * layout.data)),
        )
