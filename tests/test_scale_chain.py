"""The scale chain, enumerated: all (tensor amax, block amax) pairs of BF16 mantissas, exponent gaps 0 to 17.

A test on random tensors is nearly blind to the order of the chain's operations (most orders agree on a whole
tensor and differ in half a percent of the blocks of the next one); this enumeration sees each of them.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

from maxtext_nvfp4.quantize import dequantize, quantize

F32 = np.float32
MANTISSAS = np.arange(128, 256)  # times 2^-7: one binade of BF16
GAPS = 18
PAIRS = 286_784


@functools.cache
def block_amaxes():
    """Block amaxes relative to the tensor's exponent, (GAPS * 128,), largest binade first."""
    gaps, mantissas = np.meshgrid(np.arange(GAPS), MANTISSAS, indexing="ij")
    return (mantissas.ravel() / 128 * 2.0 ** -gaps.ravel()).astype(F32)


def all_pairs():
    """(tensor amax, block amax), the block's at most the tensor's, flat."""
    tensor, block = np.meshgrid((MANTISSAS / 128).astype(F32), block_amaxes(), indexing="ij")
    valid = block <= tensor
    return tensor[valid], block[valid]


def tensor_with(amax, exponent):
    """A BF16 tensor (blocks, 16) of the given amax, with one block for every block amax up to it."""
    rng = np.random.default_rng(int(amax * 128))
    peaks = np.where(block_amaxes() <= amax, block_amaxes(), 0)
    x = np.round(rng.uniform(0, 63, (len(peaks), 16))) / 64 * peaks[:, None]
    rows = np.arange(len(peaks))
    x[rows, rows % 16] = peaks
    x *= rng.choice([-1.0, 1.0], x.shape)
    return (x * 2.0**exponent).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("exponent", [0, -47, 61])
def test_every_pair(exponent):
    """Block scales, tensor scale and codes of the jitted `quantize`, bit for bit, on all 286,784 pairs."""
    run = jax.jit(lambda x: quantize(x, (1, 16)))
    pairs, scales_seen = 0, set()
    for mantissa in MANTISSAS:
        x = tensor_with(mantissa / 128, exponent)
        q = run(x)
        x = x.astype(F32)
        amax_b = np.abs(x).max(axis=-1, keepdims=True)
        scale = oracle.encode_scale(amax_b.max())
        assert amax_b.max() == mantissa / 128 * 2.0**exponent
        s_b = oracle.block_scale(amax_b, scale)
        np.testing.assert_array_equal(oracle.scale_bits(q.block_scales), oracle.scale_bits(s_b))
        assert np.asarray(q.tensor_scale) == oracle.decode_scale(scale)
        codes = oracle.round_e2m1(x * oracle.block_encode(s_b, scale))
        np.testing.assert_array_equal(oracle.code_bits(q.codes), oracle.code_bits(codes))
        pairs += np.count_nonzero(amax_b)
        scales_seen.update(np.unique(s_b).tolist())
    assert pairs == PAIRS
    assert len(scales_seen) > 100


@pytest.mark.parametrize("wrap", ["eager", "vmap", "scan", "dequantized"])
def test_some_pairs_in_other_programs(wrap):
    """The same chain when the compiler sees other surroundings."""
    tensors = np.stack([tensor_with(m / 128, 0) for m in (128, 129, 171, 213, 255)])
    if wrap == "eager":
        got = [quantize(jnp.asarray(x)) for x in tensors]
        scales = np.stack([oracle.scale_bits(q.block_scales) for q in got])
    elif wrap == "vmap":
        scales = oracle.scale_bits(jax.jit(jax.vmap(quantize))(tensors).block_scales)
    elif wrap == "scan":
        scales = oracle.scale_bits(jax.lax.scan(lambda c, x: (c, quantize(x)), 0, tensors)[1].block_scales)
    else:
        # Only the dequantized values leave the program, so the casts to E4M3 and back sit inside one fusion.
        values = np.asarray(jax.jit(jax.vmap(lambda x: dequantize(quantize(x))))(tensors))

    for i, x in enumerate(tensors):
        x = x.astype(F32)
        amax_b = np.abs(x).max(axis=-1, keepdims=True)
        scale = oracle.encode_scale(amax_b.max())
        s_b = oracle.block_scale(amax_b, scale)
        if wrap == "dequantized":
            codes = oracle.round_e2m1(x * oracle.block_encode(s_b, scale))
            np.testing.assert_array_equal(values[i], codes * s_b * oracle.decode_scale(scale))
            assert np.std(values[i]) > 0
        else:
            np.testing.assert_array_equal(scales[i], oracle.scale_bits(s_b))


VARIANTS = {
    "(amax_b / 6) * S": (lambda a, b, s: (b / F32(6)) * s, 272),
    "exact real arithmetic": (lambda a, b, s: 448 * b.astype(np.float64) / a.astype(np.float64), 332),
    "amax_b * (S / 6)": (lambda a, b, s: b * (s / F32(6)), 251),
    "(amax_b * S) * (1/6)": (lambda a, b, s: (b * s) * (F32(1) / F32(6)), 253),
    "(amax_b * (1/6)) * S": (lambda a, b, s: (b * (F32(1) / F32(6))) * s, 257),
    "amax_b * (448 / amax)": (lambda a, b, s: b * (F32(448) / a), 278),
    "(amax_b / amax) * 448": (lambda a, b, s: (b / a) * F32(448), 388),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_enumeration_sees_every_variant(name):
    """Each tempting reordering differs from the canonical chain, in the documented number of pairs."""
    variant, differ = VARIANTS[name]
    amax, amax_b = all_pairs()
    assert len(amax) == PAIRS
    scale = oracle.encode_scale(amax)
    canonical = oracle.block_scale(amax_b, scale)
    scales = variant(amax, amax_b, scale)
    # The grid search takes float64 as it is, so that the exact variant is rounded once.
    exact = scales.dtype == np.float64
    other = oracle.round_to_grid(scales, oracle.E4M3_GRID) if exact else oracle.round_e4m3(scales)
    assert np.count_nonzero(other != canonical) == differ


def test_a_random_tensor_is_nearly_blind():
    """Why the enumeration: the same variant passes on a whole random tensor."""
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(ml_dtypes.bfloat16).astype(F32)
    amax_b = np.abs(x).reshape(-1, 16).max(-1)
    scale = oracle.encode_scale(amax_b.max())
    variant = oracle.round_e4m3((amax_b / F32(6)) * scale)
    assert np.mean(variant != oracle.block_scale(amax_b, scale)) < 0.01


def test_chain_by_hand():
    """amax 2688 makes S = 1: a block of amax 6 * 2^k has the scale 2^k, and codes are x / 2^k."""
    x = np.zeros((3, 16), F32)
    x[0, 0] = -2688
    x[1, :4] = [96, -40, 8, 3.9]  # scale 16: 6, -2.5 -> -2 (even), 0.5, 0.24 -> 0
    x[2, :3] = [6 * 2.0**-9, 0.25 * 2.0**-9, 0.75 * 2.0**-9]  # the smallest scale: 6, 0 (even), 1
    q = quantize(x)
    assert float(q.tensor_scale) == 1.0
    np.testing.assert_array_equal(np.asarray(q.block_scales, F32), [[448], [16], [2.0**-9]])
    codes = [[-6, 0, 0, 0], [6, -2, 0.5, 0], [6, 0, 1, 0]]
    np.testing.assert_array_equal(np.asarray(q.codes, F32)[:, :4], codes)
    want = np.zeros_like(x)
    want[0, 0] = -2688
    want[1, :3] = [96, -32, 8]
    want[2, :3] = [6 * 2.0**-9, 0, 2.0**-9]
    np.testing.assert_array_equal(dequantize(q), want)
