"""Transformer Engine's own JAX implementation against this package, code for code, on a CPU.

What can be asserted: codes, block scales and amax bit for bit, except for blocks whose scale differs because its
chain rounds once more. Those are enumerated, so each is predicted: it differs there and nowhere else. Products
are compared within bounds derived from FP32 accumulation. Its random numbers are its own: properties and means.
"""

import dataclasses
import functools
import itertools
import math
from unittest import mock

import harness as h
import jax
import numpy as np
import oracle
import pytest
from jax import numpy as jnp
from test_dot_general import reference
from test_scale_chain import GAPS, MANTISSAS, PAIRS, all_pairs, tensor_with
from transformer_engine.jax.quantize import hadamard as te_hadamard
from transformer_engine.jax.quantize import quantizer

from maxtext_nvfp4 import backends, policy, quantize, random_hadamard
from maxtext_nvfp4.backends import te_library
from maxtext_nvfp4.backends.operands import encode_operand
from maxtext_nvfp4.dot_general import routed_dot_general
from maxtext_nvfp4.plan import BF16, GEMMS, OperandPlan
from maxtext_nvfp4.recipe import load_recipe
from maxtext_nvfp4.routine import Routine

F32 = np.float32
SIXTH = F32(1) / F32(6)


@pytest.fixture(autouse=True)
def _fallback():
    with h.corrected_fallback():
        yield


# The block scales on which the two chains disagree.


def compiled_chain(amax_b, scale):
    """The fallback's `(amax_b / 6) * S` as XLA compiles it: a division by a constant is a multiplication."""
    return oracle.round_e4m3((amax_b * SIXTH) * scale)


def written_chain(amax_b, scale):
    """The fallback's chain as it is written."""
    return oracle.round_e4m3((amax_b / F32(6)) * scale)


@functools.cache
def disputed(chain):
    """Where a chain gives another block scale than ours, by mantissa of the tensor, gap and mantissa of the block."""
    amax, amax_b = all_pairs()
    scale = oracle.encode_scale(amax)
    differ = chain(amax_b, scale) != oracle.block_scale(amax_b, scale)
    table = np.zeros((128, GAPS, 128), bool)
    table[pairs(amax[differ], amax_b[differ])] = True
    return table


def pairs(amax, amax_b):
    """Indices into `disputed` of (tensor amax, block amax), which BF16 must hold."""
    (m, e), (m_b, e_b) = (
        np.frexp(np.asarray(value, np.float64)) for value in np.broadcast_arrays(amax, amax_b)
    )
    index = m * 256 - 128, e - e_b, m_b * 256 - 128
    assert all(np.array_equal(part, np.floor(part)) for part in index)
    assert np.all((index[1] >= 0) & (index[1] < GAPS))
    return tuple(part.astype(int) for part in index)


def predicted(amax, amax_b, chain=compiled_chain):
    """Whether each block's scale must differ from ours."""
    where, found = amax_b > 0, np.zeros(np.shape(amax_b), bool)
    found[where] = disputed(chain)[pairs(amax, amax_b[where])]
    return found


def block_amaxes(matrix, square=False):
    """Largest magnitude of each block along the second axis."""
    magnitude = np.abs(np.asarray(matrix, F32))
    rows, columns = magnitude.shape
    found = magnitude.reshape(rows, columns // 16, 16).max(-1)
    if square:
        found = np.repeat(found.reshape(rows // 16, 16, -1).max(1), 16, axis=0)
    return found


def assert_as_predicted(tensor, matrix, ours, square=False, chain=compiled_chain):
    """A quantized matrix has our codes and scales, except for the predicted blocks; returns how many those are.

    Args:
      tensor: Transformer Engine's.
      matrix: What it was made of, bfloat16, blocks along the second axis.
      ours: Bits of codes and scales, and the decode scale.
      square: Blocks of 16x16, whose scales Transformer Engine repeats for each row.
      chain: The chain of scales that is expected of it.
    """
    codes, scales, amax = h.stored(tensor)
    matrix = np.asarray(matrix, F32)
    amax_b = block_amaxes(matrix, square)
    assert amax == np.abs(matrix).max()
    scale = oracle.encode_scale(amax)
    assert ours[2] == oracle.decode_scale(scale)

    differ = predicted(amax, amax_b, chain)
    np.testing.assert_array_equal(scales != ours[1], differ)
    elements = np.repeat(differ, 16, axis=1)
    np.testing.assert_array_equal(codes[~elements], ours[0][~elements])
    # Where they differ, its scale is that of its chain, and its codes are those of its scale.
    s_b = chain(amax_b, scale)
    np.testing.assert_array_equal(scales, oracle.scale_bits(s_b))
    scaled = matrix * np.repeat(oracle.block_encode(s_b, scale), 16, axis=1)
    np.testing.assert_array_equal(codes, oracle.code_bits(oracle.round_e2m1(scaled)))
    assert np.unique(codes).size > 8
    return np.count_nonzero(differ)


def te_quantize(first, *, square=False, hadamard=False, columns=True):
    """A compiled `te_library.quantize` of a tensor, and of a random state if it is given one."""

    @jax.jit
    def run(x, rng_state=None):
        return te_library.quantize(
            x, first, square=square, hadamard=hadamard, columns=columns, rng_state=rng_state
        )

    return run


@functools.partial(jax.jit, static_argnames=("columns", "square", "hadamard"))
def emulated(matrix, *, columns, square, hadamard):
    """Codes, scales and decode scale of an operand of the emulation, blocks along the second axis."""
    operand = OperandPlan(block=(16, 16) if square else (1, 16), hadamard=hadamard)
    encoded = encode_operand(operand, matrix, 0 if columns else 1, None, "nvfp4").encoded
    codes, scales = encoded.codes, encoded.block_scales
    if columns:
        codes, scales = codes.T, scales.T
    if square:
        scales = jnp.repeat(scales, 16, axis=0)
    return codes, scales, encoded.tensor_scale


def bits(codes, scales, tensor_scale):
    return oracle.code_bits(codes), oracle.scale_bits(scales), np.asarray(tensor_scale)


@pytest.mark.parametrize("exponent", [0, -47, 61])
def test_every_pair_of_amaxes(exponent):
    """On all 286,784 pairs of BF16 (tensor amax, block amax), 257 scales differ: those of the enumeration."""
    assert np.count_nonzero(disputed(compiled_chain)) == 257
    run = te_quantize(1, columns=False)
    seen, blocks = 0, 0
    for mantissa in MANTISSAS:
        x = tensor_with(mantissa / 128, exponent)
        q = quantize(x, (1, 16))
        seen += assert_as_predicted(run(x).rows, x, bits(q.codes, q.block_scales, q.tensor_scale))
        blocks += np.count_nonzero(block_amaxes(x))
    assert (seen, blocks) == (257, PAIRS)


def test_the_chain_as_written_differs_for_other_pairs():
    """Its source divides by 6, for 272 pairs; XLA multiplies by 1/6 instead, which no call can prevent."""
    tables = disputed(written_chain), disputed(compiled_chain)
    assert [np.count_nonzero(table) for table in tables] == [272, 257]
    assert all(np.any(a & ~b) for a, b in itertools.permutations(tables))
    values = MANTISSAS.astype(F32)
    assert np.any(values / F32(6) != values * SIXTH)
    with jax.disable_jit():
        np.testing.assert_array_equal(jnp.divide(jnp.asarray(values), F32(6)), values * SIXTH)
    # The tensor with most of the pairs on which these two chains disagree.
    index = np.argmax(np.count_nonzero(tables[0] != tables[1], axis=(1, 2)))
    x = tensor_with(MANTISSAS[index] / 128, 0)
    q = quantize(x, (1, 16))
    ours = bits(q.codes, q.block_scales, q.tensor_scale)
    tensor = te_quantize(1, columns=False)(x).rows
    assert_as_predicted(tensor, x, ours)
    with pytest.raises(AssertionError):
        assert_as_predicted(tensor, x, ours, chain=written_chain)


# Whole tensors.

SHAPES = {
    "matrix": ((256, 128), 1),
    "activation": ((4, 64, 128), 2),
    "query kernel": ((128, 4, 64), 1),
    "out kernel": ((4, 32, 128), 2),
    "fused kernel": ((128, 2, 4, 32), 1),
    "attention output": ((2, 64, 4, 32), 2),
}


def wide(shape, seed, amax=None):
    """BF16 with outliers and a wide range of magnitudes; `amax` is put in one place, above all the others."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * np.exp(random.normal(0, 1, shape))
    if amax is not None:
        x[tuple(random.integers(0, size) for size in shape)] = amax
    return jnp.asarray(x, jnp.bfloat16)


def telling_amaxes(count):
    """Tensor amaxes for which most blocks are disputed."""
    order = np.argsort(-np.count_nonzero(disputed(compiled_chain)[:, :8], axis=(1, 2)), kind="stable")
    return MANTISSAS[order[:count]] / 128 * 2.0**8


@pytest.mark.parametrize("kind", ["plain", "hadamard", "square"])
@pytest.mark.parametrize("name", SHAPES)
def test_tensors_code_for_code(name, kind):
    """Rows and columns, 1D and 2D, with and without transform: the same operands as the emulation's."""
    shape, first = SHAPES[name]
    square, hadamard = kind == "square", kind == "hadamard"
    run = te_quantize(first, square=square, hadamard=hadamard)
    rows_only = te_quantize(first, square=square, hadamard=hadamard, columns=False)
    differ = 0
    for seed, amax in enumerate(telling_amaxes(4)):
        x = wide(shape, seed, amax)
        matrix = x.reshape(math.prod(shape[:first]), -1)
        q = run(x)
        assert q.rows.data.shape == shape
        assert q.columns.data.shape == (*shape[first:], *shape[:first])
        assert q.columns.has_rht_applied == hadamard
        ours = bits(*emulated(matrix, columns=False, square=square, hadamard=False))
        differ += assert_as_predicted(q.rows, matrix, ours, square)
        ours = bits(*emulated(matrix, columns=True, square=square, hadamard=hadamard))
        transformed = random_hadamard(matrix, 0) if hadamard else matrix
        differ += assert_as_predicted(q.columns, transformed.T, ours, square)
        alone = rows_only(x)
        assert alone.columns is None
        for a, b in zip(h.stored(alone.rows), h.stored(q.rows), strict=True):
            np.testing.assert_array_equal(a, b)
    assert differ > 0


def test_square_blocks_have_the_same_codes_along_rows_and_columns():
    """The weight is the same matrix in fprop and dgrad."""
    q = te_quantize(1, square=True)(wide((128, 256), 1))
    (rows, row_scales, amax), (columns, column_scales, column_amax) = map(h.stored, q)
    np.testing.assert_array_equal(rows, columns.T)
    np.testing.assert_array_equal(row_scales[::16], column_scales[::16].T)
    assert amax == column_amax
    one_way = te_quantize(1)(wide((128, 256), 1))
    assert np.any(h.stored(one_way.rows)[0] != h.stored(one_way.columns)[0].T)


def test_the_transform_is_rounded_to_bfloat16_before_amax_and_codes():
    """Bit for bit, on values whose sums of 16 are exact in FP32, so that only the last rounding is left."""
    random = np.random.default_rng(0)
    grid = random.integers(-255, 256, (64, 512)) * 2.0 ** random.integers(-9, -3, (64, 512))
    x = jnp.asarray(grid, jnp.bfloat16)
    exact = oracle.random_hadamard(x)
    rounded = exact.astype(F32).astype(jnp.bfloat16)
    assert np.mean(exact != rounded.astype(np.float64)) > 0.3  # it does round
    for transform in (random_hadamard, te_hadamard.apply_rht, jax.jit(te_hadamard.apply_rht)):
        assert transform(x).dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(transform(x)).view(np.uint16), rounded.view(np.uint16))
    # Codes and amax are those of the rounded values; those of the exact ones would differ.
    codes, scales, amax = h.stored(te_quantize(1, hadamard=True)(x.T).columns)
    np.testing.assert_array_equal(codes.shape, x.shape)
    assert amax == np.abs(rounded.astype(F32)).max()
    q = quantize(rounded, (1, 16))
    assert_as_predicted(
        te_quantize(1, hadamard=True)(x.T).columns, rounded, bits(q.codes, q.block_scales, q.tensor_scale)
    )
    unrounded = oracle.quantize(exact)
    same = np.repeat(scales == oracle.scale_bits(unrounded.block_scales), 16, axis=1)
    assert np.any(codes[same] != oracle.code_bits(unrounded.codes)[same])


def test_the_transform_of_any_values_differs_by_a_rounding_at_most():
    """Where sums of 16 are not exact in FP32, its order of additions is the matrix multiply's."""
    x = wide((512, 1024), 2)
    x = x * jnp.exp(4 * wide((512, 1024), 3).astype(jnp.float32) % 3).astype(jnp.bfloat16)
    a, b = (np.asarray(transform(x), np.float64) for transform in (random_hadamard, te_hadamard.apply_rht))
    largest = np.abs(np.asarray(x, np.float64)).reshape(512, -1, 16).max(-1).repeat(16, -1)
    assert np.all(np.abs(a - b) <= 2.0**-7 * np.abs(a) + 2.0**-20 * largest)
    assert np.mean(a != b) < 1e-3


@pytest.mark.parametrize("kind", ["zeros", "zero blocks", "one hot", "constant", "negative zeros"])
def test_special_tensors(kind):
    x = np.zeros((64, 128), F32)
    if kind == "zero blocks":
        x[::2] = np.asarray(wide((32, 128), 4), F32)
    elif kind == "one hot":
        x[5, 77] = -3
    elif kind == "constant":
        x[:] = 0.7
    elif kind == "negative zeros":
        x[:] = -0.0
        x[0] = 1
    x = jnp.asarray(x, jnp.bfloat16)
    for square in (False, True):
        q = te_quantize(1, square=square)(x)
        for tensor, columns in zip(q, (False, True), strict=True):
            codes, scales, amax = h.stored(tensor)
            ours = bits(*emulated(x, columns=columns, square=square, hadamard=False))
            np.testing.assert_array_equal(codes, ours[0])
            np.testing.assert_array_equal(scales, ours[1])
            assert amax == np.abs(np.asarray(x, F32)).max()
            decoded = np.asarray(tensor.dequantize(), F32)
            assert np.isfinite(decoded).all()
            assert np.any(decoded) == (kind != "zeros")


# Products.

LAYOUTS = {
    "mlp": ((2, 64, 128), (128, 256), 1),
    "query": ((2, 64, 128), (128, 4, 64), 1),
    "out": ((2, 64, 4, 64), (4, 64, 128), 2),
}
NEAREST = policy.layer_plan(load_recipe({"stochastic_rounding": "none"}))
SUBSETS = [subset for count in range(4) for subset in itertools.combinations(GEMMS, count)]


def operands(layout, undisputed=True, hadamard=True):
    """x, w and dy; with a seed for which no scale of theirs is disputed, so that all codes must be equal."""
    x_shape, w_shape, contracted = LAYOUTS[layout]
    dy_shape = (*x_shape[: len(x_shape) - contracted], *w_shape[contracted:])
    for seed in itertools.count():
        found = [wide(shape, (seed, part)) for part, shape in enumerate((x_shape, w_shape, dy_shape))]
        x, w, dy = matrices(layout, *found)
        along_tokens = [random_hadamard(part, 0) if hadamard else part for part in (x, dy)]
        tensors = [
            (x, False),
            (dy, False),
            (w, True),
            (w.T, True),
            *((part.T, False) for part in along_tokens),
        ]
        hits = sum(
            predicted(np.abs(np.asarray(part, F32)).max(), block_amaxes(part, square)).sum()
            for part, square in tensors
        )
        if (hits == 0) == undisputed:
            return found
    raise AssertionError


def matrices(layout, x, w, dy):
    k = math.prod(LAYOUTS[layout][1][: LAYOUTS[layout][2]])
    return x.reshape(-1, k), w.reshape(k, -1), dy.reshape(-1, w.size // k)


def only(plan, subset):
    """The plan with only these GEMMs in 4 bits."""
    return dataclasses.replace(plan, **{gemm: BF16 for gemm in GEMMS if gemm not in subset})


def results(backend, plans, layout, x, w, dy, entries=(None,), key=None):
    """y, dx and dw for each entry, by one compiled program."""
    contracted = LAYOUTS[layout][2]
    dims = ((tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))), ((), ()))
    routine = Routine(tuple(plans), tuple(range(len(plans))))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(x, w, dy, entry, key):
        def multiply(x, w):
            return routed_dot_general(
                backends.create(backend, "cpu"), routine, x, w, dims, entry=entry, key=key
            )

        y, pull_back = jax.vjp(multiply, x, w)
        return y, *pull_back(dy)

    return [step(x, w, dy, None if entry is None else jnp.int32(entry), key) for entry in entries]


def assert_product(got, want):
    """`got` is the product of exactly these operands, accumulated in float32 in some order, in bfloat16.

    A sum of n products rounds at most n times; either side rounds its tensor scales and their products at most
    eight times, and the result once, by half a step of 2**-8 at most.
    """
    value, magnitude, terms = want
    assert got.dtype == jnp.bfloat16
    got = np.asarray(got, np.float64).reshape(value.shape)
    excess = np.abs(got - value) - ((terms + 8) * 2.0**-24 * magnitude + 2.0**-8 * np.abs(value))
    assert np.all(excess <= 0), np.max(excess)
    assert np.std(got) > 0
    assert np.mean(got != 0) > 0.8


@pytest.mark.parametrize("weight_scaling", ["2d", "1d"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_the_same_codes(layout, weight_scaling):
    """y, dx and dw of both backends are the product of one set of operands (JAX #30467: neither zero nor constant)."""
    plan = policy.layer_plan(load_recipe({"stochastic_rounding": "none", "weight_scaling": weight_scaling}))
    x, w, dy = operands(layout)
    want = reference(plan, *matrices(layout, x, w, dy))
    for backend in ("transformer_engine", "emulated"):
        for got, expected in zip(results(backend, [plan], layout, x, w, dy)[0], want, strict=True):
            assert_product(got, expected)


def test_products_notice_one_disputed_scale():
    """The tolerance is narrower than the difference that a single other block scale makes."""
    x, w, dy = operands("mlp", undisputed=False)
    got = results("transformer_engine", [NEAREST], "mlp", x, w, dy)[0]
    want = reference(NEAREST, *matrices("mlp", x, w, dy))
    failed = 0
    for value, expected in zip(got, want, strict=True):
        try:
            assert_product(value, expected)
        except AssertionError:
            failed += 1
    assert failed


def test_each_subset_of_gemms():
    """One traced routine with all eight plans: each entry runs in 4 bits what its plan says, and nothing else."""
    plans = [only(NEAREST, subset) for subset in SUBSETS]
    x, w, dy = operands("query")
    entries = range(len(plans))
    ours = results("transformer_engine", plans, "query", x, w, dy, entries)
    want = [reference(plan, *matrices("query", x, w, dy)) for plan in plans]
    for got, expected in zip(ours, want, strict=True):
        for a, b in zip(got, expected, strict=True):
            assert_product(a, b)
    for number, gemm in enumerate(GEMMS):
        values = [np.asarray(got[number]).tobytes() for got in ours]
        assert len(set(values)) == 2
        assert [value == values[0] for value in values] == [gemm not in subset for subset in SUBSETS]
    # The program of one plan alone has no branches to share its arrays with.
    for entry in (1, 3, 5, 6):
        alone = results("transformer_engine", [plans[entry]], "query", x, w, dy)[0]
        for a, b in zip(alone, ours[entry], strict=True):
            np.testing.assert_array_equal(a, b)


# Stochastic rounding.

COARSE = np.array([0, 0.5, 1, 2, 3, 4, 6])
"""Magnitudes that the fallback rounds to stochastically: it has no 1.5, see below."""


def states(count, seed=0):
    """Random states of one device, (count, 1, 4)."""
    return jax.vmap(te_library.rng_states)(jax.random.split(jax.random.key(seed), count))


def many(x, count, seed=0):
    """Codes along rows and along columns for many keys, float32."""

    def one(state):
        q = te_library.quantize(x, 1, square=False, hadamard=False, columns=True, rng_state=state)
        return q.rows.data.astype(jnp.float32), q.columns.data.astype(jnp.float32)

    return [np.asarray(part) for part in jax.jit(lambda keys: jax.lax.map(one, keys))(states(count, seed))]


def scaled(tensor, matrix):
    """What was rounded to the codes, float32."""
    _, scales, amax = h.stored(tensor)
    s_b = scales.view(jnp.float8_e4m3fn).astype(F32)
    return np.asarray(matrix, F32) * np.repeat(
        oracle.block_encode(s_b, oracle.encode_scale(amax)), 16, axis=1
    )


def test_stochastic_rounding_moves_by_a_step_and_not_on_average():
    """TE #2270, #2487: on, unbiased, sign kept, never further than the next value."""
    x = wide((64, 128), 5)
    nearest = te_quantize(1)(x)
    count = 1024
    for tensor, matrix, codes in zip(nearest, (x, x.T), many(x, count), strict=True):
        values = scaled(tensor, matrix)
        magnitude = np.minimum(np.abs(values), 6)
        below = COARSE[np.searchsorted(COARSE, magnitude, side="right") - 1]
        above = COARSE[np.searchsorted(COARSE, magnitude, side="left")]
        assert np.all((np.abs(codes) == below) | (np.abs(codes) == above))
        assert np.all(np.signbit(codes) == np.signbit(values))
        # The mean of `count` two-valued draws: its deviation is known exactly.
        deviation = np.sqrt((above - magnitude) * (magnitude - below) / count)
        error = codes.mean(0) - np.clip(values, -6, 6)
        moving = deviation > 0
        assert np.all(error[~moving] == 0)
        z = error[moving] / np.maximum(deviation[moving], 0.5 / count)
        assert np.abs(z).max() < 6
        assert abs(z.mean()) * np.sqrt(z.size) < 4
        assert np.abs(codes[:16].mean(0) - values)[moving].mean() > 3 * np.abs(error[moving]).mean()


def test_stochastic_rounding_follows_its_key():
    """Same key same bits; each word of the state matters; rows and columns draw apart (TE #2270, #2487)."""
    x = wide((64, 128), 6)
    run = te_quantize(1)
    state = states(1)[0]
    first, again, nearest = run(x, state), run(x, state), run(x)
    other_states = [state.at[0, word].add(1) for word in range(4)]
    for side in ("rows", "columns"):
        codes = [h.stored(getattr(q, side))[0] for q in (first, again, nearest)]
        np.testing.assert_array_equal(codes[0], codes[1])
        assert 0.05 < np.mean(codes[0] != codes[2]) < 0.95
        for q in (run(x, other) for other in other_states):
            assert 0.1 < np.mean(h.stored(getattr(q, side))[0] != codes[0]) < 0.9
        for a, b in zip(
            h.stored(getattr(first, side))[1:], h.stored(getattr(nearest, side))[1:], strict=True
        ):
            np.testing.assert_array_equal(a, b)


def midpoints(rows, columns):
    """A tensor whose scaled values are 2.5 but for a 6 in each block of its rows and of its columns."""
    diagonal = (np.arange(rows)[:, None] - np.arange(columns)) % 16 == 0
    return jnp.asarray(np.where(diagonal, 6 * 448, 2.5 * 448), jnp.bfloat16), diagonal


def test_rows_and_columns_draw_apart():
    """No element meets the number along columns that it met along rows, beyond chance."""
    x, fixed = midpoints(64, 128)
    state = states(1)[0]
    rows, columns = (np.asarray(q.data, F32) for q in te_quantize(1)(x, state))
    up, up_columns = (rows == 3)[~fixed], (columns.T == 3)[~fixed]
    assert set(np.unique(rows)) == {2, 3, 6}
    assert abs(np.mean(up) - 0.5) < 0.03
    assert abs(np.mean(up == up_columns) - 0.5) < 0.03
    # It is one sequence of numbers all the same, dealt out in two orders.
    in_order = ~fixed.ravel() & ~fixed.T.ravel()
    np.testing.assert_array_equal(rows.ravel()[in_order], columns.ravel()[in_order])


def test_grid_points_do_not_move_except_one_and_a_half():
    """Its grid for stochastic rounding has no 1.5: such values go to 1 or 2, evenly, and 1.5 never occurs.

    Apart from that no grid point moves, whatever the random number, 0 included.
    """
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
    x = jnp.asarray(np.tile(np.concatenate([grid, -grid]), (16, 1)) * 448, jnp.bfloat16)
    x = x.at[0].set(0).at[0, 0].set(2688)  # S is 1 and the scales are 448, so that scaling must be exact
    x = jnp.where(jnp.arange(16)[:, None] > 0, x / 448 * 256, x)
    moves = np.abs(np.asarray(x[1], F32)) == 1.5 * 256
    run = functools.partial(
        te_library.quantize, x, 1, square=False, hadamard=False, columns=False, rng_state=states(1)[0]
    )
    for draw, rounded in ((0.0, 2), (0.5, 2), (0.5 + 2.0**-23, 1), (1 - 2.0**-23, 1)):
        with mock.patch.object(
            type(quantizer.jax.random),
            "uniform",
            staticmethod(lambda key, shape, draw=draw: jnp.full(shape, draw)),
            create=True,
        ):
            tensor = run().rows
        codes = np.asarray(tensor.data, F32)[1:]
        assert np.all(np.asarray(tensor.scale_inv, F32)[1:] == 256)
        np.testing.assert_array_equal(codes[:, ~moves], np.asarray(x, F32)[1:, ~moves] / 256)
        np.testing.assert_array_equal(np.abs(codes[:, moves]), rounded)
    assert not np.any(np.abs(many(wide((64, 128), 7), 8)[0]) == 1.5)


def test_gradients_are_rounded_stochastically():
    """Through the backend: dx and dw follow the key, y does not, and nothing is all zero (TE #3281, JAX #30467)."""
    plan = policy.layer_plan(load_recipe(None))
    x, w, dy = operands("mlp")
    run = functools.partial(results, "transformer_engine", [plan], "mlp", x, w, dy)
    keys = [jnp.asarray(words, jnp.uint32) for words in ((1, 2), (1, 2), (2, 1))]
    first, again, other = (run(key=key)[0] for key in keys)
    nearest = results("transformer_engine", [NEAREST], "mlp", x, w, dy)[0]
    for number in range(3):
        np.testing.assert_array_equal(first[number], again[number])
        values = np.asarray(first[number], np.float64)
        assert np.std(values) > 0
        assert np.mean(values != 0) > 0.8
        for different in (other, nearest):
            assert (np.mean(np.asarray(different[number]) != np.asarray(first[number])) > 0.8) == (number > 0)


def test_products_of_stochastic_gradients_average_to_the_exact_ones():
    """Over keys, dx tends to dy times the quantized weight, and dw to what the quantized x makes of dy."""
    plan = policy.layer_plan(load_recipe({"hadamard": "none"}))
    x, w, dy = operands("mlp", hadamard=False)
    x2, w2, dy2 = matrices("mlp", x, w, dy)
    row = OperandPlan(block=(1, 16))

    def decoded(matrix, contract, operand):
        encoded = encode_operand(operand, matrix, contract, None, "nvfp4").encoded
        return np.asarray(encoded.scaled_codes() * encoded.tensor_scale, np.float64)

    def within_range(matrix):
        """What stochastic rounding averages to: a value beyond 6 of its block's steps becomes 6 of them."""
        encoded = encode_operand(row, matrix, 1, None, "nvfp4").encoded
        largest = np.repeat(
            np.asarray(6 * encoded.block_scales * encoded.tensor_scale, np.float64), 16, axis=1
        )
        return np.clip(np.asarray(matrix, np.float64), -largest, largest)

    want = (
        within_range(dy2) @ decoded(w2, 1, plan.dgrad.b).T,
        decoded(x2, 0, row).T @ within_range(dy2.T).T,
    )
    dims = (((2,), (0,)), ((), ()))
    routine = Routine((plan,), (0,))

    @jax.jit
    def mean(keys):
        def one(key):
            _, pull_back = jax.vjp(
                lambda x, w: routed_dot_general(
                    backends.create("transformer_engine", "cpu"), routine, x, w, dims, key=key
                ),
                x,
                w,
            )
            return [part.astype(jnp.float32) for part in pull_back(dy)]

        return [part.mean(0) for part in jax.lax.map(one, keys)]

    keys = jax.random.bits(jax.random.key(9), (256, 2), "uint32")
    few, lots = mean(keys[:16]), mean(keys)
    for near, nearer, value in zip(few, lots, want, strict=True):
        errors = [
            np.linalg.norm(np.asarray(part, np.float64).reshape(value.shape) - value) / np.linalg.norm(value)
            for part in (near, nearer)
        ]
        assert errors[1] < 0.02
        assert 3 < errors[0] / errors[1] < 5  # sqrt(256 / 16)


# The corrections of the harness.


def without(correction):
    assert correction in h.CORRECTIONS
    return h.corrected_fallback(tuple(name for name in h.CORRECTIONS if name != correction))


def test_without_the_first_correction_every_result_holds_nan():
    """`reduce_precision` to E4M3 makes 248 and more infinite on a CPU, and the largest block has 448."""
    x, w, dy = operands("mlp")
    with without("block scales above 240"):
        tensor = te_quantize(1)(wide((128, 256), 1)).rows
        got = results("transformer_engine", [NEAREST], "mlp", x, w, dy)[0]
    scales = np.asarray(tensor.scale_inv, F32)
    assert np.isnan(scales).any()
    assert np.nanmax(scales) == 240
    assert all(np.isnan(np.asarray(part, F32)).any() for part in got)
    corrected = results("transformer_engine", [NEAREST], "mlp", x, w, dy)[0]
    assert all(np.isfinite(np.asarray(part, F32)).all() for part in corrected)


def test_without_the_second_correction_square_blocks_have_the_scales_of_others():
    w = jnp.asarray(np.random.default_rng(0).standard_normal((128, 256)), jnp.bfloat16)
    w *= (
        jnp.exp(jnp.asarray(np.random.default_rng(1).normal(0, 1, (8, 1, 16, 1))))
        .repeat(16, 1)
        .repeat(16, 3)
        .reshape(128, 256)
        .astype(jnp.bfloat16)
    )

    def error():
        decoded = np.asarray(te_quantize(1, square=True)(w).rows.dequantize(), np.float64)
        exact = np.asarray(w, np.float64)
        return np.linalg.norm(decoded - exact) / np.linalg.norm(exact)

    with without("square blocks repeated"):
        wrong = error()
    assert wrong > 0.5
    assert error() == pytest.approx(0.108, abs=0.01)


def test_without_the_third_correction_the_key_has_the_wrong_shape_in_maxtext():
    x = wide((64, 128), 0)
    state = states(1)[0]
    with jax.default_prng_impl("unsafe_rbg"):
        with without("threefry keys"), pytest.raises((TypeError, ValueError), match="shape"):
            te_quantize(1)(x, state)
        codes = h.stored(te_quantize(1)(x, state).rows)[0]
    np.testing.assert_array_equal(codes, h.stored(te_quantize(1)(x, state).rows)[0])
