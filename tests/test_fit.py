"""What a backend cannot run is refused, or changed as `nvfp4.on_unsupported` says."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_nvfp4 import backends
from maxtext_nvfp4.backends.fit import fit
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.extent import Extent
from maxtext_nvfp4.plan import GEMMS, Site
from maxtext_nvfp4.policy import resolve
from maxtext_nvfp4.recipe import load_recipe

HEAD = Site(path="decoder/logits_dense", layers=(), k=64, n=256, protected="output head")
EMULATED = backends.create("emulated", "cpu")
TE = backends.create("transformer_engine", "gpu")


def sized(k, n, path="decoder/layers/mlp/wi_0"):
    return Site(path=path, layers=(0, 1), k=k, n=n)


def fitted(section, sites, tokens, backend=EMULATED, dtype="bfloat16", **shards):
    """The sites' plans after fitting, on one device but for the sizes in `shards`."""
    recipe = load_recipe({"bf16_last_layers": 0} | section)
    extents = {}
    for site in sites:
        whole = {"K": site.k, "N": site.n} | ({} if tokens is None else {"M": tokens})
        extents[site.path] = Extent(
            whole=whole | shards.get("whole", {}),
            shard=whole | shards.get("shard", {}),
            weight_shard=whole | shards.get("weight_shard", {}),
            dtype=dtype,
        )
    return fit(resolve(recipe, sites, 2), extents, backend, recipe)


def refusal(*arguments, **keywords):
    with pytest.raises(ConfigError) as caught:
        fitted(*arguments, **keywords)
    return str(caught.value)


def precisions(plan):
    return [[getattr(layer, gemm).precision for gemm in GEMMS] for layer, _ in plan.choices]


K, N, M = "(input features)", "(output features)", "(tokens)"


@pytest.mark.parametrize(
    ("section", "k", "n", "tokens", "faults"),
    [
        ({}, 64, 128, 32, ""),
        ({}, 64, 128, None, ""),
        ({"recipe": "bf16"}, 100, 100, 33, ""),
        ({"rules": [{"module": "wi_0", "fprop": "bf16", "dgrad": "bf16"}]}, 100, 24, 32, ""),
        ({}, 100, 128, 32, f"fprop, dgrad: K=100 {K} is not a multiple of 16"),
        ({}, 64, 24, 32, f"fprop, dgrad: N=24 {N} is not a multiple of 16"),
        ({"weight_scaling": "1d"}, 100, 128, 32, f"fprop: K=100 {K} is not a multiple of 16"),
        ({"weight_scaling": "1d"}, 64, 24, 32, f"dgrad: N=24 {N} is not a multiple of 16"),
        ({}, 64, 128, 33, f"wgrad: M=33 {M} is not a multiple of 16"),
        ({"format": "mxfp4"}, 64, 144, 32, f"fprop, dgrad: N=144 {N} is not a multiple of 32"),
        ({"format": "mxfp4"}, 64, 128, 48, f"wgrad: M=48 {M} is not a multiple of 32"),
        (
            {"weight_scaling": "1d"},
            8,
            8,
            8,
            "; ".join(
                f"{gemm}: {axis} is not a multiple of 16"
                for gemm, axis in (("fprop", f"K=8 {K}"), ("dgrad", f"N=8 {N}"), ("wgrad", f"M=8 {M}"))
            ),
        ),
        (
            {"rules": [{"module": "wi_0", "layers": 0, "dgrad": "bf16"}]},
            64,
            24,
            32,
            f"fprop, dgrad: N=24 {N} is not a multiple of 16",
        ),
    ],
)
def test_sizes_that_do_not_divide_into_blocks(section, k, n, tokens, faults):
    arguments = [sized(k, n), HEAD], tokens
    before = fitted(section | {"on_unsupported": "bf16"}, *arguments)
    if not faults:
        assert fitted(section, *arguments) == before
        return
    gemms = [gemm for gemm in GEMMS if re.search(rf"\b{gemm}\b", faults)]
    rule = "{module: mlp/wi_0, " + ", ".join(f"{gemm}: bf16" for gemm in gemms) + "}"
    for policy in ("error", "no_hadamard"):  # the transform has no part in it
        assert refusal(section | {"on_unsupported": policy}, *arguments) == (
            f"decoder/layers/mlp/wi_0: backend emulated cannot run in 4 bits: {faults}; "
            f"write nvfp4.on_unsupported: bf16, or the rule {rule} first in nvfp4.rules"
        )
    assert all(row[GEMMS.index(gemm)] == "bf16" for gemm in gemms for row in precisions(before[0]))
    assert any(f"emulated: {faults.partition('; ')[0]}" in reason for _, reason in before[0].choices)


def test_a_path_without_slash():
    text = refusal({}, [Site(path="head", layers=(), k=8, n=16)], None)
    assert "the rule {module: head, fprop: bf16, dgrad: bf16} first" in text


@given(
    k=st.integers(1, 64),
    n=st.integers(1, 64),
    tokens=st.integers(1, 64),
    scaling=st.sampled_from(["1d", "2d"]),
    backend=st.sampled_from([EMULATED, TE]),
)
def test_what_a_message_proposes_solves_it(k, n, tokens, scaling, backend):
    paths = ("decoder/dense_layers/mlp/wo", "decoder/moe_layers/mlp/wo", "decoder/layers/mlp/wi_0")
    sites = [sized(k, n, path) for path in paths[:1]] + [sized(64, 64, path) for path in paths[1:]]
    section = {"weight_scaling": scaling, "recipe": "all_layers", "hadamard": "none"}
    try:
        fitted(section, sites, tokens, backend)
        return
    except ConfigError as error:
        problems = str(error).split("\n")
    rules = []
    for text in problems:
        module, gemms = re.search(r"module: (\S+), (.*?)\}", text).groups()
        rules.append({"module": module} | dict(item.split(": ") for item in gemms.split(", ")))
    if len(rules) < 3:
        fitted(section | {"rules": rules}, sites, tokens, backend)
    fitted(section | {"on_unsupported": "bf16"}, sites, tokens, backend)
    assert {rule["module"] for rule in rules} <= {"dense_layers/mlp/wo", "moe_layers/mlp/wo", "mlp/wi_0"}


LOCAL = "on one device"
HADAMARD = [
    (32, 128, 128, f"wgrad: M=32 (tokens {LOCAL}) is not a multiple of 64"),
    (64, 64, 128, f"wgrad: K=64 (input features {LOCAL}) is not a multiple of 128"),
    (64, 128, 64, f"wgrad: N=64 (output features {LOCAL}) is not a multiple of 128"),
]
"""Sizes M, K and N that Transformer Engine runs only without the transform, whose kernels abort on them.

TE #2956, #2968, #3265 and #3300.
"""


@pytest.mark.parametrize(("m", "k", "n", "fault"), HADAMARD)
def test_sizes_that_need_the_transform_off(m, k, n, fault):
    arguments = [sized(k, n)], m, TE
    text = refusal({}, *arguments)
    assert fault in text
    assert "write nvfp4.on_unsupported: no_hadamard, or nvfp4.on_unsupported: bf16, or the rule {" in text
    fitted({"hadamard": "none"}, *arguments)
    (plain,) = fitted({"on_unsupported": "no_hadamard"}, *arguments)
    ((layer, reason),) = plain.choices
    assert reason == f"wgrad without Hadamard transform: transformer_engine: {fault.removeprefix('wgrad: ')}"
    assert layer.wgrad.quantized
    assert not layer.wgrad.a.hadamard
    assert not layer.wgrad.b.hadamard
    (less,) = fitted({"on_unsupported": "bf16"}, *arguments)
    assert precisions(less) == [["nvfp4", "nvfp4", "bf16"]]
    assert less.choices[0][1] == f"transformer_engine: {fault}"


@pytest.mark.parametrize("axis", "MKN")
def test_sizes_that_transformer_engine_cannot_run(axis):
    """Odd token counts and one head of 64 stop stock te_nvfp4 with an assertion from deep inside."""
    sizes = {"M": 64, "K": 128, "N": 128} | {axis: 48}
    arguments = [sized(sizes["K"], sizes["N"])], sizes["M"], TE
    for policy in ("error", "no_hadamard"):
        assert f"{axis}=48" in refusal({"on_unsupported": policy}, *arguments)
    (less,) = fitted({"on_unsupported": "bf16"}, *arguments)
    assert precisions(less) == [["bf16"] * 3]


def test_sizes_of_one_device_decide():
    site = [sized(1024, 1024)]
    fitted({}, site, 1024, TE)
    assert f"M=32 (tokens {LOCAL})" in refusal({}, site, 1024, TE, shard={"M": 32})
    assert f"K=64 (input features {LOCAL})" in refusal({}, site, 1024, TE, shard={"K": 64})
    assert "K=8 (input features of a weight shard) is not a multiple of 16" in refusal(
        {"hadamard": "none"}, site, 1024, TE, weight_shard={"K": 8}
    )
    fitted({}, site, 1024, EMULATED, shard={"M": 32}, weight_shard={"K": 8})


def test_a_device_needs_whole_blocks_of_a_sequence():
    site = [sized(1024, 1024)]
    for part in (8, 192):
        text = refusal({"hadamard": "none"}, site, 1024, TE, whole={"S": 1536}, shard={"S": part})
        assert f"S={part} (tokens of a sequence {LOCAL}) is not 16, 32, 64 or a multiple of 128" in text
    for whole, part in ((1536, 16), (1536, 64), (1536, 384), (192, 96)):
        fitted({}, site, 1024, TE, whole={"S": whole}, shard={"S": part})


def test_float32_is_refused():
    site = [sized(128, 128)]
    for policy in ("error", "no_hadamard"):
        text = refusal({"on_unsupported": policy}, site, 64, TE, dtype="float32")
        assert "it quantizes bfloat16 only, and dtype is float32" in text
    fitted({}, site, 64, EMULATED, dtype="float32")


ODD = {
    "another format": {"precision": "mxfp4"},
    "activations rounded stochastically": {"a": {"stochastic": True}},
    "transform in fprop": {"a": {"hadamard": True}, "b": {"hadamard": True}},
    "square blocks of activations": {"a": {"block": (16, 16)}},
    "weights rounded stochastically": {"b": {"stochastic": True}},
}


@pytest.mark.parametrize("name", ODD)
def test_plans_that_transformer_engine_would_ignore(name):
    """Whatever it has no way to say, it must not pass over: fprop as the example."""
    (plan,) = fitted({}, [sized(128, 128)], 64)
    layer = plan.choices[0][0]
    changes = {
        key: dataclasses.replace(getattr(layer.fprop, key), **value) if isinstance(value, dict) else value
        for key, value in ODD[name].items()
    }
    extent = Extent.on_one_device({"M": 64, "K": 128, "N": 128}, "bfloat16")
    assert TE.unsupported(layer, extent) == {}
    odd = dataclasses.replace(layer, fprop=dataclasses.replace(layer.fprop, **changes))
    assert "fprop" in TE.unsupported(odd, extent)


def test_operands_are_quantized_once():
    (plan,) = fitted({}, [sized(128, 128)], 64)
    layer = plan.choices[0][0]
    extent = Extent.on_one_device({"M": 64, "K": 128, "N": 128}, "bfloat16")
    nearest = dataclasses.replace(layer.dgrad.a, stochastic=False)
    odd = dataclasses.replace(layer, dgrad=dataclasses.replace(layer.dgrad, a=nearest))
    assert TE.unsupported(odd, extent) == {
        "wgrad": "it quantizes the gradient once, for dgrad and wgrad alike"
    }
    row = dataclasses.replace(layer.dgrad.b, block=(1, 16))
    odd = dataclasses.replace(layer, dgrad=dataclasses.replace(layer.dgrad, b=row))
    assert TE.unsupported(odd, extent) == {"dgrad": "it quantizes the weight once, for fprop and dgrad alike"}
    one_transformed = dataclasses.replace(layer.wgrad.b, hadamard=False)
    odd = dataclasses.replace(layer, wgrad=dataclasses.replace(layer.wgrad, b=one_transformed))
    assert "wgrad" in TE.unsupported(odd, extent)


def test_the_reason_of_the_policy_stays():
    rules = [{"module": "wi_0", "layers": 0, "fprop": "bf16"}]
    (plan,) = fitted({"rules": rules, "on_unsupported": "bf16"}, [sized(128, 128)], 32, TE)
    reasons = [reason for _, reason in plan.choices]
    assert reasons[0].startswith("rule 1: module=wi_0, layers=0; transformer_engine: wgrad: M=32")
    assert reasons[1].startswith("transformer_engine: wgrad: M=32")
    assert precisions(plan) == [["bf16", "nvfp4", "bf16"], ["nvfp4", "nvfp4", "bf16"]]
