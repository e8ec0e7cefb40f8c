"""What is measured of Transformer Engine's GEMMs: operands by the emulation's rules, products as it gave them."""

import harness as h
import jax
import numpy as np
import pytest
from jax import numpy as jnp

from maxtext_nvfp4 import policy
from maxtext_nvfp4.backends import emulated, transformer_engine
from maxtext_nvfp4.dot_general import routed_dot_general
from maxtext_nvfp4.plan import MEASURED, Site
from maxtext_nvfp4.recipe import load_recipe
from maxtext_nvfp4.routine import Routine
from maxtext_nvfp4.telemetry import PROBE_SHAPE

M, K, N = 128, 256, 128


@pytest.fixture(autouse=True)
def _fallback():
    with h.corrected_fallback():
        yield


def measured(backend):
    """Outputs and statistics of the three GEMMs of a layer."""
    site = Site(path="decoder/layers/mlp/wi_0", layers=(0,), k=K, n=N)
    [plans] = policy.resolve(load_recipe({"recipe": "all_layers"}), (site,), 1)
    routine = Routine((plans.choices[0][0],), (0,))
    shapes = [(2, M // 2, K), (K, N), (2, M // 2, N)]
    x, w, dy = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))

    def step(x, w, dy, probe):
        def layer(x, w, probe):
            words = jnp.asarray([3, 4], jnp.uint32)
            return routed_dot_general(
                backend, routine, x, w, (((2,), (0,)), ((), ())), key=words, probe=probe
            )

        y, pull = jax.vjp(layer, x, w, probe)
        return y, *pull(dy)

    return [np.asarray(part, np.float32) for part in jax.jit(step)(x, w, dy, jnp.zeros(PROBE_SHAPE))]


def test_operands_are_the_emulations_and_products_its_own():
    *theirs, found = measured(transformer_engine.create("cpu"))
    *ours, wanted = measured(emulated.create("cpu"))
    operands = [0, 1, 3, 4, 6, 7]
    np.testing.assert_array_equal(found[operands], wanted[operands])
    mse = MEASURED.index("relative_mse")
    assert (found[[2, 5, 8], mse] > 1e-3).all()
    np.testing.assert_allclose(found[[2, 5, 8], mse], wanted[[2, 5, 8], mse], rtol=0.25)
    # dgrad and wgrad have another draw of the noise, and so another error.
    assert (found[[5, 8], mse] != wanted[[5, 8], mse]).all()
    assert all(np.isfinite(part).all() for part in (*theirs, *ours))


def test_a_wrong_product_shows(monkeypatch):
    """Gradients of zero, which a kernel may return without an error, are an error of 1."""
    backend = transformer_engine.create("cpu")
    backward = transformer_engine._Matmul.backward

    def zeros(self, *args):
        return jax.tree.map(jnp.zeros_like, backward(self, *args))

    monkeypatch.setattr(transformer_engine._Matmul, "backward", zeros)
    *_, found = measured(backend)
    np.testing.assert_allclose(found[[5, 8], MEASURED.index("relative_mse")], 1.0, rtol=1e-5)
