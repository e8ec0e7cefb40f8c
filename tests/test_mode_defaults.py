"""Keys of MaxText whose defaults are others in the nvfp4 mode, unless the user has chosen a value.

On GPUs the remat policy saves quantized tensors: answers MaxText #2773 and #3185, TE #2356 and #2658,
quantization replayed in the backward pass. A run that skips steps is not ended at the first of them.
"""

import pytest
from maxtext_models import BASE, TINY

from maxtext_nvfp4.integration import register
from maxtext_nvfp4.integration.config import REMAT_POLICY, load_config, mode_defaults
from maxtext_nvfp4.integration.config_files import chosen_keys, merged_keys

register()
GPU = {"quantization": "nvfp4", "hardware": "gpu"}
TE = {"quantization": "nvfp4", "nvfp4": {"backend": "transformer_engine"}}


def default(argv, keys):
    found = mode_defaults(merged_keys(argv, keys), chosen_keys(argv) | keys.keys())
    return {key: value for key, value in found.items() if key == "remat_policy"}


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        (GPU, True),
        ({**GPU, "hardware": "gpu_multiprocess"}, True),
        (TE, True),
        ({**GPU, "nvfp4": {"backend": "emulated"}}, False),
        ({**GPU, "hardware": "cpu"}, False),
        ({**GPU, "quantization": "te_nvfp4"}, False),
        ({"hardware": "gpu"}, False),
    ],
)
def test_the_policy_is_for_gpus(keys, chosen):
    assert default(["", BASE], keys) == ({"remat_policy": REMAT_POLICY} if chosen else {})


@pytest.mark.parametrize("where", ["file", "base of the file", "command line", "keyword"])
def test_a_choice_of_the_users_wins(where, tmp_path):
    file, base = tmp_path / "run.yml", tmp_path / "base-of-mine.yml"
    choice = "remat_policy: full\n"
    base.write_text("base_config: base.yml\n" + choice * (where == "base of the file"))
    file.write_text(
        f"base_config: {base.name}\nquantization: nvfp4\nnvfp4: {{backend: transformer_engine}}\n"
        + choice * (where == "file")
    )
    argv = ["", str(file), *(["remat_policy=full"] * (where == "command line"))]
    keywords = {"remat_policy": "full"} if where == "keyword" else {}
    assert default(argv, keywords) == {}
    config = load_config(
        argv, **{key: value for key, value in TINY.items() if key not in keywords}, **keywords
    )
    assert config.remat_policy == "full"
    if where == "base of the file":
        base.write_text("base_config: base.yml\n")
        assert load_config(argv, **TINY).remat_policy == REMAT_POLICY


def test_maxtexts_own_default_holds_elsewhere():
    assert load_config(["", BASE], **TINY, quantization="nvfp4").remat_policy == "full"
    assert load_config(["", BASE], **TINY).remat_policy == "full"


@pytest.mark.parametrize(
    ("keys", "aborts"),
    [
        ({}, True),
        ({"quantization": "nvfp4"}, False),
        ({"quantization": "nvfp4", "nvfp4": {"loss_scale": {"mode": "static"}}}, False),
        ({"quantization": "nvfp4", "nvfp4": {"loss_scale": {"mode": "off"}}}, True),
        ({"quantization": "nvfp4", "abort_on_nan_loss": True, "abort_on_inf_loss": True}, True),
    ],
)
def test_a_run_that_skips_steps_is_not_aborted_at_the_first(keys, aborts):
    config = load_config(["", BASE], **TINY, **keys)
    assert (config.abort_on_nan_loss, config.abort_on_inf_loss) == (aborts, aborts)
