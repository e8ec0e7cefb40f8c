"""Folders of text made into a data set and a tokenizer that MaxText reads, offline and reproducibly.

The result is one folder:

    corpus/1.0.0/      a tensorflow-datasets data set, splits `train` and `validation`, one feature `text`
    tokenizer.model    a SentencePiece BPE with byte fallback, trained on the train split alone
    corpus.json        what went in and what came out; its presence means that the corpus is complete

MaxText's text pipelines cut an example after `max_target_length` tokens and drop the rest, so documents
are stored as consecutive records that fit. Validation holds out whole files, chosen by a hash of their
path: the last part of a file is easy to predict from the part before it, and a copied file would be too,
so equal files count once.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from maxtext_nvfp4.documents import EXCLUDE, LONGEST_FILE, STDLIB_EXCLUDE, Document, cut, hold_out, read
from maxtext_nvfp4.errors import ConfigError

DATASET = "corpus"
VERSION = "1.0.0"
TOKENIZER = "tokenizer.model"
RECORD = "corpus.json"

PAD, BOS, EOS, UNK = range(4)
_SPECIAL_AND_BYTES = 4 + 256
_TOKENIZER_TEXT = 32 << 20
_FORMAT = 1
"""Part of the fingerprint: raise it when equal inputs give another corpus."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a corpus is made; part of its identity.

    Attributes:
      vocab_size: Pieces of the tokenizer, among them 4 special ones and 256 bytes.
      holdout: Share of the files that goes to the validation split.
      record_tokens: Longest record in tokens, BOS and EOS included; at most the `max_target_length` of the
        trainings that will read it.
      exclude: Shell patterns of file and folder names to leave out.
      keep_tables: Keep files in which a fifth of the words hold a digit, which are mostly generated tables.
    """

    vocab_size: int = 2048
    holdout: float = 0.05
    record_tokens: int = 256
    exclude: tuple[str, ...] = EXCLUDE
    keep_tables: bool = False

    def __post_init__(self) -> None:
        if self.vocab_size <= _SPECIAL_AND_BYTES:
            raise ConfigError(
                f"vocab_size={self.vocab_size} leaves no room beside 4 special pieces and 256 bytes; "
                f"write at least {2 * _SPECIAL_AND_BYTES}"
            )
        if not 0 < self.holdout < 1:
            raise ConfigError(f"holdout={self.holdout} is not a share of the files; write one such as 0.05")
        if self.record_tokens < 8:
            raise ConfigError(f"record_tokens={self.record_tokens} is too short for text; write 8 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Size of one split."""

    files: int
    records: int
    tokens: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusSummary:
    """A finished corpus.

    Attributes:
      out: Its folder.
      train: Size of the train split.
      validation: Size of the validation split.
      skipped: Number of files left out, by reason.
      reused: Whether it was there already, made from the same files with the same options.
    """

    out: Path
    train: Split
    validation: Split
    skipped: dict[str, int]
    reused: bool

    def __str__(self) -> str:
        train, validation = self.train, self.validation
        lines = [
            f"{'unchanged' if self.reused else 'wrote'}: {self.out}",
            *(
                f"  {name:<12}{split.files:>7,} files {split.records:>9,} records {split.tokens:>12,} tokens"
                f" {split.bytes / max(1, split.tokens):.2f} bytes each"
                for name, split in (("train", train), ("validation", validation))
            ),
        ]
        if self.skipped:
            lines.append(
                "  left out: " + ", ".join(f"{n:,} {why}" for why, n in sorted(self.skipped.items()))
            )
        lines.append(
            "MaxText reads it with\n"
            "  dataset_type=grain grain_file_type=tfrecord eval_split=validation (or dataset_type=tfds)\n"
            f"  dataset_name={DATASET}:{VERSION} eval_dataset_name={DATASET}:{VERSION} dataset_path={self.out}\n"
            f"  tokenizer_type=sentencepiece tokenizer_path={self.out / TOKENIZER}"
        )
        return "\n".join(lines)


def build(paths: Sequence[Path], out: Path, options: Options | None = None) -> CorpusSummary:
    """Makes a corpus from every text file under `paths`, or finds that it is there already.

    Equal files and options give equal bytes. The corpus appears at `out` complete or not at all; several
    processes may ask for the same one at a time.

    Args:
      paths: Files, and folders to search.
      out: Folder to make; its parents are made too.
      options: How to make it.

    Returns:
      What the corpus holds.

    Raises:
      ConfigError: A path is missing, there is too little text, or `out` holds something else.
    """
    options = options or Options()
    out = Path(os.path.abspath(out))
    if (existing := _existing(out)) is None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(out.parent / f".{out.name}.partial") as partial:
            if (existing := _existing(out)) is None:
                documents, skipped = _read(paths, out, options)
                summary = _write(documents, skipped, partial, out, options)
                os.rename(partial, out)
                return summary
    documents, _ = _read(paths, out, options)
    if existing["fingerprint"] != _fingerprint(documents, options):
        raise ConfigError(
            f"{out} holds a corpus of other files or options ({_difference(existing, documents, options)}). "
            "What was trained on it needs its tokenizer, so it is not replaced: write another --out, or "
            "delete it together with the runs trained on it"
        )
    return _summary(existing, out, reused=True)


def _read(paths: Sequence[Path], out: Path, options: Options) -> tuple[list[Document], Counter[str]]:
    return read(paths, exclude=options.exclude, keep_tables=options.keep_tables, besides=out)


def _write(
    documents: list[Document], skipped: Counter[str], folder: Path, out: Path, options: Options
) -> CorpusSummary:
    train, validation = hold_out(documents, options.holdout)
    model = _train_tokenizer([document.text for document in train], options.vocab_size)
    (folder / TOKENIZER).write_bytes(model)

    import sentencepiece

    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
    examples: dict[str, list[tuple[str, dict[str, str]]]] = {}
    sizes: dict[str, Split] = {}
    for name, part in (("train", train), ("validation", validation)):
        examples[name] = [
            (f"{document.digest}/{index}", {"text": text})
            for document in part
            for index, text in enumerate(cut(document.text, tokenizer, options.record_tokens - 2))
        ]
        texts = [example["text"] for _, example in examples[name]]
        sizes[name] = Split(
            files=len(part),
            records=len(texts),
            tokens=sum(map(len, tokenizer.encode(texts))) + 2 * len(texts),
            bytes=sum(len(text.encode()) for text in texts),
        )
    _store(examples, folder)
    record: dict[str, Any] = {
        "fingerprint": _fingerprint(documents, options),
        "options": dataclasses.asdict(options),
        "splits": {name: dataclasses.asdict(size) for name, size in sizes.items()},
        "skipped": dict(sorted(skipped.items())),
        "validation_files": sorted(document.path for document in validation),
        "documents": {document.path: document.digest for document in documents},
        "written": {
            file.relative_to(folder).as_posix(): file.stat().st_size
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        },
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return _summary(record, out, reused=False)


def _train_tokenizer(texts: Sequence[str], vocab_size: int) -> bytes:
    """A BPE model trained on at most 32 MiB of text; any text but U+2581, its mark for a space, survives it."""
    import sentencepiece

    def sample() -> Iterator[str]:
        size = 0
        for text in texts:  # in the order of a hash, so the first ones are a fair sample
            size += len(text)
            if size > _TOKENIZER_TEXT and size > len(text):
                return
            yield text

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=LONGEST_FILE,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        characters = sum(map(len, texts))
        if limit := re.search(r"set it to a value <= (\d+)", str(error)):
            advice = f"give it more text, or write a vocabulary of at most {limit[1]}"
        elif needed := re.search(r"required_chars\.\s*\d+ vs (\d+)", str(error)):
            advice = f"its characters alone need {needed[1]}; write a larger vocabulary"
        else:
            raise
        raise ConfigError(
            f"{characters:,} characters of text cannot make a tokenizer of {vocab_size} pieces: {advice}"
        ) from error
    return model.getvalue()


def _store(examples: dict[str, list[tuple[str, dict[str, str]]]], folder: Path) -> None:
    """Writes the splits as a tensorflow-datasets data set, records shuffled by a hash of their keys.

    A reader takes 16 files at a time: with more of them, another `data_shuffle_seed` starts with other
    records, and each process of a distributed run has files of its own.
    """
    import tensorflow_datasets as tfds
    from absl import logging

    shards = max(1, min(64, min(map(len, examples.values())) // 8))
    tfds.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            tfds.dataset_builders.store_as_tfds_dataset(
                name=DATASET,
                version=VERSION,
                features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
                split_datasets=examples,
                data_dir=folder,
                description="Text files, cut into records, whole files held out for validation.",
                download_config=tfds.download.DownloadConfig(try_download_gcs=False, num_shards=shards),
            )
    finally:
        logging.set_verbosity(verbosity)


def _fingerprint(documents: Iterable[Document], options: Options) -> str:
    content = [_FORMAT, dataclasses.astuple(options), [(d.path, d.digest) for d in documents]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _existing(out: Path) -> dict[str, Any] | None:
    """The record of a complete corpus at `out`; None when there is nothing."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        record: dict[str, Any] = json.loads((out / RECORD).read_text())
        written, _ = record["written"].items(), record["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{out} is there and is not a corpus; write another --out") from None
    for name, size in written:
        if not (out / name).is_file() or (out / name).stat().st_size != size:
            raise ConfigError(f"{out} is damaged: {name} is missing or cut short; delete {out} and run again")
    return record


def _summary(record: dict[str, Any], out: Path, *, reused: bool) -> CorpusSummary:
    splits = {name: Split(**size) for name, size in record["splits"].items()}
    return CorpusSummary(out=out, skipped=record["skipped"], reused=reused, **splits)


def _difference(record: dict[str, Any], documents: Iterable[Document], options: Options) -> str:
    """How the corpus at hand differs from the one asked for, in a few words."""
    wanted = json.loads(json.dumps(dataclasses.asdict(options)))
    for name, value in wanted.items():
        if record["options"].get(name) != value:
            return f"its {name} is {record['options'].get(name)}, not {value}"
    before: dict[str, str] = record["documents"]
    now = {document.path: document.digest for document in documents}
    counts = {
        "added": len(now.keys() - before.keys()),
        "removed": len(before.keys() - now.keys()),
        "changed": sum(before[path] != now[path] for path in now.keys() & before.keys()),
    }
    found = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"files: {found}" if found else "made by another version of this command"


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[Path]:
    """An empty folder that no other process uses, removed afterwards unless it was renamed."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Whoever held it before has renamed or removed it, so that this may be another folder by now.
        if folder.exists() and os.path.samestat(os.fstat(lock), os.stat(folder)):
            break
        os.close(lock)
    try:
        for leftover in folder.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield folder
    finally:
        if folder.exists() and os.path.samestat(os.fstat(lock), os.stat(folder)):
            shutil.rmtree(folder)
        os.close(lock)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `maxtext-nvfp4 corpus`."""
    default = Options()
    parser.add_argument(
        "paths",
        metavar="PATH",
        type=Path,
        nargs="*",
        help="files and folders of UTF-8 text (default: the sources of Python's standard library)",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--vocab-size",
        metavar="N",
        type=int,
        default=default.vocab_size,
        help="pieces of the tokenizer; at most MaxText's vocab_size (default: %(default)s)",
    )
    parser.add_argument(
        "--holdout",
        metavar="SHARE",
        type=float,
        default=default.holdout,
        help="share of the files kept for validation (default: %(default)s)",
    )
    parser.add_argument(
        "--record-tokens",
        metavar="N",
        type=int,
        default=default.record_tokens,
        help="longest record in tokens; at most MaxText's max_target_length (default: %(default)s)",
    )
    parser.add_argument(
        "--exclude",
        metavar="PATTERN",
        action="append",
        help="shell pattern of file and folder names to leave out, as often as needed "
        f"(default: {' '.join(EXCLUDE)}; more for the standard library)",
    )
    parser.add_argument(
        "--keep-tables", action="store_true", help="keep files in which a fifth of the words hold a digit"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `maxtext-nvfp4 corpus`.

    Args:
      args: What `add_arguments` declared.

    Returns:
      Exit status 0.

    Raises:
      ConfigError: See `build`.
    """
    exclude = EXCLUDE if args.paths else STDLIB_EXCLUDE
    options = Options(
        vocab_size=args.vocab_size,
        holdout=args.holdout,
        record_tokens=args.record_tokens,
        exclude=tuple(args.exclude) if args.exclude else exclude,
        keep_tables=args.keep_tables,
    )
    print(build(args.paths or [Path(sysconfig.get_paths()["stdlib"])], args.out, options))
    sys.stdout.flush()
    return 0
