"""Trains the runs of a comparison one after another, each in a process of its own, and goes on where it was stopped."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml  # type: ignore[import-untyped]

from maxtext_nvfp4.errors import STOPPED_STATUS, ConfigError, TrainingError
from maxtext_nvfp4.runs.records import Record, read_run, write_record

_STEP = re.compile(r"completed step: (\d+), seconds: ([0-9.]+).* loss: ([0-9.]+|nan|inf)")
_SHOWN_LINES = 12
_STOPPED = 75
"""Exit status of a run that a signal stopped: EX_TEMPFAIL, which no other end of a run has."""

Keys = Mapping[str, Any]
"""The config of one run, its run_name among them."""


def train_twins(twins: Sequence[Keys], out: Path) -> list[Record]:
    """Trains every run that is not complete, and keeps a record of each.

    Below `out` lie `configs/<name>.yml`, `logs/<name>.log`, MaxText's `runs/<name>/` and `records/<name>.json`; a run with
    a record is complete. One that was stopped goes on from its last checkpoint.

    Raises:
      ConfigError: The folder has runs of other keys, is in use, or cannot be written; or a run refused its config.
      TrainingError: A run failed.
    """
    with _alone(out) as lock:
        _write_configs(twins, out)
        records = []
        for place, keys in enumerate(twins, 1):
            name = keys["run_name"]
            path = out / "records" / f"{name}.json"
            head = f"[{place}/{len(twins)}] {name}"
            if path.exists():
                print(f"{head}: complete", flush=True)
            else:
                _train(keys, out, head, lock)
                path.parent.mkdir(exist_ok=True)
                write_record(read_run(out / "runs" / name), path)
            records.append(read_run(path))
    return records


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[int]:
    """Holds the folder's lock. The runs inherit it, so that one that outlives a killed parent still holds it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be written ({error.strerror}); write another folder for --out"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"{out}: another process is training there; wait for it, or write another --out"
        ) from None
    try:
        yield lock
    finally:
        os.close(lock)


def _write_configs(twins: Sequence[Keys], out: Path) -> None:
    folder = out / "configs"
    folder.mkdir(exist_ok=True)
    texts = {
        folder / f"{keys['run_name']}.yml": yaml.safe_dump(dict(keys), sort_keys=False) for keys in twins
    }
    for path, text in texts.items():
        if path.exists() and path.read_text() != text:
            changed = _changed(yaml.safe_load(path.read_text()), yaml.safe_load(text))
            raise ConfigError(
                f"{path} was written for other keys: {changed}\nwhat was trained with them would not compare; write another "
                "folder for --out, or the keys of before"
            )
    for path, text in texts.items():
        path.write_text(text)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in keys)


def _train(keys: Keys, out: Path, head: str, lock: int) -> None:
    name = keys["run_name"]
    log = out / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "maxtext_nvfp4", "train", str(out / "configs" / f"{name}.yml")]
    with log.open("a", buffering=1) as file:  # by lines, for those who watch it
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, STOPPED_STATUS: str(_STOPPED)},
            pass_fds=(lock,),
            start_new_session=True,  # a terminal's Ctrl-C comes from here, as the signal that a run saves at
        )
        with _passing_signals(child):
            _follow(child, file, head, int(keys["steps"]))
            status = child.wait()
    if status == _STOPPED:
        raise TrainingError(f"{name}: stopped, its state is saved; run the same command again to go on")
    if status:
        tail = "\n".join(log.read_text().splitlines()[-_SHOWN_LINES:])
        error = ConfigError if status == 2 else TrainingError
        raise error(f"{name}: the run ended with exit status {status}; the end of {log}:\n{tail}")


@contextlib.contextmanager
def _passing_signals(child: subprocess.Popen[str]) -> Iterator[None]:
    """SIGTERM and Ctrl-C reach the run, which saves a checkpoint and ends."""

    def send(number: int, frame: object) -> None:
        child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, send) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(child: subprocess.Popen[str], log: TextIO, head: str, steps: int) -> None:
    """Copies a run's output to its log, and shows how far it is."""
    live = sys.stdout.isatty()
    shown, begun = time.monotonic(), None
    assert child.stdout
    print(f"{head}: starting", flush=True)
    for line in child.stdout:
        log.write(line)
        if not (match := _STEP.search(line)):
            continue
        last, now = int(match[1]), time.monotonic()
        begun = begun or (last, now)
        if last == steps - 1 or now - shown > (1 if live else 20):
            shown = now
            done = last - begun[0]
            left = f", {_duration((now - begun[1]) / done * (steps - 1 - last))} left" if done else ""
            text = f"{head}: step {last + 1}/{steps}, loss {match[3]}{left}"
            print(f"\r{text:79}" if live else text, end="" if live and last < steps - 1 else "\n", flush=True)


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
