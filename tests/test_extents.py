"""Sizes on one device follow from the config as MaxText shards its arrays."""

import math

import jax
import pytest
from maxtext_models import Trainer, abstract_model, load, named

from maxtext_nvfp4.integration.extents import find_extents
from maxtext_nvfp4.integration.sites import find_linears

SIZES = {
    "base_emb_dim": 256,
    "head_dim": 64,
    "base_num_query_heads": 8,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 512,
    "max_target_length": 64,
}
WO, QUERY = "decoder/layers/mlp/wo", "decoder/layers/self_attention/query"


def extents(**keys):
    config = load(**SIZES, **keys)
    return find_extents(find_linears(abstract_model(config)), config)


def test_one_device():
    found = extents(gradient_accumulation_steps=2)
    for path, k, n in ((WO, 512, 256), (QUERY, 256, 512)):
        sizes = {"M": 2 * 64, "S": 64, "K": k, "N": n}
        assert found[path].whole == found[path].shard == sizes
        assert found[path].weight_shard == {"K": k, "N": n}
        assert found[path].dtype == "bfloat16"
    assert extents(dtype="float32")[WO].dtype == "float32"


@pytest.mark.parametrize(
    ("mesh", "tokens", "parts", "weight"),
    [
        ({"ici_fsdp_parallelism": 8}, 128, 1, {"K": 512, "N": 32}),
        ({"ici_data_parallelism": 8}, 128, 1, {"K": 512, "N": 256}),
        ({"dcn_fsdp_parallelism": 4, "num_slices": 4}, 128, 1, {"K": 512, "N": 64}),
        ({"ici_tensor_parallelism": 2}, 256, 2, {"K": 256, "N": 256}),
        ({"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 4}, 256, 2, {"K": 256, "N": 64}),
        ({"ici_context_parallelism": 2}, 128, 1, {"K": 512, "N": 128}),
        # It splits what lies between the norms by tokens, and the rest by features.
        ({"ici_tensor_sequence_parallelism": 2}, 128, 2, {"K": 256, "N": 256}),
        # Does not divide, so it stays whole.
        ({"ici_fsdp_parallelism": 96}, 128, 1, {"K": 512, "N": 256}),
    ],
)
def test_axes_of_a_mesh(mesh, tokens, parts, weight):
    """Tokens of a device do not depend on how many devices share the batch: per_device_batch_size says them."""
    found = extents(**mesh)[WO]
    sequence = 32 if {"ici_context_parallelism", "ici_tensor_sequence_parallelism"} & mesh.keys() else 64
    assert found.shard == {"M": tokens, "S": sequence, "K": 512 // parts, "N": 256 // parts}
    assert found.weight_shard == weight


def check_weights(mesh):
    trainer = Trainer(**SIZES, **mesh)
    found = find_extents(find_linears(abstract_model(trainer.config)), trainer.config)
    shapes, shardings = trainer._abstract
    kernels = {
        path.removeprefix("model/").removesuffix("/kernel"): (leaf.get_value().shape, shard.get_value())
        for (path, leaf), shard in zip(named(shapes).items(), named(shardings).values(), strict=True)
        if path.startswith("model/decoder/layers/") and path.endswith("/kernel")
    }
    assert set(kernels) == set(found) - {"decoder/logits_dense"}
    for path, (shape, sharding) in kernels.items():
        # The second axis stacks the layers.
        local = math.prod(sharding.shard_shape(shape)) // shape[1]
        assert local == math.prod(found[path].weight_shard.values()), path
    assert len(jax.devices()) == 8


@pytest.mark.parametrize(
    "mesh", [{"ici_fsdp_parallelism": 8}, {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}]
)
def test_weights_are_split_as_maxtext_splits_them(mesh, on_devices):
    on_devices(8, check_weights, mesh)
