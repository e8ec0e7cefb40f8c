"""Transformer Engine's JAX fallback on 8 host devices: the same codes and gradients on every mesh.

XLA partitions it as any other program; test_partitioning.py runs Transformer Engine's own partitioning. Here it
is shown that our calls of it and their keys do not depend on the mesh (TE #2294, #2418, #3272: the state of
stochastic rounding on one device and on mixed meshes; TE #1647, #2183, #2974, #3073: amax of the whole tensor).
"""

import math
from pathlib import Path

import numpy as np
import pytest

BATCH, SITES = 16, 7
KEYS = {"base_emb_dim": 256, "base_num_kv_heads": 4}
"""With two devices along `tensor`, each still has 128 features of every kernel."""

STRICT = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    # Otherwise a fusion may leave out the rounding of MaxText's BF16 values, and fusions differ between meshes.
    "xla_allow_excess_precision": False,
}

MESHES = {
    "fsdp 8": {"ici_fsdp_parallelism": 8},
    "fsdp 4, tensor 2": {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
    "data 8": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1},
    "data 2, fsdp 4": {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4},
    "fsdp 8, accumulation 2": {"ici_fsdp_parallelism": 8, "gradient_accumulation_steps": 2},
}
ONE = {
    "one": {},
    "one, accumulation 2": {"gradient_accumulation_steps": 2},
    "one, other noise": {"nvfp4": {"seed": 1}},
}


def save_gradients(directory, **runs):
    """Saves Adam's first moments after one step, a tenth of the gradients, of the layers' kernels for each set of keys."""
    import harness
    import jax
    from maxtext_models import Trainer, named

    for name, keys in runs.items():
        nvfp4 = {"backend": "transformer_engine", "recipe": "paper", **keys.pop("nvfp4", {})}
        size = BATCH / jax.device_count()
        with harness.corrected_fallback():
            trainer = Trainer(**{**harness.LEGAL, **KEYS, **keys, "per_device_batch_size": size}, nvfp4=nvfp4)
            trainer.train_step = trainer.compile(STRICT)
            state, _ = trainer.run(1)
        moments = {
            path: np.asarray(leaf.get_value(), np.float64)
            for path, leaf in named(state).items()
            if "/mu/decoder/layers/" in path and path.endswith("kernel")
        }
        np.savez(Path(directory) / name, **moments)


def save_on_one(directory):
    save_gradients(directory, **ONE)


def save_on_meshes(directory):
    save_gradients(directory, **MESHES)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """A folder for gradients by name, which two processes of the first test fill."""
    return tmp_path_factory.mktemp("gradients")


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_do_not_depend_on_the_mesh(on_devices, gradients, mesh):
    if not any(gradients.iterdir()):
        on_devices(1, save_on_one, str(gradients))
        on_devices(8, save_on_meshes, str(gradients))
    one = "one, accumulation 2" if "accumulation" in mesh else "one"
    same, other = distances(gradients, one, mesh), distances(gradients, "one", "one, other noise")
    assert len(same) == len(other) == SITES
    # Measured, as shares of a gradient's length: other noise 0.16 to 0.28; a mesh without `tensor` 0.002; one with it
    # 0.04 to 0.17, at most 0.62 of what other noise does at that site, where other noise on that mesh gives 0.997 or
    # more. Why `tensor` moves more than the other axes is not established: its partial sums are rounded to BF16.
    most = 0.8 if "tensor" in mesh else 0.1
    assert all(same[name] < most * other[name] for name in other)


def distances(directory, expected, found):
    """|a - b| / |a| of each kernel's gradient."""
    with np.load(directory / f"{expected}.npz") as a, np.load(directory / f"{found}.npz") as b:
        assert set(a) == set(b)
        return {name: np.linalg.norm(a[name] - b[name]) / np.linalg.norm(a[name]) for name in a}


def quantize_sharded():
    """Asserts equal codes for every sharding of a tensor over 1 to 8 devices, rounded to nearest and stochastically."""
    import harness
    import jax
    import numpy as np
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from maxtext_nvfp4.backends import te_library

    random = np.random.default_rng(0)
    # Each device has whole groups of 16 tokens. Heavy tails, and the largest value in one corner: an amax of the shard alone would show.
    x = jnp.asarray(random.standard_t(2, (8, 128, 256)) * np.linspace(0.1, 10, 256), jnp.bfloat16)
    kinds = {
        "activation": {"square": False, "hadamard": True},
        "weight": {"square": True, "hadamard": False},
        "gradient": {"square": False, "hadamard": True},
    }
    layouts = (
        (1, 1, ("a", None, "b")),
        (2, 1, ("a", None, "b")),
        (1, 2, ("a", None, "b")),
        (4, 1, ("b", "a")),
        (2, 4, (("a", "b"),)),
        (2, 4, ("a", None, "b")),
    )
    with harness.corrected_fallback():
        for name, kind in kinds.items():

            def quantize(x, stochastic=name == "gradient", kind=kind):
                state = te_library.rng_states(jax.random.key(3)) if stochastic else None
                return te_library.quantize(x, 2, columns=True, rng_state=state, **kind)

            expected = [harness.stored(part) for part in jax.jit(quantize)(x)]
            assert all(np.unique(codes).size > 8 for codes, _, _ in expected)
            for *shape, spec in layouts:
                devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
                mesh = Mesh(devices, ("a", "b"))
                with jax.set_mesh(mesh):
                    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
                    compiled = jax.jit(quantize, compiler_options={"xla_backend_optimization_level": 0})
                    got = [harness.stored(part) for part in compiled(sharded)]
                for one, other in zip(got, expected, strict=True):
                    for a, b in zip(one, other, strict=True):
                        np.testing.assert_array_equal(a, b, err_msg=f"{name} {spec} on {shape}")
    print("same codes")


def test_codes_do_not_depend_on_the_sharding(on_devices):
    assert "same codes" in on_devices(8, quantize_sharded)


def states():
    """Asserts that a device's random state is its own, and that of its number on any mesh."""
    import harness  # noqa: F401  loads the library's dependencies
    import jax
    import numpy as np

    from maxtext_nvfp4.backends import te_library

    key = jax.random.key(5)
    alone = np.asarray(te_library.rng_states(key))
    assert alone.shape == (1, 4)
    for shape, axes in (
        ((8,), ("fsdp",)),
        ((2, 4), ("data", "fsdp")),
        ((2, 2, 2), ("a", "b", "c")),
        ((2,), "a"),
    ):
        mesh = jax.make_mesh(shape, axes)
        with jax.set_mesh(mesh):
            found = np.asarray(jax.jit(te_library.rng_states)(key))
        assert found.shape == (mesh.size, 4)
        assert found.dtype == np.uint32
        assert found.max() < 2**31  # Transformer Engine reads pairs of words as int64
        np.testing.assert_array_equal(found[:1], alone)
        assert len({row.tobytes() for row in found}) == mesh.size
    print("states")


def test_each_device_has_a_state_of_its_own(on_devices):
    """TE #2294, #2418, #3272: (devices, 4) on one device, on one axis and on mixed meshes."""
    assert "states" in on_devices(8, states)
