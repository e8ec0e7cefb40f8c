"""Compares runs that differ in precision alone: losses and gaps over tokens, with the spread over seeds."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.runs import settings
from maxtext_nvfp4.runs.curves import common_tokens, sampled
from maxtext_nvfp4.runs.intervals import Interval, band
from maxtext_nvfp4.runs.records import EVAL_LOSS, GRADIENT_NORM, LOSS, SKIPPED, THROUGHPUT, Record

_WORST = 5
_TAIL = 0.05
"""Share of the common training steps whose mean is the final training loss."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A metric of a group over tokens.

    Attributes:
      tokens: float64 [n].
      mean: float64 [n], over the seeds.
      half: float64 [n], half width of the 95% interval; NaN for one seed.
    """

    tokens: np.ndarray
    mean: np.ndarray
    half: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one precision, one for each seed, next to the baseline's of the same seeds.

    Attributes:
      label: What it is called.
      precision: What it is, in words.
      records: In the order of their seeds.
      lines: By metric; the loss is smoothed.
      gaps: By metric, this group's minus the baseline's, seed by seed, in nats; empty for the baseline itself.
      final_loss: Mean training loss over the last 5% of the common steps.
      final_eval_loss: At the last common evaluation; None without one.
      gap_loss: Nats above the baseline, of `final_loss`; None for the baseline.
      gap_loss_percent: The same in percent of the baseline's.
      gap_eval: Nats above the baseline, of `final_eval_loss`.
      gap_eval_percent: The same in percent of the baseline's.
      throughput: Tokens a second and device over the baseline's, medians over the steps.
      skipped: Steps skipped for gradients that were not finite, in each run.
      worst_layers: Layers with the largest relative error of dw, worst first.
    """

    label: str
    precision: str
    records: tuple[Record, ...]
    lines: dict[str, Line]
    gaps: dict[str, Line]
    final_loss: Interval
    final_eval_loss: Interval | None
    gap_loss: Interval | None
    gap_loss_percent: Interval | None
    gap_eval: Interval | None
    gap_eval_percent: Interval | None
    throughput: Interval | None
    skipped: tuple[int, ...]
    worst_layers: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Groups of runs against the first of them.

    Attributes:
      groups: The baseline first.
      tokens: What all runs have seen.
      steps: Optimizer steps of the baseline until then.
      allowed: Keys besides precision that differ, which the user allowed: values of both sides.
    """

    groups: tuple[Group, ...]
    tokens: float
    steps: int
    allowed: dict[str, tuple[str, str]]

    @property
    def baseline(self) -> Group:
        """What the others are compared with."""
        return self.groups[0]


def compare(records: Sequence[Record], allowed: Sequence[str] = ()) -> Comparison:
    """Compares runs; those of the first one's precision are the baseline.

    Args:
      records: At least two.
      allowed: Glob patterns of keys besides precision that may differ.

    Raises:
      ConfigError: They differ in more than precision, or not all seeds have a run of each precision.
    """
    by_precision: dict[str, list[Record]] = {}
    for record in records:
        by_precision.setdefault(settings.precision_key(record), []).append(record)
    if len(by_precision) < 2:
        names = " and ".join(record.source for record in records)
        raise ConfigError(
            f"{names}: all of one precision, {settings.describe_precision(records[0])}; name runs of two"
        )
    paired = [_by_seed(runs) for runs in by_precision.values()]
    base, *others = paired
    differing: dict[str, tuple[str, str]] = {}
    for other in others:
        _check_seeds(base, other)
        for seed, record in other.items():
            differing |= settings.check_alike(base[seed], record, (*allowed, *settings.SEEDS))
    order = list(base)
    baseline = [base[seed] for seed in order]
    tags = {tag: common_tokens(list(records), tag) for tag in (LOSS, EVAL_LOSS, GRADIENT_NORM)}
    if not len(tags[LOSS]):
        raise ConfigError("the runs have no step in common; compare runs that trained over the same stretch")
    groups = [
        _group([runs[seed] for seed in order], None if runs is base else baseline, tags) for runs in paired
    ]
    tokens = float(tags[LOSS][-1])
    return Comparison(_labelled(groups), tokens, round(tokens / baseline[0].tokens_per_step), differing)


def _by_seed(records: Sequence[Record]) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for record in records:
        seed = settings.seed(record)
        if seed in found:
            raise ConfigError(
                f"{found[seed].source} and {record.source} have the same precision and the same seeds; name one of them"
            )
        found[seed] = record
    return found


def _check_seeds(base: dict[str, Record], other: dict[str, Record]) -> None:
    if base.keys() != other.keys():
        first, second = (next(iter(runs.values())).source for runs in (base, other))
        raise ConfigError(
            f"the runs like {first} have the seeds {', '.join(base)} ({'/'.join(settings.SEEDS)}), those like {second} have "
            f"{', '.join(other)}; losses are compared seed by seed: train or name the missing runs"
        )


def _group(records: list[Record], baseline: list[Record] | None, tags: dict[str, np.ndarray]) -> Group:
    lines, gaps = {}, {}
    for tag, tokens in tags.items():
        if len(tokens):
            values = _values(records, tag, tokens)
            lines[tag] = Line(tokens, *band(values))
            if baseline and tag != GRADIENT_NORM:
                gaps[tag] = Line(tokens, *band(values - _values(baseline, tag, tokens)))
    losses = [_final(record, tags[LOSS]) for record in records]
    evals = _final_evals(records, tags[EVAL_LOSS])
    base_losses = [_final(record, tags[LOSS]) for record in baseline or ()]
    base_evals = _final_evals(baseline or [], tags[EVAL_LOSS])
    return Group(
        label=settings.label(records[0]),
        precision=settings.describe_precision(records[0]),
        records=tuple(records),
        lines=lines,
        gaps=gaps,
        final_loss=Interval.of(losses),
        final_eval_loss=Interval.of(evals) if evals else None,
        gap_loss=_gap(losses, base_losses),
        gap_loss_percent=_gap(losses, base_losses, percent=True),
        gap_eval=_gap(evals, base_evals),
        gap_eval_percent=_gap(evals, base_evals, percent=True),
        throughput=_throughput(records, baseline) if baseline else None,
        skipped=tuple(_skipped(record) for record in records),
        worst_layers=_worst_layers(records),
    )


def _values(records: list[Record], tag: str, tokens: np.ndarray) -> np.ndarray:
    """float64 [seeds, n]; an evaluation is a mean already, and is not smoothed."""
    return np.stack([sampled(record, tag, tokens, smooth=tag != EVAL_LOSS) for record in records])


def _final(record: Record, tokens: np.ndarray) -> float:
    known = record.tokens(LOSS)
    last = tokens[-1]
    first = last - _TAIL * (last - known[0])
    return float(record.curves[LOSS].values[(known >= first) & (known <= last)].mean())


def _final_evals(records: list[Record], tokens: np.ndarray) -> list[float]:
    if not len(tokens):
        return []
    return [float(sampled(record, EVAL_LOSS, tokens[-1:], smooth=False)[0]) for record in records]


def _gap(mine: list[float], base: list[float], *, percent: bool = False) -> Interval | None:
    if not base:
        return None
    pairs = zip(mine, base, strict=True)
    return Interval.of([100 * (a - b) / b if percent else a - b for a, b in pairs])


def _throughput(records: list[Record], baseline: list[Record]) -> Interval | None:
    curves = [
        (mine.curves[THROUGHPUT].values, base.curves[THROUGHPUT].values)
        for mine, base in zip(records, baseline, strict=True)
    ]
    if not all(len(mine) and len(base) for mine, base in curves):
        return None
    return Interval.of([float(np.median(mine) / np.median(base)) for mine, base in curves])


def _skipped(record: Record) -> int:
    curve = record.curves[SKIPPED]
    return round(curve.values[-1]) if len(curve) and math.isfinite(curve.values[-1]) else 0


def _worst_layers(records: list[Record]) -> tuple[tuple[str, float], ...]:
    layers = {layer for record in records for layer in record.layer_errors}
    errors = {
        layer: float(
            np.mean([record.layer_errors[layer] for record in records if layer in record.layer_errors])
        )
        for layer in layers
    }
    return tuple(sorted(errors.items(), key=lambda item: (-item[1], item[0]))[:_WORST])


def _labelled(groups: list[Group]) -> tuple[Group, ...]:
    """Labels that are not unique become the runs' sources."""
    labels = [group.label for group in groups]
    return tuple(
        group if labels.count(group.label) == 1 else dataclasses.replace(group, label=group.records[0].source)
        for group in groups
    )


def to_json(comparison: Comparison) -> dict[str, Any]:
    """`report.json`: the numbers of the table, and the curves of the figures."""
    return {
        "tokens": comparison.tokens,
        "steps": comparison.steps,
        "confidence": 0.95,
        "allowed_differences": {key: list(values) for key, values in comparison.allowed.items()},
        "baseline": comparison.baseline.label,
        "groups": [_group_json(group) for group in comparison.groups],
    }


def _group_json(group: Group) -> dict[str, Any]:
    def interval(value: Interval | None) -> dict[str, Any] | None:
        return None if value is None else value.to_json()

    return {
        "label": group.label,
        "precision": group.precision,
        "runs": [{"source": record.source, "seeds": settings.seed(record)} for record in group.records],
        "final_loss": interval(group.final_loss),
        "final_eval_loss": interval(group.final_eval_loss),
        "loss_gap_nats": interval(group.gap_loss),
        "loss_gap_percent": interval(group.gap_loss_percent),
        "eval_loss_gap_nats": interval(group.gap_eval),
        "eval_loss_gap_percent": interval(group.gap_eval_percent),
        "throughput_ratio": interval(group.throughput),
        "skipped_steps": list(group.skipped),
        "worst_layers": [
            {"layer": layer, "wgrad_relative_error": _number(error)} for layer, error in group.worst_layers
        ],
        "curves": {tag: _line_json(line) for tag, line in group.lines.items()},
        "gap_curves_nats": {tag: _line_json(line) for tag, line in group.gaps.items()},
    }


def _line_json(line: Line) -> dict[str, Any]:
    return {
        "tokens": line.tokens.tolist(),
        "mean": [_number(value) for value in line.mean],
        "half_width": [_number(value) for value in line.half],
    }


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
