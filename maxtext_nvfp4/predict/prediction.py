"""What a step costs on some hardware: time, memory, and the rates that follow."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxtext_nvfp4.doctor.targets import TARGETS
from maxtext_nvfp4.predict.calibration import calibration
from maxtext_nvfp4.predict.hardware import Hardware
from maxtext_nvfp4.predict.memory import Memory, memory
from maxtext_nvfp4.predict.step import Step, step
from maxtext_nvfp4.predict.workload import Format, Workload

GIB = 2**30

USABLE = 0.9
"""Share of a GPU's memory that XLA may have: XLA_PYTHON_CLIENT_MEM_FRACTION of this project's environments."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step on one of the GPUs that share it.

    Attributes:
      precision: Format of what is quantized.
      workload: The step.
      hardware: The GPU.
      time: Where its time goes.
      memory: Where its memory goes.
    """

    precision: Format
    workload: Workload
    hardware: Hardware
    time: Step
    memory: Memory

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.workload.tokens_per_device / self.time.seconds

    @property
    def model_tflops(self) -> float:
        """TFLOP/s of one GPU by MaxText's count of a model's FLOPs."""
        return self.workload.model_flops / self.time.seconds / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the dense peak of the precision's format."""
        return self.model_tflops * 1e12 / self.hardware.peak(self.precision)

    @property
    def usable_memory(self) -> float:
        """Bytes of the GPU that a step may take."""
        return USABLE * TARGETS[self.hardware.name].memory

    @property
    def fits(self) -> bool:
        """Whether the step has the memory it needs."""
        return self.memory.total <= self.usable_memory

    def to_json(self, baselines: Mapping[str, "Prediction"]) -> dict[str, Any]:
        """JSON-ready values, with the speed-up over each baseline."""
        sizes = {name: size for name, size in self.memory.to_json().items() if not isinstance(size, str)}
        return {
            "precision": self.precision,
            "step_seconds": self.time.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "model_tflops_per_gpu": self.model_tflops,
            "mfu": self.mfu,
            "peak_tflops": self.hardware.peak(self.precision) / 1e12,
            **{f"speedup_over_{name}": self.over(other) for name, other in baselines.items()},
            "memory_gib": self.memory.total / GIB,
            "memory": {name: size / GIB for name, size in sizes.items() if name != "total"},
            "memory_moment": self.memory.moment,
            "usable_memory_gib": self.usable_memory / GIB,
            "fits": self.fits,
            "breakdown": self.time.parts,
            "gemms_by_site": dict(self.time.gemms),
            "collectives_hidden": self.time.collectives_hidden,
        }

    def over(self, other: "Prediction") -> float:
        """How many times as many tokens a second as another."""
        return self.tokens_per_second / other.tokens_per_second


def predict(workload: Workload, hardware: Hardware, precision: Format) -> Prediction:
    """Predicts a step.

    Args:
      workload: The step, with the formats that its GEMMs have.
      hardware: The GPU.
      precision: The name for it, and the format whose peak MFU is of.
    """
    return Prediction(
        precision=precision,
        workload=workload,
        hardware=hardware,
        time=step(workload, hardware, calibration()),
        memory=memory(workload),
    )
