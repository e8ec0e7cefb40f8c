"""Writes RESULTS.md from the files in results/.

python benchmarks/results_page.py            writes the page
python benchmarks/results_page.py --check    exits with 1 if the page is not what the files give
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rounds import cell

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "RESULTS.md", HERE / "results"

_HEAD = """\
# Results

Written by `benchmarks/results_page.py` from the files in `results/`, which hold every single measurement. A ratio is the
median of the ratios within the rounds, the smallest and the largest beside it; [README.md](README.md) says what is inside
the timed region.
"""

type Result = Mapping[str, Any]


def quantize_throughput(result: Result) -> str:
    """Cases against the memory and against peers."""
    tokens, features = result["shape"]
    peers = ", ".join(f"{name} {found or 'not installed'}" for name, found in result["peers"].items())
    parts = [f"{tokens} tokens, {features} features, BF16. Peers: {peers}."]
    ours, behind = "maxtext-nvfp4", []
    for case, figures in result["cases"].items():
        rows = [
            ("", "ms", "Gelements/s", "GB/s", "time over ours", "over a copy", "scales and codes as ours")
        ]
        for name, row in figures.items():
            same = row["agreement"]
            rows.append(
                (
                    name,
                    f"{1e3 * row['seconds']['median']:.2f}",
                    f"{row['elements_per_second'] / 1e9:.3f}",
                    f"{row['gigabytes_per_second']:.2f}",
                    cell(row["over_ours"]),
                    f"{row['over_copy']['median']:.1f}",
                    f"{same['equal_scales']:.4%}, {same['equal_codes']:.4%}" if same else "",
                )
            )
        parts.append(f"`{case}`\n\n{_table(rows)}")
        behind += [
            f"{name} at {case}"
            for name, row in figures.items()
            if name not in (ours, f"{ours}, operand", "copy") and row["over_ours"]["median"] < 1
        ]
    faster = f"; faster: {', '.join(behind)}" if behind else ""
    parts.append(_goal(f"no peer is faster in any case{faster}", met=not behind))
    return "\n\n".join(parts)


def emulation_overhead(result: Result) -> str:
    """Training steps against stock."""
    rows = [("program", "step, ms", "over BF16", "over FP32", "compiled in s")]
    rows += [
        (
            name,
            f"{1e3 * program['seconds']['median']:.1f}",
            cell(program["over_bf16"]),
            cell(program["over_float32"]),
            f"{program['compile_seconds']:.1f}",
        )
        for name, program in result["programs"].items()
    ]
    parts = [_table(rows)]
    if result["machine"]["devices"] == ["cpu"]:
        for yardstick, limit in (("bf16", 0.6), ("float32", 1.2)):
            ratio = result["programs"]["emulated"][f"over_{yardstick}"]
            words = f"`emulated` over {yardstick} at most {limit}: {cell(ratio)}"
            parts.append(_goal(words, met=ratio["median"] <= limit))
    return "\n\n".join(parts)


def telemetry_overhead(result: Result) -> str:
    """Steps with telemetry against steps without it."""
    rows = [("step", "ms", "over a run without telemetry")]
    rows += [
        (name, f"{1e3 * step['seconds']['median']:.1f}", cell(step["over_off"], 3))
        for name, step in result["steps"].items()
    ]
    same = "the same text" if result["same_program_between_samples"] else "ANOTHER TEXT"
    share = (result["steps"]["sampled"]["over_off"]["median"] - 1) / result["every"]
    return (
        f"{_table(rows)}\n\nBetween samples the program is {same} as without telemetry; a sample every {result['every']} steps "
        f"costs {share:.2%} of a run."
    )


def checkpoint_overhead(result: Result) -> str:
    """Saves against stock's."""
    rows = [("run", "training stands still, ms", "over stock", "complete after ms", "over stock", "MB")]
    rows += [
        (
            name,
            f"{1e3 * program['blocked_seconds']['median']:.0f}",
            cell(program["blocked_over_stock"]),
            f"{1e3 * program['seconds']['median']:.0f}",
            cell(program["over_stock"]),
            f"{program['bytes_on_disk'] / 1e6:.1f}",
        )
        for name, program in result["programs"].items()
    ]
    return _table(rows)


def startup_time(result: Result) -> str:
    """Starts against stock's."""
    rows = [("program", "s", "over stock")]
    rows += [
        (name, cell(program["seconds"], 1), cell(program["over_stock"]))
        for name, program in result["programs"].items()
    ]
    return _table(rows)


def compile_scaling(result: Result) -> str:
    """Growth with depth against stock's."""
    rows = [("program", "layers", "compile time", "memory", "compile time over BF16's", "memory over BF16's")]
    keys = ("compile_growth", "temp_growth", "compile_growth_over_bf16", "temp_growth_over_bf16")
    rows += [
        (row["program"], str(row["layers"]), *(f"{row[key]:.2f}" for key in keys)) for row in result["growth"]
    ]
    goals = [
        _goal(f"{goal} at most {found['limit']}: {found['value']:.2f}", met=found["met"])
        for goal, found in result["goals"].items()
    ]
    return "\n\n".join([_table(rows), *goals])


SECTIONS: dict[str, tuple[str, Callable[[Result], str]]] = {
    "quantize_throughput": ("Quantization", quantize_throughput),
    "emulation_overhead": ("A training step", emulation_overhead),
    "telemetry_overhead": ("Telemetry", telemetry_overhead),
    "checkpoint_overhead": ("Saving a checkpoint", checkpoint_overhead),
    "startup_time": ("Starting", startup_time),
    "compile_scaling": ("Growth with depth", compile_scaling),
}


def page(folder: Path) -> str:
    """The page of the results in a folder."""
    parts = [_HEAD]
    for name, (title, section) in SECTIONS.items():
        for path in sorted(folder.glob(f"{name}_*.json")):
            result = json.loads(path.read_text())
            label = path.stem.removeprefix(f"{name}_")
            parts.append(f"## {title} ({label})\n\n{_circumstances(result)}\n\n{section(result)}\n")
    return "\n".join(parts)


def _circumstances(result: Result) -> str:
    facts = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    loads = [facts[key][0] for key in ("load_average", "load_average_after") if key in facts]
    return (
        f"`python {shlex.join(result['command'])}`, {result['rounds']} rounds, on {len(facts['devices'])} x "
        f"{facts['devices'][0]}; {facts['cpu']}, {facts['cores']} cores, {' '.join(facts['flags'])}; load average "
        f"{' to '.join(map(str, loads))}; "
        f"{versions}."
    )


def _goal(words: str, met: bool) -> str:
    return f"Goal: {words}. {'Met' if met else '**Missed**'}."


def _table(rows: list[tuple[str, ...]]) -> str:
    ruler = ("---", *("---:" for _ in rows[0][1:]))
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ruler, *rows[1:]))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--check", action="store_true")
    arguments = options.parse_args()
    wanted = page(RESULTS)
    if not arguments.check:
        PAGE.write_text(wanted)
    elif not PAGE.exists() or PAGE.read_text() != wanted:
        sys.exit(f"{PAGE.name} is not what results/ gives; run python benchmarks/results_page.py")


if __name__ == "__main__":
    main()
