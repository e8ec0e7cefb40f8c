"""Checkpoints of stock MaxText continue here, and ours continue there: structure, values and whole runs."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import whole_runs as runs

OPTIMIZERS = [
    {"opt_type": "adamw"},
    pytest.param({"opt_type": "adam_pax"}, marks=pytest.mark.slow),
    pytest.param({"opt_type": "muon"}, marks=pytest.mark.slow),
]
OTHER = {runs.OURS: runs.STOCK, runs.STOCK: runs.OURS}
SCALE = "nnx_aux/model/nvfp4_loss_scale/"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_corpus(tmp_path_factory.mktemp("data") / "corpus")


@dataclasses.dataclass
class Trained:
    """A run of each program, four steps long: its folder, and the settings it has without our keys."""

    folders: dict[str, Path]
    settings: dict[str, Any]

    def of(self, program: str) -> dict[str, Any]:
        return self.settings | (runs.QUANTIZED if program == runs.OURS else {})

    def leaves(self, program: str) -> dict[str, np.ndarray]:
        return runs.leaves(runs.checkpoint(self.folders[program]))


@pytest.fixture(scope="module", params=OPTIMIZERS, ids=lambda keys: keys["opt_type"])
def trained(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    settings = runs.keys(data, **request.param, jax_cache_dir=str(root / "cache"))
    made = Trained({program: root / program for program in OTHER}, settings)
    for program, folder in made.folders.items():
        runs.train(folder, made.of(program) | {"steps": 4}, "first", program=program)
    return made


def test_only_the_loss_scale_is_ours(trained: Trained) -> None:
    ours, stock = (runs.structure(trained.leaves(program)) for program in (runs.OURS, runs.STOCK))
    assert {path for path in ours if path.startswith(SCALE)} == ours.keys() - stock.keys()
    assert {path: ours[path] for path in stock} == stock
    assert len(stock) > 40


@pytest.mark.parametrize("program", [runs.OURS, runs.STOCK], ids=["ours", "stock"])
def test_the_other_programs_state_is_restored_bit_by_bit(trained: Trained, program: str) -> None:
    other = OTHER[program]
    said, found = runs.restored(
        trained.folders[other], trained.of(program) | {"steps": 8}, f"by-{program}", program=program
    )
    assert runs.resumed_from(said) == 3
    names = ("params", "opt_state", "step")
    saved = {
        path: array
        for path, array in runs.part(trained.leaves(other), *names).items()
        if array.dtype != np.float64  # the place of an optimizer's part that has no state
    }
    assert runs.different(runs.part(found, *names), saved) == []
    if program == runs.OURS:  # a loss scale that the checkpoint lacks begins anew
        scale = {path: array.item() for path, array in runs.part(found, "nnx_aux").items()}
        assert scale == {
            "nnx_aux/scale": 1024,
            "nnx_aux/good_steps": 0,
            "nnx_aux/skipped": 0,
            "nnx_aux/skipped_in_a_row": 0,
        }


@pytest.mark.parametrize("program", [runs.OURS, runs.STOCK], ids=["ours", "stock"])
def test_the_other_programs_parameters_are_loaded_bit_by_bit(
    trained: Trained, program: str, tmp_path: Path
) -> None:
    path = runs.checkpoint(trained.folders[OTHER[program]]) / "items"
    settings = trained.of(program) | {"steps": 8, "load_parameters_path": str(path)}
    _, found = runs.restored(tmp_path, settings, "loaded", program=program)
    saved = trained.leaves(OTHER[program])
    assert runs.different(runs.part(found, "params"), runs.part(saved, "params")) == []
    assert found["step"] == 0


@pytest.mark.slow
def test_a_run_that_changes_sides_twice_has_the_bits_of_stock(trained: Trained, tmp_path: Path) -> None:
    settings = trained.settings
    bf16 = {"quantization": "nvfp4", "nvfp4": {"recipe": "bf16"}}
    _, whole = runs.train(tmp_path / "whole", settings | {"steps": 12}, "whole", program=runs.STOCK)
    parts = {}
    for steps, program in (4, runs.STOCK), (8, runs.OURS), (12, runs.STOCK):
        keys = settings | (bf16 if program == runs.OURS else {}) | {"steps": steps}
        parts |= runs.train(tmp_path / "parts", keys, f"to{steps}", program=program)[1]
    assert parts == whole
    ends = [runs.leaves(runs.checkpoint(tmp_path / run)) for run in ("whole", "parts")]
    assert runs.different(*ends) == []
