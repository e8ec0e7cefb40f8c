"""The shell scripts, run in a copy of the repository's skeleton with stand-ins for uv and Python."""

import os
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])

PYTHON_312 = "#!/bin/sh\ncase $2 in *sys.executable*) echo $0;; *version_info*) echo 3.12;; esac\n"
SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
# Notes its arguments; makes what the set-up looks for; is slow or fails when told so.
UV = """#!/bin/sh
[ "$1" = --version ] && { echo "uv 9.9.9"; exit; }
echo "$*" >> "$ROOT/uv.log"
case "$*" in
    venv*) mkdir -p "$ROOT/.venv/bin"; cp "$ROOT/bin/python3.12" "$ROOT/.venv/bin/python" ;;
    "pip install"*editable*) cp "$ROOT/bin/python3.12" "$ROOT/.venv/bin/maxtext-nvfp4" ;;
    "pip install"*) sleep "${SLOW:-0}"; [ -e "$ROOT/break" ] && exit 1 ;;
    "python install"*) exit 1 ;;
    "python find"*) [ -e "$ROOT/found" ] && echo "$ROOT/found" || exit 2 ;;
esac
exit 0
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout with the scripts, a uv and a python3.12 that only pretend."""
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    executable(tmp_path / "bin" / "uv", UV)
    executable(tmp_path / "bin" / "python3.12", PYTHON_312)
    return tmp_path


def bash(copy: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{copy}/bin:/usr/bin:/bin", "ROOT": str(copy), "HOME": str(copy), **environment}
    return subprocess.run(
        ["bash", *arguments],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def uv_calls(copy: Path) -> list[str]:
    log = copy / "uv.log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert script.name == "common.sh" or os.access(script, os.X_OK)


def test_the_lock_pins_and_hashes_everything_and_names_no_place() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^([a-z0-9-]+)==(\S+)((?:[^\n]*\\\n\s+--hash=sha256:[0-9a-f]{64})*)", lock, re.M)
    pinned = {name: version for name, version, _ in entries}
    assert len(entries) == len(re.findall(r"^\S+==", lock, re.M)) > 100
    assert all(hashes for _, _, hashes in entries)
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links|file:|^-e", lock, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name, _, version = requirement.partition("==")
        assert name in pinned
        assert not version or pinned[name] == version
    assert re.search(r"^tensorflow==\S+ ; platform_machine == 'aarch64'", lock, re.M)
    assert re.search(r"^tensorflow-cpu==\S+ ; platform_machine == 'x86_64'", lock, re.M)


def test_setup_installs_once_until_its_inputs_change(copy: Path) -> None:
    done = bash(copy, f"{copy}/scripts/setup.sh")
    assert done.returncode == 0, done.stderr
    venv, packages, editable = uv_calls(copy)
    assert f"--python {copy}/bin/python3.12 {copy}/.venv" in venv
    assert "--no-deps --require-hashes --build-constraints requirements.lock -r requirements.lock" in packages
    assert "--no-deps --no-build-isolation --editable ." in editable

    start = time.monotonic()
    assert bash(copy, f"{copy}/scripts/setup.sh").stderr == ""
    assert time.monotonic() - start < 1
    assert len(uv_calls(copy)) == 3

    with (copy / "requirements.lock").open("a") as lock:
        lock.write("# changed\n")
    assert bash(copy, f"{copy}/scripts/setup.sh").returncode == 0
    assert [call.split()[0] for call in uv_calls(copy)[3:]] == ["pip", "pip"]  # .venv is kept


def test_an_interrupted_setup_is_done_again(copy: Path) -> None:
    (copy / "break").touch()
    assert bash(copy, f"{copy}/scripts/setup.sh").returncode != 0
    (copy / "break").unlink()
    assert bash(copy, f"{copy}/scripts/setup.sh").returncode == 0
    assert "--reinstall" in uv_calls(copy)[2]
    assert "--reinstall" not in uv_calls(copy)[1]


def test_two_setups_at_a_time_install_once(copy: Path) -> None:
    environment = {"PATH": f"{copy}/bin:/usr/bin:/bin", "ROOT": str(copy), "SLOW": "1"}
    both = [subprocess.Popen(["bash", f"{copy}/scripts/setup.sh"], env=environment) for _ in range(2)]
    assert [one.wait(timeout=60) for one in both] == [0, 0]
    assert len(uv_calls(copy)) == 3


def find_python(copy: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return bash(
        copy, "-c", f'. {copy}/scripts/common.sh; find_uv; find_python; echo "$PYTHON"', **environment
    )


def test_python_is_found_where_a_pyenv_shim_is_not_selected(copy: Path) -> None:
    executable(copy / "bin" / "python3.12", SHIM)
    executable(copy / "bin" / "pyenv", f"#!/bin/sh\n[ $1 = root ] && echo {copy}/pyenv\n")
    python = executable(copy / "pyenv" / "versions" / "3.12.7" / "bin" / "python", PYTHON_312)
    assert find_python(copy).stdout.strip() == str(python)


def test_python_from_uv_is_the_last_resort(copy: Path) -> None:
    executable(copy / "bin" / "python3.12", SHIM)
    executable(copy / "found", PYTHON_312)
    assert find_python(copy).stdout.strip() == str(copy / "found")


def test_without_python_312_there_is_one_clear_message(copy: Path) -> None:
    executable(copy / "bin" / "python3.12", SHIM)
    done = find_python(copy)
    assert done.returncode == 1
    assert "Python 3.12 is needed" in done.stderr
    assert "MAXTEXT_NVFP4_PYTHON=" in done.stderr
    assert "command not found" not in done.stderr


def test_a_named_python_wins_and_is_checked(copy: Path) -> None:
    other = executable(copy / "other" / "python", PYTHON_312)
    assert find_python(copy, MAXTEXT_NVFP4_PYTHON=str(other)).stdout.strip() == str(other)
    done = find_python(copy, MAXTEXT_NVFP4_PYTHON="/nowhere/python")
    assert "MAXTEXT_NVFP4_PYTHON=/nowhere/python is not a working Python 3.12" in done.stderr


def test_uv_is_installed_beside_the_environment_when_missing(copy: Path) -> None:
    executable(copy / "bin" / "uv", SHIM)
    pip = """#!/bin/sh
case "$*" in
    "-m pip --version") echo "pip 1" ;;
    "-m pip install"*) echo "$*" > "$ROOT/pip.log"; while [ "$1" != --target ]; do shift; done
        mkdir -p "$2/bin"; printf '#!/bin/sh\\necho uv 1.0\\n' > "$2/bin/uv"; chmod +x "$2/bin/uv" ;;
esac
"""
    executable(copy / "bin" / "python3", pip)
    done = bash(copy, "-c", f'. {copy}/scripts/common.sh; find_uv; echo "$UV"')
    assert re.fullmatch(rf"{copy}/\.cache/uv-[\d.]+/bin/uv", done.stdout.strip())
    assert re.search(r"--target \S+ uv==[\d.]+$", (copy / "pip.log").read_text().strip())


@pytest.fixture
def demo(copy: Path):
    """Runs demo.sh with a command that prints its arguments instead of training."""
    executable(copy / "scripts" / "setup.sh", "#!/bin/sh\n")
    executable(copy / ".venv" / "bin" / "maxtext-nvfp4", '#!/bin/sh\necho "$@"\n')

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return bash(copy, f"{copy}/scripts/demo.sh", *arguments)

    return run


def test_demo_makes_the_corpus_and_trains(copy: Path, demo) -> None:
    corpus, train = demo().stdout.splitlines()
    assert corpus == f"corpus --out {copy}/runs/corpus"
    words = train.split()
    assert words[:2] == ["train", f"{copy}/configs/demo-cpu.yml"]
    assert {
        f"base_output_directory={copy}/runs",
        "run_name=demo",
        "steps=150",
        f"dataset_path={copy}/runs/corpus",
        f"tokenizer_path={copy}/runs/corpus/tokenizer.model",
    } <= set(words)


def test_demo_takes_up_the_last_complete_checkpoint(copy: Path, demo) -> None:
    for name in ("50", "149", "160.orbax-checkpoint-tmp", "notes"):
        (copy / "runs" / "demo" / "checkpoints" / name).mkdir(parents=True)
    done = demo()
    assert f"resuming {copy}/runs/demo after 150 steps, up to 300" in done.stderr
    assert " steps=300 " in done.stdout
    assert " steps=151 " in demo("steps=151").stdout

    done = demo("steps=150")
    assert done.returncode == 0
    assert done.stdout == ""
    assert "has 150 steps already; write steps=300, say, for more" in done.stderr


def test_demo_passes_overrides_on_last(copy: Path, demo) -> None:
    done = demo(
        "quantization=", "base_output_directory=out", "run_name=bf16", "learning_rate=1e-3", "steps=9"
    )
    corpus, train = done.stdout.splitlines()
    assert corpus == "corpus --out /out/corpus"
    assert "base_output_directory=/out run_name=bf16 steps=9 " in train
    assert train.endswith(" quantization= learning_rate=1e-3")


@pytest.mark.parametrize("mistake", ["--help", "steps", "steps=many", "=3"])
def test_demo_names_a_mistake(demo, mistake: str) -> None:
    done = demo(mistake)
    assert done.returncode == 1
    assert mistake in done.stderr
    assert "such as steps=300" in done.stderr


@pytest.fixture
def checks(copy: Path):
    """Runs test.sh with tools that print their name and arguments."""
    executable(copy / "scripts" / "setup.sh", "#!/bin/sh\n")
    for tool in ("python", "ruff", "mypy", "lint-imports"):
        executable(
            copy / ".venv" / "bin" / tool, f'#!/bin/sh\necho {tool} "$@"\n[ ! -e "$ROOT/fail-{tool}" ]\n'
        )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return bash(copy, f"{copy}/scripts/test.sh", *arguments)

    return run


def test_without_arguments_every_check_runs(checks) -> None:
    ran = checks().stdout.splitlines()
    assert [line.split()[0] for line in ran] == ["ruff", "ruff", "mypy", "lint-imports", "python", "python"]
    assert ran[-1].startswith("python -m pytest -m not slow")


def test_arguments_go_to_pytest_alone(checks) -> None:
    assert (
        checks("tests/test_x.py", "-k", "a and b").stdout == "python -m pytest tests/test_x.py -k a and b\n"
    )


def test_a_failing_check_fails_the_script(copy: Path, checks) -> None:
    (copy / "fail-mypy").touch()
    done = checks()
    assert done.returncode != 0
    assert "pytest" not in done.stdout
