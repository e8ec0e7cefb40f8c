"""A config's parallelism on a cluster, by MaxText's own rules and without its devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from maxtext.utils import max_utils

from maxtext_nvfp4.doctor.cluster import Cluster
from maxtext_nvfp4.errors import ConfigError
from maxtext_nvfp4.integration.config_checks import check_keys
from maxtext_nvfp4.integration.config_errors import raising_config_errors
from maxtext_nvfp4.integration.config_files import merged_keys
from maxtext_nvfp4.recipe import problem

_AXES = {"stage": "pipeline"}
"""Mesh axes whose keys have another name."""


def checked_keys(argv: Sequence[str]) -> dict[str, Any]:
    """All keys of a config, after this package's own checks of them."""
    with raising_config_errors():
        raw = merged_keys(argv, {})
    check_keys(raw)
    return raw


def parallelism(raw: Mapping[str, Any], network: str) -> dict[str, int]:
    """The sizes that a config gives the axes of the mesh, in their order, by their names in keys."""
    names = (_AXES.get(axis, axis) for axis in raw["mesh_axes"])
    keys = {name: f"{network}_{name}_parallelism" for name in names}
    for key in keys.values():
        value = raw.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            why = "not a number of devices"
            raise ConfigError(problem(key, value, why, "an integer of 1 or more, or -1 for what is left"))
    return {name: int(raw[key]) for name, key in keys.items() if key in raw}


def fault(cluster: Cluster, ici: Mapping[str, int], dcn: Mapping[str, int]) -> str:
    """Why MaxText would refuse these sizes on a cluster; empty if it would not."""
    if cluster.racks == 1 and abs(math.prod(dcn.values())) > 1:
        asked = " and ".join(f"dcn_{name}_parallelism={size}" for name, size in dcn.items() if size > 1)
        return f"{asked}: all devices are in one NVLink domain, where every dcn_* is 1"
    networks = [("ICI", ici, cluster.per_rack)]
    if cluster.racks > 1:
        networks.append(("DCN", dcn, cluster.racks))
    for network, sizes, total in networks:
        try:
            max_utils.fill_unspecified_mesh_axes(list(sizes.values()), total, network)
        except AssertionError:
            prefix = network.lower()
            shown = " and ".join(
                f"{prefix}_{name}_parallelism={size}" for name, size in sizes.items() if size != 1
            )
            what = "devices of an NVLink domain" if network == "ICI" else "NVLink domains"
            return f"{shown or f'every {prefix}_* is 1'}: does not make up the {total} {what}"
    return ""
