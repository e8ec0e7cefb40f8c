"""Statistics of quantization: each against NumPy, in the layer where it was planted, and at no cost between samples."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx
from jax import numpy as jnp
from maxtext_models import QUICK, TINY, Trainer, named

from maxtext_nvfp4 import dequantize, policy, quantize, random_hadamard
from maxtext_nvfp4.backends import select
from maxtext_nvfp4.dot_general import routed_dot_general
from maxtext_nvfp4.integration.probes import PROBES
from maxtext_nvfp4.integration.sampling import SAMPLED, read_probes
from maxtext_nvfp4.plan import GEMMS, MEASURED, STATS, Site
from maxtext_nvfp4.quantize import encode
from maxtext_nvfp4.recipe import load_recipe
from maxtext_nvfp4.routine import Routine
from maxtext_nvfp4.samples import OPERANDS, Reading, alarms, read_samples, to_readings, write_sample
from maxtext_nvfp4.telemetry import (
    PROBE_SHAPE,
    SKETCH,
    operand_statistics,
    product_error,
    sketch_vectors,
)

M, K, N = 64, 96, 48


def tensor(seed, shape, dtype=jnp.bfloat16):
    """Values over many binades, block by block, so that some round to zero and some blocks have a zero scale."""
    a, b = jax.random.split(jax.random.key(seed))
    tiles = jax.random.uniform(b, (shape[0] // 16, shape[1] // 16), minval=-24, maxval=0)
    wide = jnp.exp2(jnp.repeat(jnp.repeat(tiles, 16, 0), 16, 1))
    return (jax.random.normal(a, shape) * wide).astype(dtype)


def expected(x, q):
    """The statistics by NumPy in float64, from the stored tensor alone."""
    x = np.asarray(x, np.float64)
    decoded = np.asarray(dequantize(q), np.float64)
    scales = np.asarray(q.block_scales.astype(jnp.float32), np.float64)
    limit = 6 * np.repeat(np.repeat(scales, q.block[0], 0), q.block[1], 1) * float(q.tensor_scale)
    power = np.sum(x**2)
    return {
        "amax": np.abs(x).max(),
        "rounded_to_zero": np.mean((decoded == 0) & (x != 0)),
        "saturated": np.mean(np.abs(x) > limit * (1 + 1e-6)),
        "zero_scales": np.mean(scales == 0),
        "relative_mse": np.sum((decoded - x) ** 2) / power if power else 0.0,
        "nonfinite": 0,
    }


def assert_measured(got, want):
    for name, value in zip(MEASURED, np.asarray(got), strict=True):
        np.testing.assert_allclose(value, want[name], rtol=2e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)])
@pytest.mark.parametrize("seed", [None, 5])
def test_operands_against_numpy(block, seed):
    x = tensor(0, (M, K))
    key = None if seed is None else jax.random.key(seed)
    got = jax.jit(lambda x: operand_statistics(x, encode(x, block, key)))(x)
    want = expected(x, quantize(x, block, key))
    assert min(want["rounded_to_zero"], want["saturated"], want["zero_scales"]) > 0
    assert_measured(got, want)


def test_rows_longer_than_one_count():
    """Counts of a row are taken in pieces; one piece would overflow."""
    x = jnp.where(jnp.arange(1 << 17) % 16 == 0, 6.0, 2.0**-6).reshape(1, -1).astype(jnp.bfloat16)
    got = dict(zip(MEASURED, np.asarray(operand_statistics(x, encode(x, (1, 16)))), strict=True))
    assert got["rounded_to_zero"] == 15 / 16


def test_values_at_the_ends():
    zero = jnp.zeros((16, 32), jnp.bfloat16)
    got = dict(zip(MEASURED, np.asarray(operand_statistics(zero, encode(zero, (1, 16)))), strict=True))
    assert got == {name: float(name == "zero_scales") for name in MEASURED}
    broken = tensor(1, (16, 32)).at[3, 4].set(jnp.inf).at[5, 6].set(jnp.nan)
    got = dict(zip(MEASURED, np.asarray(operand_statistics(broken, encode(broken, (1, 16)))), strict=True))
    assert got["nonfinite"] == 2
    assert not np.isfinite(got["amax"])
    assert np.isnan(got["relative_mse"])
    for scale in (2.0**-100, 2.0**100):
        x = (tensor(2, (32, 32), jnp.float32) * scale).astype(jnp.bfloat16)
        got = dict(zip(MEASURED, np.asarray(operand_statistics(x, encode(x, (1, 16)))), strict=True))
        assert 0 < got["relative_mse"] < 1


@pytest.mark.parametrize("contract", [(1, 0), (1, 1), (0, 0)])
def test_products_against_numpy(contract):
    a, b = (jax.random.normal(jax.random.key(seed), (96, 96), jnp.bfloat16) for seed in (1, 2))
    exact = np.tensordot(np.asarray(a, np.float64), np.asarray(b, np.float64), ([contract[0]], [contract[1]]))
    noise = 0.1 * np.random.default_rng(0).normal(size=exact.shape) * exact.std()
    product = jnp.asarray(exact + noise, jnp.float32)
    got = float(jax.jit(functools.partial(product_error, contract=contract))(a, b, product=product))
    v = np.asarray(sketch_vectors(96), np.float64)
    assert v.shape == (96, SKETCH)
    assert set(v.flat) == {-1.0, 1.0}
    sketched = np.sum((np.asarray(product, np.float64) @ v - exact @ v) ** 2) / np.sum((exact @ v) ** 2)
    np.testing.assert_allclose(got, sketched, rtol=1e-4)
    np.testing.assert_allclose(got, np.sum(noise**2) / np.sum(exact**2), rtol=0.2)


@pytest.mark.parametrize("backend", ["emulated", "xla"])
def test_all_operands_of_a_layer_against_numpy(backend):
    """What leaves the jitted backward pass, for each operand of each GEMM and its product."""
    recipe = load_recipe({"recipe": "all_layers"})
    [plans] = policy.resolve(recipe, (Site(path="decoder/layers/mlp/wi_0", layers=(0,), k=K, n=N),), 1)
    routine = Routine((plans.choices[0][0],), (0,))
    run = select(backend, "nvfp4", "cpu").backend
    x, w, dy = (
        jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate([(M, K), (K, N), (M, N)])
    )
    x = x * jnp.exp2(jnp.arange(M) % 20 - 20)[:, None].astype(x.dtype)
    words = jnp.asarray([3, 4], jnp.uint32)

    @jax.jit
    def step(x, w, dy, probe):
        def layer(x, w, probe):
            return routed_dot_general(run, routine, x, w, (((1,), (0,)), ((), ())), key=words, probe=probe)

        y, pull = jax.vjp(layer, x, w, probe)
        return y, *pull(dy)

    y, dx, dw, got = step(x, w, dy, jnp.zeros(PROBE_SHAPE))
    np.testing.assert_array_equal(got[9], 1.0)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    dgrad, wgrad = (jax.random.fold_in(key, fold) for fold in (1, 2))
    had_x, had_dy = random_hadamard(x, 0), random_hadamard(dy, 0)
    operands = [
        (x, quantize(x, (1, 16))),
        (w, quantize(w, (16, 16))),
        (dy, quantize(dy, (1, 16), dgrad)),
        (w, quantize(w, (16, 16))),
        (had_x, quantize(had_x, (16, 1))),
        (had_dy, quantize(had_dy, (16, 1), wgrad)),
    ]
    for row, (values, q) in zip((0, 1, 3, 4, 6, 7), operands, strict=True):
        assert_measured(got[row], expected(values, q))
    products = [(y, x, w), (dx, dy, np.asarray(w).T), (dw, np.asarray(x).T, dy)]
    for row, (product, a, b) in zip((2, 5, 8), products, strict=True):
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        v = np.asarray(sketch_vectors(exact.shape[1]), np.float64)
        error = np.sum(((np.asarray(product, np.float64) - exact) @ v) ** 2) / np.sum((exact @ v) ** 2)
        np.testing.assert_allclose(got[row, MEASURED.index("relative_mse")], error, rtol=1e-3)
        assert 1e-3 < error < 0.2


SECTION = {"recipe": "all_layers", "bf16_last_layers": 1}


@functools.cache
def trainer(**keys):
    keys = json.loads(keys.pop("keys", "{}"))
    section = {**SECTION, "telemetry": {"every": 2}, **keys.pop("nvfp4", {})}
    return Trainer(**{**TINY, "quantization": "nvfp4", "nvfp4": section, **keys})


def made(**keys):
    return trainer(keys=json.dumps(keys))


def sampled(trainer):
    """The compiled program of a sampled step."""
    step = getattr(trainer._steps[0], SAMPLED)
    with trainer.context():
        lowered = step.lower(trainer.abstract_state, jax.eval_shape(trainer.batch))
        return lowered.compile(compiler_options=QUICK)


def lowered(trainer):
    return trainer.trace().lower().as_text()


def test_between_samples_the_program_is_that_of_a_run_without_telemetry():
    with made().context():
        assert lowered(made()) == lowered(made(nvfp4={"telemetry": None}))


VARIANTS = {
    "scanned": {},
    "unscanned": {"scan_layers": False},
    "accumulated": {"gradient_accumulation_steps": 2},
}


def measured(trainer, state=None, batch=None):
    """The state after a plain step, after a sampled one, and the readings by site, GEMM and operand."""
    program, batch = sampled(trainer), trainer.batch(1) if batch is None else batch
    first = trainer.initial_state() if state is None else state()
    second = trainer.initial_state() if state is None else state()
    with trainer.context():
        plain, plain_metrics = trainer.train_step(first, batch)
        after, metrics = program(second, batch)
    assert plain_metrics["scalar"].keys() == metrics["scalar"].keys()
    return plain, after, metrics[PROBES]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_sampled_step_computes_what_the_others_do(name):
    """Bit for bit, in a state of the same structure; and each layer is measured."""
    trained = made(**VARIANTS[name])
    plain, after, probes = measured(trained)
    assert jax.tree.structure(plain) == jax.tree.structure(after)
    for (path, a), (_, b) in zip(named(plain).items(), named(after).items(), strict=True):
        if jnp.issubdtype(a.get_value().dtype, jax.dtypes.prng_key):
            continue  # MaxText's, and no state of ours
        np.testing.assert_array_equal(np.asarray(a.get_value()), np.asarray(b.get_value()), err_msg=path)
    values = np.concatenate([np.asarray(probe).reshape(-1, *PROBE_SHAPE) for probe in probes.values()])
    ones = values[:, 9]
    assert (ones == ones.flat[0]).all()
    assert (ones[0, 0] == 1) == (name != "accumulated")
    amax = values[:, :9, 0] / values[:, 9, :1]
    four_bits = ~np.isnan(amax[:, 0])
    # The last layer is in BF16; a module of its own is not attached at all.
    assert four_bits.mean() == (
        1.0
        if name == "unscanned"
        else (trained.config.num_decoder_layers - 1) / trained.config.num_decoder_layers
    )
    assert (amax[four_bits][:, [0, 1, 3, 4, 6, 7]] > 0).all()


def test_microbatches_after_the_first_are_not_measured():
    trained = made(**VARIANTS["accumulated"])
    whole = trained.batch(1)
    # Row r belongs to microbatch r mod 2.
    other = {name: value.at[1::2].set(value[1::2][:, ::-1]) for name, value in whole.items()}
    first = {name: value.at[0::2].set(value[0::2][:, ::-1]) for name, value in whole.items()}
    reference, same, another = (measured(trained, batch=batch)[2] for batch in (whole, other, first))
    forward = slice(0, 3)
    for path, values in reference.items():
        a, b, c = (np.asarray(one[path]) for one in (reference, same, another))
        kept = ~np.isnan(a[:, forward])
        np.testing.assert_array_equal(a[:, forward][kept], b[:, forward][kept], err_msg=path)
        assert not np.array_equal(a[:, forward][kept], c[:, forward][kept])
        assert np.asarray(values).shape[1:] == PROBE_SHAPE


def readings_of(trained, probes):
    model = nnx.merge(trained.graphdef, trained.abstract_state).model
    found = read_probes(model, 1, jax.device_get(probes), load_recipe({"telemetry": {}}).telemetry)
    return {(one.site.rpartition("/")[2], one.gemm, one.operand): one for one in found}


def test_what_is_planted_shows_in_its_layer():
    """A dead layer, and an outlier channel: in the weight's statistics, of that layer alone."""
    trained = made(base_num_decoder_layers=4)

    def planted():
        state = trained.initial_state()
        kernel = named(state)["model/decoder/layers/mlp/wi_0/kernel"]
        value = kernel.get_value()  # [K, layers, N]
        value = value.at[:, 1].set(0.0).at[7, 2].multiply(64.0)
        kernel.set_value(value)
        return state

    before = readings_of(trained, measured(trained)[2])
    after = readings_of(trained, measured(trained, planted)[2])
    weight = ("wi_0", "fprop", "weight")
    assert before[weight].layers == after[weight].layers == (0, 1, 2)
    assert before[weight].values["zero_scales"] == (0, 0, 0)
    assert after[weight].values["zero_scales"][0:2] == (0, 1)
    ratio = np.array(after[weight].values["amax"]) / before[weight].values["amax"]
    assert (ratio[0], ratio[1]) == (1, 0)
    assert ratio[2] > 16
    assert after[weight].values["rounded_to_zero"][2] > 1.5 * before[weight].values["rounded_to_zero"][2]
    assert (
        after["wi_0", "fprop", "product"].values["sqnr_db"][0]
        == before["wi_0", "fprop", "product"].values["sqnr_db"][0]
    )


def reading(**values):
    return Reading(
        step=9, site="decoder/layers/mlp/wo", gemm="wgrad", operand="gradient", layers=(2, 5), values=values
    )


def test_a_sample_is_read_back(tmp_path):
    kept = [reading(amax=(0.5, 2.0), sqnr_db=(math.inf, 17.25))]
    write_sample(tmp_path / "t", 9, kept)
    write_sample(tmp_path / "t", 19, kept)
    found = read_samples(tmp_path / "t")
    assert list(found) == [9, 19]
    [one] = found[9]
    assert (one.layers, one.values["amax"]) == ((2, 5), (0.5, 2.0))
    assert math.isnan(one.values["sqnr_db"][0])
    assert dict(one.scalars())["nvfp4/decoder/layers_5/mlp/wo/wgrad/gradient/sqnr_db"] == 17.25
    assert dict(one.scalars())["nvfp4/decoder/layers/mlp/wo/wgrad/gradient/amax"] == 2.0


def test_the_worst_of_values_with_one_that_is_none_is_none():
    found = dict(reading(relative_mse=(0.5, math.nan), sqnr_db=(3.0, math.nan), amax=(1.0, 2.0)).scalars())
    site = "nvfp4/decoder/layers/mlp/wo/wgrad/gradient"
    assert math.isnan(found[f"{site}/relative_mse"])
    assert math.isnan(found[f"{site}/sqnr_db"])
    assert found[f"{site}/amax"] == 2.0


def test_layers_may_be_chosen():
    covers = {key: load_recipe({"telemetry": {"layers": key}}).telemetry.covers for key in ("all", "1..2", 5)}
    assert [[layer for layer in range(7) if check(layer)] for check in covers.values()] == [
        list(range(7)),
        [1, 2],
        [5],
    ]


def test_the_alarm_line_is_the_root_of_three():
    [line] = alarms([reading(gradient_to_noise=(1.74, 1.73)), reading(amax=(1.0, 1.0))])
    assert line.startswith("decoder/layers_5/mlp/wo wgrad gradient: the gradient is 1.73 times")
    assert line.endswith("help")


def test_the_first_values_that_are_not_finite_are_named():
    """In the order in which a step computes them: those that follow are mostly inherited."""
    weight = dataclasses.replace(reading(nonfinite=(0.0, 1.0)), gemm="fprop", operand="weight")
    activation = dataclasses.replace(reading(nonfinite=(0.0, 64.0)), gemm="fprop", operand="activation")
    gradient = reading(nonfinite=(32.0, 8.0))
    assert alarms([gradient, activation, weight]) == [
        "decoder/layers_5/mlp/wo fprop weight: 1 Inf or NaN (and 3 more)"
    ]
    [line] = alarms([gradient])
    assert line == "decoder/layers_5/mlp/wo wgrad gradient: 8 Inf or NaN (and 1 more)"
    assert alarms([reading(nonfinite=(0.0, 0.0))]) == []


def test_names_and_units():
    probes = np.ones((2, *PROBE_SHAPE), np.float32)
    probes[:, :9, MEASURED.index("relative_mse")] = [[0.01] * 9, [0.25] * 9]
    probes[1, 3:6] = np.nan  # dgrad of the second layer is in BF16
    found = to_readings(4, "decoder/layers/mlp/wo", [0, 3], probes, STATS)
    assert [(one.gemm, one.operand) for one in found] == [
        (gemm, operand) for gemm in GEMMS for operand in (*OPERANDS[gemm], "product")
    ]
    by_name = {(one.gemm, one.operand): one for one in found}
    np.testing.assert_allclose(by_name["wgrad", "gradient"].values["sqnr_db"], [20, 6.0206], rtol=1e-5)
    np.testing.assert_allclose(by_name["wgrad", "product"].values["gradient_to_noise"], [10, 2], rtol=1e-5)
    assert by_name["dgrad", "gradient"].layers == (0,)
    assert "gradient_to_noise" not in by_name["fprop", "weight"].values
    assert "amax" not in by_name["fprop", "product"].values
    assert to_readings(4, "decoder/layers/mlp/wo", [0, 3], probes, ["amax"])[2].operand == "gradient"
