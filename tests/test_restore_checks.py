"""Values that are not finite in a restored state are found, named and refused; nothing is deleted."""

import shutil

import jax
import pytest
from command_line import train
from flax import nnx
from jax import numpy as jnp
from maxtext.common import checkpointing
from maxtext.utils import train_utils
from maxtext_models import Trainer, load

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.non_finite import check_finite

PAPER = {"quantization": "nvfp4", "nvfp4": {"recipe": "all_layers"}}


def poisoned(trainer):
    """A state with values that are not finite in a stack of layers, a moment and an array outside the layers."""
    state = trainer.initial_state()
    kernel = state["model"]["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    assert kernel.get_value().shape == (64, 2, 128)  # stacked along the second axis
    kernel.set_value(kernel.get_value().at[:3, 1, 0].set(jnp.nan))
    moment = state["optimizer"]["opt_state"][0]["nu"]["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    moment.set_value(moment.get_value().at[0, 0, 0].set(jnp.inf))
    embedding = state["model"]["token_embedder"]["embedding"]
    embedding.set_value(embedding.get_value().at[5, 5].set(-jnp.inf))
    return state


def refusal(trainer, state):
    with pytest.raises(ConfigError) as refused:
        check_finite(nnx.merge(trainer.graphdef, state), trainer.config.param_scan_axis, "somewhere/5")
    return str(refused.value)


def test_what_is_not_finite_is_named_with_its_layer_and_count():
    trainer = Trainer(**PAPER)
    check_finite(nnx.merge(trainer.graphdef, trainer.initial_state()), 1, "somewhere/5")
    message = refusal(trainer, poisoned(trainer))
    assert message.startswith("somewhere/5 holds values that are not finite:\n")
    assert set(message.splitlines()[1:-1]) == {
        "  model/decoder/layers/mlp/wi_0/kernel of decoder layer 1: 3 of 8192 elements",
        "  optimizer/opt_state/0/nu/decoder/layers/mlp/wo/kernel of decoder layer 0: 1 of 8192 elements",
        "  model/token_embedder/embedding: 1 of 8192 elements",
    }


def test_layers_that_are_not_stacked_are_named_too():
    trainer = Trainer(**PAPER, scan_layers=False)
    state = trainer.initial_state()
    kernel = state["model"]["decoder"]["layers_1"]["mlp"]["wo"]["kernel"]
    kernel.set_value(kernel.get_value().at[0].set(jnp.nan))
    assert "model/decoder/layers_1/mlp/wo/kernel of decoder layer 1: 64 of 8192 elements" in refusal(
        trainer, state
    )


def test_a_long_list_is_cut():
    trainer = Trainer(**PAPER)
    state = jax.tree.map(
        lambda leaf: leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        trainer.initial_state(),
    )
    lines = refusal(trainer, state).splitlines()
    assert len(lines) == 23
    assert lines[21].strip().startswith("and ")


def check_on_a_mesh():
    trainer = Trainer(**PAPER, ici_fsdp_parallelism=4, ici_data_parallelism=1, per_device_batch_size=1)
    message = refusal(trainer, poisoned(trainer))
    assert "  model/decoder/layers/mlp/wi_0/kernel of decoder layer 1: 3 of 8192 elements" in message


@pytest.mark.slow
def test_sharded_weights_are_counted_once(on_devices):
    on_devices(4, check_on_a_mesh)


def test_a_run_stops_before_it_trains_on_weights_that_are_not_finite(tmp_path):
    trainer = Trainer(**PAPER)
    config = load(**PAPER, enable_checkpointing=True, base_output_directory=str(tmp_path / "out"))
    manager = train_utils.create_checkpoint_manager(config, trainer.mesh, None)
    state = poisoned(trainer)
    state["optimizer"]["step"].set_value(jnp.asarray(5, jnp.uint32))
    checkpointing.save_checkpoint(manager, 4, state, config, force=True)
    manager.close()
    checkpoints = tmp_path / "out" / "tiny" / "checkpoints"
    shutil.copytree(checkpoints, tmp_path / "before")
    said = train(tmp_path, steps=8, status=2)
    assert f"{checkpoints}/4 holds values that are not finite" in said
    assert "wi_0/kernel of decoder layer 1: 3 of 8192 elements" in said
    assert "completed step" not in said
    assert "Traceback" not in said
    assert [path.name for path in checkpoints.iterdir()] == ["4"]
    assert not (tmp_path / "out" / "tiny" / "nvfp4_history.json").exists()
