"""Paths and decoder layer numbers of the linear layers of every model family, scanned and not."""

import functools

import pytest
from maxtext_models import DENSE, MIXTURE, abstract_model, load

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import sites
from maxtext_nvfp4.integration.report import of_config

ATTENTION = ("query", "key", "value", "out")
MLP = ("wi_0", "wi_1", "wo")
MLA = ("wq_a", "wq_b", "wkv_a", "wkv_b", "out")


def under(prefix, names, layers):
    return {f"decoder/{prefix}/{name}": tuple(layers) for name in names}


def standard(layers, attention="self_attention"):
    """A decoder whose layers are all attention and a gated MLP."""
    return under(f"layers/{attention}", ATTENTION, range(layers)) | under("layers/mlp", MLP, range(layers))


def qwen3_hybrid(layers):
    """Every fourth layer has attention, the others a gated delta net; every layer a shared expert."""
    full = [layer for layer in range(layers) if layer % 4 == 3]
    linear = [layer for layer in range(layers) if layer % 4 != 3]
    return (
        under("layers/attention", ("in_proj_ba", "in_proj_qkvz", "out_proj"), linear)
        | under("layers/attention/attention", ATTENTION, full)
        | under("layers/mlp/shared_expert", MLP, range(layers))
    )


EXPECTED = {
    ("llama2", 4): standard(4),
    ("fused", 2): under("layers/self_attention", ("qkv_proj", "out"), range(2))
    | under("layers/mlp", ("wi", "wo"), range(2)),
    ("mistral", 2): standard(2),
    ("gemma", 2): standard(2),
    # A decoder layer of MaxText's gemma2 is a local and a global layer.
    ("gemma2", 4): {
        path.replace("/self_attention/", f"/self_attention_{kind}/").replace("/mlp/", f"/mlp_{kind}/"): layers
        for kind in ("local", "global")
        for path, layers in standard(4).items()
    },
    # Scanned in blocks of 6 and a remainder, either of which may be absent.
    ("gemma3", 2): standard(2),
    ("gemma3", 6): standard(6),
    ("gemma3", 14): standard(14),
    ("qwen2", 2): standard(2),
    ("qwen3", 2): standard(2),
    ("gpt3", 2): standard(2),
    ("olmo3", 8): standard(8, attention="attention"),
    ("mixtral", 2): under("layers/self_attention", ATTENTION, range(2)),
    ("qwen3_moe", 2): under("layers/self_attention", ATTENTION, range(2)),
    ("gpt_oss", 4): under("layers/GptOssAttention", ATTENTION, range(4)),
    ("llama4", 8): under("layers/self_attention", ATTENTION, range(8))
    | under("layers/mlp", MLP, range(0, 8, 2))
    | under("layers/Llama4MoEBlock_0/shared_experts", MLP, range(1, 8, 2)),
    ("deepseek", 5): under("dense_layers/self_attention", MLA, range(2))
    | under("dense_layers/mlp", MLP, range(2))
    | under("moe_layers/self_attention", MLA, range(2, 5))
    | under("moe_layers/DeepSeekMoeBlock_0/shared_experts", MLP, range(2, 5)),
    ("qwen3_5", 8): qwen3_hybrid(8),
    ("qwen3_next", 4): qwen3_hybrid(4),
}
"""(family, decoder layers) to the decoder layers of each site that the policy may quantize."""

KEYS = {
    "olmo3": {"inhomogeneous_layer_cycle_interval": 4},
    "deepseek": {"first_num_dense_layers": 2},
}
EXPERTS = {
    "mixtral": "layers/MoeBlock_0",
    "qwen3_moe": "layers/moe_block",
    "gpt_oss": "layers/GptOssMlp",
    "llama4": "layers/Llama4MoEBlock_0/MoeBlock_0",
    "deepseek": "moe_layers/DeepSeekMoeBlock_0/MoeBlock_0",
    "qwen3_5": "layers/mlp/routed_experts",
    "qwen3_next": "layers/mlp/routed_experts",
}
UNSCANNED_ONLY = ("qwen3_next",)


@functools.cache
def model_of(family, layers, scan):
    keys = KEYS.get(family, {})
    return abstract_model(load(family=family, base_num_decoder_layers=layers, scan_layers=scan, **keys))


CASES = [
    (family, layers, scan)
    for family, layers in EXPECTED
    for scan in (True, False)
    if not (scan and family in UNSCANNED_ONLY)
]


@pytest.mark.parametrize(("family", "layers", "scan"), CASES)
def test_every_site_has_its_decoder_layers(family, layers, scan):
    model = model_of(family, layers, scan)
    linears = sites.find_linears(model)
    found = sites.to_sites(linears)
    sites.check_layers(found, layers)

    free = [site for site in found if not site.protected]
    assert {site.path: site.layers for site in free} == EXPECTED[family, layers]
    assert len({site.path for site in free}) == len(free)

    for linear in linears:
        features = (*linear.module.in_features_shape, *linear.module.out_features_shape)
        stacked = linear.module.kernel.ndim > len(features)
        assert linear.stacked == stacked
        assert not stacked or len(linear.layers) in linear.module.kernel.shape
        assert stacked or len(linear.layers) <= 1

    protected = {site.path: site.protected for site in found if site.protected}
    head = {} if family == "gemma3" else {"decoder/logits_dense": "output head"}  # gemma3 ties its embedding
    gate = {"decoder/layers/mlp/shared_expert_gate": "router gate"} if "qwen3_" in family else {}
    assert protected == head | (gate if family != "qwen3_moe" else {})

    experts = {item.path: item.reason for item in sites.find_routed_experts(model)}
    if family in EXPERTS:
        path = f"decoder/{EXPERTS[family]}"
        assert set(experts) == {path, f"{path}/gate"}
        assert "grouped GEMMs" in experts[path]
        assert "router gates" in experts[f"{path}/gate"]
    else:
        assert experts == {}


def test_all_families_are_covered():
    assert {family for family, _ in EXPECTED} == set(DENSE | MIXTURE)


@pytest.mark.parametrize(
    ("path", "k", "n"),
    [
        ("self_attention/query", 64, 4 * 16),
        ("self_attention/key", 64, 2 * 16),
        ("self_attention/out", 4 * 16, 64),
        ("mlp/wi_0", 64, 128),
        ("mlp/wo", 128, 64),
    ],
)
@pytest.mark.parametrize("scan", [True, False])
def test_sizes_of_the_forward_gemm(path, k, n, scan):
    (site,) = [
        site for site in sites.to_sites(sites.find_linears(model_of("llama2", 2, scan))) if path in site.path
    ]
    assert (site.k, site.n) == (k, n)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_stack_on_another_axis(axis):
    """The stack is found by shape; here it is as long as there are heads, and of another length than in the rest."""
    model = abstract_model(load(base_num_decoder_layers=4, param_scan_axis=axis))
    found = sites.to_sites(sites.find_linears(model))
    assert {site.path: site.layers for site in found if site.layers} == standard(4)


def test_multi_token_prediction_is_outside_the_decoder():
    found = sites.to_sites(sites.find_linears(abstract_model(load(mtp_num_layers=1))))
    outside = [site for site in found if site.path.startswith("mtp_block/")]
    assert outside
    assert {site.protected for site in outside} == {"outside the decoder layers"}
    assert {site.layers for site in outside} == {()}


@pytest.mark.parametrize(
    "keys",
    [
        {"family": "qwen3_next"},
        {"decoder_block": "gemma4", "base_num_decoder_layers": 6},
        {"decoder_block": "gemma4", "base_num_decoder_layers": 8},
    ],
    ids=["qwen3_next", "gemma4", "gemma4 with a remainder"],
)
def test_a_stack_that_cannot_be_numbered_is_refused(keys):
    with pytest.raises(ConfigError, match=r"decoder/\S+ .*cannot be numbered yet; write scan_layers: false"):
        of_config(load(quantization="nvfp4", nvfp4={"recipe": "all_layers"}, scan_layers=True, **keys))


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(
        ConfigError, match="nothing could be 4-bit; write another decoder_block such as llama2"
    ):
        of_config(load(quantization="nvfp4", decoder_block="simple"))


def test_numbers_with_gaps_are_refused():
    found = sites.to_sites(sites.find_linears(model_of("llama2", 2, True)))
    with pytest.raises(
        ConfigError, match=r"has 3 decoder layers, .* layers 0, 1: .*write scan_layers: false"
    ):
        sites.check_layers(found, 3)
    with pytest.raises(ConfigError, match=r"has 1 decoder layers, .* layers 0, 1: "):
        sites.check_layers(found, 1)
