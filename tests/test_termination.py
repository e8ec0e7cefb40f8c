"""SIGTERM ends a run in good order: the step is finished and saved, and the next start goes on from there."""

import os
import signal

import pytest
from command_line import losses, start, start_two, train

LONG = {"steps": 1_000_000, "learning_rate_schedule_steps": 1_000_000, "checkpoint_period": 900_000}


def terminated(process, after="completed step: 3,", times=1):
    """Sends SIGTERM once the process has printed `after`; returns all that it printed."""
    said = ""
    for line in process.stdout:
        said += line
        if after in line:
            for _ in range(times):
                process.send_signal(signal.SIGTERM)
            break
    said += process.communicate(timeout=300)[0]
    return said


def test_a_terminated_run_saves_its_step_and_goes_on_from_there(tmp_path):
    process = start(tmp_path, **LONG)
    said = terminated(process, times=2)
    assert process.returncode == 0, said[-4000:]
    last = max(losses(said))
    assert f"run tiny: stopped by SIGTERM after {last + 1} of 1000000 steps" in said
    assert f"start it again to go on from step {last + 1}" in said
    assert sorted(os.listdir(tmp_path / "out/tiny/checkpoints")) == sorted(["0", str(last)])
    rest = train(tmp_path, **{**LONG, "steps": last + 3})
    assert list(losses(rest)) == [last + 1, last + 2]
    assert f"run tiny: {last + 3} steps" in rest


@pytest.mark.slow
def test_without_checkpoints_a_terminated_run_says_that_nothing_was_saved(tmp_path):
    process = start(tmp_path, **LONG, enable_checkpointing=False)
    said = terminated(process)
    assert process.returncode == 0, said[-4000:]
    assert "nothing was saved, as enable_checkpointing is false" in said
    assert not (tmp_path / "out/tiny/checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"quantization": "", "nvfp4": {}}])
def test_a_signal_during_compilation_is_seen_after_the_first_step(tmp_path, mode):
    process = start(tmp_path, **{**LONG, **mode})
    said = terminated(process, after="Checkpoint manager created")
    assert process.returncode == 0, said[-4000:]
    assert list(losses(said)) == [0]
    assert sorted(os.listdir(tmp_path / "out/tiny/checkpoints")) == ["0"]


@pytest.mark.slow
def test_before_the_loop_a_signal_acts_as_ever(tmp_path):
    process = start(tmp_path, **LONG)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXTEXT_NVFP4_STOPPED_STATUS", "75")
    processes = start_two(tmp_path, **LONG)
    said = [terminated(processes[0]), processes[1].communicate(timeout=300)[0]]
    assert [process.returncode for process in processes] == [75, 75], said[1][-3000:]
    last = max(losses(said[0]))
    assert all(f"stopped by SIGTERM after {last + 1} of" in text for text in said)
    assert (tmp_path / f"out/tiny/checkpoints/{last}").exists()
