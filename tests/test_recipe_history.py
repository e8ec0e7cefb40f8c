"""A run keeps the record of its recipes, and goes on under another one only where that was asked for."""

import json
import shutil

import pytest
from command_line import losses, train
from etils import epath

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.history import NAME, check, continued, lasting, read, write
from maxtext_nvfp4.recipe import load_recipe

PAPER = load_recipe(None)
PLAIN = load_recipe({"hadamard": "none"})
ALLOWED = load_recipe({"hadamard": "none", "allow_recipe_change": True})


def recipes(entries):
    return [(entry.first_step, entry.fingerprint) for entry in entries]


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path)


def test_a_run_keeps_its_first_recipe(folder):
    write(folder, continued((), PAPER, None, 0))
    assert read(folder) == continued((), PAPER, None, 0)
    assert recipes(read(folder)) == [(0, PAPER.fingerprint)]
    assert read(folder)[0].recipe == PAPER.numerics
    assert set(read(folder)[0].versions) == {"maxtext-nvfp4", "maxtext", "jax"}
    assert continued(read(folder), PAPER, None, 100) == read(folder)
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_another_recipe_is_refused_field_by_field(folder):
    entries = continued((), PAPER, None, 0)
    rules = load_recipe({"hadamard": "none", "rules": [{"module": "mlp/*", "layers": 0, "fprop": "bf16"}]})
    with pytest.raises(ConfigError) as refusal:
        check(entries, rules, None, 7, folder / NAME)
    lines = str(refusal.value).splitlines()
    assert "before step 7 was trained with another recipe" in lines[0]
    assert lines[1:3] == [
        "nvfp4.rules: was [], is [{module: mlp/*, layers: 0, fprop: bf16}]",
        "nvfp4.hadamard: was wgrad, is none",
    ]
    assert "nvfp4.allow_recipe_change: true" in lines[3]


def test_an_allowed_change_is_recorded_and_needs_no_second_permission(folder):
    entries = continued((), PAPER, None, 0)
    check(entries, ALLOWED, None, 7, folder)
    entries = continued(entries, ALLOWED, None, 7)
    assert recipes(entries) == [(0, PAPER.fingerprint), (7, PLAIN.fingerprint)]
    check(entries, PLAIN, None, 9, folder)
    check(entries, PLAIN, None, 7, folder)  # the run died before it had a checkpoint under the new recipe
    check(entries, PAPER, None, 7, folder)
    assert recipes(continued(entries, PAPER, None, 7)) == [(0, PAPER.fingerprint)]
    with pytest.raises(ConfigError, match=r"nvfp4\.hadamard: was none, is wgrad"):
        check(entries, PAPER, None, 8, folder)


def test_a_switch_that_lies_ahead_may_move_with_the_steps_and_one_behind_may_not(folder):
    late = load_recipe({"switch": {"at": 0.8}})
    entries = continued((), late, 80, 0)
    assert (entries[0].switch_step, entries[0].recipe["switch"]["at"]) == (80, 0.8)
    check(entries, late, 160, 80, folder)
    assert continued(entries, late, 160, 80) == (entries[0].model_copy(update={"switch_step": 160}),)
    check(entries, load_recipe({"switch": {"at": 80}}), 80, 90, folder)  # the same step, written otherwise
    with pytest.raises(
        ConfigError,
        match=r"(?m)^late switch: was at step 80, is at step 160; nvfp4\.switch\.at: 80 keeps it$",
    ):
        check(entries, late, 160, 81, folder)
    with pytest.raises(
        ConfigError, match=r"(?m)^late switch: was at step 80, is at no step; nvfp4\.switch\.at: 80 keeps it$"
    ):
        check(entries, PAPER, None, 50, folder)
    with pytest.raises(ConfigError, match=r"(?m)^nvfp4\.switch\.at: was 0\.8, is 90$"):
        check(entries, load_recipe({"switch": {"at": 90}}), 90, 50, folder)


def test_what_trained_nothing_that_is_left_is_replaced(folder):
    entries = continued((), PAPER, None, 0)
    assert lasting(entries, 0) == ()
    check(entries, PLAIN, None, 0, folder)
    assert recipes(continued(entries, PLAIN, None, 0)) == [(0, PLAIN.fingerprint)]


def test_stock_maxtext_comes_before_without_permission(folder):
    check((), PAPER, None, 50, folder)
    entries = continued((), PAPER, None, 50)
    assert recipes(entries) == [(0, None), (50, PAPER.fingerprint)]
    assert entries[0].name == "stock MaxText"
    write(folder, entries)
    assert read(folder) == entries


def test_permission_name_backend_and_loss_scale_are_no_change(folder):
    entries = continued((), PAPER, None, 0)
    for section in (
        {"allow_recipe_change": True},
        {"backend": "xla"},
        {"recipe": "all_layers", "bf16_last_layers": 0.15},
        {"loss_scale": {"mode": "off"}},
    ):
        check(entries, load_recipe(section), None, 5, folder)
        assert continued(entries, load_recipe(section), None, 5) == entries


def test_nested_fields_are_compared_one_by_one(folder):
    was, now = (load_recipe({"switch": {"at": 10, "gemms": gemms}}) for gemms in ("all", "fprop"))
    entries = continued((), was, 10, 0)
    with pytest.raises(ConfigError, match=r"(?m)^nvfp4\.switch\.gemms: was all, is fprop$"):
        check(entries, now, 10, 5, folder)
    with pytest.raises(ConfigError, match=r"(?m)^nvfp4\.switch: was {at: 10, .*}, is absent$"):
        check(entries, PAPER, None, 5, folder)


def test_permission_is_a_switch_and_stays_out_of_recipe_files():
    with pytest.raises(ConfigError, match=r"nvfp4\.allow_recipe_change: got .yes.: not a switch; write true"):
        load_recipe({"allow_recipe_change": "yes"})
    assert "allow_recipe_change" not in ALLOWED.to_yaml()
    assert ALLOWED.fingerprint == PLAIN.fingerprint


GOOD = {
    "format": 1,
    "entries": [
        {
            "first_step": 0,
            "fingerprint": PAPER.fingerprint,
            "recipe": PAPER.numerics,
            "switch_step": None,
            "versions": {"jax": "1"},
        }
    ],
}


def changed(**entry):
    return json.dumps({**GOOD, "entries": [{**GOOD["entries"][0], **entry}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged"),
        (json.dumps(GOOD)[:-20], "damaged"),
        ("[]", "damaged"),
        ('{"format": "one", "entries": []}', "damaged"),
        ('{"format": 0, "entries": []}', "damaged"),
        (json.dumps({**GOOD, "more": 1}), "damaged"),
        (changed(first_step=-1), r"damaged \(entries\.0\.first_step"),
        (changed(first_step="0"), "damaged"),
        (changed(fingerprint="0" * 12), "is not that of the recipe beside it"),
        (changed(recipe={**PAPER.numerics, "seed": 1}), "is not that of the recipe beside it"),
        (changed(fingerprint=None), "is not that of the recipe beside it"),
        (json.dumps({**GOOD, "entries": GOOD["entries"] * 2}), "not in the order"),
        (b"\xff\xfe", "damaged"),
        ('{"format": 2, "runs": []}', r"format 2 was written by a newer maxtext-nvfp4 than this one"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_named_and_left_alone(folder, text, message):
    data = text if isinstance(text, bytes) else text.encode()
    (folder / NAME).write_bytes(data)
    with pytest.raises(ConfigError, match=message) as refusal:
        read(folder)
    assert str(folder / NAME) in str(refusal.value)
    assert (folder / NAME).read_bytes() == data


def test_a_file_as_written_here_is_read(folder):
    (folder / NAME).write_text(json.dumps(GOOD))
    assert recipes(read(folder)) == [(0, PAPER.fingerprint)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps, with checkpoints of steps 0 and 2."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, steps=3)
    return folder


def copied(trained, folder):
    shutil.copytree(trained / "out", folder / "out")
    return folder / "out" / "tiny"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_start_under_another_recipe_is_refused_and_changes_nothing(trained, tmp_path):
    run = copied(trained, tmp_path)
    before = contents(run)
    said = train(tmp_path, "nvfp4.hadamard=none", steps=5, status=2)
    assert "nvfp4.hadamard: was wgrad, is none" in said
    assert "completed step" not in said
    assert "Traceback" not in said
    assert contents(run) == before


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"opt_type": "sgd"}, "opt_state"),
        ({"base_mlp_dim": 256}, "kernel was saved as (64, 2, 128), and is (64, 2, 256) here"),
        ({"scan_layers": False}, "'decoder/layers_1/mlp/wo/kernel': missing"),
    ],
    ids=lambda part: next(iter(part)) if isinstance(part, dict) else "",
)
def test_a_state_of_another_optimizer_or_model_is_refused(trained, tmp_path, keys, why):
    run = copied(trained, tmp_path)
    before = contents(run)
    said = train(tmp_path, steps=5, status=2, **keys)
    assert "checkpoints/2 is of another model or optimizer: " in said
    assert why in said
    assert "such as opt_type, base_mlp_dim and scan_layers, or another run_name" in said
    assert "Traceback" not in said
    assert contents(run) == before


def test_an_allowed_start_goes_on_and_is_recorded(trained, tmp_path):
    run = copied(trained, tmp_path)
    said = train(tmp_path, "nvfp4.hadamard=none", "nvfp4.allow_recipe_change=true", steps=5)
    assert list(losses(said)) == [3, 4]
    assert [step for step, _ in recipes(read(epath.Path(run)))] == [0, 3]
    assert "from step 3 on, after recipe " in said


@pytest.mark.slow
def test_a_stock_run_becomes_nvfp4_and_back(tmp_path):
    stock = {"quantization": "", "nvfp4": {}}
    train(tmp_path, steps=3, **stock)
    run = tmp_path / "out" / "tiny"
    assert not (run / NAME).exists()
    said = train(tmp_path, steps=5)
    assert list(losses(said)) == [3, 4]
    assert "from step 3 on, after stock MaxText" in said
    record = (run / NAME).read_bytes()
    assert [step for step, _ in recipes(read(epath.Path(run)))] == [0, 3]
    assert list(losses(train(tmp_path, steps=7, **stock))) == [5, 6]
    assert (run / NAME).read_bytes() == record


@pytest.mark.slow
@pytest.mark.parametrize("items", ["", "/items"])
def test_the_full_state_of_another_run_brings_its_recipe(trained, tmp_path, items):
    other = copied(trained, tmp_path)
    path = f"load_full_state_path={other}/checkpoints/2{items}"
    said = train(tmp_path, path, "run_name=next", "nvfp4.hadamard=none", steps=5, status=2)
    assert "nvfp4.hadamard: was wgrad, is none" in said
    assert list(losses(train(tmp_path, path, "run_name=next", steps=5))) == [3, 4]
    assert recipes(read(epath.Path(other.with_name("next")))) == recipes(read(epath.Path(other)))
    assert list(losses(train(tmp_path, path, "run_name=next", steps=6))) == [5]


@pytest.mark.slow
def test_parameters_may_come_from_anywhere(trained, tmp_path):
    other = copied(trained, tmp_path)
    path = f"load_parameters_path={other}/checkpoints/2/items"
    said = train(tmp_path, path, "run_name=next", "nvfp4.hadamard=none", steps=2)
    assert list(losses(said)) == [0, 1]
    assert [step for step, _ in recipes(read(epath.Path(other.with_name("next"))))] == [0]


@pytest.mark.slow
def test_a_damaged_record_stops_the_start(trained, tmp_path):
    run = copied(trained, tmp_path)
    (run / NAME).write_text("{")
    before = contents(run)
    said = train(tmp_path, steps=5, status=2)
    assert f"{run / NAME}: the record of this run's recipes is damaged" in said
    assert contents(run) == before
