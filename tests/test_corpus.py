"""Corpora from tiny folders: what is in them, that they repeat, and that MaxText reads them."""

import argparse
import concurrent.futures
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxtext_nvfp4 import corpus, documents
from maxtext_nvfp4.corpus import Options, build
from maxtext_nvfp4.errors import ConfigError

OPTIONS = Options(vocab_size=400, holdout=0.2, record_tokens=32)
WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "small",
    "file",
    "of",
    "words",
    "and",
    "learns",
    "which",
    "comes",
    "next",
    "because",
    "order",
    "is",
    "not",
    "chance",
]


def write_texts(folder: Path, count: int = 12, seed: int = 0) -> Path:
    choose = random.Random(seed)
    for index in range(count):
        file = folder / f"part{index % 3}" / f"text{index}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (" ".join(choose.choices(WORDS, k=8)) for _ in range(30))
        file.write_text("\n".join(lines) + f"\nfile {'x' * index} ends\n")
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def built(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "corpus"
    build([texts], out, OPTIONS)
    return out


@pytest.fixture(scope="module")
def tokenizer(built: Path):
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(built / corpus.TOKENIZER))


def records(out: Path, split: str) -> list[str]:
    import tensorflow_datasets as tfds

    dataset = tfds.builder(f"{corpus.DATASET}:{corpus.VERSION}", data_dir=out).as_dataset(split=split)
    return [example["text"].decode() for example in tfds.as_numpy(dataset)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_records_hold_whole_files_on_one_side_each(texts: Path, built: Path, tokenizer) -> None:
    record = json.loads((built / corpus.RECORD).read_text())
    held_out = set(record["validation_files"])
    files = {str(p.relative_to(texts)): p.read_text() for p in texts.rglob("*.txt")}
    assert 0 < len(held_out) < len(files) == 12
    for split in ("train", "validation"):
        parts = [text for path, text in files.items() if (path in held_out) == (split == "validation")]
        stored = records(built, split)
        assert sum(map(len, stored)) == sum(map(len, parts))
        assert all(any(one in part for part in parts) for one in stored)
        assert max(len(tokenizer.encode(one)) + 2 for one in stored) <= OPTIONS.record_tokens
        assert record["splits"][split]["records"] == len(stored)
        assert record["splits"][split]["bytes"] == sum(len(part.encode()) for part in parts)


def test_equal_inputs_give_equal_bytes(texts: Path, built: Path, tmp_path: Path) -> None:
    build([texts], tmp_path / "again", OPTIONS)
    assert contents(tmp_path / "again") == contents(built)


def test_rerun_on_a_finished_corpus_changes_nothing(texts: Path, built: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    summary = build([texts], built, OPTIONS)
    assert summary.reused
    assert str(summary).startswith(f"unchanged: {built}")
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before
    assert [path.name for path in built.parent.iterdir()] == ["corpus"]


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (Options(vocab_size=401, holdout=0.2, record_tokens=32), "its vocab_size is 400, not 401"),
        (Options(vocab_size=400, holdout=0.3, record_tokens=32), r"its holdout is 0\.2, not 0\.3"),
    ],
)
def test_other_options_are_refused(texts: Path, built: Path, options: Options, difference: str) -> None:
    with pytest.raises(ConfigError, match=rf"{difference}.*write another --out"):
        build([texts], built, options)


def test_other_files_are_refused(built: Path, tmp_path: Path) -> None:
    other = write_texts(tmp_path, 13)
    (other / "part0" / "text0.txt").write_text("other words\n" * 20)
    (other / "part1" / "text1.txt").unlink()
    with pytest.raises(ConfigError, match="files: 1 added, 1 removed, 1 changed"):
        build([other], built, OPTIONS)


def test_a_damaged_corpus_is_refused(texts: Path, built: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    (copy / corpus.TOKENIZER).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"damaged: tokenizer\.model is missing or cut short"):
        build([texts], copy, OPTIONS)


@pytest.mark.parametrize("name", ["notes.txt", corpus.RECORD])
def test_a_folder_that_is_no_corpus_is_left_alone(texts: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="is not a corpus"):
        build([texts], tmp_path, OPTIONS)
    assert contents(tmp_path) == {name: b"{}"}


def test_a_build_that_fails_leaves_nothing(texts: Path, tmp_path: Path, monkeypatch) -> None:
    def fail(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "_store", fail)
    with pytest.raises(KeyboardInterrupt):
        build([texts], tmp_path / "out", OPTIONS)
    assert not list(tmp_path.iterdir())


def test_a_build_that_was_killed_is_no_corpus_and_is_cleared_away(
    texts: Path, built: Path, tmp_path: Path
) -> None:
    partial = tmp_path / ".out.partial"
    (partial / "corpus").mkdir(parents=True)
    (partial / corpus.TOKENIZER).write_bytes(b"half")
    assert not build([texts], tmp_path / "out", OPTIONS).reused
    assert contents(tmp_path) == {f"out/{name}": content for name, content in contents(built).items()}


def test_two_builds_at_a_time_make_one_corpus(texts: Path, built: Path, tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(build, [texts], tmp_path / "out", OPTIONS) for _ in range(2)]
    assert sorted(one.result().reused for one in both) == [False, True]
    assert contents(tmp_path / "out") == contents(built)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def files_read(folder: Path, **kwargs) -> tuple[list[str], dict[str, int]]:
    found, left_out = documents.read(
        [folder], **{"exclude": documents.EXCLUDE, "keep_tables": False, **kwargs}
    )
    return [document.path for document in found], dict(left_out)


def test_only_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("print('good morning')\n")
    (tmp_path / "copy.py").write_text("print('good morning')\n")
    (tmp_path / "latin.txt").write_bytes("füße".encode("latin-1"))
    (tmp_path / "zeros.bin").write_bytes(b"text\0text")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "table.py").write_text(
        "".join(f"    0x{i:04x}: 0x{i + 7:04x},  # LETTER\n" for i in range(50))
    )
    (tmp_path / ".hidden").write_text("hidden words")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "note.txt").write_text("cached words")
    (tmp_path / "link.py").symlink_to(tmp_path / "good.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    paths, left_out = files_read(tmp_path)
    assert paths == ["copy.py"]
    assert left_out == {
        "binary": 1,
        "copies of another file": 1,
        "not UTF-8": 1,
        "tables of numbers": 1,
        "without words": 1,
    }
    assert files_read(tmp_path, keep_tables=True)[0] == ["copy.py", "table.py"]
    assert files_read(tmp_path, exclude=["*.py", ".*"], keep_tables=True)[0] == ["__pycache__/note.txt"]


def test_a_file_too_long_is_left_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_FILE", 8)
    (tmp_path / "long.txt").write_text("many words")
    assert files_read(tmp_path) == ([], {"longer than 0 MiB": 1})


def test_the_corpus_does_not_read_itself(texts: Path, tmp_path: Path) -> None:
    folder = write_texts(tmp_path)
    build([folder], folder / "out", OPTIONS)
    assert build([folder], folder / "out", OPTIONS).reused


def test_a_file_keeps_its_side_when_others_come_and_go(tmp_path: Path) -> None:
    def held_out(count: int) -> set[str]:
        found, _ = documents.read([write_texts(tmp_path, count)], exclude=(), keep_tables=False)
        return {document.path for document in documents.hold_out(found, 0.3)[1]}

    few, many = held_out(20), held_out(60)
    assert few == {path for path in many if int(path.split("text")[1].split(".")[0]) < 20}
    assert len(many) == pytest.approx(18, abs=8)


@pytest.mark.parametrize(("share", "expected"), [(1e-9, 1), (1 - 1e-9, 11)])
def test_both_sides_get_a_file(texts: Path, share: float, expected: int) -> None:
    found, _ = documents.read([texts], exclude=(), keep_tables=False)
    assert len(documents.hold_out(found, share)[1]) == expected


any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=any_text)
def test_the_tokenizer_gives_any_text_back(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.one_of(any_text, st.text("ab \n", min_size=50)), tokens=st.integers(4, 40))
def test_cutting_loses_nothing_and_keeps_the_limit(tokenizer, text: str, tokens: int) -> None:
    parts = documents.cut(text, tokenizer, tokens)
    assert "".join(parts) == text
    assert all(len(tokenizer.encode(part)) <= tokens for part in parts)


def test_cuts_fall_on_line_ends(tokenizer) -> None:
    text = "the model reads a small file\n" * 20
    assert all(part.endswith("\n") for part in documents.cut(text, tokenizer, 30))


def test_special_pieces_and_bytes(tokenizer) -> None:
    ids = (tokenizer.pad_id(), tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.unk_id())
    assert ids == (corpus.PAD, corpus.BOS, corpus.EOS, corpus.UNK)
    assert tokenizer.vocab_size() == OPTIONS.vocab_size
    assert corpus.UNK not in tokenizer.encode("füße 漢字 🙂 \x00\x01\r\n\t")


def test_mistakes_are_named(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing: no such file or folder"):
        build([texts, tmp_path / "missing"], tmp_path / "out", OPTIONS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no text files"):
        build([tmp_path / "empty"], tmp_path / "out", OPTIONS)
    (tmp_path / "empty" / "one.txt").write_text("one file")
    with pytest.raises(ConfigError, match=r"only one text file, one\.txt"):
        build([tmp_path / "empty"], tmp_path / "out", OPTIONS)
    with pytest.raises(ConfigError, match=r"characters of text cannot make .* 5000 pieces: .* at most"):
        build([texts], tmp_path / "out", Options(vocab_size=5000))
    with pytest.raises(ConfigError, match="its characters alone need"):
        build([texts], tmp_path / "out", Options(vocab_size=270))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    "mistake", [{"vocab_size": 260}, {"holdout": 0.0}, {"holdout": 1.0}, {"record_tokens": 7}]
)
def test_options_are_checked(mistake: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(mistake))):
        Options(**mistake)  # type: ignore[arg-type]


def test_command(texts: Path, built: Path, capsys) -> None:
    parser = argparse.ArgumentParser()
    corpus.add_arguments(parser)
    arguments = ["--vocab-size", "400", "--holdout", "0.2", "--record-tokens", "32", "--out"]
    assert corpus.run(parser.parse_args([str(texts), *arguments, str(built)])) == 0
    said = capsys.readouterr().out
    assert "unchanged" in said
    assert f"tokenizer_path={built}/tokenizer.model" in said


def batches(built: Path, **overrides) -> Iterator[dict]:
    """MaxText's own training batches, as numpy arrays."""
    import numpy as np
    from jax.sharding import Mesh
    from maxtext.configs import pyconfig
    from maxtext.input_pipeline.input_pipeline_interface import create_data_iterator
    from maxtext.utils import maxtext_utils

    demo = Path(__file__).parent.parent / "configs" / "demo-cpu.yml"
    config = pyconfig.initialize(
        ["", str(demo)],
        quantization="",
        dataset_path=str(built),
        tokenizer_path=str(built / corpus.TOKENIZER),
        base_output_directory="/nowhere",
        enable_checkpointing=False,
        vocab_size=OPTIONS.vocab_size,
        max_target_length=OPTIONS.record_tokens,
        **overrides,
    )
    mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    train, _ = create_data_iterator(config, mesh)
    try:
        for batch in train:
            yield {name: np.asarray(value) for name, value in batch.items()}
    finally:
        train.local_iterator = train.dataloader = None  # MaxText stumbles over grain's in its destructor


@pytest.mark.parametrize(
    "pipeline",
    [
        {"dataset_type": "tfds"},
        {"dataset_type": "grain", "grain_file_type": "tfrecord", "grain_worker_count": 0},
    ],
    ids=["tfds", "grain"],
)
def test_maxtext_reads_the_corpus(built: Path, tokenizer, pipeline: dict) -> None:
    stored = {one: tokenizer.encode(one) for one in records(built, "train")}
    expected = sum(map(len, stored.values()))
    seen = 0
    for batch in batches(built, num_epoch=1, **pipeline):
        assert batch["inputs"].shape == (8, OPTIONS.record_tokens)
        seen += int((batch["targets_segmentation"] != 0).sum())
        for row, segments in zip(batch["inputs"], batch["inputs_segmentation"], strict=True):
            for segment in range(1, segments.max() + 1):
                ids = [int(i) for i in row[segments == segment] if i not in (corpus.BOS, corpus.EOS)]
                assert any(tokenizer.decode(ids) in one for one in stored)
    assert seen > 0.8 * expected
