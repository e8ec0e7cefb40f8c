"""The 4-bit GEMMs of a traced train step are those that `explain` lists, layer by layer, and no others.

`test_attach.py` compares the two for every dense family. Here are mixtures of experts, stacks of blocks, each layer by
itself, rematerialization, microbatches, evaluation and the BF16 recipe.
"""

from collections import Counter

import jax
import numpy as np
import pytest
from maxtext_models import Trainer
from traced_gemms import Walk, equations, listed, merged, sizes, walked

BF16 = {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
STACKS = {
    # Blocks of six and a remainder of two; the first rule crosses the two.
    "gemma3": (
        {"base_num_decoder_layers": 8},
        {
            "recipe": "all_layers",
            "bf16_first_layers": 1,
            "rules": [
                {"module": "mlp/*", "layers": "4..6", "fprop": "bf16"},
                {"module": "query", "layers": 7, "wgrad": "bf16"},
            ],
        },
    ),
    "olmo3": (
        {"base_num_decoder_layers": 8, "inhomogeneous_layer_cycle_interval": 4},
        {"recipe": "nemotron", "bf16_last_layers": 3},
    ),
    "mixtral": ({}, {"recipe": "all_layers", "bf16_last_layers": 1}),
    "deepseek": (
        {},
        {
            "recipe": "all_layers",
            "bf16_first_layers": 1,
            "rules": [{"module": "shared_experts/wo", "layers": 2, "dgrad": "bf16"}],
        },
    ),
    "llama4": ({}, {"recipe": "mlp_only", "rules": [{"module": "wo", "layers": "2..3", "wgrad": "bf16"}]}),
    "gpt_oss": ({}, {"recipe": "paper"}),
    # MaxText's gate of 4 outputs is no multiple of a block.
    "qwen3_5": ({}, {"recipe": "paper", "rules": [{"module": "in_proj_ba", **BF16}]}),
}
SLOW = {(family, True) for family in ("gemma3", "gpt_oss", "qwen3_5")} | {
    (family, False) for family in STACKS if family != "deepseek"
}


def nvfp4(**keys):
    return Trainer(**{"quantization": "nvfp4", "remat_policy": "minimal", **keys})


@pytest.mark.parametrize(
    ("family", "scan"),
    [
        pytest.param(family, scan, marks=[pytest.mark.slow] if (family, scan) in SLOW else [])
        for family in STACKS
        for scan in (True, False)
    ],
)
def test_explain_lists_what_a_stack_runs(family, scan):
    keys, recipe = STACKS[family]
    trainer = nvfp4(family=family, scan_layers=scan, nvfp4=recipe, **keys)
    assert merged(walked(trainer)) == listed(trainer.config)


@pytest.mark.parametrize("backend", ["emulated", "xla"])
def test_each_layer_of_a_scan_takes_its_own_branch(backend):
    """Iteration i of the layer scan, forward and backward, runs what the recipe says of decoder layer i."""
    rules = [
        {"module": "mlp/wo", "layers": "0..1", "fprop": "bf16"},
        {"module": "mlp/wo", "layers": "1..3", "dgrad": "bf16"},
        {"module": "mlp/wo", "layers": 2, "wgrad": "bf16"},
        {"module": "mlp/wo", "layers": 4, **BF16},
        {"module": "self_attention/*", **BF16},
        {"module": "wi_0", **BF16},
        {"module": "wi_1", "fprop": "bf16", "dgrad": "bf16"},
    ]
    recipe = {"recipe": "all_layers", "bf16_first_layers": 0, "backend": backend, "rules": rules}
    gemms = walked(nvfp4(base_num_decoder_layers=5, nvfp4=recipe))
    tokens, k, n = 64, 128, 64
    wo = {"fprop": ((tokens, k), (k, n)), "dgrad": ((tokens, n), (k, n)), "wgrad": ((tokens, k), (tokens, n))}
    want = Counter()
    for kind, layers in {"fprop": (2, 3), "dgrad": (0,), "wgrad": (0, 1, 3)}.items():
        for layer in layers:
            want[kind, sizes(wo[kind]), (layer,)] += 1
    wi_1 = sizes(((tokens, n), (tokens, k)))
    for layer in range(5):
        want["wgrad", wi_1, (layer,)] += 1
    assert gemms == want


@pytest.mark.parametrize(
    ("policy", "replayed", "scan"),
    [
        # Nothing is saved; only the last GEMM of a layer is not needed again.
        ("full", {"query", "key", "value", "out", "wi_0", "wi_1"}, True),
        ("full", {"query", "key", "value", "out", "wi_0", "wi_1"}, False),
        ("none", {"query", "key", "value", "out", "wi_0", "wi_1"}, True),  # jax.checkpoint without a policy
        ("save_qkv_proj", {"out", "wi_0", "wi_1"}, True),
        ("save_dot_except_mlpwi", {"wi_0", "wi_1"}, False),
        ("minimal", set(), True),
        ("minimal", set(), False),
        ("minimal_with_context", set(), True),
    ],
)
def test_rematerialization_replays_no_more_than_its_policy_says(policy, replayed, scan):
    """Forward GEMMs are quantized again where a policy drops their result, and nowhere else."""
    recipe = {"recipe": "all_layers", "bf16_last_layers": 1}
    trainer = nvfp4(remat_policy=policy, scan_layers=scan, nvfp4=recipe)
    gemms = walked(trainer)
    assert merged(gemms) == listed(trainer.config)
    features = {
        "query": (64, 64),
        "key": (64, 32),
        "value": (64, 32),
        "out": (64, 64),
        "wi_0": (64, 128),
        "wi_1": (64, 128),
    }
    want = Counter(("replay", sizes(((64, k), (k, n)))) for k, n in (features[name] for name in replayed))
    assert merged(gemms, ("replay",)) == want


def test_tags_that_policies_name_are_in_the_program():
    """A policy saves by name: MaxText's tags sit on the results of the 4-bit GEMMs."""
    jaxpr = nvfp4(nvfp4={"recipe": "all_layers"}).trace().jaxpr
    tags = {equation.params["name"] for equation in equations(jaxpr) if equation.primitive.name == "name"}
    assert {"query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"} <= tags


@pytest.mark.parametrize("scan", [True, False])
def test_microbatches_run_the_same_gemms_each(scan):
    keys = {"scan_layers": scan, "nvfp4": {"recipe": "paper", "hadamard": "none"}}
    trainer = nvfp4(gradient_accumulation_steps=3, **keys)
    gemms = walked(trainer)
    for microbatch in range(3):
        one = Counter({key: count for key, count in gemms.items() if key[2][0] == microbatch})
        assert merged(one) == listed(trainer.config)


@pytest.mark.parametrize("scan", [True, False])
def test_evaluation_runs_the_forward_gemms(scan):
    trainer = nvfp4(scan_layers=scan, nvfp4={"recipe": "paper"})
    gemms = merged(walked(trainer, evaluation=True))
    assert gemms == Counter(
        {key: count for key, count in listed(trainer.config).items() if key[0] == "fprop"}
    )


@pytest.mark.parametrize("scan", [True, False])
def test_bf16_recipe_is_stock_maxtext(scan):
    """Without a loss scale, it is the same program on the same state, to the letter."""
    stock = Trainer(scan_layers=scan)
    ours = Trainer(
        scan_layers=scan, quantization="nvfp4", nvfp4={"recipe": "bf16", "loss_scale": {"mode": "off"}}
    )
    assert ours.paths == stock.paths
    assert ours.trace().lower().as_text() == stock.trace().lower().as_text()


def test_the_walk_refuses_to_guess():
    """A 4-bit GEMM behind a branch on data is an error."""

    def multiply(x):
        with jax.named_scope("nvfp4_fprop"):
            return x @ x

    x = np.ones((4, 4), np.float32)
    jaxpr = jax.make_jaxpr(lambda x, i: jax.lax.switch(i, [multiply, lambda x: x], x))(x, 0)
    with pytest.raises(AssertionError, match="a branch that the walk cannot decide"):
        Walk().run(jaxpr, [None, None])
    for index, count in ((0, 1), (1, 0)):
        walk = Walk()
        walk.run(jaxpr, [None, np.int32(index)])
        assert walk.gemms.total() == count
