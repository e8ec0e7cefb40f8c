"""How far predictions are from public measurements, measurement by measurement."""

import statistics
from collections.abc import Iterator

from maxtext_nvfp4.predict.calibration import Accuracy, Calibration
from maxtext_nvfp4.predict.measurements import Measurement, SpeedUp, measurements, speed_ups


def judge(calibration: Calibration) -> Accuracy:
    """Errors of what the constants were not fitted to."""
    steps = [_error(found, calibration) for found in measurements() if not found.fitted]
    ratios = [found.predicted(calibration) / found.measured - 1 for found in speed_ups() if not found.fitted]
    return Accuracy(
        step_mean=_mean(steps),
        step_worst=max(steps, key=abs),
        ratio_mean=_mean(ratios),
        ratio_worst=max(ratios, key=abs),
        measurements=len(steps),
    )


def table(calibration: Calibration) -> str:
    """Markdown of every measurement: what was measured, what is predicted, and the error."""
    return "\n".join((*_steps(calibration), "", *_speed_ups(calibration)))


def _steps(calibration: Calibration) -> Iterator[str]:
    yield "| source | what | hardware | precision | fitted | measured ms | predicted ms | error |"
    yield "|---|---|---|---|---|---:|---:|---:|"
    for found in measurements():
        predicted = found.predicted(calibration)
        yield (
            f"| {found.source} | {found.what} | {found.hardware} | {found.precision} | {_mark(found)} | "
            f"{1e3 * found.seconds:.4g} | {1e3 * predicted:.4g} | {_error(found, calibration):+.1%} |"
        )


def _speed_ups(calibration: Calibration) -> Iterator[str]:
    yield "| source | what | hardware | speed-up | fitted | measured | predicted | error |"
    yield "|---|---|---|---|---|---:|---:|---:|"
    for found in speed_ups():
        predicted = found.predicted(calibration)
        yield (
            f"| {found.fast.source} | {found.fast.what} | {found.fast.hardware} | "
            f"{found.fast.precision} over {found.slow.precision} | {_mark(found)} | {found.measured:.2f} | "
            f"{predicted:.2f} | {predicted / found.measured - 1:+.1%} |"
        )


def _mark(found: Measurement | SpeedUp) -> str:
    return "yes" if found.fitted else ""


def _error(found: Measurement, calibration: Calibration) -> float:
    return found.predicted(calibration) / found.seconds - 1


def _mean(errors: list[float]) -> float:
    return statistics.fmean(map(abs, errors))
