"""Text to token ids and token ids back to streamed text, with the model directory's `tokenizer.json`.

Owns loading that file and the incremental detokeniser. The prompt's grammar is `chat_template.py`'s.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders

from runtime.errors import ArtifactError

TOKENIZER_FILE = "tokenizer.json"


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer in `directory`, without truncation or padding; None when it has no `tokenizer.json`.

    Raises:
        ArtifactError: The file cannot be read, is damaged, or is not a byte-level tokenizer.
    """
    path = directory / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise _unusable(path, " ".join(str(error).split())) from error
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise _unusable(path, f"its decoder is {type(tokenizer.decoder).__name__}, expected ByteLevel")
    # Either would change a prompt without a word; the runtime checks lengths against the context itself.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def require_tokenizer_in(directory: Path) -> Tokenizer:
    """As `load_tokenizer`, but a missing file is an ArtifactError too."""
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise missing_tokenizer(directory)
    return tokenizer


def missing_tokenizer(directory: Path) -> ArtifactError:
    """What to raise where text is to be read or written without one."""
    return ArtifactError(
        f"{directory / TOKENIZER_FILE}: file is missing, expected the model's tokenizer; copy it there"
        " (the Python API works on token ids without it)"
    )


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each id stands for, special tokens spelled out; empty for an id without a token."""
    spelled = _byte_alphabet()
    ids = range(max(tokenizer.get_vocab().values(), default=-1) + 1)
    return [_bytes_of(token, spelled) if (token := tokenizer.id_to_token(token_id)) else b"" for token_id in ids]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of `text`; nothing is added, so BOS is there only if the text says so.

    The names of role tokens in the text become those tokens, which is how a rendered prompt gets its turns. This holds
    for a name typed by a user too: like the official encoder, this one does not tell the program's role tokens from
    those inside a message, so text from an untrusted source can open a turn.
    """
    return tokenizer.encode(text, add_special_tokens=False).ids


class Detokenizer:
    """Turns one stream of token ids into text, piece by piece, at a cost per token that does not grow with the stream.

    The pieces joined equal `tokenizer.decode(ids, skip_special_tokens=True)`: tokens flagged special (EOS, BOS, padding)
    and ids without a token yield nothing; `</think>` is not flagged and stays visible. A character whose bytes are
    spread over several tokens comes out with its last one; bytes that are no UTF-8 become U+FFFD.

    Use one object a stream; `finish` ends it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._skipped_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_of_char = _byte_alphabet()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is incomplete."""
        token = None if token_id in self._skipped_ids else self._tokenizer.id_to_token(token_id)
        return "" if token is None else self._utf8.decode(_bytes_of(token, self._byte_of_char))

    def finish(self) -> str:
        """The rest of the text: U+FFFD for a character that the stream left incomplete, else empty."""
        return self._utf8.decode(b"", final=True)


def _bytes_of(token: str, byte_of_char: Mapping[str, int]) -> bytes:
    codes = [byte_of_char.get(char) for char in token]
    # Added tokens are stored as plain text: a character outside the alphabet (｜, ▁) gives them away.
    return token.encode() if None in codes else bytes(code for code in codes if code is not None)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    A byte that is a visible Latin-1 character stands for itself; the others take U+0100, U+0101, … in order (GPT-2).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


def _unusable(path: Path, found: str) -> ArtifactError:
    return ArtifactError(
        f"{path}: not a usable tokenizer ({found}), expected the byte-level tokenizer.json released with the model;"
        " fetch that file again"
    )
