"""The parent's side of `torch_peers.py`."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from quantize_cases import Stored

_LOG = "peers.log"


def python() -> Path:
    """The Python of the environment that `scripts/bench.sh --peers` makes; it need not exist."""
    return Path(__file__).parents[1] / ".cache" / "bench-peers" / "bin" / "python"


class PeerProcess:
    """A running `torch_peers.py`.

    Attributes:
      versions: Of the installed packages by name.
      cases: Names of cases by peer.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path):
        self._process, self._folder = process, folder
        hello = json.loads(self._answer())
        self.versions: dict[str, str] = hello["versions"]
        self.cases: dict[str, list[str]] = hello["cases"]

    def seconds(self, peer: str, case: str) -> float:
        """Runs a case once."""
        return float(self._ask("time", peer, case))

    def stored(self, peer: str, case: str) -> tuple[Stored, ...]:
        """Runs a case and returns what came out."""
        count = int(self._ask("store", peer, case))
        files = [np.load(self._folder / f"{peer}.{case}.{number}.npz") for number in range(count)]
        return tuple(Stored(file["codes"], file["scales"]) for file in files)

    def _ask(self, *words: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = (self._folder / _LOG).read_text()[-2000:]
            raise RuntimeError(f"torch_peers.py ended with {self._process.wait()}:\n{said}")
        return line


@contextlib.contextmanager
def peer_process(folder: Path, compiled: bool) -> Iterator[PeerProcess | None]:
    """Starts the peers on the x.npy in a folder; None if their environment does not exist."""
    if not python().exists():
        yield None
        return
    script = Path(__file__).parent / "torch_peers.py"
    with (
        (folder / _LOG).open("w") as log,
        subprocess.Popen(
            [str(python()), str(script), str(folder), *(["--compile"] if compiled else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Threads that wait for the next call must not take the cores from those that are measured meanwhile.
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        ) as process,
    ):
        try:
            yield PeerProcess(process, folder)
        finally:
            assert process.stdin is not None
            process.stdin.close()
