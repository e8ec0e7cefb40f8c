"""`maxtext-nvfp4 train`, with a fault planted into the gradients of some steps.

    python faulty_train.py '{"steps": [3], "value": "inf", "path": "decoder/layers/mlp/wi_0/kernel", "layer": 1}' \
        train run.yml key=value ...

With no `path` the loss itself becomes `value`. The fault acts between MaxText's train step and the
plugin's, so neither knows of it.
"""

import functools
import json
import sys

import jax
from flax import nnx
from jax import numpy as jnp

import maxtext_nvfp4
from maxtext_nvfp4 import cli


@jax.custom_vjp
def poisoned(x, fault):
    return x


poisoned.defvjp(lambda x, fault: (x, fault), lambda fault, cotangent: (cotangent + fault, None))


def plant(steps, value, path=None, layer=0, axis=1):
    """Makes the gradient of one layer's parameter, or the loss, `value` at these steps."""
    maxtext_nvfp4.register()
    from maxtext.trainers.pre_train import train

    train_step, loss_fn, now = train.train_step, train.loss_fn, {}

    def stepping(model, config, shardings, params, state, *rest):
        step = state["optimizer"]["step"].get_value()
        now["fault"] = jnp.where(jnp.isin(step, jnp.asarray(steps)), float(value), 0.0)
        return train_step(model, config, shardings, params, state, *rest)

    @functools.wraps(loss_fn)
    def losing(model, *args, **kwargs):
        for found, variable in nnx.iter_graph(model):
            if path is None or "/".join(map(str, found)) != path:
                continue
            kernel = variable.get_value()
            fault = jnp.zeros_like(kernel)
            index = [0] * kernel.ndim
            if axis is not None:
                index[axis] = layer
            variable.set_value(poisoned(kernel, fault.at[tuple(index)].set(now["fault"])))
        loss, aux = loss_fn(model, *args, **kwargs)
        return (loss + now["fault"] if path is None and kwargs.get("is_train", True) else loss), aux

    train.train_step, train.loss_fn = stepping, losing


if __name__ == "__main__":
    plant(**json.loads(sys.argv[1]))
    raise SystemExit(cli.main(sys.argv[2:]))
