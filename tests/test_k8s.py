"""The manifests that scripts/k8s/render.py prints: valid, complete, and understood by scripts/launch.sh."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pydantic
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

ROOT = Path(__file__).parent.parent
RENDER = ROOT / "scripts" / "k8s" / "render.py"
KUBERNETES = "1.34"  # the first with resource.k8s.io/v1 in force
RUN = (
    "--name",
    "llama",
    "--image",
    "registry/nvfp4:1",
    "configs/llama3.1-405b.yml",
    "steps=5",
    "a=b $(JOBS)",
    "c=$$(JOBS)$",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RENDER, *arguments], capture_output=True, text=True, check=False)


def rendered(*arguments: str) -> dict[str, dict]:
    done = run(*arguments, *RUN)
    assert done.returncode == 0, done.stderr
    return {item["kind"]: item for item in yaml.safe_load_all(done.stdout)}


RACKS = ("--racks", "2", "--pods-per-rack", "16")
CASES = {
    "a4x": ("a4x", *RACKS, "--queue", "research"),
    "a4x-alone": ("a4x", "--pods-per-rack", "18"),
    "a4x-max": ("a4x-max", *RACKS, "--volume", "data=/data", "--service-account", "trainer"),
    "indexed-job": ("indexed-job", "--pods-per-rack", "2", "--volume", "runs=/runs", "--queue", "research"),
    "indexed-job-gpus": ("indexed-job", "--pods-per-rack", "2", "--gpus-per-pod", "8"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, dict]]:
    return request.param, rendered(*CASES[request.param])


WORDS_OF_A_JOBSET = {
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "spec": {
            "properties": {
                "failurePolicy": {
                    "properties": {
                        "restartStrategy": {"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
                        "rules": {
                            "items": {
                                "properties": {
                                    "action": {
                                        "enum": [
                                            "FailJobSet",
                                            "RestartJobSet",
                                            "RestartJobSetAndIgnoreMaxRestarts",
                                        ]
                                    }
                                }
                            }
                        },
                    }
                }
            }
        },
    }
}
"""What the generated models of JobSet take any text for."""


def strict(**properties: dict) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


COMPUTE_DOMAIN = strict(
    apiVersion={"const": "resource.nvidia.com/v1beta1"},
    kind={"const": "ComputeDomain"},
    metadata=strict(name={"type": "string"}),
    spec=strict(
        numNodes={"type": "integer", "minimum": 1},
        channel=strict(resourceClaimTemplate=strict(name={"type": "string"})),
    ),
)
"""The required fields of the resource that NVIDIA's DRA driver defines; none of the optional ones is used."""

REFUSALS = (kubernetes_validate.ValidationError, jsonschema.ValidationError, pydantic.ValidationError)


def validate(item: dict) -> None:
    """Raises one of `REFUSALS` at the first thing that Kubernetes, JobSet or the DRA driver would not take."""
    if item["kind"] == "JobSet":
        jsonschema.validate(item, WORDS_OF_A_JOBSET)
        JobsetV1alpha2JobSet.model_validate(without_pods(item), extra="forbid", by_alias=True, by_name=False)
        for job in item["spec"]["replicatedJobs"]:
            validate(job_of(item, job))
    elif item["kind"] == "ComputeDomain":
        jsonschema.validate(item, COMPUTE_DOMAIN)
    else:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


def without_pods(jobset: dict) -> dict:
    """Kubernetes' own schema checks a pod; the models of JobSet know no text for an amount such as `250Gi`."""
    jobset = copy.deepcopy(jobset)
    for job in jobset["spec"]["replicatedJobs"]:
        job.get("template", {}).get("spec", {})["template"] = {}
    return jobset


def job_of(jobset: dict, replicated: dict) -> dict:
    name = f"{jobset['metadata']['name']}-{replicated['name']}-0"
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **replicated["template"]}


def jobs(items: dict[str, dict]) -> list[dict]:
    """Every Job that the manifests lead to."""
    if "Job" in items:
        return [items["Job"]]
    [replicated] = items["JobSet"]["spec"]["replicatedJobs"]
    return [job_of(items["JobSet"], replicated)] * replicated["replicas"]


def container_of(job: dict) -> dict:
    [container] = job["spec"]["template"]["spec"]["containers"]
    return container


def test_the_schemas_take_it(case) -> None:
    for item in case[1].values():
        validate(item)


MISTAKES = {
    "a misspelled field of a pod": lambda job: job["spec"]["template"]["spec"].update(toleration=[]),
    "a misspelled field of a job": lambda job: job["spec"].update(completion=2),
    "a count that is text": lambda job: job["spec"].update(completions="2"),
    "no containers": lambda job: job["spec"]["template"]["spec"].pop("containers"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("platform", ["a4x", "indexed-job"])
def test_the_schemas_refuse_a_wrong_job(platform: str, name: str) -> None:
    items = rendered(*CASES[platform])
    owner = items.get("JobSet") or items["Job"]
    MISTAKES[name](owner["spec"]["replicatedJobs"][0]["template"] if platform == "a4x" else owner)
    with pytest.raises(REFUSALS):
        validate(owner)


CUSTOM_MISTAKES = {
    "a misspelled policy": ("JobSet", lambda spec: spec.update(failurepolicy={})),
    "a field in Python's spelling": ("JobSet", lambda spec: spec.update(failure_policy={})),
    "a count of restarts that is text": (
        "JobSet",
        lambda spec: spec["failurePolicy"].update(maxRestarts="3"),
    ),
    "another strategy": ("JobSet", lambda spec: spec["failurePolicy"].update(restartStrategy="Blocking")),
    "another action": ("JobSet", lambda spec: spec["failurePolicy"]["rules"][0].update(action="Fail")),
    "a rule without a name": ("JobSet", lambda spec: spec["failurePolicy"]["rules"][0].pop("name")),
    "another network": ("JobSet", lambda spec: spec["network"].update(hostNetwork=True)),
    "a job without a template": ("JobSet", lambda spec: spec["replicatedJobs"][0].pop("template")),
    "a domain of no nodes": ("ComputeDomain", lambda spec: spec.update(numNodes=0)),
    "a domain with a misspelled channel": ("ComputeDomain", lambda spec: spec.update(chanel={})),
    "a channel without a claim": ("ComputeDomain", lambda spec: spec["channel"].clear()),
}


@pytest.mark.parametrize("name", CUSTOM_MISTAKES)
def test_the_schemas_refuse_a_wrong_custom_resource(name: str) -> None:
    kind, mistake = CUSTOM_MISTAKES[name]
    item = rendered(*CASES["a4x"])[kind]
    mistake(item["spec"])
    with pytest.raises(REFUSALS):
        validate(item)


def test_every_pod_can_run_a_process(case) -> None:
    for job in jobs(case[1]):
        pod, container = job["spec"]["template"]["spec"], container_of(job)
        assert container["image"] == "registry/nvfp4:1"
        assert container["command"] == ["scripts/launch.sh"]
        assert container["args"] == ["configs/llama3.1-405b.yml", "steps=5", "a=b $$(JOBS)", "c=$$$$(JOBS)$$"]
        assert job["spec"]["completionMode"] == "Indexed"
        assert job["spec"]["completions"] == job["spec"]["parallelism"]
        assert pod["restartPolicy"] == "Never"
        assert pod["terminationGracePeriodSeconds"] == 900
        memory = {volume["name"]: volume.get("emptyDir") for volume in pod["volumes"]}
        assert memory["shm"] == {"medium": "Memory", "sizeLimit": "250Gi"}
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(memory)


@pytest.mark.parametrize(("name", "gpu"), [("a4x", "gb200"), ("a4x-max", "gb300")])
def test_a_tray_of_a_rack(name: str, gpu: str) -> None:
    items = rendered(*CASES[name])
    [job, _] = jobs(items)
    pod, container = job["spec"]["template"]["spec"], container_of(job)
    assert items["ComputeDomain"]["spec"]["numNodes"] == 32
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (told["CUDA_VISIBLE_DEVICES"], told["JOBSET_NAME"]) == ("0,1,2,3", "llama")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-accelerator": f"nvidia-{gpu}",
        "kubernetes.io/arch": "arm64",
    }
    assert {(entry["key"], entry["effect"]) for entry in pod["tolerations"]} == {
        ("nvidia.com/gpu", "NoSchedule"),
        ("kubernetes.io/arch", "NoSchedule"),
    }
    # Every claim is made by a template that is there, and the container has it.
    templates = {items["ComputeDomain"]["spec"]["channel"]["resourceClaimTemplate"]["name"]}
    if gpu == "gb300":
        templates.add(items["ResourceClaimTemplate"]["metadata"]["name"])
        [request] = items["ResourceClaimTemplate"]["spec"]["spec"]["devices"]["requests"]
        assert request["exactly"] == {"deviceClassName": "mrdma.google.com", "allocationMode": "All"}
    else:
        text = job["spec"]["template"]["metadata"]["annotations"]["networking.gke.io/interfaces"]
        networks = [interface["network"] for interface in json.loads(text)]
        assert networks == ["default", "gvnic-1", "rdma-0", "rdma-1", "rdma-2", "rdma-3"]
    claims = {claim["name"]: claim["resourceClaimTemplateName"] for claim in pod["resourceClaims"]}
    assert set(claims.values()) == templates
    assert {claim["name"] for claim in container["resources"]["claims"]} == set(claims)


def test_racks_are_not_torn() -> None:
    queued, alone = rendered(*CASES["a4x"]), rendered(*CASES["a4x-alone"])
    assert queued["JobSet"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    annotations = jobs(queued)[0]["spec"]["template"]["metadata"]["annotations"]
    rack, block = "cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-block"
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == block
    assert annotations["kueue.x-k8s.io/podset-slice-required-topology"] == rack
    assert annotations["kueue.x-k8s.io/podset-slice-size"] == "16"
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": rack}
    assert alone["JobSet"]["metadata"]["annotations"] == exclusive
    assert "annotations" not in queued["JobSet"]["metadata"]


def test_what_is_started_again(case) -> None:
    name, items = case
    for job in jobs(items):
        final, *others = job["spec"]["podFailurePolicy"]["rules"]
        assert final == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 3]}}
        if name.startswith("a4x"):
            assert job["spec"]["backoffLimit"] == 0  # one pod's end is the job's, and the JobSet's to judge
            assert not others
        else:
            assert job["spec"]["backoffLimit"] == 100 * job["spec"]["completions"]
            assert [rule["action"] for rule in others] == ["Ignore"]
    if "JobSet" in items:
        policy = items["JobSet"]["spec"]["failurePolicy"]
        assert (policy["maxRestarts"], policy["restartStrategy"]) == (100, "BlockingRecreate")
        [rule] = policy["rules"]
        assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """scripts/launch.sh with a program that only says which process it is."""
    (tmp_path / "scripts" / "env").mkdir(parents=True)
    for name in ("launch.sh", "common.sh", "env/gb200.sh"):
        (tmp_path / "scripts" / name).symlink_to(ROOT / "scripts" / name)
    program = tmp_path / "bin" / "maxtext-nvfp4"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\necho "$JAX_PROCESS_ID of $JAX_PROCESS_COUNT at $JAX_COORDINATOR_ADDRESS"\n'
    )
    program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("name", ["a4x-small", "indexed-job"])
def test_launch_numbers_all_processes(name: str, checkout: Path) -> None:
    """With the variables of each pod, as Kubernetes and JobSet fill them in."""
    items = rendered(*{**CASES, "a4x-small": ("a4x", "--racks", "2", "--pods-per-rack", "2")}[name])
    said = []
    for job_index, job in enumerate(jobs(items)):
        for pod_index in range(job["spec"]["completions"]):
            labels = {"metadata.labels['jobset.sigs.k8s.io/job-index']": str(job_index)}
            described = {"JOB_COMPLETION_INDEX": str(pod_index)}
            for entry in container_of(job)["env"]:
                described[entry["name"]] = (
                    entry["value"]
                    if "value" in entry
                    else labels[entry["valueFrom"]["fieldRef"]["fieldPath"]]
                )
            path = f"{checkout / 'bin'}:/usr/bin:/bin"
            done = subprocess.run(
                [checkout / "scripts" / "launch.sh", *container_of(job)["args"]],
                env={"PATH": path, "HOME": str(checkout), "JAX_PLATFORMS": "cpu", **described},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            said += done.stdout.splitlines()
    count, host = (16, "llama-rack-0-0") if name == "a4x-small" else (2, "llama-0")
    assert sorted(said) == sorted(f"{index} of {count} at {host}.llama:61440" for index in range(count))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a4x", "--pods-per-rack", "19"), "--pods-per-rack: got 19: a rack has 18 nodes; write fewer"),
        (("a4x", "--pods-per-rack", "2", "--gpus-per-pod", "8"), "a node of a4x has 4 GPUs"),
        (("indexed-job", "--pods-per-rack", "2", "--racks", "2"), "--racks: got 2: an Indexed Job alone"),
        (("a4x", "--pods-per-rack", "0"), "got 0: not a count"),
        (("a4x", "--pods-per-rack", "2", "--volume", "data"), "--volume: got data: no claim and folder"),
        (("a4x", "--pods-per-rack", "2", "--volume", "a-=/x"), "--volume: got a-=/x: no claim and folder"),
        (("a4x", "--pods-per-rack", "2", "--volume", "a=/x:y"), "--volume: got a=/x:y: no claim and folder"),
        (
            ("a4x", "--pods-per-rack", "2", "--volume", "a=/dev/shm/"),
            "--volume: got a=/dev/shm/: the folder has another volume",
        ),
        (
            ("a4x", "--pods-per-rack", "2", "--volume", "a=/x", "--volume", "b=/x"),
            "--volume: got b=/x: the folder has another volume",
        ),
        (("a4x", "--pods-per-rack", "2", "--queue", "Bad Queue!"), "--queue: got Bad Queue!: no name"),
        (("a4x", "--pods-per-rack", "2", "--service-account", "a b"), "--service-account: got a b: no name"),
        (("a4x", "--pods-per-rack", "2", "--name", "Llama_3"), "--name: got Llama_3: no DNS label"),
        (("a4x", "--pods-per-rack", "2", "--name", "a" * 41), "no DNS label of at most 40 characters"),
        (("a4x", "--pods-per-rack", "2", "--image", "an image"), "--image: got an image: no image"),
        (("a4x", "--pods-per-rack", "2", "--image", "[x"), "--image: got [x: no image"),
        (("a4x", "--pods-per-rack", "2", "--name", 'a"b'), '--name: got a"b: no DNS label'),
        (("b200", "--pods-per-rack", "2"), "invalid choice: 'b200'"),
    ],
)
def test_a_mistake_is_one_message(arguments: tuple[str, ...], said: str) -> None:
    done = run(arguments[0], *RUN, *arguments[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_config_and_pairs_are_checked() -> None:
    needed = ("a4x", "--name", "a", "--image", "i", "--pods-per-rack", "2")
    done = run(*needed, "config.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "CONFIG: got config.yaml: no MaxText YAML" in done.stderr
    done = run(*needed, "config.yml", "steps")
    assert (done.returncode, done.stdout) == (2, "")
    assert "key=value: got steps: no pair; write such as steps=100" in done.stderr
