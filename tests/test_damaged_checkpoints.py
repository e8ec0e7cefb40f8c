"""A damaged checkpoint is found, named and moved aside, and the one before it is used; nothing is deleted."""

import re
import shutil

import jax
import numpy as np
import pytest
import tensorstore
from command_line import losses, start_two
from etils import epath
from jax import numpy as jnp
from maxtext.common import checkpointing
from maxtext.utils import max_logging, train_utils
from maxtext_models import Trainer, load, named

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.checksums import checksum, checksums, mismatches
from maxtext_nvfp4.integration.damage import find_damage

PAPER = {"quantization": "nvfp4", "nvfp4": {"recipe": "all_layers"}}
STEPS = (2, 4, 6)


@pytest.fixture(scope="module")
def trainer():
    return Trainer(**PAPER)


@pytest.fixture(scope="module")
def saved(trainer, tmp_path_factory):
    """A folder of checkpoints whose floats are the initial ones plus the step."""
    folder = tmp_path_factory.mktemp("saved")
    config, manager = opened(trainer, folder)
    state = trainer.initial_state()
    for step in STEPS:
        checkpointing.save_checkpoint(manager, step, at(state, step), config, force=True)
    manager.wait()
    return folder / "tiny" / "checkpoints"


def opened(trainer, folder, **keys):
    """Config and checkpoint manager of a run in the folder, as MaxText makes them."""
    config = load(**PAPER, **keys, enable_checkpointing=True, base_output_directory=str(folder))
    return config, train_utils.create_checkpoint_manager(config, trainer.mesh, None)


def at(state, step):
    def move(leaf):
        return leaf + step if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    moved = jax.tree.map(move, state)
    moved["optimizer"]["step"].set_value(jnp.asarray(step + 1, jnp.uint32))
    return moved


def restored(trainer, folder, **keys):
    """The step that a start restores from; checks that its floats are those of that step."""
    config, manager = opened(trainer, folder, **keys)
    with trainer.context():
        result, _ = checkpointing.load_state_if_possible(
            manager, None, "", "", 96, trainer.abstract_state, maxtext_config=config
        )
    found, initial = named(result["items"]), named(trainer.initial_state())
    step = int(found["optimizer/step"].get_value()) - 1
    scale = "model/decoder/decoder_norm/scale"
    np.testing.assert_array_equal(found[scale].get_value(), initial[scale].get_value() + step)
    return step


def copied(saved, folder):
    return shutil.copytree(saved, folder / "tiny" / "checkpoints")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(bytes(data))


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


QUICK = ("data cut short", "a bit of the data", "metadata missing")
DAMAGES = {
    "data cut short": (
        lambda c: cut(largest(c)),
        r"items/ocdbt\.process_0/d/\w+: cut short, to \d+ bytes",
    ),
    "data missing": (lambda c: largest(c).unlink(), r"items/ocdbt\.process_0/d/\w+: missing"),
    "data of zeros": (lambda c: largest(c).write_bytes(bytes(largest(c).stat().st_size)), "DATA_LOSS: Error"),
    "a bit of the data": (lambda c: flip(largest(c)), r"params(\.\w+)+: not the values that were saved"),
    "manifest empty": (lambda c: (c / "items/manifest.ocdbt").write_bytes(b""), r"items/manifest\.ocdbt"),
    "manifest missing": (
        lambda c: (c / "items/manifest.ocdbt").unlink(),
        r"items/manifest\.ocdbt: NOT_FOUND",
    ),
    "index missing": (lambda c: largest(c / "items/d").unlink(), r"items/d/\w+: missing"),
    "index garbled": (lambda c: flip(largest(c / "items/d")), r"items/d/\w+: DATA_LOSS"),
    "metadata cut short": (lambda c: cut(c / "items/_METADATA"), "items/_METADATA: not valid JSON"),
    "metadata missing": (lambda c: (c / "items/_METADATA").unlink(), "items/_METADATA: missing"),
    "shapes empty": (
        lambda c: (c / "items/array_metadatas/process_0").write_bytes(b""),
        "items/array_metadatas/process_0: not valid JSON",
    ),
}


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in DAMAGES]
)
def test_the_checkpoint_before_a_damaged_one_is_used(trainer, saved, tmp_path, monkeypatch, damage):
    logged = []
    monkeypatch.setattr(max_logging, "log", logged.append)
    newest = copied(saved, tmp_path) / "6"
    harm, message = DAMAGES[damage]
    harm(newest)
    left = contents(newest)
    assert restored(trainer, tmp_path) == 4
    said = next(line for line in logged if "damaged" in line)
    assert str(newest) in said
    assert re.search(message, said), said
    assert not newest.exists()
    assert contents(newest.with_name("6.damaged")) == left
    assert restored(trainer, tmp_path) == 4  # and its step can be written again


def test_nothing_is_changed_where_no_checkpoint_is_whole(trainer, saved, tmp_path):
    checkpoints = copied(saved, tmp_path)
    for step in STEPS:
        flip(largest(checkpoints / str(step)))
    left = contents(checkpoints)
    with pytest.raises(ConfigError, match="no checkpoint of this run is whole") as refusal:
        restored(trainer, tmp_path)
    assert all(f"checkpoint {checkpoints / str(step)} is damaged" in str(refusal.value) for step in STEPS)
    assert contents(checkpoints) == left


def test_a_model_that_does_not_fit_is_not_damage(saved, tmp_path):
    checkpoints = copied(saved, tmp_path)
    wider = Trainer(**PAPER, base_mlp_dim=256)
    with pytest.raises(ConfigError, match="checkpoints/6 is of another model or optimizer: ") as refusal:
        restored(wider, tmp_path)
    assert "damaged" not in str(refusal.value)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "4", "6"]


@pytest.mark.slow
def test_a_step_can_be_damaged_twice(trainer, saved, tmp_path):
    checkpoints = copied(saved, tmp_path)
    shutil.copytree(checkpoints / "6", checkpoints / "6.damaged")
    flip(largest(checkpoints / "6"))
    assert restored(trainer, tmp_path) == 4
    assert (checkpoints / "6.damaged-2").exists()


@pytest.mark.slow
def test_a_ramp_of_the_batch_is_not_continued_from_another_step(trainer, saved, tmp_path):
    checkpoints = copied(saved, tmp_path)
    flip(largest(checkpoints / "6"))
    ramp = {"enable_rampup_batch_size": True, "per_device_batch_size_start": 1, "global_rampup_samples": 8}
    with pytest.raises(ConfigError, match="start the run again, which goes on from step 5"):
        restored(trainer, tmp_path, **ramp)
    assert restored(trainer, tmp_path, **ramp) == 4


def test_a_checkpoint_of_stock_maxtext_has_no_record_and_passes(trainer, saved, tmp_path):
    newest = copied(saved, tmp_path) / "6"
    (newest / "_CHECKPOINT_METADATA").unlink()
    assert restored(trainer, tmp_path) == 6


@pytest.mark.slow
@pytest.mark.parametrize("harm", [cut, flip])
def test_two_processes_fall_back_together(tmp_path, harm):
    def run(steps):
        processes = start_two(tmp_path, steps=steps)
        said = [process.communicate(timeout=300)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said[0][-3000:]
        return losses(said[0])

    whole = run(5)
    checkpoints = tmp_path / "out" / "tiny" / "checkpoints"
    harm(largest(checkpoints / "4" / "items" / "ocdbt.process_1"))  # that only one of them reads
    rest = run(6)
    assert list(rest) == [3, 4, 5]
    assert rest[4] == whole[4]
    assert {path.name for path in checkpoints.iterdir()} == {"0", "2", "4", "4.damaged", "5"}


def test_another_type_is_not_taken_for_damage():
    record = checksums({"w": jnp.ones(4, jnp.float32), "gone": jnp.ones(4)})
    assert mismatches({"w": jnp.ones(4, jnp.bfloat16), "new": jnp.ones(4)}, record) == []
    assert mismatches({"w": jnp.zeros(4, jnp.float32)}, record) == ["w"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8", "bool", "float8_e4m3fn"])
def test_every_bit_counts_in_a_checksum(dtype):
    values = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(dtype)
    whole = int(checksum(jnp.asarray(values)))
    bits = [0] if dtype == "bool" else range(8 * values.itemsize)
    for position in range(values.nbytes):
        for bit in (bit for bit in bits if bit < 8):
            data = bytearray(values.tobytes())
            data[position] ^= 1 << bit
            other = np.frombuffer(bytes(data), values.dtype).reshape(values.shape)
            assert int(checksum(jnp.asarray(other))) != whole


def test_a_checksum_tells_places_apart():
    values = jnp.arange(12.0).reshape(3, 4)
    assert int(checksum(values)) != int(checksum(values[::-1]))
    assert int(checksum(values)) != int(checksum(values[:, ::-1]))


def check_sharded():
    mesh = jax.make_mesh((4,), ("a",))
    values = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    whole = checksums({"w": jnp.asarray(values)})
    for spec in [("a",), (None, "a"), ()]:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        assert checksums({"w": jax.device_put(values, sharding)}) == whole


def test_a_checksum_does_not_depend_on_the_sharding(on_devices):
    on_devices(4, check_sharded)


def test_a_deep_index_is_walked_to_its_files(tmp_path):
    items = tmp_path / "items"
    items.mkdir()
    (items / "_METADATA").write_text('{"use_ocdbt": true}')
    config = {"max_inline_value_bytes": 0, "max_decoded_node_bytes": 200}
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": f"file://{items}/", "config": config}
    ).result()
    with tensorstore.Transaction() as transaction:
        for key in range(100):
            store.with_transaction(transaction)[f"array.number.{key}"] = b"x" * 100
    assert find_damage(epath.Path(tmp_path)) == []
    for file in (items / "d").iterdir():
        data = file.read_bytes()
        file.unlink()
        assert f"items/d/{file.name}: missing" in find_damage(epath.Path(tmp_path))
        file.write_bytes(data)
