"""Predicted memory of a training step is what XLA counts for MaxText's compiled step on CPUs."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from maxtext_step import TrainStep, load

from maxtext_nvfp4 import backends
from maxtext_nvfp4.integration.attach import resolve
from maxtext_nvfp4.integration.cluster_model import abstract_model
from maxtext_nvfp4.integration.config import enabled, recipe_of
from maxtext_nvfp4.integration.workload import workload_of
from maxtext_nvfp4.predict.memory import CPU, GPU, memory
from maxtext_nvfp4.predict.workload import Layout, Linear, Remat, Workload

SIZES = {
    "decoder_block": "llama2",
    "base_num_decoder_layers": 6,
    "base_emb_dim": 256,
    "base_mlp_dim": 768,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_target_length": 256,
    "per_device_batch_size": 8,
}
WIDE = {
    "base_num_decoder_layers": 4,
    "base_emb_dim": 512,
    "base_mlp_dim": 1536,
    "base_num_query_heads": 8,
    "base_num_kv_heads": 2,
    "max_target_length": 512,
    "per_device_batch_size": 4,
}
NVFP4 = {"quantization": "nvfp4"}
ONE = {
    "full": {"remat_policy": "full"},
    "minimal": {"remat_policy": "minimal"},
    "vocabulary": {"remat_policy": "full", "vocab_size": 8192},
    "accumulated": {"remat_policy": "minimal", "gradient_accumulation_steps": 2},
    "except_mlp": {**WIDE, "remat_policy": "save_dot_with_context_except_mlp"},
    "nvfp4": {**NVFP4, "remat_policy": "full", "vocab_size": 512, "per_device_batch_size": 16},
    "unscanned": {"remat_policy": "minimal_with_context", "scan_layers": False},
    "unscanned_except_mlp": {
        **WIDE,
        "remat_policy": "save_dot_with_context_except_mlp",
        "scan_layers": False,
    },
    "unscanned_none": {
        "remat_policy": "none",
        "scan_layers": False,
        "base_num_decoder_layers": 4,
        "vocab_size": 512,
        "per_device_batch_size": 16,
    },
    "unscanned_nvfp4": {
        **NVFP4,
        "remat_policy": "minimal",
        "scan_layers": False,
        "base_num_decoder_layers": 3,
    },
}
FSDP = {"ici_fsdp_parallelism": 8, "per_device_batch_size": 4}
EIGHT = {
    "full": {**FSDP, "remat_policy": "full", "use_iota_embed": True},
    "minimal": {**FSDP, "remat_policy": "minimal"},
    "nvfp4": {**FSDP, **NVFP4, "remat_policy": "minimal"},
    "unscanned": {**FSDP, "remat_policy": "minimal", "scan_layers": False, "base_num_decoder_layers": 4},
    "tensor": {
        "ici_fsdp_parallelism": 4,
        "ici_tensor_parallelism": 2,
        "remat_policy": "minimal",
        "per_device_batch_size": 4,
    },
}


def predicted_and_counted(keys):
    """Bytes of the state, of the rest and of all, as predicted and as XLA has it."""
    config = load(**{**SIZES, **keys})
    model = abstract_model(config)
    plans = resolve(model, config, recipe_of(config)).plans if enabled(config) else None
    size = np.dtype(backends.create("emulated", "cpu").operand_dtype).itemsize
    found = memory(workload_of(config, model, plans), dataclasses.replace(CPU, emulated_bytes=size))
    count = TrainStep(config).lower().compile().memory_analysis()
    state = found.parameters + found.optimizer
    # The state is given up as an argument and returned in its place, and so is there once.
    argument = count.argument_size_in_bytes
    total = argument + count.output_size_in_bytes - count.alias_size_in_bytes + count.temp_size_in_bytes
    return {
        "state": (state, argument),
        "rest": (found.total - state, count.temp_size_in_bytes),
        "total": (found.total, total),
        "activations": found.activations,
    }


FEW_TOKENS = {"remat_policy": "full", "vocab_size": 512, "max_target_length": 64, "per_device_batch_size": 4}


@pytest.mark.parametrize(
    "keys",
    [
        NVFP4,
        {**NVFP4, **WIDE},
        {**NVFP4, "scan_layers": False},
        {**NVFP4, "nvfp4": {"loss_scale": {"mode": "off"}}},
    ],
    ids=["scanned", "wide", "unscanned", "without_loss_scaling"],
)
def test_where_weights_outweigh_activations(keys):
    """The update is the fullest moment where its results wait to be chosen."""
    found = predicted_and_counted({**keys, **FEW_TOKENS})
    assert found["total"][0] == pytest.approx(found["total"][1], rel=0.15)


def check(found):
    state, rest, total = (found[name] for name in ("state", "rest", "total"))
    assert state[0] == pytest.approx(state[1], rel=0.01)  # the batch, 20 bytes a token, is not counted
    assert total[0] == pytest.approx(total[1], rel=0.15)
    # What is no state is where the formulas are.
    assert rest[0] == pytest.approx(rest[1], rel=0.1)


@functools.cache
def on_one_device(name):
    return predicted_and_counted(ONE[name])


@pytest.mark.parametrize("name", ONE)
def test_one_device(name):
    check(on_one_device(name))


def test_a_policy_saves_what_its_names_say():
    """Between two policies nothing but activations differs."""
    full, minimal = on_one_device("full"), on_one_device("minimal")
    more = minimal["activations"] - full["activations"]
    assert more == 6 * 8 * 256 * (4 * 256 + 2 * 768) * 2
    assert more == pytest.approx(minimal["rest"][1] - full["rest"][1], rel=0.02)


def count_on_eight():
    for name, keys in EIGHT.items():
        print(json.dumps([name, predicted_and_counted(keys)]))


@pytest.fixture(scope="module")
def eight():
    return {}


@pytest.mark.parametrize("name", EIGHT)
def test_eight_devices(name, eight, on_devices):
    if not eight:
        lines = [line for line in on_devices(8, count_on_eight).splitlines() if line.startswith("[")]
        eight.update(json.loads(line) for line in lines if line.startswith('["'))
    check(eight[name])


# A step with numbers that are easy to see through: 1024 tokens of a device, and layers of 64 x 64, 64 x 32 and 64 x 256.
BF16, FOUR = ("bf16",) * 3, ("nvfp4",) * 3


def small(formats=None, **keys):
    formats = formats or {FOUR: 4}
    sizes = {"query": (64, 64), "key": (64, 32), "value": (64, 32), "out": (64, 64), "wi": (64, 256)}
    linears = [
        Linear(path=name, k=k, n=n, split=None, formats=formats, output=f"{name}_proj")
        for name, (k, n) in sizes.items()
    ]
    linears.append(Linear(path="wo", k=256, n=64, split=None, formats=formats, output="mlpwo"))
    step = {
        "layers": 4,
        "width": 64,
        "mlp_width": 256,
        "mlp_inputs": 1,
        "query_width": 64,
        "kv_width": 32,
        "head_size": 16,
        "vocabulary": 512,
        "tied": False,
        "one_hot": False,
        "sequence": 256,
        "sequences": 4.0,
        "microbatches": 1,
        "layout": Layout(),
        "remat": Remat(policy="full", saved=frozenset()),
    }
    return Workload(linears=tuple(linears), **{**step, **keys})


X = 1024 * (5 * 64 + 256)
W = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 256
"""Elements of the activations and of the weights that one layer's GEMMs multiply."""


def codes(workload, backend=GPU):
    return memory(workload, backend).quantized


@pytest.mark.parametrize(
    ("wanted", "size"),
    [("nvfp4", 9 / 16), ("mxfp8", 33 / 32), ("fp8", 1), ("fp8_current", 1), ("bf16", 0)],
)
def test_codes_that_are_kept(wanted, size):
    remat = Remat(policy="minimal_with_quantization", saved=frozenset({"out_proj"}), quantized=True)
    step = small(remat=remat).in_format(wanted)
    assert codes(step) == 4 * size * (X + W)
    assert codes(step, CPU) == 0
    assert codes(dataclasses.replace(step, remat=Remat(policy="full", saved=frozenset()))) == 0
    assert codes(dataclasses.replace(step, remat=Remat(policy="all", saved=None))) == 4 * size * (X + W)


def test_codes_of_layers_in_several_formats():
    remat = Remat(policy="minimal_with_quantization", saved=frozenset(), quantized=True)
    mixed = small({FOUR: 3, BF16: 1}, remat=remat)
    assert codes(mixed) == 4 * 9 / 16 * (X + W)  # a scan stacks the same for each
    assert memory(dataclasses.replace(mixed, scanned=False)).quantized < codes(mixed)
    # fprop and dgrad in 4 bits, wgrad not: x is not quantized for it.
    assert codes(small({("nvfp4", "nvfp4", "bf16"): 4}, remat=remat)) == 4 * 9 / 16 * W


def test_what_fused_attention_saves():
    def saved(*names, **keys):
        remat = Remat(policy="of a test", saved=frozenset(names))
        return memory(small(remat=remat, **keys)).activations

    inputs = 4 * 1024 * 64 * 2
    assert saved() == inputs
    assert saved("mlpwo") == inputs
    assert saved("out_proj") == 2 * inputs
    assert saved("context") == 2 * inputs + 4 * 1024 * 4 * 4  # log-sum-exp of 4 heads in float32
    assert saved("context", fused_attention=False) == inputs


def test_state_and_gradients_are_divided():
    whole = memory(small(), GPU)
    parts = memory(small(layout=Layout(fsdp=4, fsdp_across=2, data=3)), GPU)
    step = small()
    assert whole.parameters == 4 * step.parameters
    assert whole.optimizer == 8 * step.parameters
    for name in ("parameters", "optimizer"):
        assert getattr(parts, name) == getattr(whole, name) / 8
    assert parts.gathered > 0 == whole.gathered
    assert parts.activations == whole.activations  # each part has its own tokens
    stages = memory(small(layout=Layout(pipeline=2), microbatches=4), GPU)
    tables = 4 * (step.parameters - step.layer_parameters)
    assert stages.parameters - tables == (whole.parameters - tables) / 2
    assert stages.activations == whole.activations / 2 * 5  # 4 microbatches, and one of padding


def test_weights_are_divided_by_what_divides_the_sequence_and_gathered_whole():
    few = {"sequences": 1 / 16, "layout": Layout(fsdp=2, context=2, tensor=2)}
    found = memory(small(**few), GPU)
    assert found.parameters == 4 * small().parameters / 8
    assert found.moment == "backward"
    # Of two layers, what a device needs with half of the features; the norms' two vectors are counted as divided.
    assert found.gathered == 2 * (W + 2 * 64) / 2 * 2
    assert memory(small(**few), CPU).gathered == found.gathered / 2
    loss = memory(small(layout=Layout(fsdp=4), vocabulary=65536))
    assert (loss.moment, loss.gathered) == ("loss", 65536 * 64 * 2)


def test_gradients():
    def gradients(backend=GPU, tokens=16, **keys):
        found = memory(small(sequences=tokens / 256, **keys), backend)
        assert found.moment == "backward"
        return found.gradients

    layers, table = small().layer_parameters, 512 * 64
    one, four = {}, {"layout": Layout(fsdp=4)}
    unscanned = {"scanned": False}
    # A scan stacks them in float32; others wait in the compute dtype, and whole where there is no reduce-scatter.
    assert gradients() == 4 * layers + 2 * 2 * table
    assert gradients(**unscanned) == 2 * layers + 2 * 2 * table
    assert gradients(**four) == (4 * layers + 4 * table + 2 * table) / 4
    assert gradients(CPU, **four) == 4 * layers / 4 + 4 * table + 2 * table / 4
    assert gradients(CPU, **four, one_hot=True) == 4 * layers / 4 + 2 * 4 * table
    assert gradients(CPU, **four, tied=True) == 4 * layers / 4 + 4 * table
    assert gradients(CPU, **four, **unscanned) == 4 * layers + 4 * table + 2 * table / 4
    assert gradients(**unscanned, layout=Layout(data=2)) == 4 * layers + 4 * table + 2 * table
    # Sums over microbatches are there besides; a pipeline's loop needs none.
    sums = 4 * small().parameters
    assert gradients(microbatches=2, **one) == 4 * layers + 2 * 2 * table + sums
    pipeline = {"layout": Layout(pipeline=2), "microbatches": 2}
    assert gradients(**pipeline) == gradients(layout=Layout(pipeline=2)) == 4 * layers / 2 + 2 * 2 * table


def test_the_first_or_the_last_backward_pass_is_the_fullest():
    """Unscanned, each layer frees what it saved and leaves gradients."""
    layers, table = small().layer_parameters, 512 * 64
    many = memory(small(scanned=False, vocabulary=64, sequences=16.0))
    assert many.moment == "backward"
    assert many.activations == 3 * 16 * 256 * 64 * 2  # the inputs of all but the layer at work
    assert many.gradients == 2 * layers / 4 + 2 * 2 * 64 * 64
    few = memory(small(scanned=False, sequences=1 / 16))
    assert few.activations == 0
    assert few.gradients == 2 * layers + 2 * 2 * table


def test_workspace():
    def work(backend=GPU, **keys):
        found = memory(small(vocabulary=64, **keys), backend)
        assert found.moment == "backward"
        return found.workspace

    stream, attention, hidden, scores = 64 * (2 * 4 + 6 * 2), (3 * 64 + 2 * 32) * 2, 256 * 2, 256 * 4
    mlp = 5 * hidden
    assert work() == 1024 * (stream + attention + mlp)
    # Scores are computed again before the MLP unless its input is there; the larger of the two phases counts.
    assert work(fused_attention=False) == 1024 * (stream + attention + 2 * scores * (2 + 4) + hidden)
    short = {"fused_attention": False, "sequence": 32, "sequences": 32.0}
    scores = 32 * 4
    assert work(**short) == 1024 * (stream + attention + mlp + 2 * scores * 2)
    saved = Remat(policy="save_out_proj", saved=frozenset({"out_proj"}))
    assert work(**short, remat=saved) == 1024 * (stream + attention + mlp)
    # Emulated operands of wgrad: the largest layer's where each GEMM has a branch, else every activation.
    mixed = {"formats": {FOUR: 3, BF16: 1}}
    assert work(CPU, formats={BF16: 4}) == work()
    assert work(CPU, **mixed) == work() + 4 * 1024 * (64 + 256)
    assert work(CPU) == work(CPU, **mixed, scanned=False) == work() + 4 * X


def test_without_a_policy_everything_is_saved():
    everything = Remat(policy="of a test", saved=None)
    widths = 64 + 2 * 64 + (64 + 32 + 32 + 64 + 256) + 256  # input, norms, linear layers, hidden layer
    found = memory(small(remat=everything, formats={BF16: 4}))
    assert found.activations == 4 * 1024 * ((widths + 64) * 2 + 4 * 4)
    unfused = memory(small(remat=everything, formats={BF16: 4}, fused_attention=False))
    assert unfused.activations == 4 * 1024 * (widths + 2 * 256 * 4) * 2


def test_json_is_the_fields_and_their_total():
    found = memory(small(), GPU)
    fields = found.to_json()
    assert fields.pop("total") == found.total == sum(v for v in fields.values() if not isinstance(v, str))
    assert fields.pop("moment") in ("loss", "backward", "update")
    assert json.loads(json.dumps(fields)) == fields


def test_a_fused_kernel_and_a_smaller_vocabulary_need_less():
    step = small()
    assert memory(dataclasses.replace(step, fused_attention=False)).total > memory(step).total
    assert memory(dataclasses.replace(step, vocabulary=4096)).logits == 1024 * 4096 * 6 + 1024 * 64 * 10
