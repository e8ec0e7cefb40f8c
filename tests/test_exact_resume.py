"""A run that was stopped and taken up again, or killed at any moment, has the bits of one that was not."""

from pathlib import Path
from typing import Any

import kill_loop
import pytest
import whole_runs as runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_corpus(tmp_path_factory.mktemp("data") / "corpus")


UNROLLED = {"scan_layers": False}
BLOCKING = {"async_checkpointing": False}
ACCUMULATED = {"gradient_accumulation_steps": 2}
HOST_MEMORY = {"parameter_memory_host_offload": True, "param_scan_axis": 0}
CASES = [
    pytest.param({}, 1, id="scan"),
    pytest.param(UNROLLED | BLOCKING | ACCUMULATED, 1, id="unrolled-blocking-accumulated"),
    *(
        pytest.param(settings, processes, id=f"{name}-{processes}", marks=pytest.mark.slow)
        for name, settings, processes in [
            ("unrolled", UNROLLED, 1),
            ("blocking", BLOCKING, 1),
            ("accumulated", ACCUMULATED, 1),
            ("host-memory", HOST_MEMORY, 1),
            ("data-workers", {"grain_worker_count": 2}, 1),
            ("scan", {}, 2),
            ("unrolled-blocking-accumulated", UNROLLED | BLOCKING | ACCUMULATED, 2),
        ]
    ),
]


@pytest.mark.parametrize(("settings", "processes"), CASES)
def test_two_halves_are_the_whole(
    tmp_path: Path, data: Path, settings: dict[str, Any], processes: int
) -> None:
    keys = runs.keys(data, **runs.QUANTIZED, enable_tensorboard=True, **settings, steps=8)
    keys["jax_cache_dir"] = str(tmp_path / "cache")
    _, whole = runs.train(tmp_path / "whole", keys, "whole", processes=processes)
    _, first = runs.train(tmp_path / "parts", keys | {"steps": 4}, "first", processes=processes)
    said, second = runs.train(tmp_path / "parts", keys, "second", processes=processes)

    assert runs.resumed_from(said) == 3
    assert list(second) == [4, 5, 6, 7]
    assert first | second == whole
    assert len(set(whole.values())) == 8
    assert " at step 0, " in said  # the summary covers both halves
    ends = [runs.leaves(runs.checkpoint(tmp_path / run)) for run in ("whole", "parts")]
    assert runs.different(*ends) == []
    # The scale has grown twice, the second time from a count that began in the first half.
    scale = runs.part(ends[0], "nnx_aux")
    assert scale["nnx_aux/model/nvfp4_loss_scale/scale"] == 4096
    assert scale["nnx_aux/model/nvfp4_loss_scale/good_steps"] == 2


@pytest.mark.parametrize(
    ("kills", "processes"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)], ids=["1", "2"]
)
def test_kills_leave_no_trace(tmp_path: Path, data: Path, kills: int, processes: int) -> None:
    proof = kill_loop.kill_loop(tmp_path, runs.keys(data, **runs.QUANTIZED), kills=kills, processes=processes)
    assert len(proof.kills) == kills
    assert proof.losses + len(proof.unlogged) == 15 * kills
    assert proof.leaves > 50


@pytest.mark.slow
def test_tfds_begins_anew(tmp_path: Path, data: Path) -> None:
    """MaxText's, and why exact-resume.md asks for grain: without learning, a loss tells which text it is of."""
    keys = runs.keys(data, dataset_type="tfds", learning_rate=0.0, jax_cache_dir=str(tmp_path / "cache"))
    _, first = runs.train(tmp_path, keys | {"steps": 4}, "first")
    _, second = runs.train(tmp_path, keys | {"steps": 8}, "second")
    assert len(set(first.values())) == 4
    assert list(second.values()) == list(first.values())


def test_data_that_end_are_an_error(tmp_path: Path, data: Path) -> None:
    keys = runs.keys(data, num_epoch=1, per_device_batch_size=256, steps=50)
    job = runs.start(tmp_path, keys, "short")
    assert job.processes[0].wait(600) == 2
    assert "num_epoch: got 1, and the data end before step 50; write a larger num_epoch" in job.said()
    assert runs.checkpoints(tmp_path)
