"""What is wrong with the files of a checkpoint, as far as their structure tells."""

import json
from collections.abc import Iterator
from typing import Any

import tensorstore
from etils import epath

_LOST = ("DATA_LOSS", "OUT_OF_RANGE")
"""How TensorStore begins its messages about files that are cut short or fail a checksum."""


def find_damage(checkpoint: epath.Path) -> list[str]:
    """Looks for files of a checkpoint that are missing, cut short or unreadable, without reading its arrays.

    Args:
      checkpoint: Folder of one step, in MaxText's layout.

    Returns:
      One line for each file: its path in the folder and what is wrong with it.
    """
    found: dict[str, str] = {}
    for path in _documents(checkpoint):
        try:
            json.loads(path.read_text())
        except FileNotFoundError:
            found[str(path.relative_to(checkpoint))] = "missing"
        except ValueError:
            found[str(path.relative_to(checkpoint))] = "not valid JSON"
    items = checkpoint / "items"
    # Checkpoints without OCDBT have a folder for each array instead of a database.
    if "items/_METADATA" in found or json.loads((items / "_METADATA").read_text()).get("use_ocdbt"):
        found |= _database_damage(items)
    return [f"{name}: {why}" for name, why in found.items()]


def data_lost(error: BaseException) -> str:
    """What TensorStore says is lost, from the causes of a failed restore; empty if it says no such thing."""
    seen: BaseException | None = error
    while seen is not None:
        for line in str(seen).splitlines():
            if line.startswith(_LOST):
                return line.partition(" [")[0]
        seen = seen.__cause__ or seen.__context__
    return ""


def _documents(checkpoint: epath.Path) -> Iterator[epath.Path]:
    """The JSON files that a restore reads."""
    yield checkpoint / "items" / "_METADATA"
    yield from (checkpoint / "items" / "array_metadatas").glob("*")
    yield from (checkpoint / "iter").glob("*.json")


def _database_damage(items: epath.Path) -> dict[str, str]:
    """Walks the index down to the extents of the arrays in their files."""
    base = tensorstore.KvStore.open(_spec(items)).result()
    try:
        versions = tensorstore.ocdbt.dump(base).result()["versions"]
    except ValueError as error:
        return {"items/manifest.ocdbt": _first_part(error)}
    found: dict[str, str] = {}
    roots = (version["root"].get("location") for version in versions)
    pending = [root for root in roots if root]  # an empty database has none
    while pending:
        location = pending.pop()
        kind, folder, name, offset, length = location.split(":")
        file = items / (folder + name)
        if not file.exists():
            found[f"items/{folder}{name}"] = "missing"
        elif file.stat().length < int(offset) + int(length):
            found[f"items/{folder}{name}"] = f"cut short, to {file.stat().length} bytes"
        elif kind == "btreenode":
            try:
                entries = tensorstore.ocdbt.dump(base, location).result()["entries"]
            except ValueError as error:
                found[f"items/{folder}{name}"] = _first_part(error)
                continue
            below = (entry.get("indirect_value") or entry.get("location") for entry in entries)
            pending += [entry for entry in below if entry]
    return found


def _first_part(error: Exception) -> str:
    """A message of TensorStore without the specification that follows it."""
    return str(error).partition(" [")[0]


def _spec(folder: epath.Path) -> Any:
    text = str(folder)
    return f"{text}/" if "://" in text else {"driver": "file", "path": f"{text}/"}
