"""Loss scaling changes no bit of a run on Transformer Engine's JAX fallback."""

import harness as h
import maxtext_models
import numpy as np
from flax import nnx


def trained(loss_scale):
    nvfp4 = {"backend": "transformer_engine", "recipe": "paper", "loss_scale": loss_scale}
    with h.corrected_fallback():
        trainer = maxtext_models.Trainer(**h.LEGAL, nvfp4=nvfp4)
        trainer.__dict__["train_step"] = trainer.compile()
        state, history = trainer.run(30)
    return maxtext_models.named(state), [step["learning/loss"] for step in history]


def test_no_mode_changes_a_bit():
    off, losses = trained({"mode": "off"})
    assert len(set(losses)) == 30
    for mode in ({"mode": "static", "init": 1024}, {"mode": "dynamic", "growth_interval": 7}):
        state, ours = trained(mode)
        assert ours == losses
        for path, leaf in off.items():
            if not isinstance(leaf, nnx.RngState):
                np.testing.assert_array_equal(leaf.get_value(), state[path].get_value(), err_msg=path)
