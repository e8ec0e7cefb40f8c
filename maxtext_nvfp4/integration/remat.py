"""The rematerialization policy of a config."""

from typing import Any

from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.predict.remat import POLICIES, named
from maxtext_nvfp4.predict.workload import Remat
from maxtext_nvfp4.recipe import problem


def remat_of(config: Any) -> Remat:
    """The policy of a config.

    Raises:
      ConfigError: It moves tensors to the host, or is made up of the config's own lists.
    """
    # MaxText reads `none` as no policy, and without one jax.checkpoint saves a layer's input alone.
    policy = config.remat_policy or "none"
    if policy == "none":
        return Remat(policy=policy, saved=frozenset())
    if policy not in POLICIES:
        why = "no memory or time is predicted where tensors wait on the host or are chosen one by one"
        raise ConfigError(problem("remat_policy", policy, why, " or ".join(sorted(POLICIES))))
    return named(policy)
