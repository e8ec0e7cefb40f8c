"""What `doctor` knows of a run: its config on a cluster, from shapes alone, on any machine."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from maxtext.configs import pyconfig

from maxtext_nvfp4.backends import te_library
from maxtext_nvfp4.doctor.cluster import Cluster, MeshPlan, derive
from maxtext_nvfp4.doctor.facts import Folder, Run, Shapes
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import cluster_mesh
from maxtext_nvfp4.integration.attach import for_another_machine, resolve
from maxtext_nvfp4.integration.cluster_model import abstract_model, load_for, undivided
from maxtext_nvfp4.integration.config import enabled
from maxtext_nvfp4.integration.config_checks import missing_paths
from maxtext_nvfp4.integration.config_errors import raising_setup_errors
from maxtext_nvfp4.integration.extents import TOKENS, parts_of
from maxtext_nvfp4.integration.report import build
from maxtext_nvfp4.integration.resume import check_recipe
from maxtext_nvfp4.recipe import load_recipe

_KEYS = (
    "attention",
    "checkpoint_period",
    "dataset_type",
    "hardware",
    "max_num_checkpoints_to_keep",
    "max_segments_per_seq",
    "num_decoder_layers",
    "packing",
    "per_device_batch_size",
    "remat_policy",
    "save_checkpoint_on_start",
    "scan_layers",
    "shard_optimizer_over_data",
    "steps",
)
_DTYPES = ("grad_dtype", "mu_dtype", "weight_dtype")


def read(
    argv: Sequence[str],
    raw: Mapping[str, Any],
    cluster: Cluster,
    *,
    capability: str,
    engine: bool,
    environment: Mapping[str, str],
    look: Callable[[str], Folder],
) -> Run:
    """The facts of a run.

    Args:
      argv: Program name, YAML file, then `key=value` arguments.
      raw: All keys of the config, as `cluster_mesh.checked_keys` gives them.
      cluster: Where it is to run.
      capability: Compute capability of the GPUs there; empty without any.
      engine: Whether Transformer Engine can be used there.
      environment: Environment variables of the run; those that MaxText reads must be hidden from this process.
      look: Looks at a folder for checkpoints.

    Raises:
      ConfigError: Anything wrong in the config that has nothing to do with the cluster.
    """
    mesh, mesh_fault, mesh_fix = _mesh(raw, cluster)
    config = load_for(argv, raw, mesh)
    with raising_setup_errors(), for_another_machine():
        model = abstract_model(config)
        if mesh and (fault := undivided(model, mesh)):
            mesh_fault, mesh_fix = fault
            mesh, config = None, load_for(argv, raw, None)
            model = abstract_model(config)
        shapes = _shapes(model, config, raw, capability, engine) if enabled(config) and mesh else None
    parameters, checkpoint_bytes, device_bytes = _sizes(model, config)
    folder = look(config.checkpoint_dir) if config.enable_checkpointing else None
    parts = parts_of(config)
    return Run(
        keys={
            **{key: getattr(config, key) for key in _KEYS},
            **{key: str(getattr(config, key)) for key in _DTYPES},
            "skip_jax_distributed_system": bool(raw.get("skip_jax_distributed_system")),
        },
        plan=mesh,
        mesh_fault=mesh_fault,
        mesh_fix=mesh_fix,
        shapes=shapes,
        backend_wanted=load_recipe(raw.get("nvfp4")).backend if enabled(config) else "",
        parameters=parameters,
        checkpoint_bytes=checkpoint_bytes,
        device_bytes=device_bytes if mesh else 0,
        rows=int(config.micro_batch_size_to_train_on),
        row_parts=parts(TOKENS[:1]),
        token_parts=parts(TOKENS),
        folder=folder,
        missing_paths=tuple(f"{key}: {path}" for key, path in missing_paths(raw)),
        overridden=tuple(name for key in raw if (name := pyconfig.yaml_key_to_env_key(key)) in environment),
        refusal=_refusal(config, folder),
    )


def _mesh(raw: Mapping[str, Any], cluster: Cluster) -> tuple[MeshPlan | None, str, str]:
    """The mesh for a cluster, why MaxText would refuse the one that is written, and what to write."""
    ici, dcn = cluster_mesh.parallelism(raw, "ici"), cluster_mesh.parallelism(raw, "dcn")
    if cluster.fault():
        return None, "", ""
    try:
        mesh = derive(cluster, ici, dcn)
    except ConfigError as error:
        found, _, write = str(error).rpartition("; write ")
        return None, found, write
    return mesh, cluster_mesh.fault(cluster, ici, dcn), mesh.arguments()


def _shapes(model: nnx.Module, config: Any, raw: Mapping[str, Any], capability: str, engine: bool) -> Shapes:
    """What becomes of the 4-bit GEMMs on the backend that the run will use."""
    recipe = load_recipe(raw.get("nvfp4"))
    name = recipe.backend
    if name == "auto":
        kernels = recipe.format == "nvfp4" and capability in te_library.CAPABILITIES and engine
        name = "transformer_engine" if kernels else "emulated"
    recipe = recipe.model_copy(update={"backend": name})
    try:
        report = build(resolve(model, config, recipe), recipe, config)
    except ConfigError as error:
        return Shapes(backend=name, fault=str(error))
    changed = [f"{row.path} ({row.layers}): {row.reason}" for row in report.rows if f"{name}: " in row.reason]
    return Shapes(
        backend=name,
        fault="",
        changed=tuple(changed),
        gemms=(report.nvfp4_gemms, report.gemms),
        fraction=report.nvfp4_flops_fraction,
        uncovered=tuple(f"{path} ({reason})" for path, reason in report.high_precision),
    )


def _sizes(model: nnx.Module, config: Any) -> tuple[int, int, int]:
    """Parameters, bytes of a checkpoint, and bytes of parameters, moments and gradients on one device."""
    from maxtext.optimizers import optimizers
    from maxtext.utils import maxtext_utils

    params = nnx.state(model, nnx.Param)
    leaves = jax.tree.leaves(params)
    optimizer = optimizers.get_optimizer(config, maxtext_utils.create_learning_rate_schedule(config))
    moments = sum(_bytes(leaf) for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, params)))
    whole = sum(map(_bytes, leaves))
    part = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    # Moments are sharded as their parameters; a gradient has the type of its parameter.
    device = 2 * part + moments * part // whole
    return sum(math.prod(leaf.shape) for leaf in leaves), whole + moments, device


def _bytes(leaf: Any) -> int:
    return int(math.prod(leaf.shape)) * int(leaf.dtype.itemsize)


def _refusal(config: Any, folder: Folder | None) -> str:
    """Why the run would not go on from the checkpoints that are there; empty if it would."""
    if not enabled(config) or folder is None or not folder.saved:
        return ""
    steps = [int(name) for name in os.listdir(folder.nearest) if name.isdigit()]
    try:
        check_recipe(config, max(steps))
    except ConfigError as error:
        return str(error)
    return ""
