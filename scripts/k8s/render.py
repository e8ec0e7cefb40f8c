#!/usr/bin/env python3
"""Prints the Kubernetes manifests of a training run.

    scripts/k8s/render.py a4x --name N --image I --racks 2 --pods-per-rack 16 CONFIG.yml key=value ... |
        kubectl apply -f -

Needs PyYAML alone. What a pod has on a platform is in the YAML files beside this one; docs/kubernetes.md says
what a cluster needs first.
"""

import argparse
import copy
import re
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

try:
    import yaml  # type: ignore[import-untyped]
except ImportError:
    sys.exit("error: PyYAML is missing; run this with .venv/bin/python, or install PyYAML")

HERE = Path(__file__).parent
PLATFORMS = ("a4x", "a4x-max", "indexed-job")

PORT = 61440
STARTS = 100
"""Times that a run is started again before Kubernetes gives up."""

NO_RESTART = [2, 3]
"""Exit statuses after which another start would end alike: a wrong config, a run that stopped itself."""

_NAME = r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?"
_SHARED_MEMORY = "/dev/shm"

BLOCK, RACK = "cloud.google.com/gce-topology-block", "cloud.google.com/gce-topology-subblock"
"""Node labels of GKE. A subblock of A4X is a rack, which is an NVLink domain."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the manifests; returns the exit status, 2 for a mistake in the arguments."""
    arguments = _parser().parse_args(argv)
    _check_words(arguments)
    platform = _read(f"{arguments.platform}.yml", arguments)
    _check_counts(arguments, platform)
    print(yaml.safe_dump_all(manifests(arguments, platform), sort_keys=False), end="")
    return 0


def manifests(arguments: argparse.Namespace, platform: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects of a run, what others refer to first."""
    job = {
        "completionMode": "Indexed",
        "completions": arguments.pods_per_rack,
        "parallelism": arguments.pods_per_rack,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": NO_RESTART}},
            ]
        },
        "template": _pod(arguments, platform),
    }
    metadata: dict[str, Any] = {"name": arguments.name}
    if arguments.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": arguments.queue}
    elif platform["jobset"]:  # without Kueue, JobSet itself gives each job a rack to itself
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": RACK}
    if platform["jobset"]:
        return [*platform["objects"], _jobset(metadata, job, arguments.racks)]
    # A pod that is evicted costs no start; the others end with it, and each is replaced by itself.
    job["podFailurePolicy"]["rules"].append(
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    )
    job["backoffLimit"] = STARTS * arguments.pods_per_rack
    job["template"]["spec"]["subdomain"] = arguments.name
    return [
        *platform["objects"],
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
    ]


def _jobset(metadata: dict[str, Any], job: dict[str, Any], racks: int) -> dict[str, Any]:
    """One job for each rack; when a pod fails, all pods of all racks are made anew."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": STARTS,
                "restartStrategy": "BlockingRecreate",  # all old pods are gone before the first new one
                "rules": [
                    {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [
                {"name": "rack", "replicas": racks, "template": {"spec": {**job, "backoffLimit": 0}}}
            ],
        },
    }


def _pod(arguments: argparse.Namespace, platform: dict[str, Any]) -> dict[str, Any]:
    pod = merged(_read("pod.yml", arguments), platform["pod"])
    spec, metadata = pod["spec"], pod["metadata"]
    [container] = spec["containers"]
    # Kubernetes replaces $(NAME), and takes $$ for a dollar sign.
    container["args"] = [word.replace("$", "$$") for word in (arguments.config, *arguments.overrides)]
    coordinator = f"{arguments.name}-rack-0-0" if platform["jobset"] else f"{arguments.name}-0"
    container["env"] = [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{coordinator}.{arguments.name}:{PORT}"},
        {"name": "PODS_IN_JOB", "value": str(arguments.pods_per_rack)},
        {"name": "JOBSET_NAME", "value": arguments.name},  # MaxText's run_name, unless one is given
        {"name": "PROCESSES_PER_POD", "value": str(arguments.gpus_per_pod or 1)},
    ]
    if platform["jobset"]:
        field = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}}
        container["env"] += [
            {"name": "JOBS", "value": str(arguments.racks)},
            {"name": "JOB_INDEX", "valueFrom": field},
        ]
    if arguments.gpus_per_pod:
        gpus = {"nvidia.com/gpu": arguments.gpus_per_pod}
        container.setdefault("resources", {})["limits"] = gpus
        # launch.sh counts them by it: nvidia-smi is not on every image's PATH.
        visible = ",".join(map(str, range(arguments.gpus_per_pod)))
        container["env"].append({"name": "CUDA_VISIBLE_DEVICES", "value": visible})
    if arguments.service_account:
        spec["serviceAccountName"] = arguments.service_account
    for index, volume in enumerate(arguments.volume):
        claim, _, path = volume.partition("=")
        spec["volumes"].append({"name": f"data-{index}", "persistentVolumeClaim": {"claimName": claim}})
        container["volumeMounts"].append({"name": f"data-{index}", "mountPath": path})
    if platform["jobset"] and arguments.queue:
        metadata.setdefault("annotations", {}).update(
            {
                "kueue.x-k8s.io/podset-required-topology": BLOCK,
                "kueue.x-k8s.io/podset-slice-required-topology": RACK,
                "kueue.x-k8s.io/podset-slice-size": str(arguments.pods_per_rack),
            }
        )
    return pod


def merged(base: Any, over: Any) -> Any:
    """Mappings key by key, lists of named entries by name, other lists one after the other."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            key: merged(base[key], over[key])
            if key in base and key in over
            else copy.deepcopy({**base, **over}[key])
            for key in [*base, *(key for key in over if key not in base)]
        }
    if isinstance(base, list) and isinstance(over, list):
        named = {entry["name"]: entry for entry in over}
        known = [merged(entry, named.pop(entry["name"], {})) for entry in base]
        return [*known, *copy.deepcopy(list(named.values()))]
    return copy.deepcopy(over)


def _read(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    values = {
        "name": arguments.name,
        "image": arguments.image,
        "nodes": arguments.racks * arguments.pods_per_rack,
    }
    text = string.Template((HERE / name).read_text()).substitute(values)
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def _check_words(arguments: argparse.Namespace) -> None:
    # The longest name made of it: a pod's, "-rack-", two numbers and five random letters.
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", arguments.name):
        _refuse(
            "--name", arguments.name, "no DNS label of at most 40 characters", "letters a-z, digits and -"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", arguments.image):
        _refuse("--image", arguments.image, "no image", "registry/repository:tag")
    if not arguments.config.endswith(".yml"):
        _refuse(
            "CONFIG", arguments.config, "no MaxText YAML", "a path in the image such as configs/llama3-8b.yml"
        )
    for pair in arguments.overrides:
        if not re.match(r"[^=-][^=]*=", pair):
            _refuse("key=value", pair, "no pair", "such as steps=100")
    for option in ("queue", "service_account"):
        name = getattr(arguments, option)
        if name is not None and not re.fullmatch(_NAME, name):
            _refuse(
                f"--{option.replace('_', '-')}", name, "no name of an object", "letters a-z, digits, - and ."
            )
    folders = [_SHARED_MEMORY]
    for volume in arguments.volume:
        if not re.fullmatch(rf"{_NAME}=/[^\s:]*", volume):
            _refuse("--volume", volume, "no claim and folder", "CLAIM=/runs")
        folders.append(volume.partition("=")[2].rstrip("/") or "/")
        if folders.count(folders[-1]) > 1:
            _refuse("--volume", volume, "the folder has another volume", "another folder")


def _check_counts(arguments: argparse.Namespace, platform: dict[str, Any]) -> None:
    if arguments.gpus_per_pod is None:
        arguments.gpus_per_pod = platform["gpus"]
    elif platform["gpus"] and arguments.gpus_per_pod != platform["gpus"]:
        why = f"a node of {arguments.platform} has {platform['gpus']} GPUs, and a pod all of them"
        _refuse("--gpus-per-pod", arguments.gpus_per_pod, why, "nothing")
    if not platform["jobset"] and arguments.racks > 1:
        _refuse("--racks", arguments.racks, "an Indexed Job alone knows no racks", "a4x or a4x-max")
    if platform["rack"] and arguments.pods_per_rack > platform["rack"]:
        why = f"a rack has {platform['rack']} nodes"
        _refuse("--pods-per-rack", arguments.pods_per_rack, why, "fewer, and more --racks")


def _refuse(what: str, given: object, why: str, write: str) -> NoReturn:
    print(f"error: {what}: got {given}: {why}; write {write}", file=sys.stderr)
    sys.exit(2)


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"got {text}: not a count; write an integer of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("platform", choices=PLATFORMS, help="GB200 or GB300 on GKE, or any cluster")
    parser.add_argument("config", metavar="CONFIG.yml", help="a MaxText YAML file in the image")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file")
    parser.add_argument("--name", required=True, help="of the job")
    parser.add_argument("--image", required=True, help="with the repository as its working directory")
    parser.add_argument("--racks", type=_count, default=1, metavar="N", help="NVLink domains (default: 1)")
    parser.add_argument("--pods-per-rack", type=_count, required=True, metavar="N", help="nodes of each")
    parser.add_argument("--gpus-per-pod", type=_count, metavar="N", help="for indexed-job; without it, CPUs")
    parser.add_argument("--queue", metavar="NAME", help="Kueue's local queue")
    parser.add_argument("--service-account", metavar="NAME", help="with the right to a bucket, say")
    parser.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM=/FOLDER", help="a persistent volume claim"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
