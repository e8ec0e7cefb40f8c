"""Which job a process joins, what it refuses, and what it says when the others cannot be reached."""

import socket
import threading
import time

import jax
import pytest
from whole_runs import free_port

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.distributed import Job, check_job, job_of, join_job

TWO = {"JAX_COORDINATOR_ADDRESS": "n1:7000", "JAX_PROCESS_ID": "1", "JAX_PROCESS_COUNT": "2"}
ONE = {**TWO, "JAX_PROCESS_ID": "0", "JAX_PROCESS_COUNT": "1"}
TIMEOUT = {"jax_distributed_initialization_timeout": 1}


@pytest.fixture
def environment(monkeypatch):
    def set_to(variables: dict[str, str]) -> None:
        for name in ("JOB_INDEX", "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB", *TWO):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_to({})
    return set_to


def test_a_job_is_described_by_three_variables() -> None:
    assert job_of(TWO) == Job(coordinator="n1:7000", process=1, processes=2)
    assert job_of({**TWO, "JAX_COORDINATOR_ADDRESS": "[::1]:7000"}) is not None


def test_what_maxtext_reads_itself_describes_no_job() -> None:
    assert (
        job_of({"JAX_COORDINATOR_ADDRESS": "n1", "JAX_PROCESS_COUNT": "2", "JOB_COMPLETION_INDEX": "1"})
        is None
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JAX_PROCESS_COUNT": None}, "JAX_PROCESS_ID: got .*1.*: .* has no JAX_PROCESS_COUNT; write"),
        (
            {"JAX_COORDINATOR_ADDRESS": None},
            "JAX_PROCESS_ID: got .*1.*: .* has no JAX_COORDINATOR_ADDRESS; write",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "n1"}, "JAX_COORDINATOR_ADDRESS: got n1: not host:port; write"),
        ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID: got .*-1.*: not a whole number; write"),
        ({"JAX_PROCESS_COUNT": "two"}, "JAX_PROCESS_COUNT: got two: not a whole number; write"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID: got 2: .* JAX_PROCESS_COUNT is 2; write a number below 2"),
    ],
)
def test_a_description_that_cannot_be_is_refused(change: dict[str, str | None], message: str) -> None:
    described = {name: value for name, value in {**TWO, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        job_of(described)


def test_several_processes_do_not_train_alone(environment) -> None:
    alone = {"hardware": "cpu", "skip_jax_distributed_system": True}
    environment(TWO)
    with pytest.raises(ConfigError, match=r"process 1 of 2.*write skip_jax_distributed_system: false"):
        check_job(alone)
    environment(ONE)
    check_job(alone)
    environment({})
    check_job(alone)


def test_processes_of_the_launcher_are_on_gpus_or_cpus(environment) -> None:
    environment(TWO)
    with pytest.raises(ConfigError, match=r"hardware: got tpu: .*write hardware: gpu_multiprocess"):
        check_job({"hardware": "tpu"})
    check_job({"hardware": "gpu_multiprocess"})
    environment({})
    check_job({"hardware": "tpu"})


def test_cpus_need_a_description(environment) -> None:
    with pytest.raises(ConfigError, match=r"no JOB_INDEX, JOB_COMPLETION_INDEX,.*start scripts/launch.sh"):
        check_job({"hardware": "cpu"})
    environment(TWO)
    check_job({"hardware": "cpu"})
    environment(
        {"JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "0", "PROCESSES_IN_JOB": "1", "JAX_PROCESS_COUNT": "1"}
    )
    check_job({"hardware": "cpu"})


def test_without_a_description_maxtext_is_left_to_itself(environment, monkeypatch) -> None:
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("joined"))
    for variables, raw in [
        ({}, {"hardware": "gpu"}),
        (TWO, {"hardware": "tpu"}),
        (ONE, {"hardware": "cpu", "skip_jax_distributed_system": True}),
    ]:
        environment(variables)
        join_job(raw | TIMEOUT)


def test_a_coordinator_that_cannot_be_reached_is_one_message(environment) -> None:
    environment({**TWO, "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"})
    with pytest.raises(
        ConfigError, match=r"process 1 of 2 did not reach it within 1 s .*; write the host of process 0"
    ):
        join_job({"hardware": "cpu"} | TIMEOUT)


def test_a_name_that_does_not_resolve_is_one_message(environment) -> None:
    environment({**ONE, "JAX_COORDINATOR_ADDRESS": "nosuch.invalid:61440"})
    with pytest.raises(ConfigError, match=r"its name did not resolve within 1 s .*; write a name or address"):
        join_job({"hardware": "cpu"} | TIMEOUT)
    assert not jax.distributed.is_initialized()


def test_a_port_in_use_is_one_message(environment) -> None:
    with socket.create_server(("", 0)) as busy:
        environment({**ONE, "JAX_COORDINATOR_ADDRESS": f"localhost:{busy.getsockname()[1]}"})
        with pytest.raises(
            ConfigError, match=r"process 0 of 1 cannot listen there .Address already in use.; write another"
        ):
            join_job({"hardware": "cpu"} | TIMEOUT)
    assert not jax.distributed.is_initialized()


def test_a_coordinator_that_comes_late_is_waited_for(environment, monkeypatch) -> None:
    port, joined = free_port(), []
    environment({**TWO, "JAX_COORDINATOR_ADDRESS": f"localhost:{port}"})
    monkeypatch.setattr(jax.distributed, "initialize", lambda *place, **_: joined.append(place))

    def listen() -> None:
        time.sleep(0.5)
        with socket.create_server(("localhost", port)) as server:
            server.accept()

    coordinator = threading.Thread(target=listen)
    coordinator.start()
    join_job({"hardware": "cpu", "jax_distributed_initialization_timeout": 30})
    coordinator.join()
    assert joined == [(f"localhost:{port}", 2, 1)]
