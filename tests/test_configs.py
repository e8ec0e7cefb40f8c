"""The example configs do what they say: what each GEMM gets, and that the whole training step traces."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from maxtext_step import BASE, TrainStep, load

from maxtext_nvfp4 import cli

ROOT = Path(__file__).parents[1]
NAMES = ("llama3-8b", "llama3.1-70b", "llama3.1-405b", "qwen3-8b")
SITES = (
    "mlp/wi_0",
    "mlp/wi_1",
    "mlp/wo",
    *(f"self_attention/{name}" for name in ("key", "out", "query", "value")),
)

# Copied from the models' publications, not from MaxText: embedding, MLP, query heads, key heads, layers, vocabulary.
SHAPES = {
    "llama3-8b": (4096, 14336, 32, 8, 32, 128256),
    "llama3.1-70b": (8192, 28672, 64, 8, 80, 128256),
    "llama3.1-405b": (16384, 53248, 128, 8, 126, 128256),
    "qwen3-8b": (4096, 12288, 32, 8, 36, 151936),
}
HEAD_DIM, SEQUENCE = 128, 8192
GIGAFLOPS = {"llama3-8b": 51.470, "llama3.1-70b": 449.22, "llama3.1-405b": 2523.96}
"""Published FLOPs a token of a training step at 8192 tokens, attention causal."""

BF16_LAYERS = {"llama3-8b": 5, "llama3.1-70b": 12, "llama3.1-405b": 19, "qwen3-8b": 6}
"""15% of the layers, rounded up."""


def path(name: str) -> str:
    return str(ROOT / "configs" / f"{name}.yml")


def linear_gigaflops(name: str, layers: int) -> float:
    """Forward and backward FLOPs a token of the linear layers of some decoder layers: 6 for each weight."""
    emb, mlp, heads, kv_heads, _, _ = SHAPES[name]
    attention = 2 * emb * heads * HEAD_DIM + 2 * emb * kv_heads * HEAD_DIM
    return 6 * layers * (attention + 3 * emb * mlp) / 1e9


def total_gigaflops(name: str) -> float:
    """The same of the whole step: linear layers, output head, and causal attention's two products."""
    emb, _, heads, _, layers, vocabulary = SHAPES[name]
    attention = 3 * layers * 2 * 2 * (SEQUENCE / 2) * heads * HEAD_DIM / 1e9
    return linear_gigaflops(name, layers) + 6 * emb * vocabulary / 1e9 + attention


@pytest.fixture(scope="module")
def explained():
    """What `maxtext-nvfp4 explain --json` prints about a config, each once."""
    reports = {}

    def explain(name):
        if name not in reports:
            with pytest.MonkeyPatch.context() as patch:
                out = []
                patch.setattr("builtins.print", out.append)
                assert cli.main(["explain", path(name), "--json"]) == 0
            reports[name] = json.loads("".join(out))
        return reports[name]

    return explain


def ranges(report):
    """{site: [(first, last, precisions of fprop, dgrad and wgrad)]}."""
    found = {}
    for site in report["sites"]:
        ends = [int(end) for end in site["layers"].split("..") if end != "-"]
        row = (*(ends[:1] or [None]), *(ends[-1:] or [None]), site["fprop"], site["dgrad"], site["wgrad"])
        found.setdefault(site["path"], []).append(row)
    return found


def test_the_command_explains_the_largest_model_within_a_minute():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "maxtext_nvfp4", "explain", path("llama3.1-405b"), "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: it does not depend on what else the machine does, and bounds the time on an idle one.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    report = json.loads(done.stdout)  # and nothing but JSON
    assert ranges(report) == {
        "decoder/logits_dense": [(None, None, "bf16", "bf16", "bf16")],
        **{
            f"decoder/layers/{site}": [
                (0, 106, "nvfp4", "nvfp4", "nvfp4"),
                (107, 125, "bf16", "bf16", "bf16"),
            ]
            for site in SITES
        },
    }


def test_json_has_the_documented_keys(explained):
    report = explained("llama3-8b")
    assert {"sites", "totals", "recipe", "fingerprint"} <= report.keys()
    assert report["totals"].keys() == {"nvfp4_flops_fraction", "nvfp4_gemms", "gemms"}
    for site in report["sites"]:
        assert {"path", "layers", "fprop", "dgrad", "wgrad", "reason"} <= site.keys()
    assert report["recipe"] == "paper"
    assert re.fullmatch(r"[0-9a-f]{12}", report["fingerprint"])


@pytest.mark.parametrize("name", NAMES)
def test_reasons_are_given_where_a_gemm_is_not_4_bit(explained, name):
    for site in explained(name)["sites"]:
        assert bool(site["reason"]) == ("bf16" in (site["fprop"], site["dgrad"], site["wgrad"]))


@pytest.mark.parametrize("name", NAMES)
def test_the_last_15_percent_of_the_layers_stay_in_bf16(explained, name):
    layers, high = SHAPES[name][4], BF16_LAYERS[name]
    for site in SITES:
        assert ranges(explained(name))[f"decoder/layers/{site}"] == [
            (0, layers - high - 1, "nvfp4", "nvfp4", "nvfp4"),
            (layers - high, layers - 1, "bf16", "bf16", "bf16"),
        ]


@pytest.mark.parametrize("name", NAMES)
def test_totals_are_those_of_a_hand_count(explained, name):
    totals, layers = explained(name)["totals"], SHAPES[name][4]
    quantized = layers - BF16_LAYERS[name]
    assert totals["gemms"] == 3 * (7 * layers + 1)  # seven linear layers, and the output head once
    assert totals["nvfp4_gemms"] == 3 * 7 * quantized
    expected = linear_gigaflops(name, quantized) / total_gigaflops(name)
    assert totals["nvfp4_flops_fraction"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", GIGAFLOPS)
def test_the_flops_fraction_is_of_the_published_flops(explained, name):
    four_bit = linear_gigaflops(name, SHAPES[name][4] - BF16_LAYERS[name])
    fraction = explained(name)["totals"]["nvfp4_flops_fraction"]
    assert four_bit / fraction == pytest.approx(GIGAFLOPS[name], rel=1e-4)


def test_the_8b_fraction_in_numbers(explained):
    # 218.1M linear weights a layer, 6 FLOPs each, 27 of 32 layers: 35.333 of 51.470 GF.
    assert explained("llama3-8b")["totals"] == {
        "nvfp4_flops_fraction": pytest.approx(0.68647, abs=1e-5),
        "nvfp4_gemms": 567,
        "gemms": 675,
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_training_step_traces_at_full_size(name):
    """From shapes alone. The attention kernel and the mesh are those of the test's machine."""
    config = load(path(name), ici_fsdp_parallelism=1, ici_data_parallelism=1, dcn_fsdp_parallelism=1)
    step = TrainStep(config)
    traced = step.trace()
    state, metrics = traced.out_info
    assert metrics["scalar"]["learning/loss"].shape == ()

    def shapes(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    assert jax.tree.leaves(shapes(state)) == jax.tree.leaves(shapes(step.shapes))
    parameters = [leaf for leaf in jax.tree.leaves(step.shapes["model"]) if leaf.dtype == "float32"]
    emb, mlp, heads, kv_heads, layers, vocabulary = SHAPES[name]
    matrices = layers * (2 * emb * heads * HEAD_DIM + 2 * emb * kv_heads * HEAD_DIM + 3 * emb * mlp)
    matrices += 2 * emb * vocabulary
    assert sum(leaf.size for leaf in parameters) == pytest.approx(matrices, rel=1e-4)  # and the norms
    assert not any(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(step.shapes))  # masters and moments


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_one_for_gb200(name):
    with open(path(name), encoding="utf-8") as file:
        keys = yaml.safe_load(file)
    assert keys["quantization"] == "nvfp4"
    assert keys["hardware"] == "gpu_multiprocess"
    assert keys["attention"] == "cudnn_flash_te"
    assert keys["max_target_length"] == SEQUENCE
    assert keys["max_segments_per_seq"] > 1  # Transformer Engine's attention packs real data
    assert {keys[key] for key in ("weight_dtype", "grad_dtype", "mu_dtype")} == {"float32"}
    assert not {"dataset_path", "base_output_directory", "hf_access_token"} & keys.keys()  # the user's


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_is_that_of_the_model(name):
    config = load(path(name))
    assert config.vocab_size == SHAPES[name][5]
    if name == "qwen3-8b":
        assert (config.tokenizer_type, config.tokenizer_path) == ("huggingface", "Qwen/Qwen3-8B")
        return
    # An installed MaxText does not find its own file by name alone; the run then refuses until it has a path.
    assert (config.tokenizer_type, config.tokenizer_path) == ("tiktoken", "tokenizer_llama3.tiktoken")
    pieces = (
        (Path(BASE).parents[1] / "assets" / "tokenizers" / config.tokenizer_path).read_bytes().splitlines()
    )
    assert len(pieces) == 128000  # and 256 special ones


@pytest.mark.parametrize("slices", [1, 2])
def test_the_largest_config_shards_over_every_gpu_of_every_rack(slices):
    config = load(path("llama3.1-405b"), num_slices=slices)
    axes = dict(
        zip(config.mesh_axes, zip(config.ici_parallelism, config.dcn_parallelism, strict=True), strict=True)
    )
    assert axes.pop("fsdp") == (-1, -1)
    assert set(axes.values()) == {(1, 1)}
