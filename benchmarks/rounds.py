"""Trials that take turns, and ratios between them.

Other work on a machine comes and goes over seconds. Trials that take turns all get their share of it, so a ratio within
one round says more than a quotient of two averages; how far the ratios of the rounds lie apart says how much more.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

type Trial = Callable[[], float]
"""Does the work once and returns the seconds that count."""

type Spread = dict[str, float]
"""`median`, `min` and `max` of some numbers."""


def interleave(trials: Mapping[str, Trial], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each trial in each round; those of the first `warmup` rounds are not kept.

    Each round begins with another trial, so that none profits, or suffers, from what always comes before it.
    """
    names = list(trials)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds = trials[name]()
            if number >= warmup:
                times[name].append(seconds)
    return times


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(times: Sequence[float], yardstick: Sequence[float]) -> Spread:
    """The spread of the ratios within the rounds."""
    return spread([a / b for a, b in zip(times, yardstick, strict=True)])


def cell(values: Spread, digits: int = 2) -> str:
    """A spread for people."""
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} to {values['max']:.{digits}f})"
