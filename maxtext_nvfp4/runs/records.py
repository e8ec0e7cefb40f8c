"""One run as `compare` sees it: its settings, its curves and its layers' errors, from the run's folder or from a file.

A record file is what remains of a run whose folder is gone: some tens of KiB of JSON, written by `ab` for every run that is complete.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.runs.events import read_events
from maxtext_nvfp4.runs.keys import ELSEWHERE, matches
from maxtext_nvfp4.runs.suggest import layer_errors
from maxtext_nvfp4.samples import FOLDER, read_samples

LOSS, EVAL_LOSS, GRADIENT_NORM, THROUGHPUT, SKIPPED = _KEPT = (
    "learning/loss",
    "eval/avg_loss",
    "learning/raw_grad_norm",
    "perf/per_device_tokens_per_sec",
    "nvfp4/skipped_steps",
)
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values of one metric.

    Attributes:
      steps: int64 [n], ascending, counted from 0.
      values: float64 [n].
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A run.

    Attributes:
      name: Its run_name.
      source: Where it was read from.
      settings: MaxText's resolved config, every value as text, without keys that say only where and how it ran.
      curves: By TensorBoard tag; an empty curve for what the run did not log.
      layer_errors: By layer's path, such as `decoder/layers_3`, the relative error of its dw, averaged over its
        sites; empty without telemetry.
    """

    name: str
    source: str
    settings: Mapping[str, str]
    curves: Mapping[str, Curve]
    layer_errors: Mapping[str, float]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all devices and microbatches."""
        return int(self.settings["global_batch_size_to_train_on"]) * int(self.settings["max_target_length"])

    def tokens(self, tag: str) -> np.ndarray:
        """float64 [n], how many tokens the run had seen after the step of each value of a curve."""
        return (self.curves[tag].steps + 1.0) * self.tokens_per_step

    def to_json(self) -> dict[str, Any]:
        """As a record file holds it, values to 7 digits."""
        curves = {
            tag: {"steps": curve.steps.tolist(), "values": [_written(value) for value in curve.values]}
            for tag, curve in self.curves.items()
        }
        return {
            "format": _FORMAT,
            "name": self.name,
            "settings": dict(self.settings),
            "curves": curves,
            "layer_errors": {layer: _written(error) for layer, error in self.layer_errors.items()},
        }


def read_run(path: Path) -> Record:
    """Reads a run's folder, `<base_output_directory>/<run_name>`, or a record file.

    Raises:
      ConfigError: There is no such run, or nothing to compare in it.
    """
    record = _from_file(path) if path.suffix == ".json" else _from_folder(path)
    if not len(record.curves[LOSS]):
        raise ConfigError(f"{path}: the run has no {LOSS} yet; wait until it has logged some steps")
    return record


def _from_folder(path: Path) -> Record:
    example = (
        "write the folder of a run, <base_output_directory>/<run_name>, or a record of one that `ab` wrote"
    )
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; {example}")
    events = read_events(path / "tensorboard")
    if "run_name" not in events.texts:
        why = "no TensorBoard log of MaxText below it, which enable_tensorboard: true writes"
        raise ConfigError(f"{path}: {why}; {example}")
    return Record(
        name=events.texts["run_name"],
        source=str(path),
        settings={key: text for key, text in events.texts.items() if not matches(key, ELSEWHERE)},
        curves={tag: _curve(events.scalars.get(tag, {})) for tag in _KEPT},
        layer_errors=layer_errors(read_samples(path / FOLDER)),
    )


def _from_file(path: Path) -> Record:
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ConfigError(f"{path}: a record of format {content['format']}; this version reads {_FORMAT}")
        return Record(
            name=content["name"],
            source=str(path),
            settings=content["settings"],
            curves={
                tag: _curve(dict(zip(curve["steps"], map(_read, curve["values"]), strict=True)))
                for tag, curve in content["curves"].items()
            },
            layer_errors={layer: _read(error) for layer, error in content["layer_errors"].items()},
        )
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); write a run's folder or record"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{path}: not the record of a run; write one that `ab` wrote, or a run's folder"
        ) from None


def write_record(record: Record, path: Path) -> None:
    """Writes a record file; nothing else ever sees half of one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record.to_json(), allow_nan=False) + "\n")
    new.replace(path)


def _curve(by_step: Mapping[int, float]) -> Curve:
    steps = sorted(by_step)
    values = [by_step[step] for step in steps]
    return Curve(np.asarray(steps, np.int64), np.asarray(values, np.float64))


def _written(value: float) -> float | None:
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _read(value: float | None) -> float:
    return math.nan if value is None else float(value)
