"""A comparison as people and programs read it: text, `report.json`, `report.html` and PNG files."""

import json
from importlib import resources
from pathlib import Path

import jinja2

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.runs import settings
from maxtext_nvfp4.runs.compare import Comparison, Group, to_json
from maxtext_nvfp4.runs.intervals import Interval
from maxtext_nvfp4.tables import aligned

_HEADER = (
    "runs",
    "precision",
    "seeds",
    "final eval loss",
    "eval gap, nats",
    "eval gap, %",
    "final train loss",
    "train gap, %",
    "tokens/s ratio",
    "skipped",
)


def write_report(comparison: Comparison, out: Path) -> list[Path]:
    """Writes report.html, report.json and one PNG for each figure.

    Args:
      comparison: What to show.
      out: A folder, made if it is not there; files of the same names are replaced.

    Returns:
      What was written.

    Raises:
      ConfigError: The folder cannot be written.
    """
    # matplotlib takes a second to import, and only reports need it.
    from maxtext_nvfp4.runs.figures import figures, to_svg, write_png

    try:
        out.mkdir(parents=True, exist_ok=True)
        drawn, written = [], []
        for name, caption, figure in figures(comparison):
            drawn.append((caption, to_svg(figure)))
            write_png(figure, out / f"{name}.png")
            written.append(out / f"{name}.png")
        page, data = out / "report.html", out / "report.json"
        page.write_text(_page(comparison, drawn), encoding="utf-8")
        data.write_text(json.dumps(to_json(comparison), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be written ({error.strerror}); write another folder for --out"
        ) from None
    return [page, data, *written]


def to_text(comparison: Comparison) -> str:
    """The table, its columns aligned."""
    rows = [_HEADER, *map(_row, comparison.groups)]
    return "\n".join((*aligned(rows), "", _summary(comparison), *_notes(comparison)))


def _page(comparison: Comparison, drawn: list[tuple[str, str]]) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    template = environment.from_string(resources.files(__package__).joinpath("report.html.j2").read_text())
    labels = [group.label for group in comparison.groups]
    return template.render(
        title=f"{', '.join(labels[1:])} against {labels[0]}",
        summary=_summary(comparison),
        notes=_notes(comparison),
        header=_HEADER,
        rows=[_row(group) for group in comparison.groups],
        figures=drawn,
        runs=[
            (record.name, record.source, settings.seed(record))
            for group in comparison.groups
            for record in group.records
        ],
    )


def _row(group: Group) -> tuple[str, ...]:
    def show(value: Interval | None, digits: int, unit: str = "") -> str:
        return "-" if value is None else value.to_text(digits, unit)

    def level(value: Interval | None) -> str:
        return "-" if value is None else f"{value.mean:.4f}"

    return (
        group.label,
        group.precision,
        str(len(group.records)),
        level(group.final_eval_loss),
        show(group.gap_eval, 4),
        show(group.gap_eval_percent, 2, "%"),
        level(group.final_loss),
        show(group.gap_loss_percent, 2, "%"),
        "-" if group.throughput is None else f"{group.throughput.mean:.2f}",
        str(sum(group.skipped)),
    )


def _summary(comparison: Comparison) -> str:
    seeds = len(comparison.baseline.records)
    return (
        f"After {comparison.tokens / 1e6:.2f} million tokens ({comparison.steps} steps), {seeds} "
        f"seed{'s' if seeds > 1 else ''}. Gaps are to {comparison.baseline.label}, seed by seed, with 95% intervals over seeds "
        "in brackets; the final training loss is the mean of the last 5% of the steps."
    )


def _notes(comparison: Comparison) -> list[str]:
    notes = []
    if len(comparison.baseline.records) == 1:
        notes.append("One seed: nothing tells how much of a gap is chance, so no interval is given.")
    elif any(len(group.records) < 3 for group in comparison.groups):
        notes.append(
            "Two seeds give intervals so wide that they rarely decide anything; three or more do better."
        )
    notes += [
        f"The runs also differ in {key}: {mine} and {theirs}."
        for key, (mine, theirs) in comparison.allowed.items()
        if key not in settings.SEEDS
    ]
    return notes
