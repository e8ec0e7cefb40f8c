"""Sampled statistics as a run keeps them: one small JSONL file per sample, and their names in TensorBoard.

A line holds one operand, or the product, of one GEMM of one site over the decoder layers:

    {"step": 99, "site": "decoder/layers/mlp/wi_0", "gemm": "wgrad", "operand": "gradient",
     "layers": [0, 1], "amax": [0.011, 0.009], "sqnr_db": [18.4, 18.6], ...}

What is not a finite number is null: the error of a tensor that holds an Inf, the sqnr_db of one without error.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_nvfp4.plan import GEMMS, MEASURED, STATS, Gemm

FOLDER = "nvfp4_telemetry"
"""Where the samples of a run lie, below its own folder."""

OPERANDS: Mapping[Gemm, tuple[str, str]] = {
    "fprop": ("activation", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("activation", "gradient"),
}
PRODUCT = "product"

NOISE_LIMIT = math.sqrt(3.0)
"""A gradient_to_noise below it is an alarm: 4 bits no longer help training (arXiv 2505.19115)."""

_OF_PRODUCTS = ("relative_mse", "sqnr_db", "gradient_to_noise")
_SMALLER_IS_WORSE = ("sqnr_db", "gradient_to_noise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Statistics of an operand, or of the product, of one GEMM of a site in one sampled step.

    Attributes:
      step: The training step, counted from 0.
      site: Path of the site, such as `decoder/layers/mlp/wi_0`.
      gemm: Which of its GEMMs.
      operand: `activation`, `weight`, `gradient` or `product`.
      layers: Decoder layers, ascending; empty for a site outside the layer stack, which has one value.
      values: By statistic one number for each layer.
    """

    step: int
    site: str
    gemm: str
    operand: str
    layers: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]

    def to_json(self) -> str:
        """One line of a file."""
        head = {"step": self.step, "site": self.site, "gemm": self.gemm, "operand": self.operand}
        values = {
            name: [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
            for name, values in self.values.items()
        }
        return json.dumps({**head, "layers": list(self.layers), **values}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Reading":
        """Reads what `to_json` wrote; null becomes NaN."""
        content = json.loads(line)
        head = {name: content.pop(name) for name in ("step", "site", "gemm", "operand")}
        layers = tuple(content.pop("layers"))
        values = {
            name: tuple(math.nan if value is None else value for value in values)
            for name, values in content.items()
        }
        return cls(**head, layers=layers, values=values)

    def scalars(self) -> Iterator[tuple[str, float]]:
        """TensorBoard tags and values: of each layer, and of the worst one under the site's own path."""
        for stat, values in self.values.items():
            tail = f"{self.gemm}/{self.operand}/{stat}"
            for layer, value in zip(self.layers, values, strict=False):
                yield f"nvfp4/{layer_path(self.site, layer)}/{tail}", value
            worst = np.min if stat in _SMALLER_IS_WORSE else np.max  # NaN if there is one
            yield f"nvfp4/{self.site}/{tail}", float(worst(values))


def layer_path(site: str, layer: int) -> str:
    """The path of a site in one decoder layer, as an unscanned model has it: `decoder/layers_3/mlp/wi_0`."""
    root, stack, *rest = site.split("/")
    return "/".join((root, f"{stack}_{layer}", *rest))


def to_readings(
    step: int, site: str, layers: Sequence[int], probes: np.ndarray, stats: Sequence[str]
) -> list[Reading]:
    """Turns what the layers of a site measured into readings.

    Args:
      step: The training step.
      site: Path of the site.
      layers: Its decoder layers, none for one outside the stack.
      probes: float32 [layers or 1, *telemetry.PROBE_SHAPE].
      stats: Names of the statistics to keep.

    Returns:
      Those of GEMMs that are in 4 bits in at least one of the layers; a layer where one is not is left out.
    """
    measured = probes[:, :9] / probes[:, 9:]
    readings = []
    for index, gemm in enumerate(GEMMS):
        for place, operand in enumerate((*OPERANDS[gemm], PRODUCT)):
            rows = measured[:, 3 * index + place]
            known = ~np.isnan(rows[:, MEASURED.index("nonfinite")])
            by_name = _derive(dict(zip(MEASURED, rows[known].T, strict=True)))
            names = _names(gemm, operand, stats)
            if known.any() and names:
                kept = tuple(layer for layer, one in zip(layers, known, strict=False) if one)
                values = {name: tuple(map(float, by_name[name])) for name in names}
                readings.append(
                    Reading(step=step, site=site, gemm=gemm, operand=operand, layers=kept, values=values)
                )
    return readings


def _derive(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with np.errstate(divide="ignore"):
        noise = np.asarray(values["relative_mse"], np.float64)
        return {**values, "sqnr_db": -10.0 * np.log10(noise), "gradient_to_noise": noise**-0.5}


def _names(gemm: Gemm, operand: str, stats: Sequence[str]) -> list[str]:
    """The statistics that mean something: a ratio of gradient to noise for gradients alone, dw among them."""
    wanted = [name for name in STATS if name in stats]
    if operand == PRODUCT:
        wanted = [name for name in wanted if name in _OF_PRODUCTS]
    if operand != "gradient" and (operand, gemm) != (PRODUCT, "wgrad"):
        wanted = [name for name in wanted if name != "gradient_to_noise"]
    return wanted


def write_sample(folder: Any, step: int, readings: Sequence[Reading]) -> None:
    """Writes the file of one sample; one of the same step, from before a restart, is replaced.

    Args:
      folder: The run's folder of samples, an `epath.Path` or a `pathlib.Path`.
      step: The training step.
      readings: What was measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{reading.to_json()}\n" for reading in readings)
    new = folder / f"{step:08d}.new"  # a run that is killed leaves no half of a sample
    new.write_text(text)
    new.replace(folder / f"{step:08d}.jsonl")


def read_samples(folder: Path) -> dict[int, list[Reading]]:
    """The readings of every sample of a run, by step."""
    return {
        int(path.stem): [Reading.from_json(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("[0-9]*.jsonl"))
    }


def alarms(readings: Sequence[Reading]) -> list[str]:
    """What needs a look, a line each: where values stop being finite, and the gradient that its noise drowns most."""
    lines = []
    if found := [place for place in _places(readings, "nonfinite") if place.value > 0]:
        first = min(found, key=_Place.order)
        lines.append(f"{first.name}: {first.value:g} Inf or NaN{_more(found)}")
    if found := [place for place in _places(readings, "gradient_to_noise") if place.value < NOISE_LIMIT]:
        worst = min(found, key=lambda place: place.value)
        lines.append(
            f"{worst.name}: the gradient is {worst.value:.2f} times its quantization noise, below {NOISE_LIMIT:.2f}, "
            f"where 4 bits no longer help{_more(found)}"
        )
    return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """A statistic of one operand of one layer."""

    name: str
    operand: str
    layer: int
    value: float

    def order(self) -> tuple[bool, int, float]:
        """Sorts by when a step computes it: weights and activations upwards, then gradients downwards."""
        backward = self.operand == "gradient"
        return backward, -self.layer if backward else self.layer, self.value


def _places(readings: Sequence[Reading], stat: str) -> Iterator[_Place]:
    for reading in readings:
        for index, value in enumerate(reading.values.get(stat, ())):
            layer = reading.layers[index] if reading.layers else 0
            path = layer_path(reading.site, layer) if reading.layers else reading.site
            name = f"{path} {reading.gemm} {reading.operand}"
            yield _Place(name=name, operand=reading.operand, layer=layer, value=value)


def _more(found: Sequence[_Place]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""
