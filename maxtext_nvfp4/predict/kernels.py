"""Seconds of single operations on one GPU, from what they compute and move."""

import dataclasses

from maxtext_nvfp4.predict.calibration import Calibration
from maxtext_nvfp4.predict.hardware import Hardware
from maxtext_nvfp4.predict.workload import Format

_PICO = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as it runs."""

    hardware: Hardware
    calibration: Calibration

    @property
    def _clock(self) -> float:
        return self.calibration.clock[self.hardware.name]

    def gemm(self, wanted: Format, m: float, n: float, k: float) -> float:
        """`[m, k] @ [k, n]` with operands that are there in the format already.

        2 m n k / (share of peak) + m n * (time to write an element): the second does not depend on k or the format.
        """
        rate = self.calibration.gemm * self.hardware.peak(wanted)
        return (2 * m * n * k / rate + self.calibration.output * _PICO * m * n) / self._clock

    def quantize(self, formats: tuple[Format, Format], elements: float) -> float:
        """A tensor for the two GEMMs that multiply it: one kernel gives both copies, of which each is half the work."""
        costs = (self.calibration.quantize[wanted] / 2 for wanted in formats if wanted != "bf16")
        return sum(costs) * _PICO * elements / self._clock

    def attention(self, flops: float, exponentials: float) -> float:
        """Fused attention: its products in BF16, then the exponentials of its softmax."""
        rate = self.calibration.attention * self.hardware.peak("bf16") * self._clock
        return flops / rate + exponentials / self.hardware.exponentials

    def move(self, size: float) -> float:
        """Bytes read from or written to memory by elementwise operations."""
        return size / (self.calibration.memory * self.hardware.hbm)
