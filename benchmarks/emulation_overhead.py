"""What emulated NVFP4 costs: training-step time against stock MaxText in BF16 and in float32.

    python benchmarks/emulation_overhead.py --rounds 15 --json OUT.json
    python benchmarks/emulation_overhead.py --preset h200 --json OUT.json      on a GPU

All programs are compiled first, in one process. Then they take turns, one step each, round after round, so that
whatever else the machine does falls on all of them; a ratio is the median of the ratios within the rounds, with
the smallest and largest beside it. Timed is one call of MaxText's whole training step (forward and backward
pass, AdamW, metrics), jitted and with the state donated as in training, until its results are ready. Batches
stay on the device.

Programs: stock in BF16; stock with dtype=float32; this plugin's backends `emulated` and `xla`, with the recipe
`all_layers` so that no layer is spared; and MaxText's own emulation of FP4 through Qwix (quantization=fp4,
use_qwix_quantization=true), which has one scale per channel, no transform and no stochastic rounding.

A BF16 step is a fair yardstick only where the hardware multiplies BF16 well. On CPUs with AMX, XLA's fast path
needs the contracted axis last; stock's weight gradients contract the first and fall off it, so float32 may be
the faster of the two.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from maxtext_step import TrainStep, header, load, machine, table

_NVFP4 = {"quantization": "nvfp4"}
PROGRAMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "float32": {"dtype": "float32"},
    "emulated": {**_NVFP4, "nvfp4": {"recipe": "all_layers", "backend": "emulated"}},
    "xla": {**_NVFP4, "nvfp4": {"recipe": "all_layers", "backend": "xla"}},
    "qwix_fp4": {"quantization": "fp4", "use_qwix_quantization": True},
}
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "base_emb_dim": 512,
        "base_mlp_dim": 1536,
        "base_num_decoder_layers": 4,
        "base_num_query_heads": 8,
        "base_num_kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 2048,
        "max_target_length": 256,
        "per_device_batch_size": 8,
    },
    # Layers of Llama 3 8B on one GPU of 140 GB.
    "h200": {
        "base_emb_dim": 4096,
        "base_mlp_dim": 14336,
        "base_num_decoder_layers": 2,
        "base_num_query_heads": 32,
        "base_num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_target_length": 4096,
        "per_device_batch_size": 1,
    },
}


class Runner:
    """A compiled program with its state and batch."""

    def __init__(self, model: dict[str, Any], keys: dict[str, Any], *, sampled: bool = False):
        step = TrainStep(load(decoder_block="llama2", scan_layers=True, **model, **keys))
        lowered = step.lower(sampled)
        start = time.perf_counter()
        self._compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        self._state, self._batch = step.initial_state(), step.batch()
        jax.block_until_ready((self._state, self._batch))

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self._state, self._metrics = self._compiled(self._state, self._batch)
        jax.block_until_ready((self._state, self._metrics))
        return time.perf_counter() - start

    @property
    def loss(self) -> float:
        """The loss of the last step: that something was trained."""
        return float(self._metrics["scalar"]["learning/loss"])


def interleave(runners: dict[str, Runner], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Step times of each program; the rounds of warm-up are not kept."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(warmup + rounds):
        for name, runner in runners.items():
            seconds = runner.step()
            if number >= warmup:
                times[name].append(seconds)
    return times


def ratios(times: Sequence[float], yardstick: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest ratio within a round."""
    found = [a / b for a, b in zip(times, yardstick, strict=True)]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def _cell(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--rounds", type=int, default=11, metavar="N")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="rounds that are not counted")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result as JSON")
    arguments = parser.parse_args()
    facts, model = machine(), PRESETS[arguments.preset]
    print(header(facts))
    runners = {}
    for name in dict.fromkeys(["bf16", "float32", *arguments.programs]):
        runners[name] = Runner(model, PROGRAMS[name])
        print(f"{name}: compiled in {runners[name].compile_seconds:.1f} s", file=sys.stderr)
    times = interleave(runners, arguments.rounds, arguments.warmup)

    programs = {
        name: {
            "seconds": {"median": statistics.median(spent), "min": min(spent), "max": max(spent)},
            "over_bf16": ratios(spent, times["bf16"]),
            "over_float32": ratios(spent, times["float32"]),
            "compile_seconds": runners[name].compile_seconds,
            "loss": runners[name].loss,
            "all_seconds": spent,
        }
        for name, spent in times.items()
    }
    rows = [("program", "step ms", "over bf16 (min to max)", "over float32 (min to max)", "loss")]
    rows += [
        (
            name,
            f"{1e3 * program['seconds']['median']:.1f}",
            _cell(program["over_bf16"]),
            _cell(program["over_float32"]),
            f"{program['loss']:.4f}",
        )
        for name, program in programs.items()
    ]
    print(f"preset {arguments.preset}, {arguments.rounds} rounds\n\n{table(rows)}")
    after = machine()["load_average"]
    print(f"\nload average after: {' '.join(map(str, after))}")
    if arguments.json:
        result = {
            "command": sys.argv,
            "machine": {**facts, "load_average_after": after},
            "model": model,
            "rounds": arguments.rounds,
            "programs": programs,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
