"""When text is junk: the rules, their numbers, and the classes of tokens they ask about. Looks at no text; `junk` applies them.

A table, a list or a block of code is nearly periodic too. Three things tell a loop from it: how many tokens it lasts, how much
is new in each copy (a token that departs once is a variation; one that departs in every copy is a column), and whether the
copies are lines, of which more are needed. Defaults are measured: tests/runtime/test_junk.py has the clean text they hold for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from runtime.errors import StrawError


@dataclass(frozen=True, slots=True)
class JunkRules:
    """When text is junk. Lengths are tokens, a run of one filler token counting as one; shares are of 1."""

    misplaced_ids: frozenset[int] = frozenset()  # special tokens with no business inside an answer
    patterns: tuple[tuple[int, ...], ...] = ()  # sequences of ids that the user adds
    texts: tuple[bytes, ...] = ()  # in UTF-8, wherever they appear, however they are cut into tokens
    token_bytes: tuple[bytes, ...] = ()  # of each id as the reader sees it; where there are `texts`
    filler_ids: frozenset[int] = frozenset()  # blanks and the stuff of rulers; see `token_classes`
    newline_ids: frozenset[int] = frozenset()
    max_period: int = 128
    exact_tokens: int = 64  # a loop in which nothing is new lasts so long after its second copy; one with variations
    loop_tokens: int = 60  # and period p lasts p + this after its first copy,
    loop_periods: float = 2.4  # and so many periods
    novel_share: float = 1 / 12  # of its tokens differ from the copies before
    row_factor: float = 2.0  # copies that contain a newline and vary last so many times longer,
    row_novel_share: float = 0.03  # with less that is new in them,
    row_columns: float = 0.3  # and so many tokens per copy that differ each time (elsewhere one)
    long_rows_tokens: int = 1024  # or as long as this, with as much that is new as elsewhere
    filler_run: int = 256  # of one filler token, in tokens
    trigram_window: int = 192
    trigram_share: float = 0.92  # of the window's trigrams occurred before within it

    def check(self) -> None:
        """Nothing, if the rules can be applied.

        Raises:
            StrawError: A pattern is empty, or a length is below 1.
        """
        if not all(self.patterns) or not all(self.texts):
            raise StrawError("junk: got an empty text or sequence, expected some; remove it (--junk)")
        for name in ("max_period", "exact_tokens", "loop_tokens", "long_rows_tokens", "filler_run", "trigram_window"):
            if getattr(self, name) < 1:
                raise StrawError(f"junk rules: {name} is {getattr(self, name)}, expected 1 or more; raise it")


class TokenClasses(NamedTuple):
    """`filler_ids` and `newline_ids` of a tokenizer."""

    filler_ids: frozenset[int]
    newline_ids: frozenset[int]


def token_classes(tokenizer: Tokenizer) -> TokenClasses:
    """The ids of blanks and ruler characters (one kind of ASCII mark, blanks beside it), and of what contains a newline."""
    ids = range(tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[token_id] for token_id in ids], skip_special_tokens=False)
    filler = (token_id for token_id, text in zip(ids, texts, strict=True) if _is_filler(text))
    return TokenClasses(
        frozenset(filler), frozenset(token_id for token_id, text in zip(ids, texts, strict=True) if "\n" in text)
    )


def _is_filler(text: str) -> bool:
    marks = set(text) - set(" \t\r\n")
    return bool(text) and text.isascii() and len(marks) <= 1 and not any(mark.isalnum() for mark in marks)
