"""MaxText's training step as its training loop builds it, without the loop: jitted, sharded, state donated.

step = TrainStep(load("base.yml", quantization="nvfp4", base_num_decoder_layers=4, ...))
step.trace(), step.lower()          from shapes alone, at any model size
compiled = step.lower().compile()
state, metrics = compiled(step.initial_state(), step.batch())
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# TensorFlow and transformers come with MaxText and are not measured.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Where no XLA flags are set, MaxText sets some that write every program it compiles to disk.
os.environ.setdefault("XLA_FLAGS", "--xla_dump_hlo_module_re=none")

import jax
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import train_state_nnx
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, sharding, train_utils
from maxtext.utils.model_creation_utils import create_nnx_abstract_model

import maxtext_nvfp4
from maxtext_nvfp4.integration.config import load_config
from maxtext_nvfp4.integration.sampling import SAMPLED

maxtext_nvfp4.register()

BASE = str(Path(pyconfig.__file__).parent / "base.yml")

HERE = {
    "hardware": "gpu" if jax.default_backend() == "gpu" else "cpu",
    "skip_jax_distributed_system": True,
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "log_config": False,
    "jax_cache_dir": "",  # a program from the cache is not compiled, and so has no compile time
    "run_name": "benchmark",
    "base_output_directory": "unused",
}
"""One process on the devices of this machine, and nothing written."""


def load(path: str = BASE, **keys: Any) -> Any:
    """A MaxText config from a file, with keys that win over it and over `HERE`."""
    return load_config(["benchmark", path], **{**HERE, **keys})


@contextlib.contextmanager
def _process_options(config: Any) -> Iterator[None]:
    """JAX as MaxText's `train.initialize` sets it up for its process."""
    options = {
        "jax_default_prng_impl": "unsafe_rbg",
        "jax_remove_size_one_mesh_axis_from_type": config.remove_size_one_mesh_axis_from_type,
    }
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


class TrainStep:
    """What MaxText's training loop makes of a config before its first step.

    Attributes:
      config: The config.
      mesh: All devices.
      shapes: Shapes, dtypes and shardings of the training state.
    """

    def __init__(self, config: Any):
        self.config = config
        self.mesh = maxtext_utils.get_mesh_from_config(config)
        with _process_options(config):
            self._create, model = create_nnx_abstract_model(config, self.mesh)
            _, self._optimizer = train_utils.create_training_optimizer(config, model, mesh=self.mesh)
            self.shapes, _, shardings = maxtext_utils.get_abstract_state(config, self.mesh, self._init, True)
            with logical_axis_rules(config.logical_axis_rules):
                graphdef, _ = nnx.split(nnx.eval_shape(self._init))
        params, self._shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
        self._jitted, _ = train_utils.jit_train_and_eval_step(
            config,
            graphdef,
            self.mesh,
            self.shapes,
            self._shardings,
            train.train_step,
            params_shardings=params,
        )

    def _init(self) -> nnx.Module:
        model = self._create()
        return train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, self._optimizer, wrt=nnx.Param))

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        rules = logical_axis_rules(self.config.logical_axis_rules)
        with _process_options(self.config), jax.set_mesh(self.mesh), rules:
            yield

    def _batch_shapes(self) -> dict[str, Any]:
        data = sharding.get_input_data_sharding(self.config, self.mesh)
        return maxtext_utils.get_shaped_batch(self.config, batch_sharding=data)

    def trace(self) -> Any:
        """The traced step; allocates nothing."""
        with self._context():
            return self._jitted.trace(self.shapes, self._batch_shapes())

    def lower(self, sampled: bool = False) -> Any:
        """The lowered step, or the one that telemetry samples; allocates nothing."""
        step = getattr(self._jitted, SAMPLED) if sampled else self._jitted
        with self._context():
            return step.lower(self.shapes, self._batch_shapes())

    def initial_state(self) -> Any:
        """A fresh state. A step consumes its argument."""
        with _process_options(self.config), logical_axis_rules(self.config.logical_axis_rules):
            return jax.jit(lambda: nnx.state(self._init()), out_shardings=self._shardings)()

    def batch(self, seed: int = 0) -> dict[str, Any]:
        """A global batch of random tokens."""
        with self._context():
            return train.make_synthetic_batch(self.config, self._batch_shapes(), seed)


class Runner:
    """A compiled training step of a Llama with its state and batch.

    Attributes:
      compile_seconds: What XLA took.
    """

    def __init__(self, model: dict[str, Any], keys: dict[str, Any], *, sampled: bool = False):
        """Compiles the step.

        Args:
          model: One of `presets.PRESETS`.
          keys: MaxText keys that are compared.
          sampled: Takes the step that telemetry samples.
        """
        step = TrainStep(load(decoder_block="llama2", scan_layers=True, **model, **keys))
        lowered = step.lower(sampled)
        start = time.perf_counter()
        self._compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        self._state, self._batch = step.initial_state(), step.batch()
        jax.block_until_ready((self._state, self._batch))

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self._state, self._metrics = self._compiled(self._state, self._batch)
        jax.block_until_ready((self._state, self._metrics))
        return time.perf_counter() - start

    @property
    def loss(self) -> float:
        """The loss of the last step: that something was trained."""
        return float(self._metrics["scalar"]["learning/loss"])
