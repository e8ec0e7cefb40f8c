"""scripts/slurm/train.sbatch under a real Slurm of two nodes, which the test starts on this machine.

The run that it must equal was started as two pods of an Indexed Job, without interruption.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
import whole_runs as runs

ROOT = Path(__file__).parent.parent
JOB = "scripts/slurm/train.sbatch"
CPU_NODES = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0")

# Shows what it is asked to do and where; then does what the test wants of it, unless it is doctor.
PROGRAM = """#!/bin/bash
printf '%s %s %s of %s\\n' "$*" "$CUDA_VISIBLE_DEVICES" "$JAX_PROCESS_ID:$JAX_LOCAL_DEVICE_IDS" "$JAX_PROCESS_COUNT"
[[ $1 != doctor ]] || exit "${DOCTOR:-0}"
eval "${BEHAVIOUR:-}"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    if missing := slurm_cluster.missing():
        why = f"Slurm is not installed ({', '.join(missing)}): apt-get install slurm-wlm munge"
        (pytest.fail if "MAXTEXT_NVFP4_NEEDS_SLURM" in os.environ else pytest.skip)(why)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def cluster(slurm: slurm_cluster.Cluster) -> Iterator[slurm_cluster.Cluster]:
    """The cluster, for a test whose jobs end with it."""
    yield slurm
    slurm.cancel_all()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Where a user submits from: logs and runs come to lie there."""
    for folder in ("scripts", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    return tmp_path


@pytest.fixture
def pretending(checkout: Path) -> Path:
    """The same, with a maxtext-nvfp4 that only pretends."""
    program = checkout / ".venv" / "bin" / "maxtext-nvfp4"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return checkout


def batch_log(checkout: Path, job: str) -> str:
    return (checkout / f"slurm-{job}.out").read_text()


def task_log(checkout: Path, job: str, task: int) -> Path:
    return checkout / "runs" / f"slurm-{job}" / f"task-{task}.log"


def wait_for(log: Path, words: str, timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not log.exists() or words not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, f"no {words!r} in {log}"
        time.sleep(0.02)


def test_a_tray_has_four_tasks_that_each_see_all_gpus_and_use_one(cluster, pretending: Path) -> None:
    job = cluster.submit("--nodes=2", JOB, "config.yml", "steps=3", cwd=pretending)
    assert cluster.wait(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", batch_log(pretending, job)
    for task in range(8):
        said = task_log(pretending, job, task).read_text()
        assert said == f"train config.yml steps=3 0,1,2,3 {task}:{task % 4} of 8\n"
    assert "doctor config.yml steps=3 --nodes 2 --gpus-per-node 4 " in batch_log(pretending, job)


def test_a_config_that_doctor_refuses_starts_nothing(cluster, pretending: Path) -> None:
    job = cluster.submit(JOB, "config.yml", cwd=pretending, DOCTOR="2")
    assert cluster.wait(job, "COMPLETED", "FAILED")["ExitCode"] == "2:0"
    assert not task_log(pretending, job, 0).exists()


def test_a_dry_run_shows_what_it_runs_and_saves_nothing(cluster, pretending: Path) -> None:
    job = cluster.submit(JOB, "--dry-run", "config.yml", "steps=900", cwd=pretending)
    assert cluster.wait(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", batch_log(pretending, job)
    pairs = f"steps=900 run_name=dry-run-{job} steps=2 enable_checkpointing=false enable_tensorboard=false"
    said = task_log(pretending, job, 3).read_text()
    assert said.startswith(f"train config.yml {pairs} ")
    _, shown = (line for line in batch_log(pretending, job).splitlines() if line.startswith("  "))
    assert shlex.split(shown)[0] == "srun"
    assert shlex.split(shown)[-7:] == ["scripts/launch.sh", "config.yml", *pairs.split()]


def test_in_a_container_the_same_scripts_run_from_the_image(cluster, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts" / "slurm", tmp_path / "scripts" / "slurm")  # the rest is in the image
    srun = tmp_path / "bin" / "srun"  # without pyxis, Slurm's own refuses the options
    srun.parent.mkdir()
    srun.write_text("#!/bin/sh\nprintf '%s ' \"$@\"; echo\n")
    srun.chmod(0o755)
    job = cluster.submit(
        *(JOB, "--container", "/images/a.sqsh", "config.yml"),
        cwd=tmp_path,
        PATH=f"{srun.parent}:{cluster.environment['PATH']}",
        CONTAINER_WORKDIR="/opt/repository",
        CONTAINER_MOUNTS="/data:/data,/runs:/runs",
    )
    assert cluster.wait(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", batch_log(tmp_path, job)
    options = (
        "--container-image=/images/a.sqsh --container-workdir=/opt/repository"
        " --container-mounts=/data:/data,/runs:/runs"
    )
    _, preflight, train, _ = batch_log(tmp_path, job).splitlines()
    assert f"{options} scripts/slurm/preflight.sh config.yml --nodes 1 --gpus-per-node 4 " in preflight
    assert train.endswith(f"{options} scripts/launch.sh config.yml ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no config; write sbatch"),
        (("--dryrun", "config.yml"), "--dryrun: no such option; write --dry-run"),
        (("--container",), "--container: write the image"),
    ],
)
def test_a_mistake_is_one_message(
    cluster, pretending: Path, arguments: tuple[str, ...], message: str
) -> None:
    job = cluster.submit(JOB, *arguments, cwd=pretending)
    assert cluster.wait(job, "COMPLETED", "FAILED")["ExitCode"] == "2:0"
    [line] = batch_log(pretending, job).splitlines()
    assert line.startswith(f"error: {message}")


def test_submitted_from_elsewhere_the_message_says_from_where(
    cluster, checkout: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    job = cluster.submit(str(checkout / JOB), "config.yml", cwd=elsewhere)
    assert cluster.wait(job, "COMPLETED", "FAILED")["ExitCode"] == "2:0"
    assert "submit from the root of the repository" in batch_log(elsewhere, job)


SLEEPS = "echo up; exec sleep 600"


def fails(status: int) -> str:
    return f"if ((JAX_PROCESS_ID == 1)); then exit {status}; fi; {SLEEPS}"


@pytest.mark.parametrize("status", [2, 3, 137])
def test_what_would_fail_again_is_not_requeued(cluster, pretending: Path, status: int) -> None:
    job = cluster.submit(JOB, "config.yml", cwd=pretending, BEHAVIOUR=fails(status))
    state = cluster.wait(job, "FAILED", "COMPLETED")
    assert (state["ExitCode"], state["Restarts"]) == (f"{status}:0", "0")


def test_a_crash_after_a_while_is_requeued(cluster, pretending: Path) -> None:
    job = cluster.submit(JOB, "config.yml", cwd=pretending, BEHAVIOUR=fails(1), REQUEUE_AFTER="0")
    assert cluster.requeued(job)["Restarts"] == "1"


def test_a_cancelled_job_stays_cancelled(cluster, pretending: Path) -> None:
    job = cluster.submit(JOB, "config.yml", cwd=pretending, BEHAVIOUR=SLEEPS)
    wait_for(task_log(pretending, job, 3), "up")
    cluster.run("scancel", job)
    wait_for(pretending / f"slurm-{job}.out", "ended with status 143")
    time.sleep(0.5)  # in which it would be requeued
    state = cluster.state(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0")


def test_before_the_time_limit_the_tasks_get_sigterm_and_the_job_is_requeued(
    cluster, pretending: Path
) -> None:
    job = cluster.submit(JOB, "config.yml", cwd=pretending, BEHAVIOUR=SLEEPS)
    wait_for(task_log(pretending, job, 3), "up")
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does for --signal=B:USR1@600
    assert cluster.requeued(job)["Restarts"] == "1"
    assert "ended with status 143" in batch_log(pretending, job)


STEPS = 150
TINY = {
    "base_num_decoder_layers": 2,
    "base_emb_dim": 64,
    "base_mlp_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 400,
    "max_target_length": 32,
    "per_device_batch_size": 2,
    "eval_interval": -1,
    "enable_tensorboard": "false",
    "log_period": 1,
}


@pytest.fixture
def demo(checkout: Path):
    """Arguments of launch.sh that train the demo config, at tiny sizes and in two processes, in a folder."""
    (checkout / ".venv").symlink_to(ROOT / ".venv")
    data = runs.make_corpus(checkout / "corpus")
    keys = {
        **TINY,
        "skip_jax_distributed_system": "false",
        "ici_fsdp_parallelism": 2,
        "dataset_path": data,
        "tokenizer_path": data / "tokenizer.model",
        "steps": STEPS,
        "checkpoint_period": 40,
        "jax_cache_dir": checkout / "cache",
    }

    def arguments(folder: str) -> list[str]:
        out = checkout / folder
        out.mkdir()
        places = {"base_output_directory": out, "run_name": "run", "metrics_file": out / "losses"}
        return ["configs/demo-cpu.yml", *(f"{key}={value}" for key, value in {**keys, **places}.items())]

    return arguments


def losses(folder: Path) -> dict[int, set[float]]:
    """Losses of each step that the two processes wrote, over all starts."""
    found: dict[int, set[float]] = {}
    for line in (folder / "losses").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(int(record["step"]), set()).add(record["learning/loss"])
    return found


def kill_task(job: str, task: int) -> None:
    """Kills the training process of a task with SIGKILL."""
    wanted = {f"SLURM_JOB_ID={job}", f"SLURM_PROCID={task}", f"JAX_PROCESS_ID={task}"}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((process / "environ").read_text(errors="replace").split("\0")):
                os.kill(int(process.name), signal.SIGKILL)
                return
    raise AssertionError(f"job {job} has no process of task {task}")


def test_the_demo_survives_sigterm_and_a_killed_task_as_if_nothing_had_happened(
    cluster, checkout: Path, demo
) -> None:
    whole = demo("whole")
    pods = runs.start_pods(checkout / "scripts" / "launch.sh", checkout, lambda pod: whole)
    said = runs.Job(pods, checkout / "pod-0.log", checkout / "unused").wait()
    assert "process 0 of 2; coordinator localhost:" in said
    expected = losses(checkout / "whole")
    assert sorted(expected) == list(range(STEPS))
    assert all(len(values) == 1 for values in expected.values())
    assert len({value for values in expected.values() for value in values}) > STEPS // 2

    job = cluster.submit(*CPU_NODES, JOB, *demo("parts"), cwd=checkout, JAX_PLATFORMS="cpu")
    log = task_log(checkout, job, 0)
    wait_for(log, "completed step: 10,")
    cluster.run("scancel", "--signal=TERM", job)
    assert cluster.requeued(job)["Restarts"] == "1"
    assert "ended with status 143" in batch_log(checkout, job)
    [last] = runs.checkpoints(checkout / "parts")
    assert 10 <= last < 40, "it saved the step at hand, not one that was due"
    said = log.read_text()
    assert f"stopped by SIGTERM after {last + 1} of {STEPS} steps" in said

    cluster.release(job)
    wait_for(log, "completed step: 90,")
    assert runs.resumed_from(log.read_text()) == last
    kill_task(job, 1)
    began = time.monotonic()
    state = cluster.wait(job, "FAILED", "COMPLETED")
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "137:0")
    assert time.monotonic() - began < 30  # JAX alone would notice after 100 s
    kept = runs.checkpoints(checkout / "parts")

    cluster.run("scontrol", "requeue", job)
    cluster.release(job)
    assert cluster.wait(job, "COMPLETED", "FAILED", timeout=400)["JobState"] == "COMPLETED"
    assert runs.resumed_from(log.read_text()) == kept[-1]
    found = losses(checkout / "parts")
    assert len(found) > STEPS - 5  # the killed process may have trained steps that it did not write down
    assert found == {step: expected[step] for step in found}
    ends = [runs.leaves(runs.checkpoint(checkout / name)) for name in ("whole", "parts")]
    assert runs.different(*ends) == []
