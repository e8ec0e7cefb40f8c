"""Where Transformer Engine can be used, and the words that say why not. Needs no Transformer Engine.

Answers TE #3281 (rounding gives zeros on compute capability 12) and TE #3195 (a check that passes where the kernels
cannot run): only the capabilities that have the kernels are taken. TE #2695 (a race between RHT amax kernels): the
oldest version is stated and checked.
"""

import importlib.metadata
import types

import jax
import pytest

from maxtext_nvfp4 import backends
from maxtext_nvfp4.backends import te_library
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration import te_context


@pytest.fixture
def machine(monkeypatch):
    """Makes a machine with a GPU of a capability, and a version of Transformer Engine, None for none."""

    def make(capability="10.0", version="2.20.2", name="NVIDIA GB200", imports=True):
        device = types.SimpleNamespace(compute_capability=capability, device_kind=name)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        found = importlib.metadata.version

        def versions(package):
            if package.startswith("transformer_engine"):
                if version is None:
                    raise importlib.metadata.PackageNotFoundError(package)
                return version
            return found(package)

        def library():
            if not imports:
                raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")

        monkeypatch.setattr(importlib.metadata, "version", versions)
        monkeypatch.setattr(te_library, "_import", library)

    return make


@pytest.mark.parametrize("capability", ["10.0", "10.3"])
@pytest.mark.parametrize("version", ["2.20.0", "2.20.2", "2.21.0+nv27.1", "3.0.0.dev0"])
def test_blackwell_is_taken(capability, version, machine):
    machine(capability, version)
    assert te_library.unavailable() is None
    for name in ("auto", "transformer_engine"):
        assert backends.select(name, "nvfp4", "gpu").backend.name == "transformer_engine"
    assert backends.select("auto", "nvfp4", "gpu").why == "backend transformer_engine on gpu (auto)"
    why = backends.select("auto", "mxfp4", "gpu").why
    assert (
        why == "backend emulated on gpu (auto; not transformer_engine: it multiplies nvfp4 only, not mxfp4)"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"capability": "9.0", "name": "NVIDIA H200"},
            "10.0 or 10.3 (B200, GB200, B300, GB300), and NVIDIA H200 has 9.0",
        ),
        ({"capability": "12.0", "name": "RTX 5090"}, "and RTX 5090 has 12.0"),
        ({"capability": "12.1"}, "has 12.1"),
        (
            {"version": None},
            "needs Transformer Engine 2.20 or newer, which is not installed (see docs/transf",
        ),
        ({"version": "2.19.1"}, "needs Transformer Engine 2.20 or newer, and 2.19.1 is installed"),
        ({"version": "1.13.0+nv25"}, "and 1.13.0+nv25 is installed"),
        (
            {"imports": False},
            "Transformer Engine 2.20.2 is installed but does not import: libcuda.so.1: cannot open",
        ),
    ],
)
def test_others_are_refused_by_name(keys, message, machine):
    machine(**keys)
    with pytest.raises(ConfigError) as caught:
        backends.select("transformer_engine", "nvfp4", "gpu")
    assert str(caught.value).startswith("nvfp4.backend: got transformer_engine: ")
    assert message in str(caught.value)
    assert str(caught.value).endswith("; write emulated, which runs everywhere")
    selection = backends.select("auto", "nvfp4", "gpu")
    assert selection.backend.name == "emulated"
    assert f"not transformer_engine: {te_library.unavailable()}" in selection.why


def test_a_plan_for_another_machine_needs_none_of_it():
    selection = backends.select("transformer_engine", "nvfp4", "cpu", elsewhere=True)
    assert selection.backend.name == "transformer_engine"
    assert "not on this machine: it needs a GPU of compute capability" in selection.why
    assert "and JAX runs on cpu here" in selection.why


class OfARunError(Exception):
    pass


def test_errors_of_a_run_are_not_masked():
    """MaxText's own context turns every error into `generator didn't stop after throw()`."""
    with pytest.raises(OfARunError, match="the cause"), te_context.transformer_engine_context():
        raise OfARunError("the cause")


def test_the_context_is_maxtexts(monkeypatch):
    from maxtext.utils import max_utils

    from maxtext_nvfp4.integration import register

    register()
    assert max_utils.transformer_engine_context is te_context.transformer_engine_context
    config = types.SimpleNamespace(hardware="gpu")
    with pytest.raises(OfARunError), max_utils.maybe_get_transformer_engine_context(config):
        raise OfARunError
