"""A Slurm of two nodes on this machine: one controller and two node daemons, all in a temporary folder."""

import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
# Debian's daemons are where only root's PATH leads.
_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))

# The nodes are named as addresses, so that their names resolve without an entry in this machine's hosts file.
NODES = ("127.0.0.1", "127.0.0.2")

# Slurm counts and hands out any devices as GPUs; the tasks are told their numbers by CUDA_VISIBLE_DEVICES.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=1
FirstJobId={first_job}
KillWait=5
ReturnToService=2
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=4 Gres=gpu:{gpus}
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs of Slurm that this machine does not have."""
    return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]


class Cluster:
    """The running cluster.

    Attributes:
      environment: In which Slurm's commands find it.
    """

    def __init__(self, folder: Path) -> None:
        # Jobs inherit it; without JAX_PLATFORMS they look for GPUs.
        inherited = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
        self.environment = {**inherited, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._folder = folder

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Runs one of Slurm's commands; returns what it printed."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, *command: str, cwd: Path, **variables: str) -> str:
        """Submits a job; returns its number."""
        return self.run("sbatch", "--parsable", *command, cwd=cwd, **variables).strip()

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts and others."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, *states: str, timeout: float = 120) -> dict[str, str]:
        """Waits until a job is in one of the states."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {job}, not {states} within {timeout} s: {state}"
            time.sleep(0.2)
        return state

    def requeued(self, job: str, timeout: float = 120) -> dict[str, str]:
        """Waits until a job that has run is back in the queue."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job))["JobState"] != "PENDING" or state["Restarts"] == "0":
            assert time.monotonic() < deadline, f"job {job}, not requeued within {timeout} s: {state}"
            time.sleep(0.2)
        return state

    def release(self, job: str) -> None:
        """Lets a requeued job start soon: Slurm keeps it back for two minutes.

        Not at once: the nodes refuse a job in the second in which they ended it.
        """
        self.requeued(job)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def cancel_all(self, timeout: float = 30) -> None:
        """Ends all jobs, and waits for their processes: those outlive the daemons."""
        self.run("scancel", "--user", getpass.getuser())
        deadline = time.monotonic() + timeout
        while self.run("squeue", "--noheader"):
            assert time.monotonic() < deadline, "jobs that do not end"
            time.sleep(0.2)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in self._folder.glob("*.log"))


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Starts one in a folder, and stops it."""
    running = Cluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str | Path) -> None:
        with (folder / "daemons.log").open("ab") as log:
            daemons.append(
                subprocess.Popen(command, env=running.environment, stdout=log, stderr=subprocess.STDOUT)
            )

    try:
        _configure(folder)
        start(*_munged(folder))
        _wait_until(lambda: (folder / "munge.socket").exists(), running)
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        _wait_until(lambda: _idle(running) == len(NODES), running)
        yield running
    finally:
        if daemons:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                running.cancel_all()
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _configure(folder: Path) -> None:
    for name in ("state", *NODES):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    first, last = (node.rpartition(".") for node in (NODES[0], NODES[-1]))
    controller, port = _free_ports(1 + len(NODES))
    text = _CONFIGURATION.format(
        folder=folder,
        host=socket.gethostname().partition(".")[0],
        user=getpass.getuser(),
        controller=controller,
        ports=f"{port}-{port + len(NODES) - 1}",
        nodes=f"{first[0]}.[{first[2]}-{last[2]}]",
        first_job=random.randrange(1, 100_000),  # JAX's port is made from it
        gpus=len(_DEVICES),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in _DEVICES))


def _munged(folder: Path) -> Sequence[str]:
    files = {"key": "key", "socket": "socket", "pid": "pid", "log": "log", "seed": "seed"}
    options = [f"--{name}-file={folder}/munge.{end}" for name, end in files.items() if name != "socket"]
    return ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *options]


def _free_ports(count: int) -> tuple[int, int]:
    """A free port, and the first of `count - 1` free ones in a row."""
    while True:
        with contextlib.ExitStack() as held:
            start = random.randrange(20_000, 32_000)
            try:
                for port in range(start, start + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return start, start + 1


def _idle(running: Cluster) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle"],
        env=running.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0


def _wait_until(condition, running: Cluster, timeout: float = 60) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"Slurm did not start\n{running.logs()}"
        time.sleep(0.1)
