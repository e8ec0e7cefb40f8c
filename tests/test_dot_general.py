"""The custom VJP against quantize, dequantize and matrix multiplies written out."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from maxtext_nvfp4 import backends, dequantize, dot_general, policy, quantize, random_hadamard
from maxtext_nvfp4.backends.operands import encode_operand
from maxtext_nvfp4.dot_general import routed_dot_general
from maxtext_nvfp4.plan import BF16, GEMMS, GemmPlan, LayerPlan, OperandPlan
from maxtext_nvfp4.recipe import load_recipe
from maxtext_nvfp4.routine import Routine

COMPOSED = ("emulated", "xla")
"""Backends that run everywhere; that of Transformer Engine has tests of its own."""

KEY = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
PAPER = policy.layer_plan(load_recipe(None))
ALL_BF16 = LayerPlan(fprop=BF16, dgrad=BF16, wgrad=BF16)

LAYOUTS = {
    # As MaxText's layers call it: activation axes, kernel axes, contracted axes of both.
    "mlp": ("bsk", "kn", "bsn"),
    "query": ("bsk", "khd", "bshd"),
    "out": ("bshd", "hdn", "bsn"),
    "fused_qkv": ("bsk", "kphd", "bsphd"),
    "fused_mlp": ("bsk", "kpf", "bspf"),
    # Orders that it does not use.
    "kernel_contracts_last": ("bsk", "nk", "bsn"),
    "activation_contracts_first": ("kbs", "kn", "bsn"),
    "contracted_axes_apart": ("hbds", "ndh", "bsn"),
}
SIZES = {"b": 2, "s": 48, "k": 64, "n": 32, "h": 4, "d": 16, "p": 3, "f": 32}


def dimension_numbers(layout, negative=False):
    """Contracting dimensions; the axes of the activation counted from the end if `negative`, as MaxText may."""
    x_axes, w_axes, _ = LAYOUTS[layout]
    shared = [axis for axis in x_axes if axis in w_axes]
    contract_x = tuple(x_axes.index(axis) - len(x_axes) * negative for axis in shared)
    return ((contract_x, tuple(w_axes.index(axis) for axis in shared)), ((), ()))


def operands(layout, dtype, seed=0):
    """Activation, kernel and output gradient with outliers and a wide range of magnitudes."""
    rng = np.random.default_rng(seed)

    def draw(axes):
        shape = [SIZES[axis] for axis in axes]
        x = rng.standard_normal(shape) * np.exp(rng.normal(0, 1.0, shape))
        return jnp.asarray(x, jnp.float32).astype(dtype)

    return tuple(draw(axes) for axes in LAYOUTS[layout])


def matrices(layout, x, w, dy):
    """x[M, K], w[K, N], dy[M, N] in the order in which the free and contracted axes stand."""
    x_axes, w_axes, y_axes = LAYOUTS[layout]
    shared = "".join(axis for axis in x_axes if axis in w_axes)
    m = "".join(axis for axis in x_axes if axis not in shared)
    n = "".join(axis for axis in w_axes if axis not in shared)
    assert y_axes == m + n
    k_size = math.prod(SIZES[axis] for axis in shared)
    n_size = math.prod(SIZES[axis] for axis in n)
    x2 = jnp.einsum(f"{x_axes}->{m}{shared}", x).reshape(-1, k_size)
    w2 = jnp.einsum(f"{w_axes}->{shared}{n}", w).reshape(k_size, n_size)

    def shaped(dx2, dw2):
        dx = dx2.reshape([SIZES[axis] for axis in m + shared])
        dw = dw2.reshape([SIZES[axis] for axis in shared + n])
        return np.einsum(f"{m}{shared}->{x_axes}", dx), np.einsum(f"{shared}{n}->{w_axes}", dw)

    return x2, w2, dy.reshape(-1, n_size), shaped


def decoded(operand, x, axis, key, precision):
    """A rank-2 GEMM operand as a 4-bit GEMM sees it: quantized along the contracted axis, float64."""
    if operand is None:
        return np.asarray(x, np.float64)
    if operand.hadamard:
        x = random_hadamard(x, axis)
    block = operand.block if axis == 1 else operand.block[::-1]
    quantized = quantize(x, block, key if operand.stochastic else None, precision)
    return np.asarray(dequantize(quantized), np.float64)


def reference(plan, x, w, dy, key=KEY):
    """y, dx, dw as float64 matrices, each with the sum of the magnitudes that were added up in it."""
    words = jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    dgrad_key, wgrad_key = (jax.random.fold_in(words, number) for number in (1, 2))

    def gemm(which, a, a_axis, b, b_axis, key):
        chosen = getattr(plan, which)
        a = decoded(chosen.a, a, a_axis, key, chosen.precision)
        b = decoded(chosen.b, b, b_axis, key, chosen.precision)
        a, b = (a.T if a_axis == 0 else a), (b.T if b_axis == 1 else b)
        return a @ b, np.abs(a) @ np.abs(b), a.shape[1]

    return (
        gemm("fprop", x, 1, w, 0, None),
        gemm("dgrad", dy, 1, w, 1, dgrad_key),
        gemm("wgrad", x, 0, dy, 0, wgrad_key),
    )


def assert_product(got, want, dtype):
    """`got` is the product of exactly these operands, accumulated in float32 in some order.

    A sum of n products rounds at most n times (Higham: gamma_n), the two tensor scales round three times more,
    and a bfloat16 result once more.
    """
    value, magnitude, terms = want
    bound = (terms + 4) * 2.0**-24 * magnitude
    if dtype == jnp.bfloat16:
        bound = bound + 2.0**-8 * np.abs(value)
    got = np.asarray(got, np.float64)
    assert got.shape == value.shape
    assert np.all(np.abs(got - value) <= bound), np.max(np.abs(got - value) - bound)
    assert np.std(got) > 0
    assert np.mean(got != 0) > 0.8


def program(routine, layout, *, negative=False, key=KEY):
    """A compiled function of (x, w, dy, entry) that returns y, dx and dw."""
    dims = dimension_numbers(layout, negative)
    words = None if key is None else jnp.asarray(key)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(x, w, dy, entry=None):
        def multiply(x, w):
            return routed_dot_general(*routine, x, w, dims, entry=entry, key=words)

        y, pull_back = jax.vjp(multiply, x, w)
        dx, dw = pull_back(dy)
        assert (y.dtype, dx.dtype, dw.dtype) == (x.dtype, x.dtype, w.dtype)
        assert (dx.shape, dw.shape) == (x.shape, w.shape)
        return y, dx, dw

    return step


def results(routine, layout, x, w, dy, **options):
    return program(routine, layout, **options)(x, w, dy)


def routine_of(*plans, table=None, backend="emulated"):
    """The backend and the routine, the first two arguments of `routed_dot_general`."""
    return backends.create(backend, "cpu"), Routine(plans, table or tuple(range(len(plans))))


PLANS = {
    "paper": PAPER,
    "1d weights": policy.layer_plan(load_recipe({"weight_scaling": "1d"})),
    "no hadamard": policy.layer_plan(load_recipe({"hadamard": "none"})),
    "nearest": policy.layer_plan(load_recipe({"stochastic_rounding": "none"})),
    "mxfp4": policy.layer_plan(load_recipe({"format": "mxfp4"})),
    "forward only": dataclasses.replace(ALL_BF16, fprop=PAPER.fprop),
    "dgrad only": dataclasses.replace(ALL_BF16, dgrad=PAPER.dgrad),
    "wgrad only": dataclasses.replace(ALL_BF16, wgrad=PAPER.wgrad),
}


def assert_all(plan, layout, dtype, got, x, w, dy):
    x2, w2, dy2, shaped = matrices(layout, x, w, dy)
    y, dx, dw = reference(plan, x2, w2, dy2)
    assert_product(np.asarray(got[0], np.float64).reshape(y[0].shape), y, dtype)
    ones, twos = (shaped(dx[part], dw[part]) for part in (0, 1))
    assert_product(got[1], (ones[0], twos[0], dx[2]), dtype)
    assert_product(got[2], (ones[1], twos[1], dw[2]), dtype)


@pytest.mark.parametrize(
    ("layout", "backend"),
    [*((layout, "emulated") for layout in LAYOUTS), ("out", "xla"), ("contracted_axes_apart", "xla")],
)
def test_value_in_every_layout(layout, backend):
    x, w, dy = operands(layout, jnp.float32)
    got = results(routine_of(PAPER, backend=backend), layout, x, w, dy, negative=layout in ("mlp", "out"))
    assert_all(PAPER, layout, jnp.float32, got, x, w, dy)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", PLANS)
def test_value_of_every_plan(name, dtype):
    plan = PLANS[name]
    layout = "out"
    x, w, dy = operands(layout, dtype, seed=1)
    if name == "mxfp4":  # 96 tokens, K = 64 and N = 32 are multiples of its blocks too
        assert plan.wgrad.b.block == (1, 32)
    got = results(routine_of(plan), layout, x, w, dy)
    assert_all(plan, layout, dtype, got, x, w, dy)


def test_reference_tells_the_plans_apart():
    """The tolerance is narrower than any difference between two plans."""
    layout = "mlp"
    x, w, dy = operands(layout, jnp.bfloat16)
    for name, plan in PLANS.items():
        got = results(routine_of(plan), layout, x, w, dy)
        for other, other_plan in PLANS.items():
            if name != other:
                with pytest.raises(AssertionError):
                    assert_all(other_plan, layout, jnp.bfloat16, got, x, w, dy)


@pytest.mark.parametrize("backend", COMPOSED)
def test_codes_and_scales_are_those_of_quantize(backend, monkeypatch):
    """Bit for bit, for every operand of every GEMM: what is multiplied is what `quantize` returns."""
    seen = []

    def recording(plan, x, contract, key, precision):
        operand = encode_operand(plan, x, contract, key, precision)
        seen.append((plan, contract, operand.encoded))
        return operand

    monkeypatch.setattr("maxtext_nvfp4.backends.operands.encode_operand", recording)
    layout = "query"
    x, w, dy = operands(layout, jnp.bfloat16, seed=2)
    with jax.disable_jit():
        results(routine_of(PAPER, backend=backend), layout, x, w, dy)
    x2, w2, dy2, _ = matrices(layout, x, w, dy)
    words = jax.random.wrap_key_data(jnp.asarray(KEY), impl="threefry2x32")
    want = [
        (PAPER.fprop.a, 1, x2, None),
        (PAPER.fprop.b, 0, w2, None),
        (PAPER.dgrad.a, 1, dy2, jax.random.fold_in(words, 1)),
        (PAPER.dgrad.b, 1, w2, None),
        (PAPER.wgrad.a, 0, random_hadamard(x2, 0), None),
        (PAPER.wgrad.b, 0, random_hadamard(dy2, 0), jax.random.fold_in(words, 2)),
    ]
    assert [(plan, contract) for plan, contract, _ in seen] == [item[:2] for item in want]
    for (_, _, encoded), (plan, contract, tensor, key) in zip(seen, want, strict=True):
        q = quantize(tensor, plan.block if contract == 1 else plan.block[::-1], key)
        np.testing.assert_array_equal(encoded.codes, q.codes.astype(jnp.float32))
        np.testing.assert_array_equal(encoded.block_scales, q.block_scales.astype(jnp.float32))
        np.testing.assert_array_equal(encoded.tensor_scale, q.tensor_scale)
    # The weight has the same codes in both of its GEMMs.
    np.testing.assert_array_equal(seen[1][2].codes, seen[3][2].codes)
    np.testing.assert_array_equal(seen[1][2].block_scales, seen[3][2].block_scales)
    # The gradient is rounded with other numbers in each of its GEMMs, and not to nearest.
    nearest = quantize(dy2, (1, 16)).codes.astype(jnp.float32)
    assert 0.05 < np.mean(np.asarray(seen[2][2].codes) != nearest) < 0.95


@pytest.mark.parametrize("name", ["paper", "nearest", "1d weights", "no hadamard"])
def test_backends_agree(name):
    """The same codes in another order of accumulation at most."""
    layout = "query"
    x, w, dy = operands(layout, jnp.float32, seed=3)
    x2, w2, dy2, _ = matrices(layout, x, w, dy)
    first, second = (
        results(routine_of(PLANS[name], backend=backend), layout, x, w, dy) for backend in ("emulated", "xla")
    )
    bounds = reference(PLANS[name], x2, w2, dy2)
    for a, b, (_, magnitude, terms) in zip(first, second, bounds, strict=True):
        a, b = (np.asarray(v, np.float64).reshape(magnitude.shape) for v in (a, b))
        assert np.all(np.abs(a - b) <= 2 * (terms + 4) * 2.0**-24 * magnitude)
        assert np.std(a) > 0


@pytest.mark.parametrize("backend", COMPOSED)
def test_entry_selects_the_precision_of_each_gemm(backend):
    """Each entry gives the values of its own plan, GEMM by GEMM."""
    plans = (*(PLANS[name] for name in ("paper", "forward only", "wgrad only", "nearest")), ALL_BF16)
    table = (4, 0, 1, 1, 3, 2, 4)
    layout = "mlp"
    x, w, dy = operands(layout, jnp.float32, seed=4)
    mixed = routine_of(*plans, table=table, backend=backend)
    step = program(mixed, layout)
    got = [step(x, w, dy, jnp.int32(entry)) for entry in range(len(table))]
    for entry, choice in enumerate(table):
        assert_all(plans[choice], layout, jnp.float32, got[entry], x, w, dy)
    # Entries of different plans differ in each GEMM whose plans differ: a wrong branch would have shown.
    for number, gemm in enumerate(GEMMS):
        kinds = [getattr(plans[choice], gemm) for choice in table]
        values = [np.asarray(result[number]).tobytes() for result in got]
        assert [kinds.index(kind) for kind in kinds] == [values.index(value) for value in values]


def test_entry_of_a_scan():
    """One traced body serves every layer of a scan."""
    layout = "mlp"
    x, w, dy = operands(layout, jnp.bfloat16, seed=5)
    routine = routine_of(PLANS["nearest"], ALL_BF16, table=(0, 1, 0))

    def loss(x, w, entry):
        return jnp.sum(routed_dot_general(*routine, x, w, dimension_numbers(layout), entry=entry) * dy)

    def body(_, entry):
        return None, jax.grad(loss, argnums=(0, 1))(x, w, entry)

    _, (dx, dw) = jax.jit(lambda: jax.lax.scan(body, None, jnp.arange(3)))()
    for entry, plan in enumerate((PLANS["nearest"], ALL_BF16, PLANS["nearest"])):
        _, want_dx, want_dw = results(routine_of(plan), layout, x, w, dy, key=None)
        np.testing.assert_array_equal(dx[entry], want_dx)
        np.testing.assert_array_equal(dw[entry], want_dw)
    assert np.any(np.asarray(dx[0]) != np.asarray(dx[1]))


def test_high_precision_gemms_are_plain_ones():
    """A routine of BF16 plans alone is `lax.dot_general` bit for bit, precision included."""
    layout = "query"
    dims = dimension_numbers(layout)
    x, w, dy = operands(layout, jnp.float32, seed=6)
    for precision in jax.lax.Precision:
        backend, routine = routine_of(ALL_BF16)
        routine = backend, dataclasses.replace(routine, precision=precision)
        text = program(routine, layout, key=None).lower(x, w, dy).as_text()
        assert text.count("stablehlo.dot_general") == 3
        assert text.count(f"precision = [{precision}, {precision}]") == 3
    y, pull_back = jax.vjp(lambda x, w: jax.lax.dot_general(x, w, dims), x, w)
    for got, want in zip(
        results(routine_of(ALL_BF16), layout, x, w, dy, key=None), (y, *pull_back(dy)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_keys():
    layout = "mlp"
    x, w, dy = operands(layout, jnp.float32, seed=7)
    run = functools.partial(results, routine_of(PAPER), layout, x, w, dy)
    first, again, other = run(), run(), run(key=KEY[::-1])
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(first[0], other[0])  # the forward pass rounds to nearest
    assert np.mean(np.asarray(first[1]) != np.asarray(other[1])) > 0.9
    assert np.mean(np.asarray(first[2]) != np.asarray(other[2])) > 0.9


def test_gradient_without_a_key_is_refused():
    layout = "mlp"
    x, w, dy = operands(layout, jnp.float32)
    message = (
        r"gradients are rounded stochastically, which needs a key: pass key= to dot_general, run the model "
        r"inside maxtext_nvfp4.training_step\(step\), or set nvfp4.stochastic_rounding: none"
    )
    dims = dimension_numbers(layout)
    assert np.std(routed_dot_general(*routine_of(PAPER), x, w, dims)) > 0  # inference needs none
    for plan in (PAPER, PLANS["dgrad only"], PLANS["wgrad only"]):
        with pytest.raises(ValueError, match=message):
            results(routine_of(plan), layout, x, w, dy, key=None)
    # A layer that the entry does not select decides too: the key may not depend on data.
    with pytest.raises(ValueError, match=message):
        program(routine_of(ALL_BF16, PAPER), layout, key=None)(x, w, dy, jnp.int32(0))
    for plan in (PLANS["nearest"], PLANS["forward only"], ALL_BF16):
        results(routine_of(plan), layout, x, w, dy, key=None)
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda x: jnp.sum(dot_general(x, w, dims)))(x)


def test_refused_operands():
    x, w, _ = operands("mlp", jnp.float32)
    routine = routine_of(PAPER)
    with pytest.raises(ValueError, match=r"batch dimensions are not supported, got \(\(0,\), \(0,\)\)"):
        routed_dot_general(*routine, x, w[:2], (((2,), (1,)), ((0,), (0,))))
    with pytest.raises(ValueError, match=r"one dtype, got bfloat16 and float32; cast the weight first"):
        routed_dot_general(*routine, x.astype(jnp.bfloat16), w, dimension_numbers("mlp"))
    with pytest.raises(ValueError, match=r"has 63 elements, not a multiple of its block of 16"):
        routed_dot_general(*routine, x[:, :, :63], w[:63], dimension_numbers("mlp"))


@pytest.mark.parametrize("where", ["x", "w", "dy"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("backend", COMPOSED)
def test_not_finite_stays_visible(where, bad, backend):
    tensors = dict(zip(("x", "w", "dy"), operands("mlp", jnp.float32), strict=True))
    tensors[where] = tensors[where].at[(0,) * tensors[where].ndim].set(bad)
    got = results(routine_of(PAPER, backend=backend), "mlp", **tensors)
    feeds = {"x": (True, False, True), "w": (True, True, False), "dy": (False, True, True)}[where]
    for result, fed in zip(got, feeds, strict=True):
        assert np.all(np.isfinite(result)) != fed


def test_functional_form_follows_its_recipe():
    layout = "out"
    x, w, dy = operands(layout, jnp.float32, seed=8)
    x2, w2, dy2, _ = matrices(layout, x, w, dy)
    key = jax.random.key(3)
    words = jax.random.bits(key, (2,), "uint32")
    for section in ({}, {"hadamard": "none"}, {"backend": "xla"}, {"format": "mxfp4"}):
        y, pull_back = jax.vjp(
            lambda x, w, s=section: dot_general(x, w, dimension_numbers(layout), recipe=s, key=key), x, w
        )
        plan = policy.layer_plan(load_recipe(section))
        want = reference(plan, x2, w2, dy2, words)
        for got, expected in zip((y, *pull_back(dy)), want, strict=True):
            assert_product(np.asarray(got, np.float64).reshape(expected[0].shape), expected, jnp.float32)


def test_operand_plans_reach_the_right_operand():
    """Plans that no recipe makes: each operand is quantized as its own plan says."""
    row, square = OperandPlan(block=(1, 16)), OperandPlan(block=(16, 16))
    odd = LayerPlan(
        fprop=GemmPlan(precision="nvfp4", a=square, b=row),
        dgrad=GemmPlan(precision="nvfp4", a=row, b=OperandPlan(block=(1, 16), stochastic=True)),
        wgrad=GemmPlan(precision="nvfp4", a=OperandPlan(block=(16, 16), stochastic=True), b=square),
    )
    layout = "query"
    x, w, dy = operands(layout, jnp.float32, seed=9)
    for backend in COMPOSED:
        got = results(routine_of(odd, backend=backend), layout, x, w, dy)
        assert_all(odd, layout, jnp.float32, got, x, w, dy)


def test_a_scan_over_layers_keeps_no_constants_of_an_operands_size():
    """A scan takes what its iterations share out of its body: a select of two constants would become two arrays."""
    backend, routine = routine_of(PAPER)
    words = jnp.asarray(KEY)

    def loss(x, kernels):
        def layer(x, w):
            return backend.dot(routine, x, w, 1, None, words), None

        return jnp.sum(lax.scan(jax.checkpoint(layer), x, kernels)[0])

    x, kernels = jnp.ones((96, 64), jnp.bfloat16), jnp.ones((3, 64, 64), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, kernels)
    scans = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(scans) == 2, "forward and backward"
    for scan in scans:
        shared = [variable.aval for variable in scan.invars[: len(scan.params["ft_in"].unpack()[0])]]
        assert [value for value in shared if value.size >= x.size] == []


def test_on_cpus_an_activation_is_read_row_by_row():
    """Behind an RMSNorm, whose scale XLA multiplies with the features first."""
    backend, routine = routine_of(PAPER)

    @jax.jit
    def layer(x, scale, w):
        normed = jnp.einsum("...k,k->...k", x / jnp.linalg.norm(x, axis=-1, keepdims=True), scale)
        return backend.dot(routine, normed, w, 1, None, None)

    shapes = ((4, 64, 256), (256,), (256, 128))
    text = layer.lower(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)).compile().as_text()
    computations = [part for part in text.split("\n}\n") if "nvfp4_fprop/reduce_max" in part]
    assert computations
    assert not [part for part in computations if " transpose(" in part]


@pytest.mark.parametrize("backend", COMPOSED)
def test_numpy_arrays_and_vmap(backend):
    layout = "mlp"
    x, w, _ = operands(layout, jnp.float32, seed=8)
    several = np.stack([x, 2 * x[::-1], -x])

    def multiply(x, w):
        return routed_dot_general(*routine_of(PAPER, backend=backend), x, w, dimension_numbers(layout))

    one_by_one = [multiply(each, w) for each in jnp.asarray(several)]
    np.testing.assert_array_equal(multiply(several[0], np.asarray(w)), one_by_one[0])
    mapped = jax.vmap(multiply, (0, None))
    np.testing.assert_array_equal(mapped(several, w), one_by_one)
    np.testing.assert_array_equal(jax.jit(mapped)(several, w), one_by_one)
