"""What every test needs before JAX is imported, and a way to run on several host devices."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

_CALL = """
import importlib.util, json, sys
path, name, arguments = json.loads(sys.argv[1])
sys.path.insert(0, {tests!r})
spec = importlib.util.spec_from_file_location("module_under_test", path)
module = importlib.util.module_from_spec(spec)
sys.modules["module_under_test"] = module
spec.loader.exec_module(module)
getattr(module, name)(*arguments)
"""


@pytest.fixture
def on_devices() -> Callable[..., str]:
    """Runs a function of the test module in a process of its own with several CPU devices.

    JAX fixes its devices once a process, and tests share theirs, which has one device: MaxText sizes the
    global batch and the mesh by the device count. Usage:

        def check_same_codes(shards): ...  # asserts, with jax.devices() of 8

        def test_same_codes(on_devices):
            on_devices(8, check_same_codes, 4)

    The arguments must survive JSON. Returns what the function printed; its failure fails the test.
    """

    def run(devices: int, function: Callable[..., Any], *arguments: Any, timeout: float = 600) -> str:
        path = inspect.getfile(function)
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                _CALL.format(tests=os.path.dirname(path)),
                json.dumps([path, function.__name__, arguments]),
            ],
            env={**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            pytest.fail(
                f"{function.__name__} on {devices} devices exited with {done.returncode}\n"
                f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}",
                pytrace=False,
            )
        return done.stdout

    return run
