"""Curves of several runs on one axis of tokens, smoothed, and the gaps between them."""

import numpy as np

from maxtext_nvfp4.runs.records import Record

_POINTS = 400
_WINDOW = 0.02
"""Share of the common tokens over which a training loss is averaged."""


def common_tokens(records: list[Record], tag: str) -> np.ndarray:
    """float64 [n], the tokens at which all of the runs can be compared, at most 400 of them.

    Of a metric of every step, evenly spaced over what all runs have seen; of one that is rarer, the places where
    the first run has it, as far as the others have come.
    """
    known = [record.tokens(tag) for record in records]
    if not all(len(tokens) for tokens in known):
        return np.zeros(0)
    first, last = max(tokens[0] for tokens in known), min(tokens[-1] for tokens in known)
    points = known[0][(known[0] >= first) & (known[0] <= last)]
    return points if len(points) <= _POINTS else np.linspace(points[0], points[-1], _POINTS)


def sampled(record: Record, tag: str, tokens: np.ndarray, *, smooth: bool) -> np.ndarray:
    """float64 [n], a metric of a run at some numbers of tokens.

    Args:
      record: The run.
      tag: The metric.
      tokens: Ascending.
      smooth: Average over the values around each point, 2% of the whole stretch wide, instead of drawing lines between them.
    """
    known, values = record.tokens(tag), record.curves[tag].values
    if not smooth or not len(tokens):
        return np.interp(tokens, known, values)
    half = _WINDOW / 2 * (tokens[-1] - tokens[0])
    begin = np.searchsorted(known, tokens - half, "left")
    end = np.maximum(np.searchsorted(known, tokens + half, "right"), begin + 1)
    # Sums rather than differences of a running sum: one Inf must not spoil what comes after it.
    return np.array(
        [values[i:j].mean() for i, j in zip(np.minimum(begin, len(values) - 1), end, strict=True)]
    )
