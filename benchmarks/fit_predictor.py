"""Fits the predictor's constants to the public measurements that are marked so, and judges them by the others.

    python benchmarks/fit_predictor.py            shows constants and errors
    python benchmarks/fit_predictor.py --write    and writes calibration.yml and the table of docs/predict.md

Weighted least squares over the logarithms of predicted by measured times. A prior holds each constant that the
measurements say little about near a guess that was made before fitting: it weighs a change by the whole guess as much
as an error of 5%.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml
from scipy.optimize import least_squares

from maxtext_nvfp4.predict.accuracy import judge, table
from maxtext_nvfp4.predict.calibration import CALIBRATION, Accuracy, Calibration
from maxtext_nvfp4.predict.measurements import measurements

_PRIOR_WEIGHT = 0.05

_PAGE = Path(__file__).parents[1] / "docs" / "predict.md"
_BEGIN, _END = "<!-- table: benchmarks/fit_predictor.py --write -->", "<!-- end of table -->"

_HEADER = """\
# Constants of the predictor; what they mean is in calibration.py. Written by
#
#   python benchmarks/fit_predictor.py --write
#
# from the measurements of measurements.yml that are marked `fit`. overlap is a guess, as no measurement tells it: in
# all of them gathers hide behind computation. clock of gb200 is the unit, and that of b200, of which no measurement is
# fitted, is taken to be the same.
#
# held_out: relative errors over the other measurements.
"""

# Smallest, guess before fitting, largest. What is a share of a peak cannot pass it on the hardware with the fastest
# clock either.
_BOUNDS: Mapping[str, tuple[float, float, float]] = {
    "gemm": (0.5, 0.7, 0.95),
    "output": (0.3, 1.5, 3),
    "quantize.nvfp4": (0.8, 2.2, 4),
    "quantize.fp8": (0.0, 0.8, 3),
    "quantize.fp8_current": (0.3, 1.6, 4),
    "quantize.mxfp8": (0.3, 1.6, 4),
    "attention": (0.25, 0.6, 0.72),
    "memory": (0.4, 0.8, 0.92),
    "tensor_parallel": (0.2, 0.8, 2),
    "clock.gb300": (1, 1.18, 1.35),
    "clock.b300": (0.9, 1.1, 1.35),
}

# No measurement tells it: in all of them gathers hide behind computation.
_OVERLAP = 0.8


def calibration(values: Mapping[str, float]) -> Calibration:
    """Constants by their names in `_BOUNDS`."""
    groups: dict[str, dict[str, float]] = {"quantize": {}, "clock": {"gb200": 1.0, "b200": 1.0}}
    plain = {}
    for name, value in values.items():
        group, _, key = name.rpartition(".")
        (groups[group] if group else plain)[key] = value
    return Calibration(**plain, **groups, overlap=_OVERLAP)


def fit() -> Calibration:
    """The constants that explain the fitted half of the measurements best."""
    fitted = [found for found in measurements() if found.fitted]
    low, guess, high = map(np.array, zip(*_BOUNDS.values(), strict=True))

    def residuals(x: np.ndarray) -> list[float]:
        constants = calibration(dict(zip(_BOUNDS, x, strict=True)))
        errors = [np.log(found.predicted(constants) / found.seconds) for found in fitted]
        return [*errors, *(_PRIOR_WEIGHT * (x - guess) / guess)]

    found = least_squares(residuals, guess, bounds=(low, high)).x
    return calibration({name: round(float(value), 3) for name, value in zip(_BOUNDS, found, strict=True)})


def written(constants: Calibration, found: Accuracy) -> str:
    """The text of calibration.yml."""
    values = {"constants": dataclasses.asdict(constants), "held_out": dataclasses.asdict(found)}
    values["held_out"] = {key: round(value, 4) for key, value in values["held_out"].items()}
    return _HEADER + yaml.safe_dump(values, sort_keys=False)


def with_table(page: str, constants: Calibration) -> str:
    """The page with the table of errors in its place."""
    before, rest = page.split(_BEGIN)
    after = rest.split(_END)[1]
    return f"{before}{_BEGIN}\n\n{table(constants)}\n\n{_END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--write", action="store_true", help="write calibration.yml and the table of docs/predict.md"
    )
    arguments = parser.parse_args()
    constants = fit()
    text = written(constants, judge(constants))
    print(f"{table(constants)}\n\n{text}", end="")
    if arguments.write:
        CALIBRATION.write_text(text)
        _PAGE.write_text(with_table(_PAGE.read_text(), constants))


if __name__ == "__main__":
    main()
