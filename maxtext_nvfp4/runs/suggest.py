"""Which layers a run would best keep in BF16: those whose weight gradients the 4 bits disturb most.

arXiv 2509.25149 chooses its BF16 blocks by the relative error of wgrad's quantized product; telemetry measures it.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.samples import FOLDER, PRODUCT, Reading, layer_path, read_samples

SHARE = 0.15
"""Of the layers: what the paper's 8B and 12B models kept in BF16 (8 of 52, 10 of 62)."""

_STAT = "relative_mse"
_LAYER = re.compile(r"(.*)_([0-9]+)")

Samples = Mapping[int, Sequence[Reading]]


def layer_errors(samples: Samples) -> dict[str, float]:
    """The relative error of dw of each decoder layer.

    Args:
      samples: Readings by step.

    Returns:
      By the layer's path, such as `decoder/layers_3`, in the order of the layers: the root of the mean, over its
      sites and over the samples, of `relative_mse`. Not finite if one of them is not.
    """
    found: dict[str, list[float]] = {}
    for readings in samples.values():
        for reading in readings:
            if (reading.gemm, reading.operand) == ("wgrad", PRODUCT):
                # A site outside the layer stack has a value, but no layer.
                for layer, value in zip(reading.layers, reading.values.get(_STAT, ()), strict=False):
                    found.setdefault(_stack(reading.site, layer), []).append(value)
    return {layer: float(np.sqrt(np.mean(found[layer]))) for layer in sorted(found, key=_order)}


def _stack(site: str, layer: int) -> str:
    return "/".join(layer_path(site, layer).split("/")[:2])


def _order(layer: str) -> tuple[str, int]:
    match = _LAYER.fullmatch(layer)
    assert match
    return match[1], int(match[2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """What a run's telemetry says about its layers.

    Attributes:
      run: The run's folder.
      steps: First and last sampled step that count.
      samples: How many samples count.
      errors: As `layer_errors` gives them.
      keep: The layers to keep in BF16, worst first.
    """

    run: str
    steps: tuple[int, int]
    samples: int
    errors: Mapping[str, float]
    keep: tuple[str, ...]

    @property
    def spread(self) -> float:
        """The largest error over the median one."""
        values = np.asarray(list(self.errors.values()))
        return float(np.max(values) / np.median(values))

    @property
    def indices(self) -> list[int]:
        """The layers to keep, by number, ascending."""
        return sorted(_order(layer)[1] for layer in self.keep)

    def to_yaml(self) -> str:
        """The keys that keep these layers in BF16, one rule for each run of neighbours."""
        rules = [
            f'    - {{module: "*", layers: {_range(first, last)}, fprop: bf16, dgrad: bf16, wgrad: bf16}}'
            for first, last in _neighbours(self.indices)
        ]
        return "\n".join(("nvfp4:", "  rules:", *rules))

    def to_json(self) -> dict[str, Any]:
        """For programs; an error that is not finite is null."""
        return {
            "run": self.run,
            "samples": self.samples,
            "first_step": self.steps[0],
            "last_step": self.steps[1],
            "layers": [
                {"layer": layer, "wgrad_relative_error": error if math.isfinite(error) else None}
                for layer, error in self.errors.items()
            ],
            "keep_bf16": self.indices,
            "rules": self.to_yaml(),
        }

    def to_text(self) -> str:
        """A table of the layers, worst marked, and what to write."""
        first, last = self.steps
        width = max(map(len, self.errors))
        lines = [
            f"{self.run}: {self.samples} samples, steps {first} to {last}",
            "relative error of the weight gradient (wgrad's product in 4 bits against the same in high precision)",
            "",
        ]
        largest = max((error for error in self.errors.values() if math.isfinite(error)), default=1.0)
        for layer, error in self.errors.items():
            bar = "#" * round(30 * error / largest) if math.isfinite(error) else "not finite"
            mark = "  <- keep in BF16" if layer in self.keep else ""
            lines.append(f"  {layer:{width}}  {error:8.4f}  {bar}{mark}".rstrip())
        lines += ["", "layers that the run kept in BF16 are not measured and not in this list"]
        lines += [f"the worst layer has {self.spread:.2f} times the median error"]
        if self.spread < 1.2:
            lines.append("so little that any other choice of layers would do as well")
        return "\n".join((*lines, "to keep the marked layers in BF16, write", "", self.to_yaml()))


def suggest(run: Path, share: float = SHARE, last: int = 10) -> Suggestion:
    """Names the layers of a run to keep in BF16.

    Args:
      run: The run's folder.
      share: Of the measured layers, rounded up.
      last: How many of the newest samples count.

    Raises:
      ConfigError: The run has no samples, or none with what is needed.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: no such folder; write a run's, <base_output_directory>/<run_name>")
    samples = read_samples(run / FOLDER)
    newest = {step: samples[step] for step in sorted(samples)[-last:]}
    errors = layer_errors(newest)
    write = "train it with nvfp4.telemetry: {every: 100}"
    if not samples:
        raise ConfigError(f"{run}: the run has no samples in {FOLDER}; {write}")
    if not errors:
        why = f"its samples have no {_STAT} of wgrad's product in a decoder layer"
        raise ConfigError(f"{run}: {why}; {write}, with all stats, and with wgrad in 4 bits in some layers")
    count = math.ceil(share * len(errors))
    worst_first = sorted(
        errors, key=lambda layer: -errors[layer] if math.isfinite(errors[layer]) else -math.inf
    )
    return Suggestion(
        run=str(run),
        steps=(min(newest), max(newest)),
        samples=len(newest),
        errors=errors,
        keep=tuple(worst_first[:count]),
    )


def _neighbours(indices: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1] = (ranges[-1][0], index)
        else:
            ranges.append((index, index))
    return ranges


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"
