"""Text files to documents, and documents to the token sequences that a model reads. Owns no model and writes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from runtime.chat_template import BOS
from runtime.errors import StrawError
from runtime.tokenizer import encode

LINES = ".jsonl"  # the suffix of a file with one document a line; any other is one document


@dataclass(frozen=True, slots=True)
class SourceText:
    """One document: its file's name, with the line where there are several, and its text, which is not empty."""

    name: str
    text: str


def read_documents(paths: Iterable[Path]) -> Iterator[SourceText]:
    """The documents of all files in order, one in memory at a time; of a line of .jsonl the text is its key "text".

    Raises:
        StrawError: A file cannot be read, is not UTF-8, or a document is empty or no JSON object with a text.
    """
    for path in paths:
        try:
            yield from (
                _read_lines(path) if path.suffix == LINES else [SourceText(path.name, _text(path, path.read_bytes()))]
            )
        except OSError as cause:
            raise StrawError(
                f"{path}: cannot be read ({cause.strerror}), expected a text file; name another --text"
            ) from None


def _read_lines(path: Path) -> Iterator[SourceText]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield SourceText(f"{path.name}:{number}", _checked(where, _line_text(where, _decoded(where, line))))
        if not file.tell():
            raise StrawError(f"{path}: empty, expected one document a line; name another --text")


def _line_text(where: str, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise StrawError(f'{where}: no JSON object with "text", expected one a line; correct the file')
    return text


def _text(path: Path, content: bytes) -> str:
    return _checked(str(path), _decoded(str(path), content))


def _decoded(where: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as cause:
        raise StrawError(
            f"{where}: byte {cause.start:,} is not UTF-8, expected a text file; convert it or name another --text"
        ) from None


def _checked(where: str, text: str) -> str:
    broken = any("\ud800" <= char <= "\udfff" for char in text)  # JSON can spell them, no tokenizer takes them
    if broken or not text.strip():
        found = "half a surrogate pair" if broken else "empty"
        raise StrawError(f"{where}: {found}, expected a document in words; remove it or name another --text")
    return text


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file by its name and number, so that a resumed run knows whether its text is the same.

    Raises:
        StrawError: A file cannot be read.
    """
    found = {}
    for number, path in enumerate(paths):
        try:
            with path.open("rb") as file:
                found[f"{number}:{path.name}"] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as cause:
            raise StrawError(
                f"{path}: cannot be read ({cause.strerror}), expected a text file; name another --text"
            ) from None
    return found


def token_sequences(tokenizer: Tokenizer, text: str, longest: int) -> list[list[int]]:
    """The token ids of `text` in sequences of at most `longest`, each after its own BOS, which counts.

    Raises:
        StrawError: The tokenizer has no BOS, or leaves nothing of the text.
    """
    bos, ids = encode(tokenizer, BOS), encode(tokenizer, text)
    if len(bos) != 1 or not ids:
        raise StrawError(
            f"tokenizer: {len(bos)} tokens for BOS, {len(ids)} for a text, expected 1 and some; fetch it again"
        )
    return [bos + ids[start : start + longest - 1] for start in range(0, len(ids), longest - 1)]
