"""What reaches Transformer Engine's CUDA kernels: the calls in programs lowered for a GPU, their types and attributes.

Public threads answered here: MaxText #2773 #3185, TE #2356 #2658 (quantization replayed in the backward pass),
MaxText #5324 (tags that remat policies name), MaxText #2207 #2319 (what of a mixture of experts stays in high
precision), MaxText #5027 (cost of random state per layer), TE #2270 (stochastic rounding silently off), TE #3195
(silent fallback), TE #2569 #2102 (other precisions forward and backward).
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import zlib
from collections import Counter
from unittest import mock

import harness
import jax
import pytest
from jax import numpy as jnp
from maxtext.layers import quantizations
from maxtext.utils import max_utils
from maxtext_models import MIXTURE, Trainer
from traced_gemms import Walk, equations, walked
from transformer_engine.common.recipe import NVFP4BlockScaling

from maxtext_nvfp4.backends.transformer_engine import CHECKPOINT_NAME, create
from maxtext_nvfp4.dot_general import routed_dot_general
from maxtext_nvfp4.integration import attach
from maxtext_nvfp4.integration.report import of_config
from maxtext_nvfp4.plan import BF16, GEMMS
from maxtext_nvfp4.policy import layer_plan
from maxtext_nvfp4.recipe import load_recipe
from maxtext_nvfp4.routine import Routine

QUANTIZE, GEMM, AMAX = TARGETS = ("te_dbias_quantize_ffi", "te_gemm_v2_ffi", "te_rht_amax_ffi")

# One dense layer. No two of M, K and N are equal, so that a quantized operand is known by its type.
M, K, N = 64, 128, 256
ONE, SQUARE = 4, 5
"""Transformer Engine's scaling modes: a scale for 1x16 and for 16x16 elements."""
ROWS, BOTH = 0, 2
"""Its layouts: quantized along rows, and along rows and columns."""
SIGNS = 55272
KNOBS = {
    "weight_scaling": ("2d", "1d"),
    "hadamard": ("wgrad", "none"),
    "stochastic_rounding": ("gradients", "none"),
}
SUBSETS = [set(some) for size in range(4) for some in itertools.combinations(GEMMS, size)]


def dense(plan):
    """The program of a dense layer, forward and backward."""
    routine = Routine((plan,), (0,))

    def layer(x, w, dy, key):
        def multiply(x, w):
            return routed_dot_general(create("gpu"), routine, x, w, (((1,), (0,)), ((), ())), key=key)

        y, pullback = jax.vjp(multiply, x, w)
        return y, pullback(dy)

    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (K, N), (M, N)))
    return harness.lower_for_cuda(jax.jit(layer), *arrays, jax.ShapeDtypeStruct((2,), jnp.uint32))


def planned(bf16=(), **knobs):
    plan = layer_plan(load_recipe({"recipe": "all_layers", **knobs}))
    return dataclasses.replace(plan, **dict.fromkeys(bf16, BF16))


@functools.cache
def program(bf16=frozenset(), **knobs):
    with harness.blackwell():
        return dense(planned(bf16, **knobs))


def implied(plan):
    """What a plan means in calls, from the plan alone: (target, what identifies the call)."""
    fprop, dgrad, wgrad = (getattr(plan, gemm).quantized for gemm in GEMMS)
    transform = wgrad and plan.wgrad.a.hadamard
    gradient = plan.wgrad.b if wgrad else plan.dgrad.a
    weight = plan.fprop.b if fprop else plan.dgrad.b
    random = gradient is not None and gradient.stochastic
    calls = Counter()

    def quantize(shape, mode, columns, *, rht=False, state=False):
        calls[QUANTIZE, shape, mode, BOTH if columns else ROWS, rht, "1x4xui32" if state else "0xui32"] += 1
        if rht:
            calls[AMAX, shape, SIGNS] += 1

    if fprop or wgrad:
        quantize((M, K), ONE, wgrad, rht=transform)
    if fprop or dgrad:
        quantize((K, N), SQUARE if weight.block == (16, 16) else ONE, fprop)
    if dgrad or wgrad:
        quantize((M, N), ONE, wgrad, rht=transform, state=random)
    if fprop:
        calls[GEMM, (M, K), (N, K), (M, N)] += 1  # rows of x, columns of w
    if dgrad:
        calls[GEMM, (M, N), (K, N), (M, K)] += 1  # rows of dy, rows of w
    if wgrad:
        calls[GEMM, (K, M), (N, M), (K, N)] += 1  # columns of x, columns of dy
    return calls


def found(text):
    """The calls of a program in the form of `implied`; what holds for every call is asserted on the way."""
    calls = Counter()
    for call in harness.te_calls(text):
        flags = dict(re.findall(r"(\w+) = (\w+)", call["attributes"]))
        arguments, results = call["arguments"], call["results"]
        if call["target"] == AMAX:
            assert flags["produce_regular_amax"] == "true"
            assert kind(arguments[0]) == "bf16"
            calls[AMAX, shape(arguments[0]), int(flags["rht_matrix_random_sign_mask_t"])] += 1
        elif call["target"] == QUANTIZE:
            layout, rht = int(flags["q_layout"]), flags["use_rht"] == "true"
            assert kind(arguments[0]) == "bf16"
            assert (flags["stochastic_rounding"] == "true") == (arguments[3] != "0xui32")
            assert flags["is_dbias"] == "false"
            assert shape(arguments[5]) == ((16, 16) if rht else (1, 1))
            rows, columns = shape(arguments[0]), shape(arguments[0])[::-1]
            data = [rows, columns] if layout == BOTH else [rows]
            assert [shape(result) for result in results[: len(data)]] == data
            scaled = [kind(result) for result in results[:4] if math.prod(shape(result)) > 1]
            assert scaled == ["f4E2M1FN"] * len(data) + ["f8E4M3FN"] * len(data)
            calls[QUANTIZE, rows, int(flags["scaling_mode"]), layout, rht, arguments[3]] += 1
        else:
            assert call["target"] == GEMM
            assert [kind(argument) for argument in arguments[:4]] == ["f4E2M1FN", "f8E4M3FN"] * 2
            assert kind(results[0]) == "bf16"
            assert (flags["lhs_transposed"], flags["rhs_transposed"]) == ("false", "true")
            calls[GEMM, shape(arguments[0]), shape(arguments[2]), shape(results[0])] += 1
    return calls


def shape(text):
    return tuple(map(int, text.split("x")[:-1]))


def kind(text):
    return text.split("x")[-1]


def test_calls_of_a_dense_layer():
    """Written out once, so that `implied` is not the only witness."""
    assert found(program()) == Counter(
        {
            (AMAX, (M, K), 55272): 1,
            (QUANTIZE, (M, K), 4, 2, True, "0xui32"): 1,
            (QUANTIZE, (K, N), 5, 2, False, "0xui32"): 1,
            (AMAX, (M, N), 55272): 1,
            (QUANTIZE, (M, N), 4, 2, True, "1x4xui32"): 1,
            (GEMM, (M, K), (N, K), (M, N)): 1,
            (GEMM, (M, N), (K, N), (M, K)): 1,
            (GEMM, (K, M), (N, M), (K, N)): 1,
        }
    )
    assert harness.counts(program()) == {QUANTIZE: 3, GEMM: 3, AMAX: 2}


@pytest.mark.parametrize("bf16", SUBSETS, ids=lambda some: "+".join(sorted(some)) or "none")
def test_a_dense_layer_is_lowered_as_planned(bf16):
    """Every knob with every choice of GEMMs: the calls that the plan implies, and BF16 multiplies for the rest.

    TE #2569 #2102: forward and backward may differ. TE #2270: stochastic rounding is not silently off. A knob changes
    the program wherever a GEMM of its own is in 4 bits, and nowhere else.
    """
    four_bit = set(GEMMS) - bf16
    matters = {
        "weight_scaling": four_bit & {"fprop", "dgrad"},
        "hadamard": four_bit & {"wgrad"},
        "stochastic_rounding": four_bit & {"dgrad", "wgrad"},
    }
    texts = {}
    for values in itertools.product(*KNOBS.values()):
        text = texts[values] = program(frozenset(bf16), **dict(zip(KNOBS, values, strict=True)))
        assert found(text) == implied(planned(bf16, **dict(zip(KNOBS, values, strict=True))))
        multiplies = re.findall(r"stablehlo.dot_general .* -> tensor<(.*)>", text)
        # The 16x16 transform itself is made by a multiply.
        assert sorted(shape(result) for result in multiplies if shape(result) != (16, 16)) == sorted(
            {"fprop": (M, N), "dgrad": (M, K), "wgrad": (K, N)}[gemm] for gemm in bf16
        )
    for place, name in enumerate(KNOBS):
        for values in texts:
            if values[place] == KNOBS[name][0]:
                other = (*values[:place], KNOBS[name][1], *values[place + 1 :])
                assert (texts[values] != texts[other]) == bool(matters[name]), (name, values)


# MaxText's whole train step.

LAYERS = harness.LEGAL["base_num_decoder_layers"]
LEGAL = {**harness.LEGAL, "remat_policy": "minimal_with_context_and_quantization"}
DEMO = {
    **LEGAL,
    "decoder_block": "llama2",
    "base_num_decoder_layers": 6,
    "base_emb_dim": 256,
    "base_mlp_dim": 768,
    "base_num_kv_heads": 4,
    "vocab_size": 2048,
    "attention": "dot_product",
}
"""As configs/demo-cpu.yml, with fewer tokens."""
MIXED = {
    "recipe": "all_layers",
    "bf16_last_layers": 2,
    "rules": [
        {"module": "mlp/wo", "layers": "0..1", "fprop": "bf16"},
        {"module": "mlp/wo", "layers": 2, "dgrad": "bf16", "wgrad": "bf16"},
        {"module": "query", "wgrad": "bf16"},
        {"module": "value", "layers": "1..2", "dgrad": "bf16"},
        {"module": "self_attention/out", "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"},
    ],
}
"""For six layers: every GEMM is in BF16 somewhere and in NVFP4 somewhere else."""
SITES = 7


class Calls(Walk):
    """Counts calls to Transformer Engine by (target, site label, operand sizes, iteration of the layer scan)."""

    def __init__(self):
        super().__init__()
        self._scopes = []

    def kind(self, equation):
        target = called(equation)
        if not target:
            return ""
        scopes = "/".join([*self._scopes, str(equation.source_info.name_stack)])
        labels = re.findall(r"site_(\d+)_(\w+)", scopes)
        return target, labels[-1] if labels else None

    def _equation(self, equation, inputs, where, replaying):
        self._scopes.append(str(equation.source_info.name_stack))
        try:
            return super()._equation(equation, inputs, where, replaying)
        finally:
            self._scopes.pop()


def called(equation):
    """The target of a call to Transformer Engine; "" for any other equation."""
    name = equation.primitive.name
    return name.removesuffix("_wrapper") if name.startswith("te_") else ""


@contextlib.contextmanager
def labelled():
    """Names the site and the layer, if it is one, in the name stack of every multiply, forward and backward."""
    plain = attach.Nvfp4DotGeneral.__call__

    def call(self, *args, **kwargs):
        layer = "stacked" if isinstance(self.layer, attach.LayerIndex) else self.layer
        with jax.named_scope(f"site_{self.site_id}_{layer}"):
            return plain(self, *args, **kwargs)

    with mock.patch.object(attach.Nvfp4DotGeneral, "__call__", call):
        yield


class Step:
    """MaxText's train step, lowered for CUDA.

    Attributes:
      trainer: The trainer.
      report: What `explain` says; None for stock MaxText.
      text: The StableHLO.
      calls: Calls that one step makes, as `Calls` counts them.
      operations: What `operations` finds.
      cases: What `cases` finds.
    """

    def __init__(self, **keys):
        with harness.blackwell(), max_utils.transformer_engine_context(), labelled():
            self.trainer = Trainer(**keys)
            ours = keys["quantization"] == "nvfp4"
            self.report = of_config(self.trainer.config) if ours else None
            self.calls = walked(self.trainer, walk=Calls())
            with self.trainer.context():
                lowered = self.trainer.trace().lower(lowering_platforms=("cuda",))
        self.text = lowered.as_text()
        self.operations = operations(lowered.compiler_ir("stablehlo"))
        self.cases = cases(lowered.compiler_ir("stablehlo"))
        # The walk saw each call of the lowered program, and no other.
        jaxpr = self.trainer.trace().jaxpr
        assert Counter(filter(None, map(called, equations(jaxpr)))) == harness.counts(self.text)

    @property
    def total(self):
        """Calls of one step by target."""
        total = Counter()
        for ((target, _), _, _), count in self.calls.items():
            total[target] += count
        return total

    @property
    def by_layer(self):
        """Calls of one step by (site, decoder layer, target)."""
        paths = {zlib.crc32(row.path.encode()): row for row in self.report.rows}
        found = Counter()
        for ((target, label), _, where), count in self.calls.items():
            assert label, "a call outside the sites"
            site, layer = label
            path = paths[int(site)].path
            # In a stack the walk tells the iteration; a site's rows tell the layers of its stack.
            number = first_layer(self.report, path) + where[-1] if layer == "stacked" else int(layer)
            found[path, number, target] += count
        return found


@pytest.fixture(scope="module")
def ours():
    """Makes our train step of a recipe; each is lowered once."""
    steps = {}

    def make(recipe="all_layers", **keys):
        nvfp4 = {
            **harness.BARE,
            **(recipe if isinstance(recipe, dict) else {"recipe": recipe}),
        }
        keys = {**LEGAL, "nvfp4": nvfp4, **keys}
        name = repr(sorted(keys.items()))
        if name not in steps:
            steps[name] = Step(**keys)
        return steps[name]

    return make


def rows_by_layer(report):
    """The plan of every site and decoder layer that `explain` lists."""
    for row in report.rows:
        first, _, last = row.layers.partition("..")
        for layer in range(int(first), int(last or first) + 1) if first != "-" else [None]:
            yield row.path, layer, row.plan


def first_layer(report, path):
    return min(layer for site, layer, _ in rows_by_layer(report) if site == path)


def expected(report):
    """Calls by (site, decoder layer, target) that the plans of `explain` imply."""
    calls = Counter()
    for path, layer, plan in rows_by_layer(report):
        for (target, *_), count in implied(plan).items():
            calls[path, layer, target] += count
    return calls


def operations(module):
    """Operations of a lowered program by (name, types of its arrays), each function as often as it is called.

    An array has more than 16 elements. Loop counters, layer numbers and random keys have fewer.
    """
    functions = {str(f.attributes["sym_name"]).strip('"'): f for f in module.body.operations}

    def nested(operation):
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield inner.operation
                    yield from nested(inner)

    @functools.cache
    def body(name):
        total = Counter()
        for operation in nested(functions[name]):
            if operation.name == "func.call":
                total += body(str(operation.attributes["callee"]).removeprefix("@"))
            elif not operation.name.endswith("return"):
                types = (str(value.type) for value in (*operation.operands, *operation.results))
                arrays = sorted(text for text in types if elements(text) > 16)
                total[operation.name, " ".join(arrays)] += 1
        return total

    return body("main")


def cases(module):
    """Calls to Transformer Engine in a program: (inside a branch on data, outside of any)."""
    counts = [0, 0]

    def visit(operation, inside):
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    if inner.operation.name == "stablehlo.custom_call":
                        target = str(inner.attributes["call_target_name"]).strip('"')
                        counts[not inside] += target in TARGETS
                    visit(inner, inside or inner.operation.name == "stablehlo.case")

    visit(module.operation, False)
    return tuple(counts)


def elements(text):
    found = re.fullmatch(r"tensor<((?:\d+x)*)[^x]+>", text)
    return math.prod(int(size) for size in found[1].split("x")[:-1]) if found else 0


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("recipe", ["paper", MIXED], ids=["paper", "mixed"])
def test_each_layer_calls_what_its_plan_says(recipe, scan, ours):
    """3 quantizations, 3 GEMMs and 2 amax per 4-bit site and layer; none for BF16 layers, head and embeddings."""
    step = ours(recipe, **DEMO, scan_layers=scan)
    plans = {(path, layer): plan for path, layer, plan in rows_by_layer(step.report)}
    assert len(plans) == SITES * 6 + 1
    assert step.by_layer == expected(step.report)
    if recipe == "paper":
        inside = [path for path, layer in plans if layer == 0]
        assert step.by_layer == Counter(
            {
                (path, layer, target): count
                for path in inside
                for layer in range(5)
                for target, count in ((QUANTIZE, 3), (GEMM, 3), (AMAX, 2))
            }
        )


@pytest.mark.parametrize(
    ("recipe", "inside", "outside"), [("all_layers", 0, 8 * SITES), ("paper", 8 * SITES, 0)]
)
def test_calls_sit_in_the_branch_of_their_layers(recipe, inside, outside, ours):
    """Where layers differ, a BF16 layer runs none of the calls: they are in the branch of the others."""
    step = ours(recipe, scan_layers=True)
    assert step.cases == (inside, outside)


@pytest.mark.parametrize("recipe", ["all_layers", "paper"])
def test_the_scanned_program_does_not_grow_with_depth(recipe, ours):
    shallow = ours(recipe, scan_layers=True)
    deep = ours(recipe, scan_layers=True, base_num_decoder_layers=12)
    assert deep.operations.total() == shallow.operations.total()
    assert harness.counts(deep.text) == harness.counts(shallow.text)


REPLAYED = {
    # A policy's: what of the forward pass runs again, in calls per layer (quantizations, GEMMs, amax).
    "full": (2 * SITES, SITES - 1, SITES),  # the last GEMM's result is not needed again
    "none": (2 * SITES, SITES - 1, SITES),  # MaxText 0.2.5 takes it for jax.checkpoint without a policy
    "minimal": (2 * SITES, 0, SITES),
    "minimal_with_quantization": (0, 0, 0),
    "minimal_with_context_and_quantization": (0, 0, 0),
}


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("policy", REPLAYED)
def test_nothing_is_quantized_again_where_the_policy_saves_it(policy, scan, ours):
    """One quantization per operand and step: MaxText #2773 #3185, TE #2356 #2658."""
    quantizations, gemms, amax = REPLAYED[policy]
    want = {QUANTIZE: 3 * SITES + quantizations, GEMM: 3 * SITES + gemms, AMAX: 2 * SITES + amax}
    assert ours(scan_layers=scan, remat_policy=policy).total == {
        target: LAYERS * count for target, count in want.items()
    }


def test_nothing_is_quantized_again_where_layers_differ(ours):
    """As above, where the quantized tensors leave a branch on the layer number."""
    step = ours(MIXED, **DEMO, scan_layers=True)
    replaying = ours(MIXED, **{**DEMO, "scan_layers": True, "remat_policy": "full"})
    assert step.by_layer == expected(step.report)
    assert replaying.by_layer > step.by_layer


@pytest.mark.parametrize("recipe", ["all_layers", "paper"])
def test_quantized_tensors_carry_the_name_that_policies_save(recipe, ours):
    """MaxText #5324: a tag that is renamed or lost makes remat policies stop matching without a word."""
    step = ours(recipe, scan_layers=True)
    names = [
        equation for equation in equations(step.trainer.trace().jaxpr) if equation.primitive.name == "name"
    ]
    tagged = Counter(
        equation.invars[0].aval.dtype.name for equation in names if equation.params["name"] == CHECKPOINT_NAME
    )
    # Columns of x and rows of w: data, block scales and amax.
    assert tagged == dict.fromkeys(("float4_e2m1fn", "float8_e4m3fn", "float32"), 2 * SITES)
    assert CHECKPOINT_NAME == "quantization"


# Beside MaxText's own te_nvfp4.


def stock(stochastic=True, **keys):
    """MaxText's own mode, which `register()` leaves as it is."""
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=not stochastic)
    te = quantizations.TransformerEngineQuantization
    with mock.patch.object(te, "_get_recipe", staticmethod(lambda _: recipe)):
        return Step(**{**LEGAL, "quantization": "te_nvfp4", **keys})


def without_labels(calls):
    total = Counter()
    for ((target, _), operands, where), count in calls.items():
        total[target, operands, where] += count
    return total


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("policy", ["full", "minimal_with_context_and_quantization"])
def test_no_more_work_than_stock(policy, scan, ours):
    """The same calls on operands of the same sizes in the same layers, and no other operation on an array.

    Beyond arrays there is only the hash of random keys, on a few words for each gradient; MaxText #5027.
    """
    own, stocks = ours(scan_layers=scan, remat_policy=policy), stock(scan_layers=scan, remat_policy=policy)
    assert without_labels(own.calls) == without_labels(stocks.calls)
    assert harness.counts(own.text) == harness.counts(stocks.text)
    print(f"{policy}, scan {scan}, calls: {dict(own.total)}")
    for name, step in (("ours", own), ("stock", stocks)):
        arrays = sum(count for (_, types), count in step.operations.items() if types)
        print(
            f"  {name}: {arrays} operations on arrays, {step.operations.total() - arrays} on a few elements"
        )
    more = own.operations - stocks.operations
    assert not any(types for _, types in more)
    bookkeeping = {
        "add",
        "xor",
        "shift_left",
        "shift_right_logical",
        "or",
        "and",
        "constant",
        "iota",
        "slice",
    }
    bookkeeping |= {"broadcast_in_dim", "concatenate", "reshape", "dynamic_slice", "dynamic_update_slice"}
    assert {name.removeprefix("stablehlo.") for name, _ in more} <= bookkeeping
    assert more.total() <= 1200 * SITES * (1 if scan else LAYERS)


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_without_random_rounding_the_program_is_that_of_stock(scan, ours):
    """Nothing is added but, under a scan, the layer numbers, which are stacked and sliced for each site."""
    recipe = {"recipe": "all_layers", "stochastic_rounding": "none"}
    own, stocks = ours(recipe, scan_layers=scan), stock(stochastic=False, scan_layers=scan)
    more = own.operations - stocks.operations
    assert more.total() <= (6 * SITES if scan else 0)
    assert not any(types for _, types in more)


# Mixtures of experts.

MOE = {"num_experts": 6, "base_moe_mlp_dim": 256}
FAMILIES = {
    "mixtral": {**MIXTURE["mixtral"], **MOE},
    "deepseek": {
        **MIXTURE["deepseek"],
        **MOE,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 128,
        "v_head_dim": 64,
    },
}


@pytest.mark.parametrize(
    ("family", "scan"), [("mixtral", True), ("mixtral", False), ("deepseek", True), ("deepseek", False)]
)
def test_gates_and_experts_are_not_quantized(family, scan, ours):
    """MaxText #2207 #2319: what has no 4-bit path is listed, and stays as it is."""
    step = ours("all_layers", family=family, scan_layers=scan, **FAMILIES[family])
    want = expected(step.report)
    for path, layer, target in want:
        # MaxText's policies do not name the results of these two, so both run again whole.
        if path.endswith(("/wq_a", "/wkv_a")):
            want[path, layer, target] += {QUANTIZE: 2, GEMM: 1, AMAX: 1}[target]
    assert step.by_layer == want
    high_precision = dict(step.report.high_precision)
    assert [path.rpartition("/")[2] for path in high_precision] == ["gate", "MoeBlock_0"]
    assert not high_precision.keys() & {path for path, _, _ in step.by_layer}
    sizes_seen = {size for _, operands, _ in step.calls for operand in operands for size in operand}
    assert FAMILIES[family]["num_experts"] not in sizes_seen


@pytest.mark.parametrize(
    "keys",
    [
        {"max_target_length": 24, "per_device_batch_size": 8},
        {"head_dim": 8, "base_num_query_heads": 16, "base_num_kv_heads": 16},
        {"max_target_length": 96, "per_device_batch_size": 2},
        {"max_target_length": 192, "per_device_batch_size": 1},
        {"head_dim": 96, "base_num_query_heads": 4, "base_num_kv_heads": 4},
    ],
    ids=str,
)
def test_axes_whose_scales_cannot_be_laid_out(keys):
    """Transformer Engine stops at a sequence of 24 or 192 and heads of 8 or 96, whatever the matrices' sizes are."""
    with harness.blackwell():
        trainer = Trainer(
            **{**harness.LEGAL, **keys}, nvfp4={"backend": "transformer_engine", "recipe": "all_layers"}
        )
        traced = trainer.trace()
        with trainer.context():
            traced.lower(lowering_platforms=("cuda",))


def forward_only(plan, x, w):
    routine = Routine((plan,), (0,))
    return routed_dot_general(create("gpu"), routine, x, w, (((2,), (0,)), ((), ())))


def test_evaluation_quantizes_for_the_forward_gemm_alone():
    """No transform, no kept tensors; and sizes that only wgrad could not take, such as of 96 tokens."""
    plan = layer_plan(load_recipe(None))
    x, w = jnp.ones((2, 48, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    with harness.blackwell():
        text = harness.lower_for_cuda(jax.jit(functools.partial(forward_only, plan)), x, w)
    assert harness.counts(text) == {QUANTIZE: 2, GEMM: 1}
    assert "use_rht = true" not in text


@pytest.mark.parametrize("tokens", [8, 96])
def test_sizes_that_were_not_fitted_are_refused_in_words(tokens):
    """Those of an evaluation or of a call of one's own, which no plan was fitted to."""
    plan = layer_plan(load_recipe({"stochastic_rounding": "none"}))
    x, w = jnp.ones((1, tokens, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    with harness.blackwell():
        message = (
            rf"Transformer Engine cannot run in 4 bits: .*wgrad: M={tokens} \(tokens on one device\) is not"
        )
        with pytest.raises(ValueError, match=message):
            jax.grad(lambda x: jnp.sum(forward_only(plan, x, w).astype(jnp.float32)))(x)
