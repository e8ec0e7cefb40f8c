"""Which training step, microbatch and seed the layers are being traced for.

Layers read it when they derive stochastic-rounding keys. It carries traced values, so one compiled step
serves the whole run, and it holds no random state: a key is a function of (seed, step, microbatch, layer,
site, GEMM), which is what makes a resumed run repeat the noise of an uninterrupted one.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
from jax import Array

_step_key: contextvars.ContextVar[Array | None] = contextvars.ContextVar("nvfp4_step_key", default=None)


@contextlib.contextmanager
def training_step(step: Array | int, *, seed: int = 0) -> Iterator[None]:
    """Gives the layers traced inside it keys for one optimizer step.

    MaxText's own training loop is wrapped in this; a custom loop around a quantized model uses it by hand:

        with maxtext_nvfp4.training_step(step):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)

    Args:
      step: Optimizer step, a Python or traced integer.
      seed: `nvfp4.seed`.
    """
    token = _step_key.set(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step))
    try:
        yield
    finally:
        _step_key.reset(token)


@contextlib.contextmanager
def microbatch(index: Array | int) -> Iterator[None]:
    """Gives the layers traced inside it keys of their own for one microbatch of the current step."""
    key = _step_key.get()
    assert key is not None
    token = _step_key.set(jax.random.fold_in(key, index))
    try:
        yield
    finally:
        _step_key.reset(token)


def site_key(site_id: int, layer: Array | int) -> Array | None:
    """uint32 words of the key for a site in a decoder layer; None outside a training step (evaluation)."""
    key = _step_key.get()
    if key is None:
        return None
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, site_id), layer))
