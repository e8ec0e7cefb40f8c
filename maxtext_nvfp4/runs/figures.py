"""The figures of a comparison, each as matplotlib draws it."""

import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from maxtext_nvfp4.runs.compare import Comparison, Group, Line
from maxtext_nvfp4.runs.records import EVAL_LOSS, GRADIENT_NORM, LOSS

_COLORS = (
    "#444444",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c564b",
    "#7f7f00",
    "#9467bd",
)
"""Of the groups in their order: told apart in any kind of colour vision (Okabe and Ito), then four more."""

_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, in the reader's own fonts
    "svg.hashsalt": "maxtext-nvfp4",  # the same comparison gives the same file
}

Draw = Callable[[Axes, Comparison], None]


def figures(comparison: Comparison) -> Iterator[tuple[str, str, Figure]]:
    """File name, caption and figure of everything that the runs have data for."""
    for name, caption, draw in _FIGURES:
        with matplotlib.rc_context(_STYLE):
            figure = Figure(figsize=(8, 4.2), layout="constrained")
            axes = figure.subplots()
            draw(axes, comparison)
        if axes.has_data():
            yield name, caption, figure


def to_svg(figure: Figure) -> str:
    """The figure as an element of an HTML page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def write_png(figure: Figure, path: Path) -> None:
    """The figure as a file, 1280 pixels wide."""
    figure.savefig(path, dpi=160, metadata={"Software": None})


def _loss(axes: Axes, comparison: Comparison) -> None:
    for color, group in _colored(comparison):
        _line(axes, group.lines[LOSS], color, group.label)
    _zoom(axes, [group.lines[LOSS] for group in comparison.groups])
    axes.set_ylabel("training loss, nats")
    _tokens(axes)


def _eval_loss(axes: Axes, comparison: Comparison) -> None:
    lines = [(color, group) for color, group in _colored(comparison) if EVAL_LOSS in group.lines]
    for color, group in lines:
        _line(axes, group.lines[EVAL_LOSS], color, group.label, marker="o", markersize=3)
    if lines:
        _zoom(axes, [group.lines[EVAL_LOSS] for _, group in lines])
    axes.set_ylabel("evaluation loss, nats")
    _tokens(axes)


def _gap(tag: str, what: str) -> Draw:
    def draw(axes: Axes, comparison: Comparison) -> None:
        base = comparison.baseline
        gaps = []
        for color, group in _colored(comparison):
            if tag in group.gaps:
                gap = group.gaps[tag]
                scale = 100 / base.lines[tag].mean
                percent = Line(gap.tokens, gap.mean * scale, gap.half * scale)
                marker = {"marker": "o", "markersize": 3} if tag == EVAL_LOSS else {}
                _line(axes, percent, color, group.label, **marker)
                _band(axes, percent, color)
                gaps.append(percent)
        if gaps:
            axes.axhline(0, color=_COLORS[0], linewidth=1)
            _zoom(axes, gaps, gap=True)
        axes.set_ylabel(f"{what} loss above {base.label}, %")
        _tokens(axes)

    return draw


def _final_gap(axes: Axes, comparison: Comparison) -> None:
    gaps = [(color, group.label, group.gap_eval_percent) for color, group in _colored(comparison)]
    names: list[str] = []
    for color, label, gap in gaps:
        if gap is not None:
            place = -len(names)
            names.append(label)
            if math.isfinite(gap.low):
                axes.plot([gap.low, gap.high], [place, place], color=color, linewidth=2)
            axes.plot(gap.mean, place, "|", color=color, markersize=16, markeredgewidth=3)
            axes.plot(gap.values, [place] * len(gap.values), "o", color="white", markeredgecolor=color)
    if names:
        axes.axvline(0, color=_COLORS[0], linewidth=1)
        axes.set_yticks([-place for place in range(len(names))], names)
        axes.set_ylim(0.6 - len(names), 0.6)
    axes.set_xlabel(f"final evaluation loss above {comparison.baseline.label}, %")


def _gradient_norm(axes: Axes, comparison: Comparison) -> None:
    for color, group in _colored(comparison):
        if GRADIENT_NORM in group.lines:
            _line(axes, group.lines[GRADIENT_NORM], color, group.label)
    axes.set_ylabel("gradient norm")
    if axes.has_data():
        axes.set_yscale("log")
    _tokens(axes)


def _throughput(axes: Axes, comparison: Comparison) -> None:
    groups = [(color, group) for color, group in _colored(comparison) if group.throughput]
    for place, (color, group) in enumerate(groups):
        ratio = group.throughput
        assert ratio
        axes.bar(place, ratio.mean, 0.6, color=color)
        axes.plot(
            [place] * len(ratio.values),
            ratio.values,
            "o",
            color="white",
            markeredgecolor="black",
            markersize=5,
        )
        axes.text(place, 0.02, f"{ratio.mean:.2f}", color="white", ha="center", va="bottom")
    if groups:
        axes.axhline(1, color=_COLORS[0], linewidth=1)
        axes.set_xticks(range(len(groups)), [group.label for _, group in groups])
    axes.set_ylabel(f"tokens a second over {comparison.baseline.label}'s")


def _skipped(axes: Axes, comparison: Comparison) -> None:
    if any(any(group.skipped) for group in comparison.groups):
        for place, (color, group) in enumerate(_colored(comparison)):
            axes.bar(place, sum(group.skipped), 0.6, color=color)
        axes.set_xticks(range(len(comparison.groups)), [group.label for group in comparison.groups])
    axes.set_ylabel("skipped steps, all seeds")


def _worst_layers(axes: Axes, comparison: Comparison) -> None:
    bars = [
        (f"{group.label}: {layer}", error, color)
        for color, group in _colored(comparison)
        for layer, error in group.worst_layers
    ]
    for place, (_, error, color) in enumerate(reversed(bars)):
        axes.barh(place, error, 0.7, color=color)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in reversed(bars)])
    axes.set_xlabel("relative error of the weight gradient")


_FIGURES: tuple[tuple[str, str, Draw], ...] = (
    ("eval_loss", "Evaluation loss, mean over seeds", _eval_loss),
    (
        "eval_gap",
        "Evaluation loss above the baseline's, seed by seed, with its 95% interval over seeds",
        _gap(EVAL_LOSS, "evaluation"),
    ),
    (
        "final_gap",
        "Final evaluation loss above the baseline's: the seeds, their mean and its 95% interval",
        _final_gap,
    ),
    ("loss", "Training loss, mean over seeds and over 2% of the tokens around each point", _loss),
    ("loss_gap", "Training loss above the baseline's, likewise", _gap(LOSS, "training")),
    ("gradient_norm", "Gradient norm before clipping, averaged likewise", _gradient_norm),
    (
        "throughput",
        "Throughput over the baseline's on the machine of these runs; points are seeds",
        _throughput,
    ),
    ("skipped_steps", "Steps skipped because a gradient was not finite", _skipped),
    ("worst_layers", "Layers whose weight gradient the 4 bits disturb most", _worst_layers),
)


def _colored(comparison: Comparison) -> list[tuple[str, Group]]:
    return [(_COLORS[index % len(_COLORS)], group) for index, group in enumerate(comparison.groups)]


def _band(axes: Axes, line: Line, color: str) -> None:
    axes.fill_between(
        line.tokens / 1e6, line.mean - line.half, line.mean + line.half, color=color, alpha=0.18, linewidth=0
    )


def _line(axes: Axes, line: Line, color: str, label: str, **style: Any) -> None:
    axes.plot(line.tokens / 1e6, line.mean, color=color, label=label, linewidth=1.4, **style)


def _zoom(axes: Axes, lines: list[Line], *, gap: bool = False) -> None:
    """Shows what follows the first tenth, where every run falls from the same height; of gaps the bands and zero too."""
    ends = [line.mean + side * np.nan_to_num(line.half) * gap for line in lines for side in (-1, 1)]
    later = np.concatenate([end[len(end) // 10 :] for end in ends])
    values = later[np.isfinite(later)]
    if len(values):
        low, high = (min(values.min(), 0), max(values.max(), 0)) if gap else (values.min(), values.max())
        margin = 0.05 * (high - low) or 0.05
        axes.set_ylim(low - margin, high + margin)


def _tokens(axes: Axes) -> None:
    axes.set_xlabel("million tokens")
    if axes.has_data():
        axes.legend()
