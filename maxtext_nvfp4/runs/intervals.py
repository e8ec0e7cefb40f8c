"""Confidence intervals of a mean over seeds."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95% confidence interval, by Student's t.

    Attributes:
      mean: Of the values.
      low: Lower end; NaN for fewer than two values, which say nothing of their spread.
      high: Upper end.
      values: One for each seed.
    """

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Of one value for each seed, at least one."""
        mean, half = band(np.asarray(values, np.float64)[:, None])
        return cls(
            float(mean[0]), float(mean[0] - half[0]), float(mean[0] + half[0]), tuple(map(float, values))
        )

    def to_json(self) -> dict[str, Any]:
        """Numbers that are not finite become null."""
        return {
            "mean": finite(self.mean),
            "low": finite(self.low),
            "high": finite(self.high),
            "values": [finite(value) for value in self.values],
        }

    def to_text(self, digits: int, unit: str = "") -> str:
        """Such as `+0.41% [+0.20, +0.62]`."""
        if not math.isfinite(self.mean):
            return "not finite"
        text = f"{self.mean:+.{digits}f}{unit}"
        if math.isfinite(self.low):
            text += f" [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"
        return text


def finite(value: float) -> float | None:
    """A number as JSON can hold it."""
    return float(value) if math.isfinite(value) else None


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half width of the interval, point by point.

    Args:
      values: float64 [seeds, n].

    Returns:
      float64 [n] each; the half width is NaN for one seed.
    """
    seeds = len(values)
    if seeds < 2:
        return values.mean(0), np.full(values.shape[1], np.nan)
    quantile = float(stats.t.ppf(0.5 + LEVEL / 2, seeds - 1))
    return values.mean(0), quantile * values.std(0, ddof=1) / math.sqrt(seeds)
