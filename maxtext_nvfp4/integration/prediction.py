"""Predicts a MaxText config on hardware that need not be there."""

import itertools
from collections.abc import Sequence
from typing import Any

from flax import nnx

from maxtext_nvfp4.doctor.cluster import Cluster
from maxtext_nvfp4.doctor.targets import TARGETS
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import cluster_mesh, cluster_model
from maxtext_nvfp4.integration.attach import for_another_machine, resolve
from maxtext_nvfp4.integration.config import enabled, recipe_of
from maxtext_nvfp4.integration.config_checks import MODE
from maxtext_nvfp4.integration.config_errors import raising_setup_errors
from maxtext_nvfp4.integration.workload import workload_of
from maxtext_nvfp4.predict.advice import advise
from maxtext_nvfp4.predict.calibration import accuracy
from maxtext_nvfp4.predict.hardware import hardware
from maxtext_nvfp4.predict.prediction import predict
from maxtext_nvfp4.predict.report import Report
from maxtext_nvfp4.predict.workload import Format, Workload
from maxtext_nvfp4.recipe import Recipe, problem

_BASELINES: tuple[Format, ...] = ("bf16", "fp8")


def report(argv: Sequence[str], name: str, gpus: int, precisions: Sequence[Format]) -> Report:
    """Predicts a config in several precisions.

    In NVFP4 it is the config's own recipe; in others every linear layer of the decoder has the one format.

    Args:
      argv: Program name, YAML file, then `key=value` arguments.
      name: The hardware, one of `predict.hardware.names()`.
      gpus: Their number.
      precisions: What to show, in this order.

    Raises:
      ConfigError: Anything that a run would refuse, or that nothing is predicted for.
    """
    cluster = _cluster(name, gpus)
    if not str(cluster_mesh.checked_keys(argv)["hardware"]).startswith("gpu"):
        argv = [*argv, "hardware=gpu_multiprocess"]
    planned = cluster_model.planned(argv, cluster, lambda nodes: f"--gpus {nodes * cluster.gpus_per_node}")
    workload = _workload(planned.config, planned.model, wanted="nvfp4" in precisions)
    gpu = hardware(name)
    found = {
        precision: predict(
            workload if precision == "nvfp4" else workload.in_format(precision), gpu, precision
        )
        for precision in (*precisions, *_BASELINES)
    }
    return Report(
        hardware=name,
        gpus=gpus,
        parallelism=planned.mesh.settings(),
        changed=planned.mesh.changed,
        predictions=[found[precision] for precision in precisions],
        baselines={precision: found[precision] for precision in _BASELINES},
        advice=advise(found[precisions[0]]),
        accuracy=accuracy(),
    )


def _cluster(name: str, gpus: int) -> Cluster:
    """So many GPUs of a kind, in as few NVLink domains as hold them."""
    target = TARGETS[name]
    per_node = min(gpus, target.gpus_per_node)

    def of(nodes: int) -> Cluster:
        return Cluster(nodes=nodes, gpus_per_node=per_node, rack_gpus=target.domain)

    def alike(nodes: int) -> bool:
        return nodes % of(nodes).racks == 0

    nodes, rest = divmod(gpus, per_node)
    if not rest and alike(nodes):
        return of(nodes)
    why = f"a node of {name.upper()} has {per_node}"
    if not rest:
        why = f"{nodes} nodes do not divide into {of(nodes).racks} NVLink domains equally, as JAX demands"
    below = next(count for count in range(nodes if rest else nodes - 1, 0, -1) if alike(count))
    above = next(count for count in itertools.count(nodes + 1) if alike(count))
    raise ConfigError(problem("--gpus", gpus, why, f"{below * per_node} or {above * per_node}"))


def _workload(config: Any, model: nnx.Module, *, wanted: bool) -> Workload:
    if wanted and not enabled(config):
        given = getattr(config.quantization, "value", config.quantization)
        why = "there is no NVFP4 recipe to predict"
        raise ConfigError(
            problem("quantization", given, why, f"quantization={MODE}, or --precision without nvfp4")
        )
    dtype = str(getattr(config.dtype, "value", config.dtype))
    if dtype != "bfloat16":
        raise ConfigError(
            problem("dtype", dtype, "only steps that compute in BF16 are predicted", "bfloat16")
        )
    with raising_setup_errors(), for_another_machine():
        plans = resolve(model, config, _on_blackwell(config)).plans if wanted else None
        return workload_of(config, model, plans)


def _on_blackwell(config: Any) -> Recipe:
    """The config's recipe on the kernels that are timed, which do not take all sizes that this machine's backend takes."""
    return recipe_of(config).model_copy(update={"backend": "transformer_engine"})
