"""Corpus folders: text files in, one memory-mapped array of token ids out.

The same bytes whatever machine or number of workers wrote them:

    tokens.npy     `[N]` uint16, or uint32 when the vocabulary has more than 65,536 ids
    documents.npy  `[D + 1]` int64, document d is `tokens[documents[d] : documents[d + 1]]`
    meta.json      `CorpusMeta`

Every document ends with the EOS id.

The trap: numpy wraps ids that do not fit: the dtype follows the tokenizer's largest id, not those
seen.
"""

import hashlib
import json
import os
import shutil
import sysconfig
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy
from pith_engine.violations import raise_violations, type_violations
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

END_OF_TEXT = "<|endoftext|>"
TEXT_SUFFIXES = (".py", ".txt", ".jsonl")
STANDARD_LIBRARY_VOCABULARY = 4096
"""Entries of the tokenizer that `data.standard_library` trains."""

LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings", "pydoc_data"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
}
"""What distributions leave out, or data."""

BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CorpusMeta:
    """Contents of `meta.json`."""

    tokenizer_name: str
    """Of its folder."""
    tokenizer_sha256: str
    """Of its `tokenizer.json`."""
    vocab_size: int
    """Largest id of the tokenizer plus one."""
    eos_id: int
    """Ends every document."""
    num_tokens: int
    """EOS ids included."""
    num_documents: int
    """Without the empty."""
    num_empty_documents: int
    """Left out."""
    max_id: int
    """Largest in `tokens.npy`."""
    dtype: Literal["uint16", "uint32"]
    """Of `tokens.npy`."""
    sha256: str
    """Of the raw token ids, then the raw document offsets."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Read-only maps of a folder's files."""

    tokens: numpy.ndarray
    """`[N]` uint16 or uint32."""
    documents: numpy.ndarray
    """`[D + 1]` int64."""
    meta: CorpusMeta
    """Its facts."""

    @staticmethod
    def open(folder: Path, vocab_size: int) -> "Corpus":
        """Map a folder for `vocab_size` ids, reading no token; ValueError if it does not fit."""
        try:
            fields = json.loads((folder / "meta.json").read_text())
            if faults := type_violations(fields, CorpusMeta, "") or [
                f"{k} is {v}, below 0" for k, v in fields.items() if type(v) is int and v < 0
            ]:
                raise ValueError("; ".join(faults))
        except (OSError, ValueError) as error:
            raise ValueError(f"corpus {folder}: no meta.json of `pith tokenize`: {error}") from None
        meta = CorpusMeta(**fields)
        if meta.max_id >= vocab_size:
            raise ValueError(
                f"corpus {folder} holds token id {meta.max_id}, outside the model's vocab_size "
                f"{vocab_size}: use the model's tokenizer, or vocab_size >= {meta.max_id + 1}"
            )
        tokens = _open_array(folder / "tokens.npy", meta.dtype, meta.num_tokens)
        documents = _open_array(folder / "documents.npy", "int64", meta.num_documents + 1)
        if documents[0] != 0 or documents[-1] != meta.num_tokens:
            raise ValueError(
                f"corpus {folder}: documents.npy spans {documents[0]}..{documents[-1]}, not "
                f"0..{meta.num_tokens}; tokenize again"
            )
        return Corpus(tokens=tokens, documents=documents, meta=meta)


def tokenize_files(
    inputs: list[Path],
    tokenizer_folder: Path,
    output: Path,
    *,
    eos_token: str | None = None,
    text_field: str = "text",
    num_workers: int = 1,
) -> CorpusMeta:
    """Tokenise files into the new corpus folder `output`; the rest: `TokenizeArguments`.

    A ValueError names all faults of the arguments, or a text's, and leaves no file.
    """
    files, faults = _list_files(inputs)
    if num_workers < 1:
        faults.append(f"workers is {num_workers}; it must be at least 1")
    if output.exists():
        faults.append(f"{output} exists: remove it or name another folder")
    try:
        tokenizer, eos_id = open_tokenizer(tokenizer_folder, eos_token)
    except ValueError as error:
        raise_violations([*faults, str(error)], "cannot tokenize")
        raise
    raise_violations(faults, "cannot tokenize")
    # Text that spells a special token is text, and a document of any length is whole.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab_size = _vocab_size(tokenizer)
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    ends, num_empty, max_id, digest = [0], 0, 0, hashlib.sha256()
    with _new_folder(output) as folder:
        batches = _batches(read_documents(files, text_field))
        with (folder / "tokens.npy").open("wb") as file:
            start = _write_header(file, dtype, 0)
            for encoding in _encode(batches, tokenizer, num_workers):
                if not len(encoding):
                    num_empty += 1
                    continue
                ids = numpy.array([*encoding.ids, eos_id], dtype=dtype)
                max_id = max(max_id, int(ids.max()))
                digest.update(ids.data)
                file.write(ids.data)
                ends.append(ends[-1] + len(ids))
            file.seek(0)  # the length is known now; numpy pads the header for that
            assert _write_header(file, dtype, ends[-1]) == start, "the header of a .npy file grew"
        if len(ends) == 1:
            raise ValueError(f"no document with any text in {len(files)} file(s): {files[0]} ...")
        documents = numpy.array(ends, dtype=numpy.int64)
        numpy.save(folder / "documents.npy", documents)
        digest.update(documents.data)
        meta = CorpusMeta(
            tokenizer_name=tokenizer_folder.resolve().name,
            tokenizer_sha256=tokenizer_hash(tokenizer_folder),
            vocab_size=vocab_size,
            eos_id=eos_id,
            num_tokens=ends[-1],
            num_documents=len(ends) - 1,
            num_empty_documents=num_empty,
            max_id=max_id,
            dtype=dtype,
            sha256=digest.hexdigest(),
        )
        (folder / "meta.json").write_text(json.dumps(asdict(meta), indent=2) + "\n")
    return meta


def standard_library_files() -> tuple[list[Path], list[Path]]:
    """The standard library's files to train on, and 1 in 16 held out by its path's hash."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = [], []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in LEFT_OUT and not f.startswith("config-")]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
            (training if digest[0] % 16 else held_out).append(path)
    if not training or not held_out:
        raise ValueError(f"no standard library source below {root}; name another corpus")
    return sorted(training), sorted(held_out)


def prepare_standard_library(
    folder: Path,
    *,
    vocab_size: int = STANDARD_LIBRARY_VOCABULARY,
    max_bytes: int = 5_000_000,
) -> None:
    """Make what is missing of `folder/{tokenizer,training,held_out}`, also beside another run."""
    training, held_out = standard_library_files()
    training = _spread(training, max_bytes)
    for name, files in {"tokenizer": training, "training": training, "held_out": held_out}.items():
        output = folder / name
        if output.exists():
            continue
        try:
            if name == "tokenizer":
                train_tokenizer(files, output, vocab_size=vocab_size)
            else:
                tokenize_files(files, folder / "tokenizer", output)
        except (OSError, ValueError):
            if not output.exists():  # else another run made it meanwhile
                raise


def train_tokenizer(
    files: list[Path], output: Path, *, vocab_size: int, max_bytes: int = 4_000_000
) -> None:
    """Train a byte-level BPE tokenizer (arXiv 1508.07909) on at most `max_bytes`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_documents(_spread(files, max_bytes), "text"), trainer)
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size}: the text gives only {size} entries; give more text or set "
            "it lower"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    with _new_folder(output) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def open_tokenizer(folder: Path, eos_token: str | None = None) -> tuple[Tokenizer, int]:
    """A Hugging Face folder's tokenizer and its EOS id."""
    tokenizer = _read_tokenizer(path := folder / "tokenizer.json")
    eos_token = named_eos_token(folder) if eos_token is None else eos_token
    if eos_token is None:
        raise ValueError(
            f"tokenizer_config.json in {folder} names no eos_token to end documents: pass eos_token"
        )
    if (eos_id := tokenizer.token_to_id(eos_token)) is None:
        raise ValueError(f"eos_token {eos_token!r} is not in the vocabulary of {path}")
    return tokenizer, eos_id


def raise_if_too_large(folder: Path, vocab_size: int) -> None:
    """Refuse a tokenizer with ids beyond the embedding."""
    path = folder / "tokenizer.json"
    if (size := _vocab_size(_read_tokenizer(path))) > vocab_size:
        raise ValueError(f"{path} has ids up to {size - 1}, but model.vocab_size is {vocab_size}")


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises the bare Exception
        raise ValueError(f"tokenizer {path}: {error}") from None


def _vocab_size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def named_eos_token(folder: Path) -> str | None:
    """The EOS token of a folder's `tokenizer_config.json`, if any."""
    path = folder / "tokenizer_config.json"
    try:
        token = json.loads(path.read_text()).get("eos_token")
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: not a JSON object: {error}") from None
    if isinstance(token, dict):
        token = token.get("content", token)
    if token is None or isinstance(token, str):
        return token
    raise ValueError(f"{path}: eos_token, or its content, is {token!r}, no text")


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 of a folder's `tokenizer.json`; ValueError if it has none."""
    try:
        return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    except OSError:
        raise ValueError(f"{folder} is no folder with a tokenizer.json; name one") from None


def unigram_entropy(tokens: numpy.ndarray) -> float:
    """Entropy of single tokens in nats: the best loss without context."""
    counts = numpy.bincount(tokens)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * numpy.log(shares)).sum())


def read_documents(files: list[Path], text_field: str) -> Iterator[str]:
    """Every document, line ends as in the file."""
    for path in tqdm(files, desc="documents", unit="file", disable=None, leave=False):
        try:
            if path.suffix != ".jsonl":
                yield path.read_bytes().decode("utf-8")
                continue
            with path.open(encoding="utf-8", newline="\n") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _text_of_line(line, text_field, f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def _spread(files: list[Path], max_bytes: int) -> list[Path]:
    """Every n-th file, about `max_bytes`."""
    size = sum(path.stat().st_size for path in files)
    return files[:: max(1, -(-size // max_bytes))]


def _text_of_line(line: str, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(text := record.get(text_field), str):
            text.encode()  # refuses half of a surrogate pair
            return text
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    found = sorted(record) if isinstance(record, dict) else type(record).__name__
    raise ValueError(f"{where} has no text in field {text_field!r}; it has {found}")


def _list_files(inputs: list[Path]) -> tuple[list[Path], list[str]]:
    """Text files among and below the inputs, in order; faults."""
    files, faults = [], [] if inputs else ["no input file given"]
    for path in inputs:
        below = sorted(p for p in (path, *path.rglob("*")) if p.is_file())
        found = [p for p in below if p.suffix in TEXT_SUFFIXES]
        others = sorted({p.suffix or "no suffix" for p in below}.difference(TEXT_SUFFIXES))
        if not path.exists():
            faults.append(f"{path}: no such file")
        elif not found:
            kinds = ", ".join(TEXT_SUFFIXES)
            faults.append(f"{path}: give a file of {kinds} or a folder that holds one")
        elif others:
            print(f"{path}: skipped {len(below) - len(found)} file(s) of {', '.join(others)}")
        files += found
    faults += [f"{path}: not readable" for path in files if not os.access(path, os.R_OK)]
    counts = Counter(map(os.path.abspath, files))
    faults += [f"{path}: given {n} times" for path, n in counts.items() if n > 1]
    return files, faults


@contextmanager
def _new_folder(output: Path) -> Generator[Path]:
    """A temporary folder that becomes `output` if the body succeeds."""
    existing = next(parent for parent in output.absolute().parents if parent.exists())
    temporary = existing / f".{output.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir()
    except OSError as error:
        raise ValueError(f"cannot write {output}: {error}") from None
    try:
        yield temporary
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _encode(
    batches: Iterator[list[str]], tokenizer: Tokenizer, num_workers: int
) -> Iterator[Encoding]:
    """Every document, in order; one batch more than workers is under way.

    In threads: `tokenizers` holds no Python lock while it encodes, nearly all of the time.
    """
    encode, pending = tokenizer.encode_batch_fast, deque[Future[list[Encoding]]]()
    with ThreadPoolExecutor(num_workers) as pool:
        for batch in batches:
            pending.append(pool.submit(encode, batch, add_special_tokens=False))
            if len(pending) > num_workers:
                yield from pending.popleft().result()
        for future in pending:
            yield from future.result()


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch, size = list[str](), 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _open_array(path: Path, dtype: str, length: int) -> numpy.ndarray:
    try:
        array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is missing or truncated, tokenize again: {error}") from None
    if array.dtype != numpy.dtype(dtype) or array.shape != (length,):
        raise ValueError(
            f"{path} holds {array.shape} {array.dtype}, meta.json says ({length},) {dtype}; "
            "tokenize again"
        )
    return array


def _write_header(file: BinaryIO, dtype: str, length: int) -> int:
    header = {"descr": numpy.dtype(dtype).str, "fortran_order": False, "shape": (length,)}
    numpy.lib.format.write_array_header_1_0(file, header)
    return file.tell()
