"""Puts `doctor` together: probes of this machine, facts of the config, every check."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

import jax

from maxtext_nvfp4.doctor import launch, probes, versions
from maxtext_nvfp4.doctor.cluster import Cluster
from maxtext_nvfp4.doctor.facts import Machine, Run, Situation
from maxtext_nvfp4.doctor.findings import Outcome
from maxtext_nvfp4.doctor.registry import Diagnosis, examine
from maxtext_nvfp4.doctor.targets import TARGETS, Target, domain_of
from maxtext_nvfp4.integration import register


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says about the cluster; None where it does not."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    rack_gpus: int | None = None
    target: str | None = None


def diagnose(argv: Sequence[str] | None, options: Options) -> Diagnosis:
    """Checks this machine, and a config on it or on a target.

    Args:
      argv: Program name, YAML file, then `key=value` arguments; None to check the machine alone.
      options: The cluster.

    Raises:
      ConfigError: A mistake in the config that has nothing to do with the machine or the cluster.
    """
    environment = dict(os.environ)
    gpus, driver = probes.gpus()
    place = launch.read(environment, max(1, len(gpus)))
    target = TARGETS[options.target] if options.target else None
    machine = probes.machine(environment, place, gpus, driver)
    seen = probes.as_target(machine, target) if target else machine

    alone = Situation(
        machine=seen,
        cluster=_cluster(options, target, seen, place, ""),
        cluster_given=options.nodes is not None,
        launch=place,
        run=None,
        target=target,
    )
    if argv is None:
        return examine(alone)
    packages = versions.pinned(alone)
    if packages.status == "problem":  # MaxText cannot be asked
        unread = dataclasses.replace(packages, found=f"CONFIG was not read: {packages.found}")
        return Diagnosis((*examine(alone).outcomes, Outcome("config", unread)))
    with _undisturbed():
        cluster, run = _read(argv, options, alone)
    return examine(dataclasses.replace(alone, cluster=cluster, run=run))


def _read(argv: Sequence[str], options: Options, alone: Situation) -> tuple[Cluster, Run]:
    """The cluster that a config is for, and the facts of its run there."""
    register()
    from maxtext_nvfp4.integration import cluster_mesh, run_facts

    machine, target, raw = alone.machine, alone.target, cluster_mesh.checked_keys(argv)
    hardware = str(raw["hardware"])
    cluster = _cluster(options, target, machine, alone.launch, hardware)
    run = run_facts.read(
        argv,
        raw,
        cluster,
        capability=machine.gpus[0].capability if machine.gpus and hardware.startswith("gpu") else "",
        engine=target is not None or machine.jax.engine is None,
        environment=machine.environment,
        look=probes.folder,
    )
    return cluster, run


def _cluster(
    options: Options, target: Target | None, machine: Machine, place: launch.Launch, hardware: str
) -> Cluster:
    """The cluster: what the options say, else the target, else what this process was started in."""
    if hardware == "cpu":  # one slice, however many processes
        nodes = options.nodes or 1
        per_node = options.gpus_per_node or (1 if options.nodes else place.count)
        return Cluster(nodes=nodes, gpus_per_node=per_node, rack_gpus=nodes * per_node)
    there = target.gpus_per_node if target else len(machine.gpus)
    per_node = options.gpus_per_node or max(1, there)
    domain = domain_of(machine.gpus[0].name if machine.gpus else "", per_node)
    return Cluster(
        nodes=options.nodes or place.nodes or -(-place.count // per_node),
        gpus_per_node=per_node,
        rack_gpus=options.rack_gpus or domain,
    )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Within it JAX starts on the CPU, as it computes nothing, and variables that would interfere are hidden.

    A wrong XLA_FLAGS would end this process; the probe of JAX has read it already. Those that begin with M_ are
    MaxText's way to override a config.
    """
    jax.config.update("jax_platforms", "cpu")
    hidden = {name: os.environ.pop(name) for name in [*os.environ] if name == "XLA_FLAGS" or name[:2] == "M_"}
    try:
        yield
    finally:
        os.environ.update(hidden)
