"""A conversation over a Session: which token ids each turn sends, and the loop that talks with a person.

Owns turns. An answer's way to the terminal is `answering`'s, the grammar of a turn is `chat_template`'s, the tokens are the session's.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer

from runtime.answering import AnswerStream, Sampling
from runtime.chat_template import ChatOptions, Message, render_prompt, render_transcript, split_answer
from runtime.engine import Session
from runtime.errors import ContextFullError, StrawError
from runtime.prompt_file import checked_prompt
from runtime.tokenizer import Detokenizer, encode, missing_tokenizer

HELP = "/reset forgets the conversation, /stats prints counters, Ctrl-C stops an answer, Ctrl-D or /exit ends"


class Conversation:
    """Turns of one conversation, as messages and as the ids that the model has seen or written."""

    def __init__(self, tokenizer: Tokenizer, options: ChatOptions, system: str = "") -> None:
        self._tokenizer, self._options = tokenizer, options
        self._opening = [Message("system", system)] if system else []
        self.reset()

    def reset(self) -> None:
        """Back to the system text alone."""
        self.messages = list(self._opening)
        self._transcript, self._ids = "", list[int]()  # what is answered so far: as text and as ids

    def ask(self, text: str) -> list[int]:
        """The prompt ids of the whole conversation with `text` as the next user turn.

        Answers keep the ids that the model wrote; their text encoded anew may give others. Where the encoding of earlier
        turns changes (reasoning that is dropped), all of it is encoded anew.
        """
        self.messages.append(Message("user", text))
        prompt = render_prompt(self.messages, self._options)
        if self._ids and prompt.startswith(self._transcript):
            return self._ids + encode(self._tokenizer, prompt[len(self._transcript) :])
        return encode(self._tokenizer, prompt)

    def withdraw(self) -> None:
        """Takes the last `ask` back: it got no answer, and would weigh on every later turn."""
        self.messages.pop()

    def answered(self, prompt_ids: list[int], answer_ids: list[int], eos_token_id: int) -> None:
        """Records the answer to the last `ask`, complete or stopped."""
        detokenizer = Detokenizer(self._tokenizer)
        text = "".join(map(detokenizer.push, answer_ids)) + detokenizer.finish()
        reasoning, content = split_answer(text, self._options.thinking, finished=True)
        self.messages.append(Message("assistant", content, reasoning))
        self._transcript = render_transcript(self.messages, self._options)
        self._ids = prompt_ids + answer_ids + ([] if answer_ids[-1:] == [eos_token_id] else [eos_token_id])


def require_tokenizer(session: Session) -> Tokenizer:
    """The session's tokenizer.

    Raises:
        ArtifactError: The model has none, so it cannot take or give text.
    """
    if session.tokenizer is None:
        raise missing_tokenizer(session.directory)
    return session.tokenizer


@contextmanager
def interrupts_between_tokens(session: Session) -> Iterator[None]:
    """Within: the first Ctrl-C waits for the token under way to end, so that nothing is lost; a second one does not wait."""
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        session.interrupt()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def answer(session: Session, conversation: Conversation, text: str, sampling: Sampling) -> None:
    """Streams the answer to `text` to stdout and its timing to stderr, and records it; Ctrl-C ends it early."""
    prompt_ids = conversation.ask(text)
    stream = AnswerStream(session, require_tokenizer(session), sampling, sys.stdout, sys.stderr)
    note = ""
    try:
        with interrupts_between_tokens(session):
            stream.run(prompt_ids)
    except KeyboardInterrupt:
        note = "stopped; the conversation is kept\n"
        sys.stdout.write("\n")
    except ContextFullError as full:
        note = f"{full}\n"
        sys.stdout.write("\n")
    if stream.answer_ids:
        conversation.answered(prompt_ids, stream.answer_ids, session.config.eos_token_id)
    else:
        conversation.withdraw()
    sys.stderr.write(f"{note}{stream.line(len(prompt_ids))}\n")


def converse(session: Session, conversation: Conversation, sampling: Sampling) -> None:
    """Reads user turns from stdin until it ends, answers each; commands begin with a slash."""
    sys.stderr.write(f"{HELP}\n")
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
            text = checked_prompt(text, "stdin") if text else text
        except (EOFError, KeyboardInterrupt):
            sys.stderr.write("\n")
            return
        except UnicodeDecodeError as error:
            raise StrawError(f"stdin: not UTF-8 text ({error.reason}), expected text; check the input") from error
        if text == "/exit":
            return
        if text:
            _turn(session, conversation, sampling, text)


def _turn(session: Session, conversation: Conversation, sampling: Sampling, text: str) -> None:
    if text == "/reset":
        conversation.reset()
        session.reset()
    elif text == "/stats":
        sys.stderr.write(json.dumps(session.stats(), indent=1) + "\n")
    elif text.startswith("/"):
        sys.stderr.write(f"{text}: not a command; {HELP}\n")
    else:
        answer(session, conversation, text, sampling)
