"""How long a training run takes from the start of its process to the end of its first step.

    python benchmarks/startup_time.py --json OUT.json

Each trial is a process of its own on the same tiny model: MaxText's own program; this plugin's, with stock's BF16
model; and this plugin's in NVFP4, where more is traced and compiled. Timed is from before the process is made
until it says that step 0 is complete: Python's start, imports, configuration, building the model, compiling, the step. Nothing
is taken from a compilation cache, and Python's bytecode is there from the first round on, which is not counted. The
programs take turns.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from output import begin, finish, parse, parser, table
from presets import PRESETS
from rounds import cell, interleave, ratios, spread

STOCK, OURS = ("-m", "maxtext.trainers.pre_train.train"), ("-m", "maxtext_nvfp4", "train")
PROGRAMS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "stock": (STOCK, {}),
    "ours_bf16": (OURS, {}),
    "ours_nvfp4": (OURS, {"quantization": "nvfp4", "nvfp4": {"recipe": "paper"}}),
}
_FIRST = "completed step: 0,"
_KEYS = {
    "base_config": "base.yml",
    "run_name": "startup",
    "decoder_block": "llama2",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "steps": 1,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "log_config": False,
    "jax_cache_dir": "",
}


def start(command: tuple[str, ...], keys: dict[str, Any], folder: Path) -> float:
    """Seconds until a new process has done its first step.

    Raises:
      RuntimeError: It did not; with what it said.
    """
    config = folder / "startup.yml"
    # JSON is YAML.
    config.write_text(json.dumps({**_KEYS, **keys, "base_output_directory": str(folder)}))
    said = []
    begun = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *command, str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "XLA_FLAGS": "--xla_dump_hlo_module_re=none"},
    ) as process:
        assert process.stdout is not None
        done = None
        for line in process.stdout:
            said.append(line)
            if done is None and _FIRST in line:
                done = time.perf_counter()
    if done is None or process.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}:\n{''.join(said)[-4000:]}")
    return done - begun


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__file__, __doc__, rounds=7)
    options.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    arguments = parse(options, argv)
    facts, model = begin(), PRESETS["tiny"]
    names = dict.fromkeys(["stock", *arguments.programs])
    with tempfile.TemporaryDirectory() as folder:

        def trial(name: str) -> float:
            command, keys = PROGRAMS[name]
            seconds = start(command, {**model, **keys}, Path(folder))
            print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)
            return seconds

        trials = {name: lambda name=name: trial(name) for name in names}
        times = interleave(trials, arguments.rounds, warmup=0 if arguments.quick else 1)

    programs = {
        name: {"seconds": spread(spent), "over_stock": ratios(spent, times["stock"]), "all_seconds": spent}
        for name, spent in times.items()
    }
    rows = [("program", "s (min to max)", "over stock (min to max)")]
    rows += [
        (name, cell(program["seconds"], 1), cell(program["over_stock"])) for name, program in programs.items()
    ]
    print(f"{arguments.rounds} rounds\n\n{table(rows)}")
    finish(arguments, facts, {"model": model, "programs": programs})


if __name__ == "__main__":
    main()
