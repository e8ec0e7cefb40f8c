"""How much of the hardware's best rates is had: `calibration.yml`, fitted to public measurements."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from maxtext_nvfp4.predict.workload import Format

CALIBRATION = Path(__file__).with_suffix(".yml")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants that hold for every model, layout and format.

    Attributes:
      gemm: Share of the peak rate at which a large GEMM multiplies.
      output: Picoseconds that a GEMM needs for each element it writes, besides multiplying. It is what keeps FP4 from
        being far ahead of FP8 where the contraction is short.
      quantize: Picoseconds to quantize an element, by format: amax, both copies, their transposition, the transform and
        the random bits, as far as the format has them.
      attention: Share of BF16's peak at which attention multiplies, besides its exponentials.
      memory: Share of the memory's bandwidth that elementwise operations have.
      tensor_parallel: Share of tensor parallelism's transfers that no computation hides.
      overlap: Share of a step's computation behind which gathers and reductions of weights hide.
      clock: Rate of a GPU under load over that of a GB200, by hardware, both as shares of their peaks. Blackwell Ultra
        may draw more power.
    """

    gemm: float
    output: float
    quantize: Mapping[Format, float]
    attention: float
    memory: float
    tensor_parallel: float
    overlap: float
    clock: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Relative errors against public measurements that the constants were not fitted to.

    Attributes:
      step_mean: Mean absolute error of a step's time.
      step_worst: The largest.
      ratio_mean: Mean absolute error of the ratio of two precisions' step times.
      ratio_worst: The largest.
      measurements: Number of such step times.
    """

    step_mean: float
    step_worst: float
    ratio_mean: float
    ratio_worst: float
    measurements: int


@functools.cache
def calibration() -> Calibration:
    """The fitted constants."""
    return Calibration(**_table()["constants"])


@functools.cache
def accuracy() -> Accuracy:
    """How far predictions were off."""
    return Accuracy(**_table()["held_out"])


def _table() -> dict[str, dict]:
    table: dict[str, dict] = yaml.safe_load(CALIBRATION.read_text())
    return table
