"""Tiny MaxText models of every family, and MaxText's own training step around them."""

import contextlib
import functools
import importlib.util
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import train_state_nnx
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, sharding, train_utils
from maxtext.utils.model_creation_utils import create_nnx_abstract_model

from maxtext_nvfp4.integration import register
from maxtext_nvfp4.integration.config import load_config

register()

_SPEC = importlib.util.find_spec("maxtext")
assert _SPEC is not None
assert _SPEC.submodule_search_locations is not None
BASE = str(Path(_SPEC.submodule_search_locations[0]) / "configs" / "base.yml")

TINY = {
    "run_name": "tiny",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 128,
    "head_dim": 16,
    "vocab_size": 128,
    "base_num_decoder_layers": 2,
    "max_target_length": 32,
    "per_device_batch_size": 2,
    "dataset_type": "synthetic",
    "steps": 4,
    "learning_rate_schedule_steps": 20,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "log_config": False,
    "jax_cache_dir": "",
    "base_output_directory": "unused",
}
"""Keys of a model that trains in milliseconds."""

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 128}

DENSE: dict[str, dict[str, Any]] = {
    "llama2": {},
    "fused": {"decoder_block": "llama2", "fused_qkv": True, "fused_mlp": True, "base_num_kv_heads": 4},
    "mistral": {},
    "gemma": {},
    "gemma2": {"sliding_window_size": 16},
    "gemma3": {"model_name": "gemma3-4b", "override_model_config": True, "sliding_window_size": 16},
    "qwen2": {},
    "qwen3": {},
    "gpt3": {"base_num_kv_heads": 4},
    "olmo3": {"inhomogeneous_layer_cycle_interval": 2, "sliding_window_size": 16},
}
"""Dense families with the keys that make the smallest model of each."""

MIXTURE: dict[str, dict[str, Any]] = {
    "mixtral": _MOE,
    "qwen3_moe": _MOE,
    "gpt_oss": {**_MOE, "inhomogeneous_layer_cycle_interval": 2, "attention": "dot_product"},
    "llama4": {
        **_MOE,
        "num_experts_per_tok": 1,
        "shared_experts": 1,
        "interleave_moe_layer_step": 2,
        "inhomogeneous_layer_cycle_interval": 4,
        "nope_layer_interval": 4,
        "chunk_attn_window_size": 16,
        "attention": "dot_product",
        "base_num_decoder_layers": 4,
    },
    "deepseek": {
        **_MOE,
        "base_num_decoder_layers": 3,
        "base_num_kv_heads": 4,
        "first_num_dense_layers": 1,
        "shared_experts": 1,
        "attention_type": "mla",
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "qwen3_5": {
        **_MOE,
        "shared_experts": 1,
        "base_num_decoder_layers": 4,
        "inhomogeneous_layer_cycle_interval": 4,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
        "gdn_num_key_heads": 2,
        "gdn_num_value_heads": 2,
        "gdn_key_head_dim": 16,
        "gdn_value_head_dim": 16,
    },
    "qwen3_next": {
        **_MOE,
        "shared_experts": 1,
        "base_num_decoder_layers": 4,
        "inhomogeneous_layer_cycle_interval": 4,
        "partial_rotary_factor": 0.25,
        "gdn_num_key_heads": 2,
        "gdn_num_value_heads": 2,
        "gdn_key_head_dim": 16,
        "gdn_value_head_dim": 16,
    },
}
"""Families with routed experts."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for a program that runs only a few times."""

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
"""The same as XLA_FLAGS of a process."""


class _QuickJax(types.ModuleType):
    """JAX for MaxText's jitted steps, compiled without the passes that take most of the time."""

    jit = staticmethod(functools.partial(jax.jit, compiler_options=QUICK))

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


def train_loop(config: Any) -> Any:
    """Trains in this process, as `train.main` does once it has read the config; returns the last state."""
    with pytest.MonkeyPatch.context() as patch, jax.default_prng_impl("unsafe_rbg"):
        patch.setattr(train_utils, "jax", _QuickJax("jax"))
        return train.train_loop(config, None)


def load(**keys: Any) -> Any:
    """The config of a tiny model; `family` names one of the families, `nvfp4` and the rest are MaxText's keys."""
    family = keys.pop("family", None)
    if family:
        keys = {"decoder_block": family, **(DENSE | MIXTURE)[family], **keys}
    return load_config(["", BASE], **{**TINY, **keys})


def abstract_model(config: Any) -> nnx.Module:
    """The model's shapes, without weights."""
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes))
    _, model = create_nnx_abstract_model(config, jax.sharding.Mesh(devices, config.mesh_axes))
    return model


class Trainer:
    """What MaxText's training loop builds from a config: the mesh, the state, a batch and the jitted steps."""

    def __init__(self, **keys: Any):
        self.config = load(**keys)
        self.mesh = maxtext_utils.get_mesh_from_config(self.config)
        create, model = create_nnx_abstract_model(self.config, self.mesh)
        _, self._optimizer = train_utils.create_training_optimizer(self.config, model, mesh=self.mesh)
        self._create = create

    def _init(self) -> nnx.Module:
        model = self._create()
        return train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, self._optimizer, wrt=nnx.Param))

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What MaxText sets up around its steps."""
        with (
            jax.default_prng_impl("unsafe_rbg"),
            jax.set_mesh(self.mesh),
            logical_axis_rules(self.config.logical_axis_rules),
        ):
            yield

    @functools.cached_property
    def _abstract(self) -> tuple[Any, Any]:
        """Shapes and shardings of the state."""
        with jax.default_prng_impl("unsafe_rbg"):
            shapes, _, shardings = maxtext_utils.get_abstract_state_nnx(self.config, self.mesh, self._init)
        return shapes, shardings

    @property
    def abstract_state(self) -> Any:
        """The state's shapes."""
        return self._abstract[0]

    @property
    def shapes(self) -> tuple[list[Any], list[Any]]:
        """Shapes of the train step's inputs: the leaves of the state and of the batch."""
        return jax.tree.leaves(self._abstract[0]), jax.tree.leaves(
            maxtext_utils.get_shaped_batch(self.config)
        )

    @property
    def paths(self) -> list[str]:
        """Paths of the state's leaves, in the order of the train step's inputs."""
        return list(named(self._abstract[0]))

    def constants(self, kind: type) -> dict[str, Any]:
        """Values of the model's variables of a kind that needs no weights, by path."""
        with jax.default_prng_impl("unsafe_rbg"), logical_axis_rules(self.config.logical_axis_rules):
            state = jax.jit(lambda: nnx.state(self._init(), kind), compiler_options=QUICK)()
        return {path: np.asarray(leaf.get_value()) for path, leaf in named(state).items()}

    @functools.cached_property
    def graphdef(self) -> Any:
        """The static part of the state."""
        with jax.default_prng_impl("unsafe_rbg"), logical_axis_rules(self.config.logical_axis_rules):
            return nnx.split(nnx.eval_shape(self._init))[0]

    def initial_state(self) -> Any:
        """A fresh state; the train step consumes its argument."""
        with jax.default_prng_impl("unsafe_rbg"), logical_axis_rules(self.config.logical_axis_rules):
            _, state = nnx.split(self._init())
        return jax.device_put(state, self._abstract[1])

    def batch(self, seed: int = 0) -> dict[str, Any]:
        """A global batch of random tokens."""
        shapes = maxtext_utils.get_shaped_batch(self.config)
        random = np.random.default_rng(seed)
        values: dict[str, Any] = {}
        for name, leaf in shapes.items():
            if name in ("inputs", "targets"):
                value = random.integers(0, self.config.vocab_size, leaf.shape)
            elif name.endswith("_position"):
                value = np.broadcast_to(np.arange(leaf.shape[1]), leaf.shape)
            else:
                value = np.ones(leaf.shape)
            values[name] = value.astype(leaf.dtype)
        return jax.device_put(values, sharding.get_input_data_sharding(self.config, self.mesh))

    @functools.cached_property
    def _steps(self) -> tuple[Any, Any]:
        shapes, shardings = self._abstract
        params, shardings = sharding.maybe_update_params_sharding_with_opt(self.config, shardings)
        return train_utils.jit_train_and_eval_step(
            self.config,
            self.graphdef,
            self.mesh,
            shapes,
            shardings,
            train.train_step,
            train.eval_step,
            True,
            params,
        )

    @functools.cache  # noqa: B019
    def trace(self, evaluation: bool = False) -> Any:
        """The traced train step, or the evaluation step; its `jaxpr` is the whole program."""
        step, state = self._steps[evaluation], self._abstract[0]
        with self.context():
            return step.trace(state, maxtext_utils.get_shaped_batch(self.config))

    @functools.cached_property
    def train_step(self) -> Any:
        """The compiled train step: (state, batch) to (state, metrics)."""
        return self.compile(QUICK)

    def compile(self, options: dict[str, Any] | None = None) -> Any:
        """The compiled train step with these compiler options."""
        traced = self.trace()
        with self.context():
            return traced.lower().compile(compiler_options=options)

    def run(self, steps: int, state: Any = None) -> tuple[Any, list[dict[str, float]]]:
        """Trains on a batch of its own each step; returns the state and the metrics of each step."""
        state = self.initial_state() if state is None else state
        train_step, history = self.train_step, []
        for step in range(steps):
            with self.context():
                state, metrics = train_step(state, self.batch(step))
            history.append({name: float(value) for name, value in metrics["scalar"].items()})
        return state, history


def named(tree: Any) -> dict[str, Any]:
    """Leaves of an nnx state by their path."""
    return {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(tree)}
