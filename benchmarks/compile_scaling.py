"""How compile time and temporary memory of MaxText's training step grow with depth.

    python benchmarks/compile_scaling.py --json OUT.json

MaxText scans its decoder layers, so one layer is compiled whatever the depth. The recipe must keep that true:
with layers of two precisions (`paper`: the last 15% in BF16) the program has both kinds and a choice between
them, not one body for each layer. Three programs are compared: stock MaxText in BF16, NVFP4 in every layer
(`all_layers`), and `paper`. Widths are tiny, so that nearly all the time is the compiler's.

Measured: seconds to trace and lower; seconds in XLA by the clock and by the processor (all threads), each the
smallest over the rounds, which interleave the programs; and `memory_analysis().temp_size_in_bytes`, which holds
the activations saved for the backward pass. Nothing is executed. Growth is a value divided by the one of the
shallowest model; a ratio of growths compares a program's with stock's. That of compile time is taken from
processor seconds, which other work on the machine hardly touches.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from maxtext_step import TrainStep, load
from output import begin, finish, parse, parser, table
from presets import PRESETS

MODEL = {**PRESETS["tiny"], "decoder_block": "llama2", "scan_layers": True}
PROGRAMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "all_layers": {"quantization": "nvfp4", "nvfp4": {"recipe": "all_layers"}},
    "paper": {"quantization": "nvfp4", "nvfp4": {"recipe": "paper"}},
}
GOALS = {
    "growth of compile time over stock's": 1.5,
    "growth of memory over stock's": 1.5,
    "paper's memory over all_layers'": 1.1,
}


_TIME = "compile_processor_seconds"


def measure(layers: int, keys: dict[str, Any]) -> dict[str, float]:
    """Compiles one program."""
    step = TrainStep(load(**{**MODEL, **keys, "base_num_decoder_layers": layers}))
    start = time.perf_counter()
    lowered = step.lower()
    middle, processor = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    return {
        "lower_seconds": middle - start,
        "compile_seconds": time.perf_counter() - middle,
        "compile_processor_seconds": time.process_time() - processor,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def collect(depths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Compiles every program at every depth in every round; one record for each pair."""
    seen: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    measure(depths[0], PROGRAMS["bf16"])  # starts the compiler's threads and fills JAX's caches
    for number in range(rounds):
        for layers in depths:
            for name, keys in PROGRAMS.items():
                print(f"round {number + 1} of {rounds}: {name}, {layers} layers", file=sys.stderr)
                seen[layers, name].append(measure(layers, keys))
    return [
        {
            "program": name,
            "layers": layers,
            **{key: min(run[key] for run in runs) for key in runs[0]},
            "rounds": runs,
        }
        for (layers, name), runs in seen.items()
    ]


def growths(records: list[dict[str, Any]], depths: Sequence[int]) -> list[dict[str, Any]]:
    """Growth of each program from the shallowest model, over the growth of stock."""
    by = {(record["program"], record["layers"]): record for record in records}

    def growth(name: str, layers: int, key: str) -> float:
        return by[name, layers][key] / by[name, depths[0]][key]

    return [
        {
            "program": name,
            "layers": layers,
            "compile_growth": growth(name, layers, _TIME),
            "temp_growth": growth(name, layers, "temp_bytes"),
            "compile_growth_over_bf16": growth(name, layers, _TIME) / growth("bf16", layers, _TIME),
            "temp_growth_over_bf16": growth(name, layers, "temp_bytes")
            / growth("bf16", layers, "temp_bytes"),
            "temp_over_all_layers": by[name, layers]["temp_bytes"] / by["all_layers", layers]["temp_bytes"],
        }
        for name in PROGRAMS
        for layers in depths
    ]


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__file__, __doc__, rounds=3)
    options.add_argument(
        "--layers", type=int, nargs="+", metavar="N", help="default 4 16 64 126; 2 8 if quick"
    )
    arguments = parse(options, argv)
    depths = arguments.layers or ([2, 8] if arguments.quick else [4, 16, 64, 126])
    facts = begin()
    records = collect(depths, arguments.rounds)
    growth = growths(records, depths)

    rows = [("program", "layers", "lower s", "compile s", "processor s", "temp MB")]
    rows += [
        (
            record["program"],
            str(record["layers"]),
            f"{record['lower_seconds']:.2f}",
            f"{record['compile_seconds']:.2f}",
            f"{record[_TIME]:.2f}",
            f"{record['temp_bytes'] / 1e6:.3f}",
        )
        for record in sorted(records, key=lambda record: list(PROGRAMS).index(record["program"]))
    ]
    print(f"\n{table(rows)}\n")
    rows = [("growth", "layers", "compile", "temp", "compile/bf16", "temp/bf16", "temp/all_layers")]
    rows += [
        (row["program"], str(row["layers"]), *(f"{value:.2f}" for value in list(row.values())[2:]))
        for row in growth
    ]
    print(table(rows))
    goals = judged(growth)
    print()
    for goal, found in goals.items():
        print(
            f"{goal}: at most {found['value']:.2f}; "
            f"goal {found['limit']}: {'met' if found['met'] else 'MISSED'}"
        )
    finish(arguments, facts, {"model": MODEL, "programs": records, "growth": growth, "goals": goals})


def judged(growth: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each goal with the largest of what it limits, over all depths."""
    ours = [row for row in growth if row["program"] != "bf16"]
    paper = [row for row in growth if row["program"] == "paper"]
    values = (
        max(row["compile_growth_over_bf16"] for row in ours),
        max(row["temp_growth_over_bf16"] for row in ours),
        max(row["temp_over_all_layers"] for row in paper),
    )
    return {
        goal: {"limit": limit, "value": value, "met": value <= limit}
        for (goal, limit), value in zip(GOALS.items(), values, strict=True)
    }


if __name__ == "__main__":
    main()
