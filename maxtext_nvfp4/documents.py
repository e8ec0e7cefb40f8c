"""Text files: found in folders, told from data, held out for validation, cut into records."""

import dataclasses
import fnmatch
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from maxtext_nvfp4.errors import ConfigError

EXCLUDE = (".*", "__pycache__", "node_modules", "site-packages", "dist-packages")
"""Names of files and folders that are left out, as shell patterns."""

STDLIB_EXCLUDE = (*EXCLUDE, "test", "tests", "idle_test", "pydoc_data", "config-*", "_sysconfigdata*")
"""The same for Python's standard library: also tests, generated text and files that name this machine."""

LONGEST_FILE = 16 << 20
_NUMERIC_WORDS = 0.2


@dataclasses.dataclass(frozen=True)
class Document:
    """A text file.

    Attributes:
      path: Path below the folder that was searched, with forward slashes.
      text: Its text.
      digest: SHA-256 of its content.
    """

    path: str
    text: str
    digest: str


def read(
    paths: Sequence[Path], *, exclude: Iterable[str], keep_tables: bool, besides: Path | None = None
) -> tuple[list[Document], Counter[str]]:
    """The text files under some paths, in the order of their paths, each content once.

    Args:
      paths: Files, and folders to search; links inside them are not followed.
      exclude: Shell patterns of names of files and folders in them to leave out.
      keep_tables: Keep files in which a fifth of the words hold a digit, which are mostly generated tables.
      besides: A folder to leave out.

    Returns:
      The documents, and how many files were left out for what reason.

    Raises:
      ConfigError: A path is missing.
    """
    documents: dict[str, Document] = {}
    left_out: Counter[str] = Counter()
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
        for name, file in _files(path.absolute(), exclude, besides):
            text, why = _text(file, keep_tables)
            if not why:
                digest = hashlib.sha256(text.encode()).hexdigest()
                if documents.setdefault(digest, Document(name, text, digest)).path != name:
                    why = "copies of another file"
            if why:
                left_out[why] += 1
    return sorted(documents.values(), key=lambda document: (document.path, document.digest)), left_out


def _files(path: Path, exclude: Iterable[str], besides: Path | None) -> Iterator[tuple[str, Path]]:
    excluded = re.compile("|".join(map(fnmatch.translate, exclude)) or "(?!)").match
    if path.is_file():
        yield path.name, path
    for folder, folders, names in os.walk(path):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not excluded(name) and here / name != besides)
        for name in sorted(names):
            file = here / name
            if not excluded(name) and file.is_file() and not file.is_symlink():
                yield file.relative_to(path).as_posix(), file


def _text(file: Path, keep_tables: bool) -> tuple[str, str]:
    """The text of a file, or why it is left out."""
    if file.stat().st_size > LONGEST_FILE:
        return "", f"longer than {LONGEST_FILE >> 20} MiB"
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except PermissionError:
        return "", "not readable"
    if "\0" in text:
        return "", "binary"
    words = Counter(any(map(str.isdigit, word)) for word in re.findall(r"[^\W_]+", text))
    if not words:
        return "", "without words"
    if words[True] >= _NUMERIC_WORDS * words.total() and not keep_tables:
        return "", "tables of numbers"
    return text, ""


def hold_out(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Splits whole files into those to train on and those held out, by a hash of their path.

    A file stays on its side when others are added or removed, unless a side would be empty.

    Args:
      documents: At least two.
      share: Expected share of the files to hold out.

    Returns:
      The files to train on and those held out, each in the order of the hash.

    Raises:
      ConfigError: There are fewer than two documents.
    """

    def place(document: Document) -> float:
        return int.from_bytes(hashlib.sha256(document.path.encode()).digest()[:8], "big") / 2**64

    if len(documents) < 2:
        found = f"only one text file, {documents[0].path}" if documents else "no text files"
        raise ConfigError(f"{found}: a corpus needs at least two, one to train on and one to hold out")
    ordered = sorted(documents, key=lambda document: (place(document), document.path))
    count = sum(place(document) < share for document in documents)
    count = min(max(count, 1), len(documents) - 1)
    return ordered[count:], ordered[:count]


def cut(text: str, tokenizer: Any, tokens: int) -> list[str]:
    """Cuts a text into consecutive parts of at most so many tokens, after a line end where one is near.

    Args:
      text: The text; the parts joined give it back.
      tokenizer: A SentencePiece processor.
      tokens: Most tokens a part may have, at least 4 (a character can take 4).

    Returns:
      The parts.
    """
    parts: list[str] = []
    lines: list[str] = []
    used = 0
    all_lines = text.splitlines(keepends=True)
    for line, ids in zip(all_lines, tokenizer.encode(all_lines), strict=True):
        if lines and used + len(ids) > tokens:
            parts.append("".join(lines))
            lines, used = [], 0
        lines.append(line)
        used += len(ids)
    parts.append("".join(lines))
    # What is still too long: single lines, and the rare part that takes more tokens than its lines do.
    pending, fitting = parts[::-1], []
    while pending:
        part = pending.pop()
        if len(tokenizer.encode(part)) <= tokens:
            fitting.append(part)
        else:
            half = part.find("\n", len(part) // 2, -1) + 1 or len(part) // 2
            pending += [part[half:], part[:half]]
    return fitting
