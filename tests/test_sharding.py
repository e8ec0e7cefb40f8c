"""Codes and losses on 1, 2, 4 and 8 devices."""

import json

import pytest

STEPS, BATCH = 3, 8


def train(*meshes):
    """Prints the losses of a few steps for each (fsdp, tensor) mesh of all devices."""
    import jax
    from maxtext_models import Trainer

    for fsdp, tensor in meshes:
        trainer = Trainer(
            quantization="nvfp4",
            nvfp4={"recipe": "all_layers", "bf16_last_layers": 1},
            dtype="float32",  # so that what differs between meshes is FP32 summation order, and nothing else
            per_device_batch_size=BATCH / jax.device_count(),
            ici_fsdp_parallelism=fsdp,
            ici_tensor_parallelism=tensor,
        )
        _, history = trainer.run(STEPS)
        print(json.dumps([step["learning/loss"] for step in history]))


@pytest.fixture(scope="module")
def single():
    """Losses on one device, found by whichever test comes first."""
    return []


@pytest.mark.parametrize(("devices", "meshes"), [(2, [(2, 1)]), (4, [(2, 2)]), (8, [(8, 1), (4, 2)])])
def test_losses_do_not_depend_on_the_mesh(on_devices, single, devices, meshes):
    if not single:
        single.append(json.loads(on_devices(1, train, (1, 1)).splitlines()[-1]))
    expected = single[0]
    assert len(set(expected)) == STEPS
    lines = on_devices(devices, train, *meshes).splitlines()
    for line in lines[-len(meshes) :]:
        assert json.loads(line) == pytest.approx(expected, rel=1e-4)


def quantize_sharded():
    """Asserts equal codes, scales and products for every sharding of the operands over 1 to 8 devices."""
    import jax
    import numpy as np
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from maxtext_nvfp4 import dequantize, quantize, random_hadamard

    random = np.random.default_rng(0)
    # Heavy tails, and the largest value in one corner: an amax of the shard alone would show.
    x = jnp.asarray(random.standard_t(2, (128, 256)) * np.linspace(0.1, 10, 256), jnp.bfloat16)
    operands = {
        "activation": lambda x: quantize(x, (1, 16)),
        "weight": lambda x: quantize(x, (16, 16)),
        "gradient": lambda x: quantize(random_hadamard(x, 0), (16, 1), jax.random.key(3)),
    }
    for name, encode in operands.items():
        expected = jax.jit(encode)(x)
        assert np.unique(np.asarray(expected.codes, np.float32)).size > 8
        for count in (1, 2, 4, 8):
            for rows in {1, 2, count} & {1, 2, 4, 8} if count > 1 else {1}:
                mesh = Mesh(np.array(jax.devices()[:count]).reshape(rows, count // rows), ("a", "b"))
                sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
                found = jax.jit(encode)(sharded)
                for part in ("codes", "block_scales", "tensor_scale"):
                    a, b = (np.asarray(getattr(q, part)).astype(np.float32) for q in (found, expected))
                    np.testing.assert_array_equal(a, b, err_msg=f"{name} {part} on {rows}x{count // rows}")
        assert np.isfinite(np.asarray(dequantize(expected))).all()
    print("same codes")


def test_codes_do_not_depend_on_the_sharding(on_devices):
    assert "same codes" in on_devices(8, quantize_sharded)
