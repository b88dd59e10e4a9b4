"""When a tokens-per-second figure may be said: never without its text being sound. Owns the verdict, measures nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from runtime.junk import Finding
from runtime.junk_rules import JunkRules, token_classes
from runtime.tokenizer import token_bytes

THINKING = ("<think>", "</think>")


def invalid_reason(
    answer_ids: Sequence[int], eos_token_id: int, max_new_tokens: int, findings: Sequence[Finding]
) -> str | None:
    """Why the speed of this transcript says nothing; None if it ended at EOS or at its limit, without junk."""
    if findings:
        return f"junk in the text: {findings[0].message}"
    if eos_token_id in answer_ids[:-1]:
        return f"{len(answer_ids) - 1 - list(answer_ids).index(eos_token_id)} tokens after the end of the text"
    if len(answer_ids) < max_new_tokens and answer_ids[-1:] != [eos_token_id]:
        return "it was stopped before its end"
    return None


def answer_rules(tokenizer: Tokenizer, eos_token_id: int, thinking: bool, texts: Sequence[str] = ()) -> JunkRules:
    """The junk rules of an answer: every added token but EOS, and the marks of thinking where that is on, is misplaced.

    `texts` are what the user does not want to see; each counts wherever the reader would see it, within a word too.
    """
    allowed = THINKING if thinking else ()
    added = tokenizer.get_added_tokens_decoder()  # the release marks few of its turn and tool marks as special
    misplaced = {token_id for token_id, token in added.items() if token.content not in allowed} - {eos_token_id}
    classes = token_classes(tokenizer)
    return JunkRules(
        misplaced_ids=frozenset(misplaced),
        texts=tuple(text.encode(errors="surrogateescape") for text in texts),
        token_bytes=_seen_bytes(tokenizer) if texts else (),
        filler_ids=classes.filler_ids,
        newline_ids=classes.newline_ids,
    )


def _seen_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Of each id; nothing of those that the detokenizer leaves out."""
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return tuple(b"" if token_id in special else own for token_id, own in enumerate(token_bytes(tokenizer)))
