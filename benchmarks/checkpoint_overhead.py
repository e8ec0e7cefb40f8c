"""What this plugin adds to a checkpoint's save: the checksum of every array, and the loss scale.

    python benchmarks/checkpoint_overhead.py --json OUT.json

Both runs save through MaxText's `maybe_save_checkpoint`, from one process, in turns, each into a folder of its own. Timed is the call, during which training stands still, and the whole save until the
checkpoint is complete, which goes on beside the next steps. The states are fresh ones: saving does not depend on their
values. What a start adds (comparing recipes, verifying checksums) is not a save's and not timed here.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from maxtext.common import checkpointing
from maxtext.utils import train_utils
from maxtext_step import TrainStep, load
from output import begin, finish, parse, parser, table
from presets import PRESETS
from rounds import cell, interleave, ratios, spread

PROGRAMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "nvfp4": {"quantization": "nvfp4", "nvfp4": {"recipe": "paper"}},
}


class Saver:
    """A run that saves its state again and again.

    Attributes:
      blocked: Seconds for which each save so far held up training.
    """

    def __init__(self, model: dict[str, Any], keys: dict[str, Any], folder: Path):
        checkpoints = {
            "enable_checkpointing": True,
            "checkpoint_period": 1,
            "base_output_directory": str(folder),
        }
        step = TrainStep(load(decoder_block="llama2", scan_layers=True, **checkpoints, **model, **keys))
        self._config, self._state = step.config, jax.block_until_ready(step.initial_state())
        self._manager = train_utils.create_checkpoint_manager(step.config, step.mesh, init_state_fn=None)
        self.blocked: list[float] = []

    def save(self) -> float:
        """Seconds until a checkpoint is complete. The one before it is deleted first."""
        shutil.rmtree(self._last, ignore_errors=True)
        number = len(self.blocked) + 1
        start = time.perf_counter()
        checkpointing.maybe_save_checkpoint(self._manager, self._state, self._config, None, number)
        self.blocked.append(time.perf_counter() - start)
        checkpointing.wait_until_finished(self._manager)
        return time.perf_counter() - start

    @property
    def bytes_on_disk(self) -> int:
        """Of the last checkpoint."""
        return sum(file.stat().st_size for file in self._last.rglob("*") if file.is_file())

    @property
    def _last(self) -> Path:
        return Path(self._config.checkpoint_dir) / str(len(self.blocked))

    def close(self) -> None:
        """Ends the threads that write."""
        self._manager.close()


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__file__, __doc__, rounds=11)
    options.add_argument("--preset", choices=PRESETS, default="cpu")
    arguments = parse(options, argv)
    facts, preset = begin(), "tiny" if arguments.quick else arguments.preset
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        savers = {}
        for name, keys in PROGRAMS.items():
            savers[name] = Saver(PRESETS[preset], keys, Path(folder) / name)
            stack.callback(savers[name].close)
        whole = interleave({name: saver.save for name, saver in savers.items()}, arguments.rounds, warmup=2)
        blocked = {name: saver.blocked[-arguments.rounds :] for name, saver in savers.items()}
        sizes = {name: saver.bytes_on_disk for name, saver in savers.items()}

    programs = {
        name: {
            "blocked_seconds": spread(blocked[name]),
            "blocked_over_stock": ratios(blocked[name], blocked["stock"]),
            "seconds": spread(whole[name]),
            "over_stock": ratios(whole[name], whole["stock"]),
            "bytes_on_disk": sizes[name],
            "all_blocked_seconds": blocked[name],
            "all_seconds": whole[name],
        }
        for name in savers
    }
    rows = [("run", "blocked ms", "over stock (min to max)", "complete ms", "over stock (min to max)", "MB")]
    rows += [
        (
            name,
            f"{1e3 * program['blocked_seconds']['median']:.1f}",
            cell(program["blocked_over_stock"]),
            f"{1e3 * program['seconds']['median']:.1f}",
            cell(program["over_stock"]),
            f"{program['bytes_on_disk'] / 1e6:.3f}",
        )
        for name, program in programs.items()
    ]
    print(f"preset {preset}, {arguments.rounds} rounds\n\n{table(rows)}")
    finish(arguments, facts, {"model": PRESETS[preset], "programs": programs})


if __name__ == "__main__":
    main()
