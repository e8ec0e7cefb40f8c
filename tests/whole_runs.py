"""Whole training runs in processes of their own, with this plugin or with MaxText alone, and what they leave on disk."""

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import yaml
from maxtext_models import BASE, TINY

from maxtext_nvfp4 import corpus

OURS = "maxtext_nvfp4"
STOCK = "maxtext.trainers.pre_train.train"

QUANTIZED = {
    "quantization": "nvfp4",
    # A scale that grows every few steps, so that a checkpoint which lost its state would differ.
    "nvfp4": {"recipe": "all_layers", "loss_scale": {"init": 1024, "growth_interval": 3}},
}
"""Every layer in 4 bits, gradients rounded stochastically, the loss scale in motion."""

_COORDINATOR_PORT = 1234  # MaxText's, on CPUs


def make_corpus(out: Path) -> Path:
    """A data set of nonsense sentences, in as many files as two processes need."""
    choose = random.Random(0)
    words = ["".join(choose.choices("abcdefghij", k=choose.randint(2, 7))) for _ in range(60)]
    texts = out.with_name("texts")
    texts.mkdir(parents=True)
    for number in range(40):
        lines = (" ".join(choose.choices(words, k=8)) for _ in range(40))
        (texts / f"{number}.txt").write_text("\n".join(lines))
    corpus.build([texts], out, corpus.Options(vocab_size=400, holdout=0.2, record_tokens=32))
    return out


def keys(data: Path, **others: Any) -> dict[str, Any]:
    """MaxText's keys of a tiny model that reads a corpus through grain and saves often."""
    return {
        **TINY,
        "base_config": BASE,
        "vocab_size": 400,
        "dataset_type": "grain",
        "grain_file_type": "tfrecord",
        "grain_worker_count": 0,
        "dataset_name": "corpus:1.0.0",
        "dataset_path": str(data),
        "tokenizer_type": "sentencepiece",
        "tokenizer_path": str(data / corpus.TOKENIZER),
        "num_epoch": 1000,
        "enable_checkpointing": True,
        "async_checkpointing": True,
        "save_checkpoint_on_start": False,
        "checkpoint_period": 3,
        "max_num_checkpoints_to_keep": 3,
        "learning_rate_schedule_steps": 1000,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        **others,
    }


_RESTORE = """
import sys
import jax
import numpy as np
program, config, out, *overrides = sys.argv[1:]
if program == "maxtext_nvfp4":
    import maxtext_nvfp4
    maxtext_nvfp4.register()
from absl import logging
logging.set_verbosity(logging.INFO)
from flax import nnx
from maxtext.common import train_state_nnx
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils
settings, recorder = train.initialize(["", config, *overrides])
*_, state = train_utils.setup_train_loop(settings, recorder)
tree = train_state_nnx.to_checkpoint_dict(nnx.state(state))
tree["nnx_aux"] = tree["nnx_aux"].get("model", {}).get("nvfp4_loss_scale", {})
flat, _ = jax.tree.flatten_with_path(tree)
np.savez(out, **{jax.tree_util.keystr(where, simple=True, separator="/"): leaf for where, leaf in flat})
"""
"""Sets up a run as its program does and writes down the state."""


@dataclasses.dataclass
class Job:
    """The processes of one start of a run.

    Attributes:
      processes: One of them, or two that train together.
      log: What the first one prints.
      losses_file: Where it writes its metrics.
    """

    processes: list[subprocess.Popen[bytes]]
    log: Path
    losses_file: Path

    def said(self) -> str:
        """What the first process has printed so far."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float = 600) -> str:
        """Waits for the end, which must be a good one; returns what was printed."""
        try:
            codes = [process.wait(timeout) for process in self.processes]
        finally:
            self.kill()
        assert not any(codes), f"exit {codes}\n{self.said()[-6000:]}"
        return self.said()

    def kill(self) -> None:
        """Ends what still runs, as a scheduler ends a job one of whose processes is gone."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()

    def losses(self) -> dict[int, float]:
        """The loss of each step that it has written."""
        return read_losses(self.losses_file)


def read_losses(file: Path) -> dict[int, float]:
    """The float32 loss of each step in a file of metrics; a process killed while it wrote leaves half a line."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {int(record["step"]): float(record["learning/loss"]) for record in records}


def start(
    folder: Path,
    settings: Mapping[str, Any],
    name: str,
    *,
    program: str = OURS,
    processes: int = 1,
    devices: int = 1,
    restore: bool = False,
) -> Job:
    """Starts a run, or takes it up again.

    Args:
      folder: Where everything goes; the run itself to `folder/run`.
      settings: Its YAML.
      name: Of this start's log, YAML and losses.
      program: `OURS` or `STOCK`.
      processes: How many train together.
      devices: CPU devices of each.
      restore: Whether only to set up the run and to write its state to `folder/name.npz`.
    """
    losses_file = folder / f"{name}.losses"
    settings = {
        **settings,
        "base_output_directory": str(folder),
        "run_name": "run",
        "skip_jax_distributed_system": processes == 1,
        "jax_distributed_initialization_timeout": 120,
    }
    config = folder / f"{name}.yml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(settings))
    command = ["-m", program, *(["train"] if program == OURS else []), str(config)]
    if restore:
        command = ["-c", _RESTORE, program, str(config), str(folder / f"{name}.npz")]
    if processes > 1:
        _wait_for_port()
    jobs = []
    for index in range(processes):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        if processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": "localhost",
                "JOB_INDEX": "0",
                "JOB_COMPLETION_INDEX": str(index),
                "PROCESSES_IN_JOB": str(processes),
                "JAX_PROCESS_COUNT": str(processes),
            }
        suffix = f".{index}" if index else ""
        metrics = f"metrics_file={losses_file}{suffix}"
        with (folder / f"{name}{suffix}.log").open("wb") as log:
            jobs.append(
                subprocess.Popen(
                    [sys.executable, *command, metrics],
                    env=environment,
                    cwd=folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return Job(jobs, folder / f"{name}.log", losses_file)


def train(folder: Path, settings: Mapping[str, Any], name: str, **how: Any) -> tuple[str, dict[int, float]]:
    """Runs to the end; returns what was printed and the losses."""
    job = start(folder, settings, name, **how)
    return job.wait(), job.losses()


def restored(
    folder: Path, settings: Mapping[str, Any], name: str, **how: Any
) -> tuple[str, dict[str, np.ndarray]]:
    """What a program has in memory before its first step: it sets up everything, and trains nothing.

    Returns:
      What it printed, and its arrays as `leaves`, of `nnx_aux` the loss scale alone.
    """
    job = start(folder, settings, name, restore=True, **how)
    said = job.wait()
    with np.load(folder / f"{name}.npz") as arrays:
        return said, dict(arrays)


def start_pods(
    launch: Path, logs: Path, arguments: Callable[[int], Sequence[object]], **environment: str
) -> list[subprocess.Popen[bytes]]:
    """Starts scripts/launch.sh in two processes with the variables of an Indexed Job's pods.

    Args:
      launch: The script, of a checkout that is the processes' working directory.
      logs: Folder for what pod N prints, as `pod-N.log`.
      arguments: The script's, by the number of the pod.
      environment: More variables.
    """
    port = free_port()
    pods = []
    for pod in range(2):
        described = {
            "JOB_COMPLETION_INDEX": str(pod),
            "PODS_IN_JOB": "2",
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_PLATFORMS": "cpu",
            **environment,
        }
        with (logs / f"pod-{pod}.log").open("wb") as log:
            pods.append(
                subprocess.Popen(
                    [launch, *map(str, arguments(pod))],
                    cwd=launch.parents[1],
                    env={**os.environ, **described},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return pods


def free_port() -> int:
    """A port that nothing on this machine listens at."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_port(timeout: float = 120) -> None:
    """MaxText's coordinator has a fixed port, which another job on this machine may hold."""
    deadline = time.monotonic() + timeout
    while True:
        with socket.socket(socket.AF_INET6) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("::", _COORDINATOR_PORT))
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.5)


def checkpoints(folder: Path) -> list[int]:
    """Steps of the run's complete checkpoints: Orbax renames a folder to its step once all of it is written."""
    root = folder / "run" / "checkpoints"
    return sorted(int(path.name) for path in root.glob("*") if path.name.isdigit())


def torn_checkpoints(folder: Path) -> list[str]:
    """Names of what a killed process left half-written where the run's checkpoints are."""
    root = folder / "run" / "checkpoints"
    return sorted(path.name for path in root.glob("*") if not path.name.isdigit())


def checkpoint(folder: Path, step: int | None = None) -> Path:
    """Folder of one of them, by default the last."""
    step = checkpoints(folder)[-1] if step is None else step
    return folder / "run" / "checkpoints" / str(step)


def leaves(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint as they are on disk, by path; an empty array where there is a place but no array."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path / "items").item_metadata.tree
        arguments = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        tree = checkpointer.restore(path / "items", restore_args=arguments)
    flat, _ = jax.tree.flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {
        jax.tree_util.keystr(where, simple=True, separator="/"): np.zeros(0)
        if leaf is None
        else np.asarray(leaf)
        for where, leaf in flat
    }


def part(arrays: Mapping[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    """Those below `params`, `opt_state`, `step` or `nnx_aux`."""
    return {path: array for path, array in arrays.items() if path.split("/")[0] in names}


def structure(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path, shape and dtype of each."""
    return {path: (array.shape, str(array.dtype)) for path, array in arrays.items()}


def different(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[str]:
    """Paths whose arrays are not bit-identical, or that only one side has."""
    return [
        path
        for path in sorted(a.keys() | b.keys())
        if path not in a
        or path not in b
        or a[path].dtype != b[path].dtype
        or a[path].shape != b[path].shape
        or a[path].tobytes() != b[path].tobytes()
    ]


def resumed_from(said: str) -> int | None:
    """Step of the checkpoint that a start says it took up; None if it began anew."""
    found = [line for line in said.splitlines() if "restoring from this run's directory step " in line]
    return int(found[-1].rsplit(" ", 1)[1]) if found else None
