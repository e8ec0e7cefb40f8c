"""What MaxText wrote to TensorBoard: the numbers by step, and the whole config as text."""

import dataclasses
from pathlib import Path
from typing import Any

_TEXT = "/text_summary"


@dataclasses.dataclass(frozen=True)
class Events:
    """Everything in a folder of event files, over all restarts of a run.

    Attributes:
      scalars: Values by tag and step; of a step that was trained again after a restart, the later one.
      texts: By key; of a run that was started again, those of the last start.
    """

    scalars: dict[str, dict[int, float]]
    texts: dict[str, str]


def read_events(folder: Path | str) -> Events:
    """Reads every event file below a folder; a record cut short by a kill ends its file."""
    import tensorflow as tf

    found = Events({}, {})
    for path in sorted(Path(folder).rglob("*tfevents*")):
        try:
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                event = tf.compat.v1.Event.FromString(record)
                for value in event.summary.value:
                    _add(found, event.step, value)
        except tf.errors.DataLossError:
            pass
    return found


def _add(found: Events, step: int, value: Any) -> None:
    if value.tag.endswith(_TEXT):
        found.texts[value.tag.removesuffix(_TEXT)] = value.tensor.string_val[0].decode()
    else:
        found.scalars.setdefault(value.tag, {})[step] = value.simple_value
