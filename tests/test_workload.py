"""A MaxText config as a `Workload`: MaxText's own count of its FLOPs, its remat policies, its batch; and refusals."""

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from maxtext.layers.nnx_decoders import NNXDecoder
from maxtext.utils import maxtext_utils
from maxtext_models import load

from maxtext_nvfp4.doctor.cluster import Cluster
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import cluster_mesh, cluster_model
from maxtext_nvfp4.integration.attach import resolve
from maxtext_nvfp4.integration.config import enabled, recipe_of
from maxtext_nvfp4.integration.remat import remat_of
from maxtext_nvfp4.integration.workload import workload_of
from maxtext_nvfp4.predict.memory import GPU, memory
from maxtext_nvfp4.predict.remat import POLICIES
from maxtext_nvfp4.predict.workload import Layout

CONFIGS = Path(__file__).parents[1] / "configs"
NODES = {"llama3-8b": 2, "llama3.1-70b": 16, "llama3.1-405b": 32, "qwen3-8b": 1, "demo-cpu": 0}
"""Machines of 4 GPUs, of which 16 are one NVLink domain."""

# Published numbers of parameters; the models' embedding tables and norms are in them.
PARAMETERS = {
    "llama3-8b": 8.03e9,
    "llama3.1-70b": 70.55e9,
    "llama3.1-405b": 405.85e9,
    "qwen3-8b": 8.19e9,
    "demo-cpu": 6.16e6,
}
LAYOUTS = {
    "llama3-8b": Layout(fsdp=4, data=2),
    "llama3.1-70b": Layout(fsdp=64),
    "llama3.1-405b": Layout(fsdp=64, fsdp_across=2),
    "qwen3-8b": Layout(fsdp=4),
    "demo-cpu": Layout(),
}


def described(config):
    model = cluster_model.abstract_model(config)
    plans = resolve(model, config, recipe_of(config)).plans if enabled(config) else None
    return workload_of(config, model, plans)


@functools.cache
def example(name):
    """The config and workload of an example config on its machines."""
    argv = ["", str(CONFIGS / f"{name}.yml")]
    cluster = Cluster(nodes=NODES[name], gpus_per_node=4, rack_gpus=64)
    mesh = cluster_model.plan(argv, cluster) if NODES[name] else None
    config = cluster_model.load_for(argv, cluster_mesh.checked_keys(argv), mesh)
    return config, described(config)


def tiny(**keys):
    return described(load(**keys))


def for_devices(count, **keys):
    return tiny(internal_compile=True, internal_compile_num_devices=count, per_device_batch_size=2, **keys)


@pytest.mark.parametrize("name", NODES)
def test_flops_are_those_that_maxtext_counts(name):
    config, workload = example(name)
    expected = maxtext_utils.calculate_tflops_training_per_device(config, log=False)[0]
    assert workload.model_flops / 1e12 == pytest.approx(expected, rel=1e-4)
    assert workload.parameters == pytest.approx(PARAMETERS[name], rel=1e-3)


@pytest.mark.parametrize("name", NODES)
def test_the_layout_and_the_batch_are_those_of_the_run(name):
    config, workload = example(name)
    assert workload.layout == LAYOUTS[name]
    assert workload.layout.devices == config.num_target_devices
    parts = workload.layout.shards * workload.layout.replicas
    assert workload.sequences * parts == config.micro_batch_size_to_train_on
    assert workload.fused_attention == (name != "demo-cpu")


def test_formats_are_those_of_the_plans():
    linears = {linear.path.rpartition("/")[2]: linear for linear in example("llama3-8b")[1].linears}
    four, bf16 = ("nvfp4",) * 3, ("bf16",) * 3
    assert set(linears) == {"query", "key", "value", "out", "wi_0", "wi_1", "wo"}
    for linear in linears.values():
        assert linear.formats == {four: 27, bf16: 5}
    wo, key = linears["wo"], linears["key"]
    assert (wo.k, wo.n, wo.split, wo.output) == (14336, 4096, "k", "mlpwo")
    assert (key.k, key.n, key.split, key.output) == (4096, 1024, "n", "key_proj")
    assert {linears[name].output for name in ("wi_0", "wi_1", "out", "query")} == {
        "mlpwi_0",
        "mlpwi_1",
        "out_proj",
        "query_proj",
    }
    rules = [
        {"module": "wo", "layers": 1, "dgrad": "bf16"},
        {"module": "key", "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"},
    ]
    recipe = {"recipe": "all_layers", "rules": rules}
    mixed = {linear.path: linear.formats for linear in tiny(quantization="nvfp4", nvfp4=recipe).linears}
    assert mixed["decoder/layers/mlp/wo"] == {four: 1, ("nvfp4", "bf16", "nvfp4"): 1}
    assert mixed["decoder/layers/self_attention/key"] == {bf16: 2}
    assert {formats for linear in tiny().linears for formats in linear.formats} == {bf16}


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ({"ici_fsdp_parallelism": 8}, Layout(fsdp=8)),
        ({"ici_fsdp_parallelism": 4, "ici_fsdp_transpose_parallelism": 2}, Layout(fsdp=8)),
        ({"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}, Layout(fsdp=4, tensor=2)),
        ({"ici_tensor_sequence_parallelism": 2, "ici_data_parallelism": 4}, Layout(tensor=2, data=4)),
        ({"ici_context_parallelism": 2, "ici_fsdp_parallelism": 4}, Layout(context=2, fsdp=4)),
        (
            {"ici_fsdp_parallelism": 4, "dcn_data_parallelism": 2, "num_slices": 2},
            Layout(fsdp=4, data_across=2),
        ),
        (
            {"ici_data_parallelism": 4, "dcn_fsdp_parallelism": 2, "num_slices": 2},
            Layout(data=4, fsdp_across=2),
        ),
    ],
)
def test_axes_of_a_mesh(mesh, layout):
    """A device's share of the batch is `per_device_batch_size`, however many devices share it."""
    workload = for_devices(8, **{"dcn_data_parallelism": 1, **mesh})
    assert workload.layout == layout
    assert workload.sequences * layout.shards * layout.replicas == 2 * 8
    assert workload.tokens_per_device == 2 * 32


PIPELINE = {
    "ici_pipeline_parallelism": 2,
    "ici_fsdp_parallelism": 4,
    "dcn_data_parallelism": 1,
    "base_num_decoder_layers": 4,
    "num_pipeline_repeats": 2,
    "num_layers_per_pipeline_stage": 1,
    "num_pipeline_microbatches": 4,
    "per_device_batch_size": 2,
    "internal_compile": True,
    "internal_compile_num_devices": 8,
}


def test_a_pipeline():
    """Its own model has stacks of stacks, in which layers cannot be numbered; here it is told another's layers."""
    config = load(**PIPELINE)
    workload = workload_of(config, cluster_model.abstract_model(load(base_num_decoder_layers=4)), None)
    assert workload.layout == Layout(fsdp=4, pipeline=2, interleaved=2)
    assert workload.microbatches == 4
    assert workload.sequences * 4 * 4 == config.micro_batch_size_to_train_on == 2 * 8
    assert workload.tokens_per_device == 2 * 32
    with pytest.raises(ConfigError, match="pipeline_module"):
        described(config)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps: got 2: .*; write 1"):
        described(load(**PIPELINE, gradient_accumulation_steps=2))


def test_accumulation_has_more_microbatches_of_the_same_size():
    one, three = tiny(), tiny(gradient_accumulation_steps=3)
    assert (one.sequences, one.microbatches) == (2, 1)
    assert (three.sequences, three.microbatches) == (2, 3)
    assert three.model_flops == 3 * one.model_flops


def test_dtypes_and_switches():
    step = tiny()
    assert (step.weight_bytes, step.gradient_bytes, step.moment_bytes, step.compute_bytes) == (4, 4, 8, 2)
    assert step.scanned
    assert not any((step.tied, step.one_hot, step.fused_attention))
    assert step.mlp_inputs == 2
    other = tiny(
        mu_dtype="bfloat16",
        dtype="float32",
        logits_via_embedding=True,
        use_iota_embed=True,
        scan_layers=False,
    )
    assert (other.moment_bytes, other.compute_bytes) == (6, 4)
    assert other.tied
    assert other.one_hot
    assert not other.scanned
    assert other.parameters == step.parameters - 128 * 64
    assert tiny(opt_type="sgd").moment_bytes == 0
    assert tiny(grad_dtype="bfloat16").gradient_bytes == 2


@pytest.mark.parametrize(
    ("keys", "fused"),
    [
        ({"attention": "dot_product", "hardware": "gpu"}, False),
        ({"attention": "autoselected"}, False),
        ({"attention": "autoselected", "hardware": "gpu", "max_target_length": 128}, True),
        ({"attention": "autoselected", "hardware": "gpu", "max_target_length": 64}, False),
        ({"attention": "cudnn_flash_te", "hardware": "gpu", "max_segments_per_seq": 2}, True),
    ],
)
def test_kernels_that_keep_scores_to_themselves(keys, fused):
    assert tiny(**keys).fused_attention == fused


@pytest.mark.parametrize("family", ["llama2", "mistral", "gemma", "qwen2", "qwen3", "fused", "gpt3"])
def test_dense_families(family):
    assert tiny(family=family).layers == 2


def test_fused_layers_are_saved_as_such():
    outputs = {linear.output: linear for linear in tiny(family="fused").linears}
    assert outputs.keys() == {"qkv_proj", "out_proj", "mlpwi", "mlpwo"}
    assert outputs["mlpwi"].split == outputs["qkv_proj"].split == "n"


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_save_the_names_that_maxtext_says(policy, monkeypatch):
    monkeypatch.setattr(jax.checkpoint_policies, "save_only_these_names", lambda *names: frozenset(names))
    decoder = SimpleNamespace(config=load(remat_policy=policy))
    decoder.minimal_policy = functools.partial(NNXDecoder.minimal_policy, decoder)
    assert (NNXDecoder.get_remat_policy(decoder) or frozenset()) == POLICIES[policy]
    remat = remat_of(decoder.config)
    assert (remat.policy, remat.saved) == (policy, POLICIES[policy])
    assert remat.quantized == ("quantization" in policy)


def test_no_policy_saves_layer_inputs_alone():
    assert remat_of(load(remat_policy="none")).saved == frozenset()


MIXTURE = {"family": "mixtral"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (MIXTURE, r"num_experts: got 4: nothing is predicted for a mixture of experts; write 1"),
        ({"family": "gemma2"}, r"decoder_block: got gemma2: MaxText counts .* FLOPs .*; write llama2"),
        ({"family": "gemma3"}, r"decoder_block: got gemma3: MaxText counts .* FLOPs"),
        ({"remat_policy": "minimal_offloaded"}, r"remat_policy: got minimal_offloaded: .*; write full or "),
        ({"remat_policy": "custom"}, r"remat_policy: got custom: .*; write full or "),
        ({"opt_type": "muon"}, r"opt_type: got muon: .*; write adamw or "),
        ({"num_vocab_tiling": 2}, r"num_vocab_tiling: got 2: .*; write 1"),
        ({"shard_optimizer_over_data": True}, r"shard_optimizer_over_data: got true: .*; write false"),
        (
            {"optimizer_memory_host_offload": True},
            r"optimizer_memory_host_offload: got true: .*; write false",
        ),
        (
            {"quantization": "nvfp4", "nvfp4": {"recipe": "all_layers", "format": "mxfp4"}},
            r"nvfp4.format: got mxfp4",
        ),
    ],
)
def test_refusals(keys, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**keys)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"ici_fsdp_parallelism": 4, "dcn_tensor_parallelism": 2, "num_slices": 2},
            r"dcn_tensor_parallelism: got 2: .*tensor parallelism over slower networks than NVLink; write 1",
        ),
        (
            {"ici_fsdp_parallelism": 4, "ici_expert_parallelism": 2},
            r"ici_expert_parallelism: got 2: no time is predicted for this parallelism; write 1",
        ),
    ],
)
def test_meshes_that_no_layout_has(mesh, message):
    with pytest.raises(ConfigError, match=message):
        for_devices(8, **{"dcn_data_parallelism": 1, **mesh})


def test_the_largest_example_keeps_what_it_says_it_keeps():
    """34 GB of layer inputs, 51 GB of weights, moments and gradients, on each of 128 GPUs."""
    found = memory(example("llama3.1-405b")[1], GPU)
    assert found.activations == pytest.approx(34e9, rel=0.01)
    assert found.parameters + found.optimizer + found.gradients == pytest.approx(51e9, rel=0.01)
