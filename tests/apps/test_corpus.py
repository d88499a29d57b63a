"""Corpus folders: what goes in comes out, whatever the number of workers; bad input is refused."""

import hashlib
import json
import os
import shutil
import stat
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from pith_apps.corpus import (
    END_OF_TEXT,
    Corpus,
    open_tokenizer,
    prepare_standard_library,
    standard_library_files,
    tokenize_files,
    train_tokenizer,
    unigram_entropy,
)
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "bpe"
    train_tokenizer(standard_library_files()[0], folder, vocab_size=512, max_bytes=200_000)
    return folder


def word_tokenizer(folder: Path, words: dict[str, int], eos: str | None) -> Path:
    folder.mkdir()
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def some_files(folder: Path) -> list[Path]:
    texts = ["def f(x):\r\n\treturn 'ä€😀'\n", "", f"a {END_OF_TEXT} b", "x = 1\n" * 3000, "\n"]
    for number, text in enumerate(texts):
        (folder / f"{number}.py").write_bytes(text.encode())
    lines = [json.dumps({"text": f"line {n} {'word ' * n}", "id": n}) for n in range(200)]
    (folder / "many.jsonl").write_text("\n".join(lines) + "\n\n")
    return [*sorted(folder.glob("*.py")), folder / "many.jsonl"]


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_documents_come_back_and_workers_change_nothing(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pith_apps.corpus.BATCH_CHARACTERS", 5000)
    (tmp_path / "in").mkdir()
    files = some_files(tmp_path / "in")
    meta = tokenize_files(files, tokenizer, tmp_path / "one")
    tokenize_files(files, tokenizer, tmp_path / "three", num_workers=3)
    assert read_bytes(tmp_path / "one") == read_bytes(tmp_path / "three")
    assert sorted(read_bytes(tmp_path / "one")) == ["documents.npy", "meta.json", "tokens.npy"]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["in", "one", "three"]

    corpus = Corpus.open(tmp_path / "one", 512)
    written = corpus.tokens.tobytes() + corpus.documents.tobytes()
    assert meta.sha256 == hashlib.sha256(written).hexdigest()
    opened, eos = open_tokenizer(tokenizer)
    texts = [path.read_bytes().decode() for path in files[:-1]]
    texts += [json.loads(line)["text"] for line in files[-1].read_text().splitlines() if line]
    texts = [text for text in texts if text]
    assert meta.num_documents == len(texts) == len(corpus.documents) - 1
    assert meta.num_empty_documents == 1
    assert np.array_equal(np.where(corpus.tokens == eos)[0] + 1, corpus.documents[1:])
    for text, start, end in zip(texts, corpus.documents, corpus.documents[1:], strict=False):
        ids = corpus.tokens[start : end - 1].tolist()
        assert opened.decode(ids, skip_special_tokens=False) == text


def test_folder_input_is_every_text_file_below_it_in_order(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("bbb")
    (tmp_path / "in" / "deep" / "a.py").write_text("aaa")
    for name in ("image.png", "b.md", "deep/a.md", "README"):
        (tmp_path / "in" / name).write_bytes(b"\x89")
    meta = tokenize_files([tmp_path / "in"], tokenizer, tmp_path / "out")
    skipped = f"{tmp_path / 'in'}: skipped 4 file(s) of .md, .png, no suffix\n"
    assert capsys.readouterr().out == skipped
    files = [tmp_path / "in" / "b.txt", tmp_path / "in" / "deep" / "a.py"]
    assert meta == tokenize_files(files, tokenizer, tmp_path / "same")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, "uint16"), (151_936, "uint32")])
def test_ids_fit_the_dtype(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    # As uint16, 151645 would come back as 20573 (transformers#2825).
    words = {"?": 0, "<eos>": 1, "last": min(151_645, vocab_size - 1), "hole": vocab_size - 1}
    if words["last"] == vocab_size - 1:
        del words["hole"]
    folder = word_tokenizer(tmp_path / "words", words, "<eos>")
    (tmp_path / "a.txt").write_text("last last\n")
    meta = tokenize_files([tmp_path / "a.txt"], folder, tmp_path / "out")
    corpus = Corpus.open(tmp_path / "out", vocab_size)
    expected = [words["last"]] * 2 + [1]
    assert corpus.tokens.tolist() == expected
    assert (corpus.tokens.dtype.name, meta.vocab_size, meta.max_id) == (
        dtype,
        vocab_size,
        expected[0],
    )
    with pytest.raises(ValueError, match=rf"{meta.max_id}.*vocab_size {meta.max_id}"):
        Corpus.open(tmp_path / "out", meta.max_id)


def test_missing_eos_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "words", {"?": 0, "a": 1, "<eos>": 2}, None)
    (tmp_path / "in.txt").write_text("a")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no eos_token"):
        tokenize_files([tmp_path / "in.txt"], folder, tmp_path / "out")
    with pytest.raises(ValueError, match="'</s>' is not in the vocabulary"):
        tokenize_files([tmp_path / "in.txt"], folder, tmp_path / "out", eos_token="</s>")
    with pytest.raises(ValueError, match=r"tokenizer.json"):
        tokenize_files([tmp_path / "in.txt"], tmp_path, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    meta = tokenize_files([tmp_path / "in.txt"], folder, tmp_path / "out", eos_token="<eos>")
    assert (meta.eos_id, meta.num_tokens) == (2, 2)


@pytest.mark.parametrize(
    "settings",
    ["[1]", "null", "{", '{"eos_token": {"id": 2}}', '{"eos_token": 2}', '{"eos_token": ["a"]}'],
)
def test_malformed_tokenizer_config_is_refused(tmp_path: Path, settings: str) -> None:
    folder = word_tokenizer(tmp_path / "words", {"?": 0, "a": 1, "<eos>": 2}, None)
    (folder / "tokenizer_config.json").write_text(settings)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json(:| is not JSON)"):
        open_tokenizer(folder)
    assert open_tokenizer(folder, "<eos>")[1] == 2


def test_bad_inputs_are_named_together_and_leave_nothing(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "bad.jsonl").write_text('{"text": "ok"}\n{"content": "x"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "ok"}\n{"text"\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (tmp_path / "table.csv").write_text("a,b")
    out = tmp_path / "out"
    before = sorted(tmp_path.iterdir())
    for names, match in [
        (
            ["gone.py", "table.csv"],
            r"(?s)gone.py: no such file.*table.csv: give a file of .py, .txt",
        ),
        (["empty.txt"], "no document with any text"),
        (["latin.txt"], "latin.txt is not UTF-8"),
        (["half.jsonl"], r"half.jsonl:1 is not JSON: .*surrogates not allowed"),
        (["bad.jsonl"], r"bad.jsonl:2 has no text in field 'text'; it has \['content'\]"),
        (["broken.jsonl"], "broken.jsonl:2 is not JSON"),
        ([], "no input file"),
        (["empty.txt", "empty.txt"], "empty.txt: given 2 times"),
    ]:
        for output in (out, tmp_path / "new" / "deep" / "out"):
            with pytest.raises(ValueError, match=match):
                tokenize_files([tmp_path / name for name in names], tokenizer, output)
    with pytest.raises(ValueError, match="workers is 0"):
        tokenize_files([tmp_path / "bad.jsonl"], tokenizer, out, num_workers=0)
    with pytest.raises(ValueError, match="exists"):
        tokenize_files([tmp_path / "bad.jsonl"], tokenizer, tokenizer)
    with pytest.raises(ValueError, match="cannot tokenize") as error:
        tokenize_files([tmp_path / "gone.py"], tmp_path, tokenizer, num_workers=0)
    for part in ("gone.py: no such", "tokenizer.json", "workers is 0", f"{tokenizer} exists"):
        assert part in str(error.value)
    assert sorted(tmp_path.iterdir()) == before


def test_unreadable_file_is_refused(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything
        monkeypatch.setattr("os.access", lambda p, mode: bool(stat.S_IMODE(Path(p).stat().st_mode)))
    with pytest.raises(ValueError, match=r"secret.txt: not readable"):
        tokenize_files([path], tokenizer, tmp_path / "out")


def test_damaged_corpora_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("some words that make tokens " * 50)
    tokenize_files([tmp_path / "a.txt"], tokenizer, tmp_path / "good")
    good = read_bytes(tmp_path / "good")
    meta = asdict(Corpus.open(tmp_path / "good", 512).meta)
    tokens = np.load(tmp_path / "good" / "tokens.npy")

    def opens(**files: bytes | None) -> None:
        folder = tmp_path / "bad"
        folder.mkdir(exist_ok=True)
        for name in good:
            data = files.get(name.split(".")[0], good[name])
            (folder / name).unlink(missing_ok=True)
            if data is not None:
                (folder / name).write_bytes(data)
        before = read_bytes(folder)
        try:
            Corpus.open(folder, 512)
        finally:
            assert read_bytes(folder) == before

    opens()
    np.save(tmp_path / "wide.npy", tokens.astype(np.uint32))
    other = json.dumps({**meta, "num_tokens": len(tokens) - 1}).encode()
    for files, match in [
        ({"tokens": good["tokens.npy"][:-1]}, "truncated"),
        ({"tokens": b""}, "truncated"),
        ({"tokens": None}, "missing"),
        ({"documents": None}, "missing"),
        ({"documents": good["documents.npy"][:-8]}, "truncated"),
        ({"meta": None}, "no meta.json"),
        ({"meta": b"[1, 2]"}, "no meta.json of `pith tokenize`: "),
        ({"meta": b"{"}, "no meta.json of `pith tokenize`: "),
        ({"meta": b"null"}, "no meta.json of `pith tokenize`: "),
        *(
            ({"meta": json.dumps({**meta, name: value}).encode()}, f"tokenize`: {name} is")
            for name, value in {
                "max_id": None,
                "num_tokens": str(len(tokens)),
                "num_documents": -1,
                "vocab_size": 512.0,
                "eos_id": True,
                "dtype": "words",
                "sha256": 0,
            }.items()
        ),
        ({"meta": other}, "meta.json says"),
        ({"tokens": (tmp_path / "wide.npy").read_bytes()}, "uint32, meta.json says .* uint16"),
    ]:
        with pytest.raises(ValueError, match=match):
            opens(**files)
    with pytest.raises(ValueError, match=r"no meta.json"):
        Corpus.open(tmp_path / "nowhere", 512)


def test_opening_a_large_corpus_reads_nothing(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    tokenize_files([tmp_path / "a.txt"], tokenizer, tmp_path / "big")
    meta = asdict(Corpus.open(tmp_path / "big", 512).meta)
    length = 2_000_000_000
    np.lib.format.open_memmap(
        tmp_path / "big" / "tokens.npy", mode="w+", dtype=np.uint16, shape=(length,)
    )
    np.save(tmp_path / "big" / "documents.npy", np.array([0, length]))
    changed = {**meta, "num_tokens": length, "num_documents": 1}
    (tmp_path / "big" / "meta.json").write_text(json.dumps(changed))
    names = sorted(p.name for p in (tmp_path / "big").iterdir())
    start = time.perf_counter()
    corpus = Corpus.open(tmp_path / "big", 512)
    assert time.perf_counter() - start < 1
    assert len(corpus.tokens) == length
    assert not corpus.tokens.flags.writeable
    assert sorted(p.name for p in (tmp_path / "big").iterdir()) == names


def test_tokenizer_is_reproducible_and_transformers_opens_it(
    tmp_path: Path, tokenizer: Path
) -> None:
    from transformers import AutoTokenizer

    training, _ = standard_library_files()
    train_tokenizer(training, tmp_path / "again", vocab_size=512, max_bytes=200_000)
    assert read_bytes(tmp_path / "again") == read_bytes(tokenizer)
    # As in an exported folder: the model's configuration stands beside the tokenizer's files.
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "again" / "config.json").write_text(json.dumps(config))
    opened = AutoTokenizer.from_pretrained(tmp_path / "again")
    ours, eos = open_tokenizer(tokenizer)
    text = "def f(x):\r\n    return 'ä€😀'  # comment\n"
    assert opened(text)["input_ids"] == ours.encode(text).ids
    assert opened.decode(opened(text)["input_ids"]) == text
    assert (opened.eos_token, opened.eos_token_id) == (END_OF_TEXT, eos)


def test_vocabulary_larger_than_the_text_gives_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"vocab_size 4096: the text gives only \d+ entries"):
        train_tokenizer([tmp_path / "a.txt"], tmp_path / "out", vocab_size=4096)
    assert not (tmp_path / "out").exists()


def test_standard_library_corpus(tmp_path: Path) -> None:
    training, held_out = standard_library_files()
    assert set(training).isdisjoint(held_out)
    assert len(training) > 10 * len(held_out) > 50
    assert training == sorted(training)
    assert not any({"test", "site-packages"} & set(path.parts[-3:]) for path in training)
    start = time.perf_counter()
    prepare_standard_library(tmp_path, max_bytes=1_000_000)
    assert time.perf_counter() - start < 30
    corpus = Corpus.open(tmp_path / "training", 4096)
    assert corpus.meta.vocab_size == 4096
    assert corpus.meta.tokenizer_name == "tokenizer"
    assert len(Corpus.open(tmp_path / "held_out", 4096).tokens) > 50_000
    # A model that ignores context reaches about 79% of ln(4096).
    assert 0.7 < unigram_entropy(corpus.tokens) / np.log(4096) < 0.85
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    prepare_standard_library(tmp_path, max_bytes=1_000_000)
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_first_runs_at_once_share_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, others = Path.rename, []

    def rename_second(self: Path, target: Path) -> Path:
        if target.parent == tmp_path / "ours":  # the other run is first every time
            shutil.copytree(self, target)
            others.append(target.name)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_second)
    prepare_standard_library(tmp_path / "ours", vocab_size=512, max_bytes=200_000)
    assert others == ["tokenizer", "training", "held_out"]
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == sorted(others)
    assert len(Corpus.open(tmp_path / "ours" / "training", 512).tokens) > 10_000


def test_unigram_entropy_is_the_entropy() -> None:
    assert unigram_entropy(np.array([3, 3, 3, 3], dtype=np.uint16)) == 0
    assert unigram_entropy(np.array([0, 9, 5, 7] * 5)) == pytest.approx(np.log(4), rel=1e-12)
    expected = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    assert unigram_entropy(np.array([1, 0, 1, 1])) == pytest.approx(expected, rel=1e-12)
