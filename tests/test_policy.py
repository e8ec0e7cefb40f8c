"""The policy: what each GEMM of each layer gets, why, and which requests are refused."""

import math
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.plan import BF16, GEMMS, GemmPlan, LayerPlan, OperandPlan, Site
from maxtext_nvfp4.policy import layer_plan, resolve
from maxtext_nvfp4.recipe import load_recipe

ALL = {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
ALL_FOUR_BIT = {"fprop": "nvfp4", "dgrad": "nvfp4", "wgrad": "nvfp4"}
HEAD = Site(path="decoder/logits_dense", layers=(), k=64, n=256, protected="output head")


def stack(prefix, layers, *names):
    return [Site(path=f"{prefix}/{name}", layers=tuple(layers), k=64, n=128) for name in names]


def dense(layers=32, attention="self_attention"):
    return [
        *stack("decoder/layers/mlp", range(layers), "wi_0", "wi_1", "wo"),
        *stack(f"decoder/layers/{attention}", range(layers), "query", "key", "value", "out"),
        HEAD,
    ]


# Site names of MaxText's decoder families: (MLP, attention, others), each with its number of layers.
MLP, QKV = ("wi_0", "wi_1", "wo"), ("query", "key", "value", "out")
FAMILIES = {
    "llama2, mistral, gemma, gemma3, qwen2, qwen3": (
        4,
        stack("decoder/layers/mlp", range(4), *MLP),
        stack("decoder/layers/self_attention", range(4), *QKV),
        [],
    ),
    "llama2 with fused projections": (
        4,
        stack("decoder/layers/mlp", range(4), "wi", "wo"),
        stack("decoder/layers/self_attention", range(4), "qkv_proj", "out"),
        [],
    ),
    "gemma2, whose decoder layer is a pair of layers": (
        4,
        stack("decoder/layers/mlp_local", range(4), *MLP)
        + stack("decoder/layers/mlp_global", range(4), *MLP),
        stack("decoder/layers/self_attention_local", range(4), *QKV)
        + stack("decoder/layers/self_attention_global", range(4), *QKV),
        [],
    ),
    "gpt3": (
        4,
        stack("decoder/layers/mlp", range(4), "wi", "wo"),
        stack("decoder/layers/self_attention", range(4), "qkv_proj", "out"),
        [],
    ),
    "olmo3": (
        8,
        stack("decoder/layers/mlp", range(8), *MLP),
        stack("decoder/layers/attention", range(8), *QKV),
        [],
    ),
    "deepseek with MLA and an indexer": (
        5,
        stack("decoder/dense_layers/mlp", range(3), *MLP)
        + stack("decoder/moe_layers/DeepSeekMoeBlock_0/shared_experts", range(3, 5), *MLP),
        [
            site
            for kind, layers in (("dense_layers", range(3)), ("moe_layers", range(3, 5)))
            for site in stack(
                f"decoder/{kind}/self_attention",
                layers,
                *("wq_a", "wq_b", "wkv_a", "wkv_b", "query", "out"),
                *("indexer/wq_b", "indexer/wk", "indexer/weights_proj"),
            )
        ],
        [],
    ),
    "gemma4, small": (
        5,
        stack("decoder/layers/mlp", range(5), *MLP),
        stack("decoder/layers/self_attention", range(5), *QKV),
        stack("decoder/layers", range(5), "per_layer_input_gate", "per_layer_projection"),
    ),
    "llama4": (
        4,
        stack("decoder/layers/Llama4MoEBlock_0/shared_experts", range(4), *MLP),
        stack("decoder/layers/self_attention", range(4), *QKV),
        [],
    ),
    "qwen3_next": (
        4,
        stack("decoder/layers/mlp/shared_expert", range(4), *MLP),
        stack("decoder/layers/attention", range(3), "in_proj_qkvz", "in_proj_ba", "out_proj")
        + stack("decoder/layers/attention/attention", [3], *QKV),
        [],
    ),
}


def four_bit_layers(plan):
    """Layers in which all three GEMMs are 4-bit; every other layer must have none."""
    counts = {
        layer: sum(getattr(choice, gemm).quantized for gemm in GEMMS)
        for layers, choice, _ in plan.ranges()
        for layer in layers or (None,)
    }
    assert set(counts.values()) <= {0, 3}
    return {layer for layer, count in counts.items() if count}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["paper", "all_layers", "bf16", "mlp_only", "nemotron"])
def test_presets_fit_every_family(family, preset):
    num_layers, mlp, attention, others = FAMILIES[family]
    plans = resolve(load_recipe({"recipe": preset}), [*mlp, *attention, *others, HEAD], num_layers)
    body = set(range(num_layers - math.ceil(0.15 * num_layers)))
    everywhere = set(range(num_layers))
    mlp_scope, attention_scope, other_scope = {
        "paper": (body, body, body),
        "all_layers": (everywhere, everywhere, everywhere),
        "bf16": (set(), set(), set()),
        "mlp_only": (everywhere, set(), set()),
        "nemotron": (body, set(), body),
    }[preset]
    scopes = (
        [mlp_scope] * len(mlp) + [attention_scope] * len(attention) + [other_scope] * len(others) + [set()]
    )
    for plan, scope in zip(plans, scopes, strict=True):
        assert four_bit_layers(plan) == scope & set(plan.site.layers), plan.site.path
    assert plans[-1].choices == ((LayerPlan(fprop=BF16, dgrad=BF16, wgrad=BF16), "output head"),)


def test_the_4_bit_plan_of_paper():
    assert layer_plan(load_recipe(None)) == LayerPlan(
        fprop=GemmPlan(precision="nvfp4", a=OperandPlan(block=(1, 16)), b=OperandPlan(block=(16, 16))),
        dgrad=GemmPlan(
            precision="nvfp4", a=OperandPlan(block=(1, 16), stochastic=True), b=OperandPlan(block=(16, 16))
        ),
        wgrad=GemmPlan(
            precision="nvfp4",
            a=OperandPlan(block=(1, 16), hadamard=True),
            b=OperandPlan(block=(1, 16), hadamard=True, stochastic=True),
        ),
    )


def test_the_4_bit_plan_of_mxfp4():
    assert layer_plan(load_recipe({"format": "mxfp4"})) == LayerPlan(
        fprop=GemmPlan(precision="mxfp4", a=OperandPlan(block=(1, 32)), b=OperandPlan(block=(32, 32))),
        dgrad=GemmPlan(
            precision="mxfp4", a=OperandPlan(block=(1, 32), stochastic=True), b=OperandPlan(block=(32, 32))
        ),
        wgrad=GemmPlan(
            precision="mxfp4",
            a=OperandPlan(block=(1, 32), hadamard=True),
            b=OperandPlan(block=(1, 32), hadamard=True, stochastic=True),
        ),
    )


def operands(plan):
    return [getattr(plan, gemm).__dict__[side] for gemm in GEMMS for side in "ab"]


@pytest.mark.parametrize(
    ("section", "knob", "expected"),
    [
        ({}, "hadamard", [False, False, False, False, True, True]),
        ({"hadamard": "none"}, "hadamard", [False] * 6),
        ({}, "stochastic", [False, False, True, False, False, True]),
        ({"stochastic_rounding": "none"}, "stochastic", [False] * 6),
        ({}, "block", [(1, 16), (16, 16), (1, 16), (16, 16), (1, 16), (1, 16)]),
        ({"weight_scaling": "1d"}, "block", [(1, 16)] * 6),
        ({"weight_scaling": "1d", "format": "mxfp4"}, "block", [(1, 32)] * 6),
    ],
)
def test_each_knob_changes_exactly_its_operands(section, knob, expected):
    plan = layer_plan(load_recipe(section))
    assert [getattr(operand, knob) for operand in operands(plan)] == expected


@pytest.mark.parametrize(
    ("section", "num_layers", "runs"),
    [
        ({}, 126, [(107, ""), (19, "among the last 19 layers (bf16_last_layers=0.15)")]),
        ({}, 20, [(17, ""), (3, "among the last 3 layers (bf16_last_layers=0.15)")]),
        (
            {"bf16_last_layers": 0.1},
            30,
            [(27, ""), (3, "among the last 3 layers (bf16_last_layers=0.1)")],
        ),
        (
            {"bf16_last_layers": 0.07},
            100,
            [(93, ""), (7, "among the last 7 layers (bf16_last_layers=0.07)")],
        ),
        ({"bf16_last_layers": 1e-9}, 100, [(99, ""), (1, "the last layer (bf16_last_layers=1e-09)")]),
        ({"bf16_last_layers": 8}, 52, [(44, ""), (8, "among the last 8 layers (bf16_last_layers=8)")]),
        (
            {"bf16_first_layers": 2, "bf16_last_layers": 1},
            62,
            [
                (2, "among the first 2 layers (bf16_first_layers=2)"),
                (59, ""),
                (1, "the last layer (bf16_last_layers=1)"),
            ],
        ),
        (
            {"bf16_first_layers": 0.05, "bf16_last_layers": 0},
            10,
            [(1, "the first layer (bf16_first_layers=0.05)"), (9, "")],
        ),
    ],
)
def test_layer_counts_and_their_reasons(section, num_layers, runs):
    sites = stack("decoder/layers/mlp", range(num_layers), "wo")
    (plan,) = resolve(load_recipe(section), sites, num_layers)
    assert [(len(layers), reason) for layers, _, reason in plan.ranges()] == runs
    assert [choice.fprop.quantized for _, choice, _ in plan.ranges()] == [not reason for _, reason in runs]


def summary(section, sites, num_layers):
    """For each site its ranges as (first layer, last layer, 4-bit GEMMs, reason)."""
    return {
        plan.site.path.removeprefix("decoder/layers/"): [
            (
                layers[0] if layers else None,
                layers[-1] if layers else None,
                " ".join(gemm for gemm in GEMMS if getattr(choice, gemm).quantized),
                reason,
            )
            for layers, choice, reason in plan.ranges()
        ]
        for plan in resolve(load_recipe(section), sites, num_layers)
    }


FOUR_BIT = "fprop dgrad wgrad"
LAST = "among the last 2 layers (bf16_last_layers=2)"


def test_rules_layers_and_reasons():
    section = {
        "bf16_last_layers": 2,
        "rules": [
            {"module": "mlp/wo", "layers": "0..1", "wgrad": "bf16"},
            {"module": "self_attention/*", **ALL},
            {"module": "*/wi_0", "layers": 7, "fprop": "nvfp4"},
            {"module": "mlp/w*", "layers": 1, "fprop": "bf16", "wgrad": "nvfp4"},
        ],
    }
    assert summary(section, dense(8), 8) == {
        "mlp/wi_0": [
            (0, 0, FOUR_BIT, ""),
            (1, 1, "dgrad wgrad", "rule 4: module=mlp/w*, layers=1"),
            (2, 5, FOUR_BIT, ""),
            (6, 6, "", LAST),
            (7, 7, "fprop", LAST),
        ],
        "mlp/wi_1": [
            (0, 0, FOUR_BIT, ""),
            (1, 1, "dgrad wgrad", "rule 4: module=mlp/w*, layers=1"),
            (2, 5, FOUR_BIT, ""),
            (6, 7, "", LAST),
        ],
        "mlp/wo": [
            (0, 0, "fprop dgrad", "rule 1: module=mlp/wo, layers=0..1"),
            (
                1,
                1,
                "dgrad",
                "fprop: rule 4: module=mlp/w*, layers=1; wgrad: rule 1: module=mlp/wo, layers=0..1",
            ),
            (2, 5, FOUR_BIT, ""),
            (6, 7, "", LAST),
        ],
        **{
            f"self_attention/{name}": [(0, 7, "", "rule 2: module=self_attention/*")]
            for name in ("query", "key", "value", "out")
        },
        "decoder/logits_dense": [(None, None, "", "output head")],
    }


def test_rules_that_a_preset_brings_are_counted_after_the_user_s():
    section = {
        "recipe": "nemotron",
        "rules": [{"module": "self_attention/out", "layers": 0, "fprop": "nvfp4"}],
    }
    assert summary(section, dense(4), 4)["self_attention/out"] == [
        (0, 0, "fprop", "rule 2: module=*[aA]ttention*/*"),
        (1, 3, "", "rule 2: module=*[aA]ttention*/*"),
    ]


def test_a_site_outside_the_layers_is_in_no_layer_range():
    outside = Site(path="mtp/projection", layers=(), k=64, n=64)
    assert summary({}, [outside], 4) == {"mtp/projection": [(None, None, FOUR_BIT, "")]}
    rules = [{"module": "mtp/*", "wgrad": "bf16"}]
    assert summary({"rules": rules}, [outside], 4) == {
        "mtp/projection": [(None, None, "fprop dgrad", "rule 1: module=mtp/*")]
    }


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("*", {"mlp/wi_0", "mlp/wi_1", "mlp/wo", "self_attention/query"}),
        ("mlp/*", {"mlp/wi_0", "mlp/wi_1", "mlp/wo"}),
        ("wi_0", {"mlp/wi_0"}),
        ("wi_?", {"mlp/wi_0", "mlp/wi_1"}),
        ("w[io]*", {"mlp/wi_0", "mlp/wi_1", "mlp/wo"}),
        ("decoder/layers/mlp/wi_0", {"mlp/wi_0"}),
        ("layers/mlp/wi_0", {"mlp/wi_0"}),
        ("*query", {"self_attention/query"}),
        ("self_attention*", {"self_attention/query"}),
    ],
)
def test_patterns_match_the_path_or_a_tail_of_it(pattern, paths):
    sites = [*stack("decoder/layers", range(2), "mlp/wi_0", "mlp/wi_1", "mlp/wo", "self_attention/query")]
    recipe = load_recipe({"bf16_last_layers": 0, "rules": [{"module": pattern, "fprop": "bf16"}]})
    hit = {plan.site.path for plan in resolve(recipe, sites, 2) if plan.choices[0][1]}
    assert hit == {f"decoder/layers/{path}" for path in paths}


@pytest.mark.parametrize(
    "pattern", ["i_0", "lp/wi_0", "MLP/wi_0", "mlp", "wi_0/", "/wi_0", "decoder/layers/mlp", "mlp/wi"]
)
def test_patterns_do_not_match_parts_of_names(pattern):
    recipe = load_recipe({"rules": [{"module": pattern, "fprop": "bf16"}]})
    with pytest.raises(ConfigError, match="no module of the model matches the pattern"):
        resolve(recipe, stack("decoder/layers", range(2), "mlp/wi_0"), 2)


def refusal(section, sites=None, num_layers=32):
    with pytest.raises(ConfigError) as caught:
        resolve(load_recipe(section), dense() if sites is None else sites, num_layers)
    return str(caught.value)


BODY_RULE = {"module": "*", "layers": "0..3", **ALL}
WRONG = [
    (
        {"rules": [{"module": "mpl/*", "fprop": "bf16"}]},
        "nvfp4.rules.1: got {module: mpl/*, fprop: bf16}: no module of the model matches the pattern; "
        "write module: mlp/*",
    ),
    (
        {"rules": [{"module": "self_attn/qkv", "fprop": "bf16"}]},
        "nvfp4.rules.1: got {module: self_attn/qkv, fprop: bf16}: no module of the model matches the "
        "pattern; write module: self_attention/key or self_attention/* or self_attention/value",
    ),
    (
        {"rules": [{"module": "xxxx", "fprop": "bf16"}]},
        "nvfp4.rules.1: got {module: xxxx, fprop: bf16}: no module of the model matches the pattern; "
        "write module: decoder/logits_dense or mlp/wi_0 or mlp/wi_1 or mlp/wo or self_attention/key or "
        "self_attention/out or self_attention/query or self_attention/value",
    ),
    (
        {"rules": [{"module": "mlp/*", "layers": 32, "fprop": "bf16"}]},
        "nvfp4.rules.1: got {module: mlp/*, layers: 32, fprop: bf16}: the model has 32 decoder layers, and "
        "these modules are in layers 0..31; write layers: 0..31, or a part of it",
    ),
    (
        {"rules": [{"module": "mlp/*", "layers": "28..40", "fprop": "bf16"}]},
        "nvfp4.rules.1: got {module: mlp/*, layers: 28..40, fprop: bf16}: the model has 32 decoder "
        "layers, and these modules are in layers 0..31; write layers: 0..31, or a part of it",
    ),
    (
        {"rules": [{"module": "mlp/*", "layers": "31..32", "fprop": "bf16"}]},
        "nvfp4.rules.1: got {module: mlp/*, layers: 31..32, fprop: bf16}: the model has 32 decoder layers, "
        "and these modules are in layers 0..31; write layers: 0..31, or a part of it",
    ),
    (
        {"rules": [{"module": "logits_dense", **ALL_FOUR_BIT}]},
        "nvfp4.rules.1: got {module: logits_dense, fprop: nvfp4, dgrad: nvfp4, wgrad: nvfp4}: it names only "
        "modules that are never quantized: decoder/logits_dense (output head); write bf16, or no such rule",
    ),
    (
        {"rules": [{"module": "mlp/*", **ALL}, {"module": "mlp/wo", "layers": "0..3", "fprop": "nvfp4"}]},
        "nvfp4.rules.2: got {module: mlp/wo, layers: 0..3, fprop: nvfp4}: it can never apply after "
        "rule 1: module=mlp/*; write the narrower rule first, or only one of them",
    ),
    (
        {
            "rules": [
                {"module": "mlp/*", "layers": "0..15", "fprop": "bf16"},
                {"module": "mlp/*", "layers": "16..31", "fprop": "nvfp4"},
                {"module": "mlp/wo", "fprop": "nvfp4"},
            ]
        },
        "nvfp4.rules.3: got {module: mlp/wo, fprop: nvfp4}: it can never apply after "
        "rule 1: module=mlp/*, layers=0..15 and rule 2: module=mlp/*, layers=16..31; "
        "write the narrower rule first, or only one of them",
    ),
    (
        {"bf16_last_layers": 33},
        "nvfp4.bf16_last_layers: got 33: the model has 32 decoder layers; write at most 32, or a fraction",
    ),
    (
        {"bf16_first_layers": 40},
        "nvfp4.bf16_first_layers: got 40: the model has 32 decoder layers; write at most 32, or a fraction",
    ),
    (
        {"bf16_last_layers": 32},
        "nvfp4.bf16_last_layers: got 32: with bf16_last_layers: 32 all decoder layers (32) would stay "
        "in BF16; write counts that leave a layer to quantize, or recipe: bf16",
    ),
    (
        {"bf16_first_layers": 28},
        "nvfp4.bf16_last_layers: got 0.15: with bf16_first_layers: 28, bf16_last_layers: 0.15 all decoder "
        "layers (32) would stay in BF16; write counts that leave a layer to quantize, or recipe: bf16",
    ),
    (
        {"bf16_first_layers": 0.999, "bf16_last_layers": 0},
        "nvfp4.bf16_first_layers: got 0.999: with bf16_first_layers: 0.999 all decoder layers (32) "
        "would stay in BF16; write counts that leave a layer to quantize, or recipe: bf16",
    ),
    (
        {"recipe": "mlp_only", "bf16_last_layers": 4},
        "nvfp4.bf16_last_layers: got 4: the rules of the recipe already choose every GEMM of these layers; "
        "write 0, or put the rule {module: '*', layers: 28..31, fprop: bf16, dgrad: bf16, wgrad: bf16} first",
    ),
    (
        {"recipe": "bf16", "bf16_first_layers": 1},
        "nvfp4.bf16_first_layers: got 1: the rules of the recipe already choose every GEMM of these layers; "
        "write 0, or put the rule {module: '*', layers: 0, fprop: bf16, dgrad: bf16, wgrad: bf16} first",
    ),
    (
        {"bf16_first_layers": 4, "rules": [BODY_RULE]},
        "nvfp4.bf16_first_layers: got 4: the rules of the recipe already choose every GEMM of these layers; "
        "write 0, or put the rule {module: '*', layers: 0..3, fprop: bf16, dgrad: bf16, wgrad: bf16} first",
    ),
]


@pytest.mark.parametrize(("section", "message"), WRONG)
def test_a_request_that_decides_nothing_is_refused(section, message):
    assert refusal(section) == message


def test_a_protected_site_does_not_count_as_an_effect():
    gate = Site(path="decoder/layers/gate", layers=tuple(range(4)), k=64, n=8, protected="router gate")
    section = {"bf16_last_layers": 1, "rules": [{"module": "mlp/*", "layers": 3, **ALL}]}
    sites = stack("decoder/layers/mlp", range(4), "wo")
    assert "nvfp4.bf16_last_layers: got 1: the rules of the recipe already choose" in refusal(
        section, [*sites, gate], 4
    )


def test_choices_come_in_the_order_of_the_layers():
    section = {"bf16_first_layers": 1, "bf16_last_layers": 1}
    (plan,) = resolve(load_recipe(section), stack("decoder/layers/mlp", range(5), "wo"), 5)
    assert [reason.split(" (")[0] for _, reason in plan.choices] == ["the first layer", "", "the last layer"]
    assert plan.table == (0, 1, 1, 1, 2)


def test_the_layers_of_a_module_are_told():
    _, mlp, attention, _ = FAMILIES["deepseek with MLA and an indexer"]
    section = {"rules": [{"module": "moe_layers/self_attention/out", "layers": "0..2", "fprop": "bf16"}]}
    assert refusal(section, [*mlp, *attention], 5) == (
        "nvfp4.rules.1: got {module: moe_layers/self_attention/out, layers: 0..2, fprop: bf16}: the "
        "model has 5 decoder layers, and these modules are in layers 3..4; write layers: 3..4, or a "
        "part of it"
    )
    odd = stack("decoder/layers/mlp", range(1, 6, 2), "wo") + stack("decoder/layers/mlp", (4,), "wi")
    section = {"bf16_last_layers": 0, "rules": [{"module": "mlp/*", "layers": 0, "fprop": "bf16"}]}
    assert "these modules are in layers 1, 3..5; write layers: 1..5, or a part of it" in refusal(
        section, odd, 6
    )


@pytest.mark.parametrize("preset", ["mlp_only", "nemotron"])
def test_a_preset_without_scope_in_the_model_is_refused(preset):
    sites = [*stack("decoder/layers/GptOssAttention", range(4), *QKV), HEAD]
    assert refusal({"recipe": preset}, sites, 4) == (
        f"nvfp4.recipe: got {preset}: no module of this model is in its scope, so nothing would be 4-bit; "
        "write another preset such as paper, or recipe: bf16"
    )
    for section in (
        {"recipe": "bf16"},
        {"recipe": "paper"},
        {"recipe": preset, "rules": [{"module": "query", **ALL_FOUR_BIT}]},
        {"recipe": preset, "rules": [{"module": "query", **ALL}]},
    ):
        resolve(load_recipe(section), sites, 4)


def test_layers_of_a_rule_for_a_site_outside_them():
    outside = Site(path="mtp/projection", layers=(), k=64, n=64)
    section = {"rules": [{"module": "mtp/*", "layers": 0, "fprop": "bf16"}]}
    assert refusal(section, [outside], 4) == (
        "nvfp4.rules.1: got {module: mtp/*, layers: 0, fprop: bf16}: these modules are outside the decoder "
        "layers; write the rule without layers"
    )


def test_every_faulty_rule_is_named():
    section = {"rules": [{"module": "a", "fprop": "bf16"}, BODY_RULE, {"module": "b", "fprop": "bf16"}]}
    assert [line.split(":")[0] for line in refusal(section).splitlines()] == [
        "nvfp4.rules.1",
        "nvfp4.rules.3",
    ]


@pytest.mark.parametrize(
    "section",
    [
        {"rules": [{"module": "logits_dense", **ALL}]},
        {"rules": [{"module": "*", **ALL}]},
        {"rules": [{"module": "*", **ALL_FOUR_BIT}]},
        {
            "rules": [
                {"module": "mlp/*", "fprop": "bf16"},
                {"module": "mlp/*", "fprop": "nvfp4", "dgrad": "bf16"},
            ]
        },
        {"recipe": "bf16", "rules": [{"module": "mlp/*", **ALL_FOUR_BIT}]},
        {"recipe": "mlp_only", "rules": [{"module": "*", "layers": "28..31", **ALL}]},
        {"bf16_last_layers": 31},
        {"bf16_last_layers": 0, "rules": [{"module": "*", "layers": "0..31", **ALL}]},
    ],
)
def test_requests_that_stand(section):
    resolve(load_recipe(section), dense(), 32)


def test_one_layer_is_not_silently_left_in_bf16():
    assert "all decoder layers (1) would stay in BF16" in refusal({}, dense(1), 1)
    resolve(load_recipe({"recipe": "bf16"}), dense(1), 1)
    resolve(load_recipe({"recipe": "all_layers"}), dense(1), 1)


def test_the_same_rules_are_the_user_s_own_in_a_file(tmp_path):
    mlp_only = stack("decoder/layers/mlp", range(4), "wo")
    recipe = load_recipe({"recipe": "nemotron"})
    resolve(recipe, mlp_only, 4)
    path = tmp_path / "mine.yml"
    path.write_text(recipe.to_yaml())
    assert "nvfp4.rules.1: got {module: '*[aA]ttention*/*'" in refusal({"recipe": str(path)}, mlp_only, 4)


SITES = st.lists(
    st.builds(
        lambda path, layers, protected: Site(
            path=f"decoder/{path}", layers=tuple(sorted(layers)), k=64, n=64, protected=protected
        ),
        st.sampled_from(["layers/mlp/wi_0", "layers/mlp/wo", "layers/self_attention/out", "head"]),
        st.sets(st.integers(0, 7)),
        st.sampled_from(["", "", "", "output head"]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda site: site.path,
)
PATTERNS = {
    "*": {"layers/mlp/wi_0", "layers/mlp/wo", "layers/self_attention/out", "head"},
    "mlp/*": {"layers/mlp/wi_0", "layers/mlp/wo"},
    "wo": {"layers/mlp/wo"},
    "out": {"layers/self_attention/out"},
    "head": {"head"},
}
CHOICES = st.fixed_dictionaries({}, optional=dict.fromkeys(GEMMS, st.sampled_from(["nvfp4", "bf16"]))).filter(
    bool
)
RULES = st.lists(
    st.tuples(
        st.sampled_from(sorted(PATTERNS)),
        st.none() | st.tuples(st.integers(0, 7), st.integers(0, 7)).map(sorted),
        CHOICES,
    ),
    max_size=4,
)


def expected(site, layer, gemm, rules, first, last):
    """Precision of one GEMM by the letter of the precedence, and which rule decided it."""
    if site.protected:
        return "bf16", None
    for index, (pattern, layers, choice) in enumerate(rules):
        in_layers = layers is None or (layer is not None and layers[0] <= layer <= layers[1])
        if gemm in choice and in_layers and site.path.removeprefix("decoder/") in PATTERNS[pattern]:
            return choice[gemm], index
    return ("bf16" if layer is not None and (layer < first or layer >= 8 - last) else "nvfp4"), None


@given(sites=SITES, rules=RULES, first=st.integers(0, 3), last=st.integers(0, 3))
def test_precedence_and_coverage(sites, rules, first, last):
    section = {
        "bf16_first_layers": first,
        "bf16_last_layers": last,
        "rules": [
            {"module": pattern, **choice} | ({"layers": f"{layers[0]}..{layers[1]}"} if layers else {})
            for pattern, layers, choice in rules
        ],
    }
    cells = {
        (site.path, layer, gemm): expected(site, layer, gemm, rules, first, last)
        for site in sites
        for layer in site.layers or (None,)
        for gemm in GEMMS
    }
    recipe = load_recipe(section)
    try:
        plans = resolve(recipe, sites, 8)
    except ConfigError as error:
        # The refusal is right: what it names decides nothing.
        for key in re.findall(r"^nvfp4\.(\S+):", str(error), re.MULTILINE):
            if key == "recipe":  # nothing would be left to quantize
                assert all(chosen == "bf16" for chosen, _ in cells.values())
            elif key.startswith("rules."):
                assert int(key.removeprefix("rules.")) - 1 not in {index for _, index in cells.values()}
            else:
                edge = range(first) if "first" in key else range(8 - last, 8)
                free = {site.path for site in sites if not site.protected}
                assert all(
                    i is not None for (p, layer, _), (_, i) in cells.items() if p in free and layer in edge
                )
        return
    assert [plan.site for plan in plans] == sites
    for plan in plans:
        ranges = plan.ranges()
        covered = [layer for layers, _, _ in ranges for layer in layers]
        assert sorted(covered) == list(plan.site.layers)
        for layers, choice, reason in ranges:
            for layer in layers or (None,):
                for gemm in GEMMS:
                    got = getattr(choice, gemm)
                    assert got.precision == cells[plan.site.path, layer, gemm][0]
                    assert got in (BF16, getattr(layer_plan(recipe), gemm))
            assert bool(reason) == any(getattr(choice, gemm) == BF16 for gemm in GEMMS)
    used = {index for _, index in cells.values()} - {None}
    protected = {site.path.removeprefix("decoder/") for site in sites if site.protected}
    for index, (pattern, _, choice) in enumerate(rules):
        present = {site.path.removeprefix("decoder/") for site in sites} & PATTERNS[pattern]
        harmless = present and present <= protected and "nvfp4" not in choice.values()
        assert index in used or harmless


@given(fraction=st.fractions(0, 1, max_denominator=1000), num_layers=st.integers(2, 200))
def test_fractions_are_rounded_up_exactly(fraction, num_layers):
    thousandths = max(1, min(999, round(fraction * 1000)))
    exact = math.ceil(Fraction(thousandths, 1000) * num_layers)
    recipe = load_recipe({"bf16_last_layers": thousandths / 1000})
    sites = stack("decoder/layers/mlp", range(num_layers), "wo")
    if exact == num_layers:
        assert "would stay in BF16" in refusal({"bf16_last_layers": thousandths / 1000}, sites, num_layers)
    else:
        assert four_bit_layers(resolve(recipe, sites, num_layers)[0]) == set(range(num_layers - exact))


@pytest.mark.parametrize(("layers", "shown"), [("3..32", "3..32"), (32, "32"), ("40..50", "40..50")])
def test_telemetry_of_layers_that_are_not_there_is_refused(layers, shown):
    says = f"nvfp4.telemetry.layers: got {shown}: the model has 32 decoder layers; write 0..31, or a part of it, or all"
    with pytest.raises(ConfigError, match=re.escape(says)):
        resolve(load_recipe({"telemetry": {"layers": layers}}), dense(), 32)


@pytest.mark.parametrize("layers", ["0..31", 31, "all"])
def test_telemetry_of_layers_that_are_there_is_not(layers):
    resolve(load_recipe({"telemetry": {"layers": layers}}), dense(), 32)
