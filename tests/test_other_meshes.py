"""A checkpoint written on one number of devices goes on on another: same parameters, same codes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import whole_runs as runs

BATCH = 4


def on(devices: int) -> dict[str, Any]:
    """Keys that keep the global batch, sharded over all devices."""
    return {"per_device_batch_size": BATCH / devices, "ici_fsdp_parallelism": devices}


def write_codes(arrays: str, out: str) -> None:
    """Quantizes every kernel of a file, sharded over all devices as FSDP would, and writes codes and scales."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from maxtext_nvfp4 import quantize

    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    found = {}
    for path, kernel in np.load(arrays).items():
        if not path.startswith("params/") or not path.endswith("/kernel"):
            continue
        weight = kernel.reshape(-1, kernel.shape[-1])
        sharded = jax.device_put(weight, NamedSharding(mesh, PartitionSpec("fsdp")))
        encoded = jax.jit(lambda w: quantize(w, (16, 16)))(sharded)
        for part in ("codes", "block_scales", "tensor_scale"):
            found[f"{path}/{part}"] = np.asarray(getattr(encoded, part)).astype(np.float32)
    np.savez(out, **found)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(1, 4), (2, 1), (4, 1), (4, 2)])],
)
def test_a_run_goes_on_on_other_devices(
    tmp_path: Path, data: Path, on_devices: Any, before: int, after: int
) -> None:
    keys = runs.keys(data, **runs.QUANTIZED, jax_cache_dir=str(tmp_path / "cache"))
    _, first = runs.train(tmp_path, keys | on(before) | {"steps": 4}, "first", devices=before)
    saved = runs.leaves(runs.checkpoint(tmp_path))

    states = {}
    for devices in (before, after):
        name = f"on{devices}"
        said, states[devices] = runs.restored(
            tmp_path, keys | on(devices) | {"steps": 8}, name, devices=devices
        )
        assert runs.resumed_from(said) == 3
        on_devices(devices, write_codes, str(tmp_path / f"{name}.npz"), str(tmp_path / f"{name}-codes.npz"))
    assert runs.different(states[before], states[after]) == []
    assert runs.different(runs.part(states[after], "params"), runs.part(saved, "params")) == []
    codes = [dict(np.load(tmp_path / f"on{devices}-codes.npz")) for devices in (before, after)]
    assert len(codes[0]) == 3 * 8
    assert runs.different(*codes) == []

    _, whole = runs.train(tmp_path / "whole", keys | on(before) | {"steps": 8}, "whole", devices=before)
    _, second = runs.train(tmp_path, keys | on(after) | {"steps": 8}, "second", devices=after)
    assert list(second) == [4, 5, 6, 7]
    # The same data, weights and noise; only the order of sums is another one.
    assert second[4] == pytest.approx(whole[4], rel=1e-6)
    assert second == pytest.approx({step: whole[step] for step in second}, rel=1e-3)
    assert first == {step: whole[step] for step in first}
