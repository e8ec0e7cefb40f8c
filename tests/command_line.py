"""Runs of the tiny model through the command line, each in a process of its own."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxtext_models import BASE, TINY

RUN = {
    **TINY,
    "base_config": BASE,
    "quantization": "nvfp4",
    "nvfp4": {"recipe": "all_layers"},
    "enable_checkpointing": True,
    "checkpoint_period": 2,
}
"""Keys of a run that keeps a checkpoint every second step."""


def start(folder: Path, *arguments: str, environment: dict[str, str] | None = None, **keys: Any) -> Any:
    """Starts `train` on the tiny model; the run's files come to lie in `folder / "out" / "tiny"`."""
    # JSON is YAML.
    config = folder / "tiny.yml"
    config.write_text(json.dumps({**RUN, "base_output_directory": str(folder / "out"), **keys}))
    return subprocess.Popen(
        [sys.executable, "-m", "maxtext_nvfp4", "train", str(config), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(folder: Path, *arguments: str, status: int = 0, **keys: Any) -> str:
    """Trains to the end and returns what was printed; checks the exit status."""
    process = start(folder, *arguments, **keys)
    said: str = process.communicate(timeout=600)[0]
    assert process.returncode == status, said[-4000:]
    return said


def start_two(folder: Path, *arguments: str, **keys: Any) -> list[Any]:
    """Starts one run in two processes; its files come to lie in `folder / "out" / "tiny"`."""
    return start_in([folder, folder], *arguments, **keys)


def start_in(
    folders: Sequence[Path], *arguments: str, environment: dict[str, str] | None = None, **keys: Any
) -> list[Any]:
    """Starts one run in as many processes as there are folders, each of which keeps its files in its own."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    job = {
        "JOB_INDEX": "0",
        "PROCESSES_IN_JOB": str(len(folders)),
        "JAX_PROCESS_COUNT": str(len(folders)),
        "JAX_COORDINATOR_ADDRESS": "localhost",
        "JAX_COORDINATOR_PORT": str(port),
    }
    return [
        start(
            folder,
            *arguments,
            environment={**(environment or {}), **job, "JOB_COMPLETION_INDEX": str(index)},
            **{"skip_jax_distributed_system": False, "ici_fsdp_parallelism": len(folders), **keys},
        )
        for index, folder in enumerate(folders)
    ]


def losses(said: str) -> dict[int, str]:
    """Loss by step, as MaxText printed it."""
    lines = [line for line in said.splitlines() if "completed step: " in line]
    return {
        int(line.split("completed step: ")[1].split(",")[0]): line.split(" loss: ")[1].split(",")[0]
        for line in lines
    }
