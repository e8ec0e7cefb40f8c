"""Kills a training run again and again and proves that it ends as if nothing had happened.

    python tests/kill_loop.py --kills 20 --out results.json
    python tests/kill_loop.py --kills 20 --processes 2 scan_layers=false

A run is trained once without interruption. Then the same run is killed with SIGKILL at random moments, part of
them while a checkpoint is being written, and started again each time until it is done. Every start must take up
the last complete checkpoint, every step must have the loss of the uninterrupted run, and the last checkpoint its
bits, leaf by leaf.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import whole_runs as runs
import yaml

_DONE = "completed step: "
_SAVING = "Started an asynchronous checkpoint save"
_STEPS_PER_KILL = 15
"""More than a start trains before it is killed, so that the run outlives all kills."""


@dataclasses.dataclass
class Kill:
    """One start and its end.

    Attributes:
      aim: `start` for a moment before the first step, `step` for one between or in steps, `save` for one just
        after a checkpoint save began.
      process: Which of the processes was killed.
      checkpoints_before: Complete checkpoints when it was started.
      resumed_from: The checkpoint it says it took up; None if it had not come so far, or began anew.
      steps_logged: Steps whose loss it logged.
      seconds: From start to kill.
      checkpoints_after: Complete checkpoints it left.
      torn: Checkpoints it left half-written.
      others_ended: Whether the other processes ended by themselves in the time given to them.
    """

    aim: str
    process: int
    checkpoints_before: list[int]
    resumed_from: int | None
    steps_logged: list[int]
    seconds: float
    checkpoints_after: list[int]
    torn: list[str]
    others_ended: bool | None


@dataclasses.dataclass
class Proof:
    """What was compared, all of it bit-identical.

    Attributes:
      kills: Each kill.
      losses: Steps whose losses were compared.
      unlogged: Steps trained by a process that was killed before it wrote the loss.
      leaves: Arrays of the last checkpoint that were compared.
    """

    kills: list[Kill]
    losses: int
    unlogged: list[int]
    leaves: int


def kill_loop(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    kills: int,
    steps: int | None = None,
    processes: int = 1,
    seed: int = 0,
    grace: float = 2.0,
    report: Callable[[Kill], None] = lambda kill: None,
) -> Proof:
    """Runs the proof.

    Args:
      folder: An empty folder.
      settings: MaxText's keys, without those of the run's length and place.
      kills: How often.
      steps: Length of the run.
      processes: How many train together.
      seed: Of the moments.
      grace: Seconds that the other processes have to end by themselves when one is killed.
      report: Called after each kill.

    Raises:
      AssertionError: Something was not as in the uninterrupted run.
    """
    choose = random.Random(seed)
    settings = {"jax_cache_dir": str(folder / "cache"), **settings, "steps": steps or _STEPS_PER_KILL * kills}
    began = time.monotonic()
    reference = runs.start(folder / "whole", settings, "whole", processes=processes)
    _wait_for(reference, _DONE, 1)
    warm_up = time.monotonic() - began  # with an empty compilation cache: longer than any start after it
    reference.wait()
    expected = reference.losses()
    assert sorted(expected) == list(range(settings["steps"]))
    assert len(set(expected.values())) > settings["steps"] // 2, "the data or the state stand still"

    parts, done = folder / "parts", []
    for number in range(kills):
        kill, job = _start_and_kill(parts, settings, f"part{number}", choose, processes, grace, warm_up)
        _check_start(job.said(), kill.checkpoints_before)
        _check_losses(job.losses(), expected)
        done.append(kill)
        report(kill)
    before = runs.checkpoints(parts)
    last = runs.start(parts, settings, "last", processes=processes)
    _check_start(last.wait(), before)
    _check_losses(last.losses(), expected)

    seen = {step for file in parts.glob("*.losses") for step in runs.read_losses(file)}
    ends = [runs.leaves(runs.checkpoint(place)) for place in (folder / "whole", parts)]
    assert not (paths := runs.different(*ends)), f"the last checkpoints differ at {paths}"
    positions = [runs.checkpoint(place) / "iter" for place in (folder / "whole", parts)]
    for file in positions[0].glob("*.json"):
        assert file.read_text() == (positions[1] / file.name).read_text(), f"the data's place differs: {file}"
    return Proof(done, len(seen), sorted(expected.keys() - seen), len(ends[0]))


def _start_and_kill(
    folder: Path,
    settings: Mapping[str, Any],
    name: str,
    choose: random.Random,
    processes: int,
    grace: float,
    warm_up: float,
) -> tuple[Kill, runs.Job]:
    before = runs.checkpoints(folder)
    aim = choose.choices(("start", "step", "save"), (2, 3, 5))[0]
    victim = choose.randrange(processes)
    began = time.monotonic()
    job = runs.start(folder, settings, name, processes=processes)
    try:
        if aim == "start":
            time.sleep(choose.uniform(0, warm_up / 2))
        elif aim == "step":
            _wait_for(job, _DONE, choose.randint(1, 8))
            time.sleep(choose.uniform(0, 0.1))
        else:
            _wait_for(job, _SAVING, choose.randint(1, 2))
            time.sleep(choose.uniform(0, 0.1))
        assert job.processes[victim].poll() is None, (
            f"the run ended before it was killed\n{job.said()[-4000:]}"
        )
        job.processes[victim].kill()
        seconds = time.monotonic() - began
        others = [process for index, process in enumerate(job.processes) if index != victim]
        deadline = time.monotonic() + grace
        while any(process.poll() is None for process in others) and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = all(process.poll() is not None for process in others) if others else None
    finally:
        job.kill()
    return (
        Kill(
            aim=aim,
            process=victim,
            checkpoints_before=before,
            resumed_from=runs.resumed_from(job.said()),
            steps_logged=sorted(job.losses()),
            seconds=round(seconds, 2),
            checkpoints_after=runs.checkpoints(folder),
            torn=runs.torn_checkpoints(folder),
            others_ended=ended,
        ),
        job,
    )


def _wait_for(job: runs.Job, words: str, count: int, timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while job.said().count(words) < count:
        running = all(process.poll() is None for process in job.processes)
        assert running, f"the run ended by itself\n{job.said()[-4000:]}"
        assert time.monotonic() < deadline, f"no {words!r} within {timeout} s\n{job.said()[-4000:]}"
        time.sleep(0.005)


def _check_start(said: str, complete: Sequence[int]) -> None:
    """What a start says of the checkpoint it took up, if it came so far, is the last complete one on disk."""
    if "checkpoint manager exists so trying to load" not in said:
        return
    found = runs.resumed_from(said)
    if found is None and "not restoring checkpoint" not in said:
        return
    assert found == (complete[-1] if complete else None), f"took up {found} of {complete}"


def _check_losses(found: Mapping[int, float], expected: Mapping[int, float]) -> None:
    wrong = {step: (loss, expected[step]) for step, loss in found.items() if loss != expected[step]}
    assert not wrong, f"losses, and those of the uninterrupted run: {wrong}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the proof from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", metavar="N", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--steps", metavar="N", type=int, help=f"default: {_STEPS_PER_KILL} for each kill")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1, help="default: %(default)s")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of the moments; default: %(default)s"
    )
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        default=2.0,
        help="for the other process to end by itself; default: %(default)s",
    )
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="what happened and what was compared")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="MaxText's keys")
    arguments = parser.parse_intermixed_args(argv)
    pairs = (pair.partition("=") for pair in arguments.overrides)
    overrides = {key: yaml.safe_load(value) for key, _, value in pairs}

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        settings = runs.keys(runs.make_corpus(Path(folder) / "corpus"), **runs.QUANTIZED, **overrides)
        proof = kill_loop(
            Path(folder),
            settings,
            kills=arguments.kills,
            steps=arguments.steps,
            processes=arguments.processes,
            seed=arguments.seed,
            grace=arguments.grace,
            report=lambda kill: print(kill, flush=True),
        )
    print(f"{len(proof.kills)} kills: {proof.losses} losses and {proof.leaves} arrays are bit-identical")
    if arguments.out:
        words = sys.argv[1:] if argv is None else argv
        result = {
            "command": f"python tests/kill_loop.py {shlex.join(words)}",
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "maxtext")},
            "cpus": os.cpu_count(),
            "seconds": round(time.monotonic() - began),
            **dataclasses.asdict(proof),
        }
        arguments.out.write_text(_compact(result))
    return 0


def _compact(result: Mapping[str, Any]) -> str:
    """JSON with one line for each kill."""
    kills = ",\n".join(f"  {json.dumps(kill)}" for kill in result["kills"])
    rest = json.dumps({**result, "kills": None}, indent=1)
    return rest.replace('"kills": null', f'"kills": [\n{kills}\n ]') + "\n"


if __name__ == "__main__":
    sys.exit(main())
