"""The shell scripts, run in a copy of the repository's skeleton with stand-ins for uv and Python."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/**/*.sh"), ROOT / ".ci" / "run"])
SOURCED = ("common.sh", "gb200.sh")

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
    for path in (ROOT / "pyproject.toml", *ROOT.glob("requirements*.lock")):
        shutil.copy(path, tmp_path / path.name)
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
    assert script.name in SOURCED or os.access(script, os.X_OK)


def pins(lock: Path) -> dict[str, str]:
    """Version by package; every one has hashes, and nothing says where it came from."""
    text = lock.read_text()
    entries = re.findall(r"^([a-z0-9-]+)==(\S+)((?:[^\n]*\\\n\s+--hash=sha256:[0-9a-f]{64})*)", text, re.M)
    assert len(entries) == len(re.findall(r"^[^\s#]+==", text, re.M)) > 0
    assert all(hashes for _, _, hashes in entries)
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links|file:|^-e", text, re.M)
    return {name: version for name, version, _ in entries}


def pinned(requirements: list[str]) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", "\n".join(requirements), re.M))


def test_the_lock_pins_and_hashes_everything_and_names_no_place() -> None:
    lock = pins(ROOT / "requirements.lock")
    assert len(lock) > 100
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name, _, version = requirement.partition("==")
        assert name in lock
        assert not version or lock[name] == version
    text = (ROOT / "requirements.lock").read_text()
    assert re.search(r"^tensorflow==\S+ ; platform_machine == 'aarch64'", text, re.M)
    assert re.search(r"^tensorflow-cpu==\S+ ; platform_machine == 'x86_64'", text, re.M)


def test_the_locks_of_transformer_engine_agree_with_each_other_and_with_the_extra() -> None:
    base, te, cuda = (pins(ROOT / f"requirements{part}.lock") for part in ("", "-te", "-cuda"))
    assert (
        not base.keys() & (te | cuda).keys()
    )  # so that setup.sh and install_te.sh change nothing back and forth
    assert all(te[name] == cuda[name] for name in te.keys() & cuda.keys())
    assert {"jax-cuda13-plugin", "jax-cuda13-pjrt"} <= cuda.keys()
    assert "jax-cuda13-pjrt" not in te  # it is what makes JAX try CUDA
    assert cuda["jax-cuda13-pjrt"] == te["jax-cuda13-plugin"] == base["jax"]

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    versions = pinned(extras["te"] + extras["te-build"])
    assert versions.pop("jax") == base["jax"]
    assert versions == {name: te[name] for name in te if name.startswith("transformer-engine")}
    assert len(set(versions.values())) == 1


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
    for tool in ("python", "ruff", "mypy", "lint-imports", "shellcheck"):
        executable(
            copy / ".venv" / "bin" / tool, f'#!/bin/sh\necho {tool} "$@"\n[ ! -e "$ROOT/fail-{tool}" ]\n'
        )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return bash(copy, f"{copy}/scripts/test.sh", *arguments)

    return run


def test_without_arguments_every_check_runs(checks) -> None:
    ran = checks().stdout.splitlines()
    tools = ["ruff", "ruff", "mypy", "lint-imports", "shellcheck", "python", "python"]
    assert [line.split()[0] for line in ran] == tools
    assert ran[-1].startswith("python -m pytest --ignore tests/te -m not slow")


def test_arguments_go_to_pytest_alone(checks) -> None:
    start = "python -m pytest --ignore tests/te"
    assert checks("tests/test_x.py", "-k", "a and b").stdout == f"{start} tests/test_x.py -k a and b\n"


def test_tests_of_transformer_engine_run_when_named(copy: Path, checks) -> None:
    executable(copy / "scripts" / "install_te.sh", "#!/bin/sh\necho installed\n")
    two = "--numprocesses 2 --dist loadfile"
    assert checks("te", "-k", "a").stdout == f"installed\npython -m pytest tests/te {two} -k a\n"
    assert checks("tests/te/test_x.py").stdout == "python -m pytest tests/te/test_x.py\n"


def test_a_failing_check_fails_the_script(copy: Path, checks) -> None:
    (copy / "fail-mypy").touch()
    done = checks()
    assert done.returncode != 0
    assert "pytest" not in done.stdout


# What pip leaves behind, for a Python that lists packages but has none of their code.
NEEDED = {
    "maxtext": "0.2.5",
    "etils": "1",
    "jax": "0.12.0.1+nv27",
    "flax": "0.12.12",
    "ml-dtypes": "1",
    "numpy": "2",
    "omegaconf": "2",
    "orbax-checkpoint": "0",
    "pydantic": "2",
    "pyyaml": "6",
    "tensorstore": "0",
    "transformer-engine": "2.20.0+1234567",
}


@pytest.fixture
def container(copy: Path):
    """Runs install_te.sh --container with a python3 that has the given packages, and a pip that pretends."""
    python = """#!/bin/sh
case "$*" in "-m pip"*) echo "$*" >> "$ROOT/pip.log"; exit ;; *maxtext_nvfp4*) exit ;; esac
PYTHONPATH="$ROOT/packages" exec {} -S "$@"
"""
    executable(copy / "bin" / "python3", python.format(sys.executable))

    def run(**packages: str | None) -> subprocess.CompletedProcess[str]:
        shutil.rmtree(copy / "packages", ignore_errors=True)
        for name, version in {**NEEDED, **{k.replace("_", "-"): v for k, v in packages.items()}}.items():
            if version is not None:
                info = copy / "packages" / f"{name.replace('-', '_')}-{version}.dist-info"
                info.mkdir(parents=True)
                (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        return bash(copy, f"{copy}/scripts/install_te.sh", "--container")

    return run


def test_in_a_container_only_this_package_is_installed(copy: Path, container) -> None:
    done = container()
    assert done.returncode == 0, done.stderr
    [call] = (copy / "pip.log").read_text().splitlines()
    assert re.search(r"^-m pip install .* --no-deps .*\.$", call)
    assert uv_calls(copy) == []
    assert not (copy / ".venv").exists()


def test_in_a_container_every_mismatch_is_named_and_nothing_installed(copy: Path, container) -> None:
    done = container(jax="0.11.0", flax=None, omegaconf=None, transformer_engine="2.2.0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: nothing was installed, ")
    assert [line.split() for line in done.stderr.splitlines()[1:]] == [
        ["jax", "found", "0.11.0", "needed", "0.12.0.1"],
        ["flax", "found", "none", "needed", "0.12.12"],
        ["omegaconf", "found", "none", "needed", "any"],
        ["transformer-engine", "found", "2.2.0", "needed", "2.20.*"],
    ]
    assert not (copy / "pip.log").exists()


def test_install_te_names_a_mistake(copy: Path) -> None:
    done = bash(copy, f"{copy}/scripts/install_te.sh", "--help")
    assert done.returncode == 1
    assert done.stderr == "error: --help: write nothing, or --container\n"


@pytest.fixture
def installed(copy: Path):
    """Runs install_te.sh with a .venv whose Python only says what the import of Transformer Engine would."""
    extension = "lib/python3.12/site-packages/transformer_engine/wheel_lib/transformer_engine_jax.so"
    python = """#!/bin/sh
case "$*" in
    *version_info*) echo 3.12 ;;
    *libcuda.so.1*cuInit*) [ -e "$ROOT/driver" ] ;;
    *get_path*) echo "$ROOT" ;;
    *verify.py*) echo "verify: $*" ;;
esac
"""
    executable(copy / "scripts" / "setup.sh", "#!/bin/sh\n")
    executable(copy / ".venv" / "bin" / "python", python)
    executable(copy / ".venv" / extension, "")
    executable(copy / "bin" / "g++", '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; : > "$2"\n')
    (copy / "Python.h").touch()

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return bash(copy, f"{copy}/scripts/install_te.sh", **environment)

    return run


def test_without_a_driver_there_is_a_stand_in_and_no_cuda_for_jax(copy: Path, installed) -> None:
    done = installed()
    assert done.returncode == 0, done.stderr
    others, extension, uninstall = uv_calls(copy)
    for call, lock in (others, "others"), (extension, "transformer-engine-jax"):
        assert call.endswith(f"--no-deps --require-hashes --no-build-isolation -r .cache/{lock}.lock")
    parts = [pins(copy / ".cache" / f"{lock}.lock") for lock in ("others", "transformer-engine-jax")]
    assert parts[0] | parts[1] == pins(copy / "requirements-te.lock")
    assert parts[1].keys() == {"transformer-engine-jax"}
    assert uninstall.endswith("jax-cuda13-plugin jax-cuda13-pjrt")
    assert f"--stub {copy}/.venv/lib/cuda-stub/libcuda.so.1" in done.stderr

    start = time.monotonic()
    assert installed().stderr == ""
    assert time.monotonic() - start < 1
    assert len(uv_calls(copy)) == 3


def test_with_a_gpu_jax_gets_cuda(copy: Path, installed) -> None:
    installed()
    (copy / "driver").touch()
    executable(copy / "bin" / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA'\n")
    done = installed()
    assert done.returncode == 0, done.stderr
    assert uv_calls(copy)[-1].endswith("--require-hashes -r requirements-cuda.lock")
    assert "verify.py --gpu" in done.stderr
    assert "--stub" not in done.stderr


def test_a_failed_installation_shows_why_and_is_done_again(copy: Path, installed) -> None:
    listed = copy / ".venv/lib/python3.12/site-packages/nvidia_cublas-13.0.dist-info"
    (copy / "break").touch()
    listed.mkdir()
    done = installed()
    assert done.returncode == 1
    assert "error: Transformer Engine could not be installed; the end of" in done.stderr
    assert listed.exists()
    (copy / "break").unlink()
    assert installed().returncode == 0
    assert not listed.exists()  # it could have been half unpacked


def test_without_a_compiler_there_is_one_clear_message(copy: Path, installed) -> None:
    done = installed(CXX="no-such-c++")
    assert done.returncode == 1
    assert done.stderr.startswith("error: a C++ compiler is needed, and there is no no-such-c++: ")
    assert uv_calls(copy) == []


def test_the_stand_in_for_the_driver_has_the_six_functions(tmp_path: Path) -> None:
    names = re.findall(r"^STUB\((\w+)\)$", (ROOT / "scripts/te/libcuda_stub.c").read_text(), re.M)
    assert len(names) == 6
    if compiler := shutil.which("g++"):
        library = tmp_path / "libcuda.so.1"
        subprocess.run(
            [compiler, "-x", "c++", "-shared", "-fPIC", "-o", library, ROOT / "scripts/te/libcuda_stub.c"],
            check=True,
        )
        loaded = ctypes.CDLL(str(library))
        assert {getattr(loaded, name)() for name in names} == {100}


def bench(copy: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs bench.sh with a Python that only notes what it is asked; returns the calls of benchmarks, too."""
    executable(copy / "bin" / "python3.12", PYTHON_312 + 'echo "$*" >> "$ROOT/python.log"\n')
    done = bash(copy, f"{copy}/scripts/bench.sh", *arguments)
    log = copy / "python.log"
    calls = log.read_text().splitlines() if log.exists() else []
    return done, [call for call in calls if call.startswith("benchmarks/")]


def test_bench_runs_every_benchmark_then_writes_the_page(copy: Path) -> None:
    done, calls = bench(copy)
    assert done.returncode == 0, done.stderr
    *benchmarks, page = calls
    assert page == "benchmarks/results_page.py"
    text = (ROOT / "benchmarks" / "results_page.py").read_text()
    sections = re.findall(r'^    "(\w+)": \("', text, re.M)
    assert benchmarks == [
        f"benchmarks/{name}.py --json benchmarks/results/{name}_cpu.json" for name in sections
    ]


def test_bench_passes_options_on_and_leaves_the_page_alone_when_quick(copy: Path) -> None:
    done, calls = bench(copy, "--quick", "--label", "x", "startup_time", "--", "--programs", "stock")
    assert done.returncode == 0, done.stderr
    out = "runs/benchmarks/startup_time_x.json"
    assert calls == [f"benchmarks/startup_time.py --quick --programs stock --json {out}"]


def test_bench_knows_its_benchmarks(copy: Path) -> None:
    done, calls = bench(copy, "startup")
    assert done.returncode == 1
    assert "startup: no such benchmark; there are quantize_throughput" in done.stderr
    assert not calls
