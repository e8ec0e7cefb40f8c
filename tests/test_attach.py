"""MaxText's own train step, traced and run, for every model family with the 4-bit multiplies attached."""

import functools
import itertools
import types
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp
from maxtext.layers.linears import DenseGeneral
from maxtext_models import DENSE, Trainer, named
from traced_gemms import Walk, listed, merged, walked

from maxtext_nvfp4 import backends, training_step
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import attach, sites
from maxtext_nvfp4.integration.attach import LayerIndex, Nvfp4DotGeneral
from maxtext_nvfp4.plan import GEMMS
from maxtext_nvfp4.recipe import Recipe, Rule, load_recipe

LAST_IN_BF16 = {
    "recipe": "all_layers",
    "bf16_last_layers": 1,
    "rules": [
        {"module": "mlp*/wo", "layers": 0, "dgrad": "bf16"},
        {"module": "*attention*/out", "fprop": "bf16"},
    ],
}
"""Decoder layer 0 in 4 bits but for two GEMMs, layer 1 in BF16."""

SETTINGS = {
    # One family or another has each pair of remat policy, gradient accumulation and scan.
    "llama2": ("full", 1),
    "fused": ("minimal", 2),
    "mistral": ("minimal_with_context", 1),
    "gemma": ("full", 2),
    "gemma2": ("minimal", 1),
    "gemma3": ("minimal_with_context", 2),
    "qwen2": ("none", 1),
    "qwen3": ("none", 2),
    "gpt3": ("save_qkv_proj", 1),
    "olmo3": ("minimal", 1),
}
RUN = {
    (family, scan)
    for scan, families in (
        (True, ("llama2", "fused", "gemma3", "qwen3", "olmo3")),
        (False, ("mistral", "gemma", "gemma2", "qwen2", "gpt3")),
    )
    for family in families
}
"""What is compiled and run each time; the rest is slow."""


def cases(scan):
    """Families, those marked slow for which the test takes a compilation that is not in RUN."""
    return [
        pytest.param(family, marks=[] if (family, scan) in RUN else [pytest.mark.slow]) for family in DENSE
    ]


@pytest.fixture(scope="module")
def trainers():
    """A function of (family, scanned) that traces and compiles each step once."""

    @functools.cache
    def trainer(family, scan):
        remat, accumulation = SETTINGS[family]
        return Trainer(
            family=family,
            scan_layers=scan,
            remat_policy=remat,
            gradient_accumulation_steps=accumulation,
            quantization="nvfp4",
            nvfp4=LAST_IN_BF16,
        )

    return trainer


def assert_trains(trainer):
    """Two steps: finite losses, and every layer of every weight has moved a gradient into the optimizer."""
    state, history = trainer.run(2)
    for metrics in history:
        assert np.isfinite(metrics["learning/loss"])
        assert 0 < metrics["learning/raw_grad_norm"] < 100
    leaves = named(state)
    moments = {path: leaf for path, leaf in leaves.items() if "/mu/" in path}
    assert len(moments) == sum(
        isinstance(leaf, nnx.Param) and path.startswith("model/") for path, leaf in leaves.items()
    )
    for path, leaf in moments.items():
        value = np.asarray(leaf.get_value(), np.float32)
        assert np.all(np.isfinite(value)), path
        axis = 1 if trainer.config.scan_layers and "/decoder/" in path and "layers" in path else None
        slices = np.moveaxis(value, axis, 0) if axis is not None and value.ndim > 1 else [value]
        assert all(np.any(part) for part in slices), path
    return history


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("family", DENSE)
def test_runs_the_gemms_that_are_listed(family, scan, trainers):
    trainer = trainers(family, scan)
    microbatches = trainer.config.gradient_accumulation_steps
    want = Counter({gemm: count * microbatches for gemm, count in listed(trainer.config).items()})
    assert merged(walked(trainer)) == want
    assert want


@pytest.mark.parametrize("family", cases(True))
def test_trains_scanned(family, trainers):
    trainer = trainers(family, True)
    history = assert_trains(trainer)
    if family in ("gemma3", "olmo3"):
        return  # with two layers, every module of the block is one layer's
    # The same program in which every layer believes to be the last one computes in BF16.
    state = trainer.initial_state()
    for leaf in named(state).values():
        if isinstance(leaf, LayerIndex):
            leaf.set_value(jnp.ones_like(leaf.get_value()))
    _, in_bf16 = trainer.run(1, state)
    gap = abs(history[0]["learning/loss"] - in_bf16[0]["learning/loss"])
    assert 0 < gap < 0.1


@pytest.mark.parametrize("family", cases(False))
def test_trains_unscanned(family, trainers):
    assert_trains(trainers(family, False))


def test_settings_cover_all_pairs():
    rows = [(*SETTINGS[family], scan) for family in DENSE for scan in (True, False)]
    policies = {"full", "minimal", "minimal_with_context", "none"}
    for a, b in itertools.combinations(range(3), 2):
        values = [policies, {1, 2}, {True, False}]
        assert set(itertools.product(values[a], values[b])) <= {(row[a], row[b]) for row in rows}


class Order(Walk):
    """Notes the decoder layer of each multiply in the order in which the program runs them."""

    def __init__(self):
        super().__init__()
        self.layers = []

    def _equation(self, equation, inputs, where, replaying):
        if equation.primitive.name == "debug_callback":
            self.layers.append(int(inputs[0]))
            return []
        return super()._equation(equation, inputs, where, replaying)


@pytest.mark.parametrize(
    ("family", "layers", "keys"),
    [
        ("llama2", 3, {}),
        ("llama2", 3, {"scan_layers": False}),
        ("llama2", 3, {"param_scan_axis": 0}),
        ("gemma3", 8, {}),  # a block of six and a remainder of two
        ("olmo3", 8, {"inhomogeneous_layer_cycle_interval": 4}),
        ("llama4", 8, {}),
        ("deepseek", 5, {"first_num_dense_layers": 2}),
        ("deepseek", 5, {"first_num_dense_layers": 2, "scan_layers": False}),
    ],
)
def test_layers_know_their_number(family, layers, keys, monkeypatch):
    """MaxText runs the layers in the order of the numbers that they were given."""

    def reporting(backend, routine, x, w, dimension_numbers, *, entry=None, key=None, probe=None):
        jax.debug.callback(lambda layer: None, entry)
        return jax.lax.dot_general(x, w, dimension_numbers)

    monkeypatch.setattr(attach, "routed_dot_general", reporting)
    trainer = Trainer(
        family=family,
        base_num_decoder_layers=layers,
        quantization="nvfp4",
        nvfp4={"recipe": "all_layers"},
        **keys,
    )
    order = Order()
    walked(trainer, evaluation=True, walk=order)
    runs = [(layer, len(list(group))) for layer, group in itertools.groupby(order.layers)]
    assert [layer for layer, _ in runs] == list(range(layers))
    assert {count for _, count in runs} == {8 if family == "deepseek" else 7}


class Layer(nnx.Module):
    def __init__(self, **keys):
        self.self_attention = nnx.Module()
        self.self_attention.out = DenseGeneral(64, 64, dtype=jnp.bfloat16, **keys)
        self.mlp = nnx.Module()
        self.mlp.wo = DenseGeneral(64, 64, dtype=jnp.bfloat16, **keys)


class Decoder(nnx.Module):
    """The least that looks like a MaxText model: layers with two linear layers each."""

    layers = 4

    def __init__(self, *, batch=2, length=32, matmul_precision="default", **section):
        rngs = nnx.Rngs(0)
        self.recipe = load_recipe(section)
        self.decoder = nnx.Module()
        for layer in range(self.layers):
            setattr(self.decoder, f"layers_{layer}", Layer(rngs=rngs, matmul_precision=matmul_precision))
        config = types.SimpleNamespace(
            num_decoder_layers=self.layers,
            micro_batch_size_to_train_on=batch,
            per_device_batch_size=batch,
            max_target_length=length,
            dtype=jnp.dtype("bfloat16"),
            logical_axis_rules=(),
            mesh_axes=(),
            ici_parallelism=(),
            dcn_parallelism=(),
            num_slices=1,
            num_target_devices=1,
        )
        self.resolution = attach.attach(self, config, self.recipe)

    def __call__(self, x):
        for layer in range(self.layers):
            block = getattr(self.decoder, f"layers_{layer}")
            x = block.mlp.wo(block.self_attention.out(x))
        return x

    def program(self):
        """The lowered gradient of a sum, as text."""
        graphdef, parameters, rest = nnx.split(self, nnx.Param, ...)

        def loss(parameters, x, step):
            with training_step(step, seed=self.recipe.seed):
                return jnp.sum(nnx.merge(graphdef, parameters, rest)(x).astype(jnp.float32))

        x = jax.ShapeDtypeStruct((2, 32, 64), jnp.bfloat16)
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return gradient.lower(parameters, x, jax.ShapeDtypeStruct((), jnp.int32)).as_text()


RULE = {"module": "mlp/wo", "layers": "1..2", "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
KNOBS = {
    "recipe": {"recipe": "mlp_only"},
    "backend": {"backend": "xla"},
    "on_unsupported": {"on_unsupported": "bf16"},
    "bf16_first_layers": {"bf16_first_layers": 1},
    "bf16_last_layers": {"bf16_last_layers": 2},
    "weight_scaling": {"weight_scaling": "1d"},
    "hadamard": {"hadamard": "none"},
    "stochastic_rounding": {"stochastic_rounding": "none"},
    "format": {"format": "mxfp4"},
    "seed": {"seed": 1},
    "rules": {"rules": [RULE]},
    "rules.module": {"rules": [{**RULE, "module": "out"}]},
    "rules.layers": {"rules": [{**RULE, "layers": "0..2"}]},
    "rules.fprop": {"rules": [{**RULE, "fprop": "nvfp4"}]},
    "rules.dgrad": {"rules": [{**RULE, "dgrad": "nvfp4"}]},
    "rules.wgrad": {"rules": [{**RULE, "wgrad": "nvfp4"}]},
}
"""Each key of the recipe with another value than the one it has by default, or in RULE."""


def test_every_knob_has_a_liveness_test():
    rules = {f"rules.{name}" for name in Rule.model_fields}
    elsewhere = {
        "allow_recipe_change",
        "loss_scale",
        "switch",
        "telemetry",
    }  # of a start or of a step, not of a layer
    assert set(KNOBS) == (set(Recipe.model_fields) - elsewhere) | rules


@pytest.mark.parametrize("backend", ["emulated", "xla"])
def test_every_knob_changes_the_program_or_is_refused(backend):
    programs = {"": Decoder(backend=backend).program()}
    assert Decoder(backend=backend).program() == programs[""]
    refused = set()
    for knob, section in KNOBS.items():
        if knob == "on_unsupported":  # decides only at sizes that do not divide into blocks
            with pytest.raises(ConfigError):
                Decoder(backend=backend, batch=1, length=24)
            section = {**section, "batch": 1, "length": 24}
        if knob == "backend":
            section = {"backend": {"xla": "emulated", "emulated": "xla"}[backend]}
        try:
            programs[knob] = Decoder(**{"backend": backend, **section}).program()
        except ConfigError:
            refused.add(knob)
    assert refused == ({"format"} if backend == "xla" else set())
    assert len(set(programs.values())) == len(programs)


def test_backends_state_what_they_cannot_run():
    assert backends.create("xla", "cpu").unavailable("mxfp4") == "it multiplies nvfp4 only, not mxfp4"
    with pytest.raises(
        ConfigError, match=r"nvfp4.backend: got xla: it multiplies nvfp4 only, not mxfp4; write emulated"
    ):
        backends.select("xla", "mxfp4", "cpu")
    for precision in ("nvfp4", "mxfp4"):
        why = backends.select("auto", precision, "cpu").why
        assert why.startswith("backend emulated on cpu (auto; not transformer_engine: it ")


def test_only_layers_with_a_4_bit_gemm_are_touched():
    rules = [{"module": "out", "fprop": "bf16", "dgrad": "bf16"}]
    model = Decoder(recipe="all_layers", bf16_first_layers=1, bf16_last_layers=1, rules=rules)
    modules = {linear.site: [] for linear in sites.find_linears(model)}
    for linear in sites.find_linears(model):
        dot = linear.module.quant_dot_general
        assert (dot is None) == (linear.layers[0] not in (1, 2))
        if dot is not None:
            assert isinstance(dot, Nvfp4DotGeneral)
            modules[linear.site].append(dot)
    for dot in itertools.chain(*modules.values()):
        assert len(dot.routine.choices) == 1
    assert len({dot.site_id for dot in itertools.chain(*modules.values())}) == len(modules)
    quantized = {
        site: [getattr(dots[0].routine.choices[0], gemm).quantized for gemm in GEMMS]
        for site, dots in modules.items()
    }
    assert quantized == {
        "decoder/layers/self_attention/out": [False, False, True],
        "decoder/layers/mlp/wo": [True, True, True],
    }


def test_high_precision_gemms_keep_the_precision_of_maxtexts():
    rules = [{"module": "wo", "dgrad": "bf16"}]
    for name, count in (("default", 0), ("high", 1), ("highest", 1)):
        text = Decoder(recipe="all_layers", rules=rules, matmul_precision=name).program()
        assert text.count(f"precision = [{name.upper()}, {name.upper()}]") >= count * Decoder.layers
        assert ("HIGH" in text) == (name != "default")


def test_tokens_of_a_microbatch_are_checked():
    Decoder(batch=2, length=24)
    with pytest.raises(
        ConfigError,
        match=r"self_attention/out: backend emulated cannot run in 4 bits: wgrad: M=24 \(tokens\) is not",
    ):
        Decoder(batch=1, length=24)
    rules = [{"module": "*", "wgrad": "bf16"}]
    Decoder(batch=1, length=24, rules=rules)


def test_noise_of_a_layer_does_not_depend_on_its_neighbours():
    """Adding a site or quantizing other layers leaves the identity of a site alone."""

    def identities(**section):
        return {
            (linear.site, linear.layers): linear.module.quant_dot_general.site_id
            for linear in sites.find_linears(Decoder(**section))
            if linear.module.quant_dot_general is not None
        }

    everything, mlp = identities(recipe="all_layers"), identities(recipe="mlp_only")
    assert 0 < len(mlp) < len(everything)
    assert mlp.items() < everything.items()
