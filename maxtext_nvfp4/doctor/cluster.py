"""The mesh of a cluster: which parallelism lies within an NVLink domain and which between domains.

JAX calls an NVLink domain a slice. MaxText lays `ici_*` axes within a slice and `dcn_*` axes over slices, and
wants the product of the first to be the devices of a slice, that of the second the number of slices.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from maxtext_nvfp4.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines of one kind.

    Attributes:
      nodes: Machines.
      gpus_per_node: GPUs (on CPUs, processes) of each.
      rack_gpus: Most GPUs that one NVLink domain joins.
    """

    nodes: int
    gpus_per_node: int
    rack_gpus: int

    @property
    def devices(self) -> int:
        """GPUs (on CPUs, processes) in all."""
        return self.nodes * self.gpus_per_node

    @property
    def racks(self) -> int:
        """NVLink domains that the nodes fill."""
        return -(-self.nodes // max(1, self._nodes_per_rack))

    @property
    def per_rack(self) -> int:
        """GPUs that the run has in each NVLink domain."""
        return self.devices // self.racks

    @property
    def _nodes_per_rack(self) -> int:
        return self.rack_gpus // self.gpus_per_node

    def fault(self) -> tuple[str, str] | None:
        """Why no mesh fits it, and what to write instead; None if one does."""
        if not self._nodes_per_rack:
            return (
                f"a node has {self.gpus_per_node} GPUs, which is more than the {self.rack_gpus} of an NVLink "
                "domain",
                f"--rack-gpus {self.gpus_per_node} or more",
            )
        if self.nodes % self.racks:
            near = [count for count in range(1, 2 * self.nodes) if self._like(count)]
            below = max(count for count in near if count < self.nodes)
            above = min(count for count in near if count > self.nodes)
            return (
                f"{self.nodes} nodes need {self.racks} racks, and do not divide into them equally, as JAX "
                "demands",
                f"--nodes {below} or --nodes {above}",
            )
        return None

    def _like(self, nodes: int) -> bool:
        """Whether so many nodes divide equally into the racks they need."""
        return nodes % dataclasses.replace(self, nodes=nodes).racks == 0

    def describe(self) -> str:
        """It in words."""
        text = f"{self.nodes} x {self.gpus_per_node} = {counted(self.devices, 'device')} in "
        return (
            text + counted(self.racks, "NVLink domain") + (f" of {self.per_rack}" if self.racks > 1 else "")
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """Parallelism for a cluster.

    Attributes:
      cluster: The cluster.
      ici: Size of each axis within an NVLink domain, by the name between `ici_` and `_parallelism`.
      dcn: The same over domains.
      changed: The keys whose value is not what the config has, and does not follow from a -1 in it.
      why: A sentence for each network.
    """

    cluster: Cluster
    ici: Mapping[str, int]
    dcn: Mapping[str, int]
    changed: tuple[str, ...]
    why: tuple[str, str]

    def overrides(self) -> dict[str, int]:
        """Every MaxText key of the mesh."""
        return {_key("ici", name): value for name, value in self.ici.items()} | {
            _key("dcn", name): value for name, value in self.dcn.items()
        }

    def settings(self) -> dict[str, int]:
        """The keys to write: those that are not 1, and the two that MaxText would fill by itself."""
        filled = ("ici_fsdp_parallelism", "dcn_data_parallelism")
        return {key: value for key, value in self.overrides().items() if value != 1 or key in filled}

    def arguments(self) -> str:
        """The settings as arguments of a command."""
        return " ".join(f"{key}={value}" for key, value in self.settings().items())

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        cluster = dataclasses.asdict(self.cluster)
        return {
            "cluster": cluster | {"racks": self.cluster.racks, "gpus_per_rack": self.cluster.per_rack},
            "parallelism": self.overrides(),
            "settings": self.settings(),
            "changed": list(self.changed),
            "why": list(self.why),
        }

    def to_text(self) -> str:
        """A table for people, then the arguments to paste."""
        rows = [f"{key:<32}{value}" for key, value in self.settings().items()]
        rest = "every other ici_* and dcn_* parallelism is 1"
        return "\n".join([self.cluster.describe(), "", *rows, rest, "", *self.why, "", self.arguments()])


def derive(cluster: Cluster, ici: Mapping[str, int], dcn: Mapping[str, int]) -> MeshPlan:
    """The mesh that keeps what a config chose, and fills the rest with FSDP within a domain.

    Args:
      cluster: The cluster.
      ici: The config's sizes within a slice by name, at most one of them -1.
      dcn: The same over slices.

    Raises:
      ConfigError: What was chosen does not fit the cluster.
    """
    if fault := cluster.fault():
        raise ConfigError(f"{fault[0]}; write {fault[1]}")
    within, changed, why = _fill("ici", ici, cluster.per_rack, "the GPUs of an NVLink domain", "fsdp")
    if cluster.racks == 1:
        across = dict.fromkeys(dcn, 1)
        asked = [name for name, value in dcn.items() if value not in (1, -1)]
        changed += [_key("dcn", name) for name in asked]
        why_across = (
            "dcn_*: 1 each, as all GPUs are in one NVLink domain, which MaxText takes for one slice"
            + (f"; {_written('dcn', dcn, asked)} would ask for more of them" if asked else "")
        )
    else:
        preferred = "fsdp" if dcn["fsdp"] != 1 else "data"
        across, more, why_across = _fill("dcn", dcn, cluster.racks, "the NVLink domains", preferred)
        changed += more
    return MeshPlan(cluster=cluster, ici=within, dcn=across, changed=tuple(changed), why=(why, why_across))


def _fill(
    network: str, sizes: Mapping[str, int], total: int, of: str, preferred: str
) -> tuple[dict[str, int], list[str], str]:
    """Sizes whose product is `total`, the keys that had to change, and why they are so."""
    chosen = [name for name, value in sizes.items() if value not in (1, -1)]
    if -1 not in sizes.values() and math.prod(sizes.values()) == total:
        return (
            dict(sizes),
            [],
            f"{network}_*: {_written(network, sizes, chosen)} as written are {total}, {of}",
        )
    filler = next((name for name, value in sizes.items() if value == -1), preferred)
    kept = [name for name in chosen if name != filler]
    if preferred in kept and total % math.prod(sizes[name] for name in kept):
        sizes = {**sizes, filler: 1}  # the axis that may be any size is the one that gives way
        filler, kept = preferred, [name for name in kept if name != preferred]
    rest = math.prod(sizes[name] for name in kept)
    if total % rest:
        raise ConfigError(_does_not_divide(network, sizes, kept, rest, total, of))
    key, value = _key(network, filler), total // rest
    others = f"what {_written(network, sizes, kept)} leave{'s' * (len(kept) == 1)} of" if kept else "all"
    why = f"{network}_*: {key} is {value}, {others} {total}, {of}"
    changed = []
    if sizes[filler] != -1:
        changed.append(key)
        why += f"; {_written(network, sizes, [filler])} as written does not fit"
    return {**sizes, filler: value}, changed, why


def _does_not_divide(
    network: str, sizes: Mapping[str, int], kept: list[str], rest: int, total: int, of: str
) -> str:
    """The message for sizes that do not divide what there is."""
    text = f"{_written(network, sizes, kept)}: {rest} does not divide {total}, {of}; write "
    if len(kept) > 1:
        return text + f"sizes whose product divides {total}"
    fitting = max(value for value in range(1, min(sizes[kept[0]], total) + 1) if total % value == 0)
    return text + f"{_key(network, kept[0])}: {fitting}, or another number of GPUs"


def _key(network: str, name: str) -> str:
    return f"{network}_{name}_parallelism"


def _written(network: str, sizes: Mapping[str, int], names: list[str]) -> str:
    return " and ".join(f"{_key(network, name)}={sizes[name]}" for name in names)


def counted(count: int, thing: str) -> str:
    """A number of things in words: `1 device`, `2 devices`."""
    return f"{count} {thing}{'s' * (count != 1)}"
