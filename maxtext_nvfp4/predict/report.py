"""Predictions of one config in several precisions, for people and for programs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext_nvfp4.predict.advice import Advice
from maxtext_nvfp4.predict.calibration import Accuracy
from maxtext_nvfp4.predict.measurements import shortest
from maxtext_nvfp4.predict.prediction import GIB, Prediction
from maxtext_nvfp4.tables import aligned

CONVENTION = (
    "MaxText's: 6 a token and weight of linear layers and head, attention causal (half the square), nothing for what "
    "is computed again"
)

_PARTS = {
    "gemms": "GEMMs of linear layers",
    "quantization": "quantization",
    "attention": "attention",
    "elementwise": "norms, residuals, activations",
    "head": "head and loss",
    "tensor_parallel": "tensor and context parallelism",
    "collectives_exposed": "gathers and reductions, exposed",
    "pipeline_bubble": "pipeline bubble",
    "optimizer": "optimizer",
}

_SHORT = 0.05
"""Part of the shortest measured step below which constants say little."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What is predicted.

    Attributes:
      hardware: Name of the GPU.
      gpus: Their number.
      parallelism: The mesh, as keys of a config.
      changed: Those of its keys whose value in the config fits no such machine.
      predictions: In the order that was asked for; the first is looked at closely.
      baselines: What speed-ups are over.
      advice: Changes to the first, best first.
      accuracy: How far predictions were off.
    """

    hardware: str
    gpus: int
    parallelism: Mapping[str, int]
    changed: Sequence[str]
    predictions: Sequence[Prediction]
    baselines: Mapping[str, Prediction]
    advice: Sequence[Advice]
    accuracy: Accuracy

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        workload = self.predictions[0].workload
        return {
            "hardware": self.hardware,
            "gpus": self.gpus,
            "parallelism": dict(self.parallelism),
            "changed": list(self.changed),
            "remat_policy": workload.remat.policy,
            "tokens_per_gpu": workload.tokens_per_device,
            "model_tflop_per_gpu_and_step": workload.model_flops / 1e12,
            "flops_convention": CONVENTION,
            "uncertainty": dataclasses.asdict(self.accuracy),
            "precisions": [found.to_json(self.baselines) for found in self.predictions],
            "advice": [advice.to_json() for advice in self.advice],
        }

    def to_text(self) -> str:
        """The report as tables."""
        first = self.predictions[0]
        mesh = " ".join(f"{key}={size}" for key, size in self.parallelism.items())
        return "\n".join(
            (
                f"{self.gpus} x {self.hardware.upper()}, {mesh}, remat_policy={first.workload.remat.policy}, "
                f"{first.workload.tokens_per_device:g} tokens a GPU",
                "",
                *aligned(self._rates(), numbers=True),
                "",
                f"{first.precision}: where a step of {1e3 * first.time.seconds:.4g} ms goes",
                *aligned(_times(first), numbers=True),
                "",
                f"{first.precision}: what is in the {first.memory.total / GIB:.3g} GiB at the fullest moment "
                f"({first.memory.moment})",
                *aligned(_sizes(first), numbers=True),
                "",
                *self._notes(),
            )
        )

    def _rates(self) -> list[tuple[str, ...]]:
        over = [f"over {name}" for name in self.baselines]
        rows = [("precision", "step ms", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", *over, "GiB", "")]
        rows += [
            (
                found.precision,
                f"{1e3 * found.time.seconds:.4g}",
                f"{found.tokens_per_second:.4g}",
                f"{found.model_tflops:.4g}",
                f"{found.mfu:.1%}",
                *(f"{found.over(other):.2f}" for other in self.baselines.values()),
                f"{found.memory.total / GIB:.3g}",
                "" if found.fits else f"does not fit into {found.usable_memory / GIB:.3g} GiB",
            )
            for found in self.predictions
        ]
        return rows

    def _notes(self) -> list[str]:
        known, first = self.accuracy, self.predictions[0]
        lines = [
            f"FLOPs: {CONVENTION}. MFU: of the dense peak of each precision's format.",
            f"Uncertainty: over {known.measurements} public measurements that no constant was fitted to, step times are "
            f"off by {known.step_mean:.0%} on average and {abs(known.step_worst):.0%} at most, speed-ups by "
            f"{known.ratio_mean:.0%} and {abs(known.ratio_worst):.0%}.",
        ]
        if self.changed:
            sizes = ", ".join(f"{key} to {self.parallelism.get(key, 1)}" for key in self.changed)
            lines.append(f"Changed, as the config's value does not fit the machine: {sizes}.")
        if first.time.seconds < _SHORT * shortest():
            lines.append(
                f"The shortest step of these took {1e3 * shortest():.0f} ms. In one this short, starting kernels, which is "
                "not counted, takes much of the time."
            )
        if self.advice:
            best = self.advice[0]
            lines.append(
                f"{'Most would bring' if first.fits else 'Fits, and is the fastest such change'}: {best.change} "
                f"({best.why}): {best.gain:.2f} times as many tokens a second, "
                f"{best.prediction.memory.total / GIB:.3g} GiB"
            )
        elif first.fits:
            lines.append("No single change that is tried here would bring 1%.")
        else:
            lines.append(
                "No single change that is tried here makes it fit: take more GPUs, or a smaller model."
            )
        return lines


def _times(found: Prediction) -> list[tuple[str, ...]]:
    total = found.time.seconds
    rows: list[tuple[str, ...]] = []
    for name, seconds in found.time.parts.items():
        if seconds:
            rows.append((_PARTS[name], f"{1e3 * seconds:.4g} ms", f"{seconds / total:.1%}"))
        if name == "gemms":
            rows += [
                (f"  {site}", f"{1e3 * spent:.4g} ms", f"{spent / total:.1%}")
                for site, spent in found.time.gemms.items()
            ]
    if hidden := found.time.collectives_hidden:
        rows.append(("gathers and reductions, hidden", f"{1e3 * hidden:.4g} ms", "-"))
    return rows


def _sizes(found: Prediction) -> list[tuple[str, ...]]:
    return [
        (name, f"{size / GIB:.3g} GiB", f"{size / found.memory.total:.1%}")
        for name, size in found.memory.to_json().items()
        if not isinstance(size, str) and size and name != "total"
    ]
