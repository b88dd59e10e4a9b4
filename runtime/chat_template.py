"""Messages to prompt text and answer text back to reasoning and answer, in DeepSeek-V4's chat encoding.

Owns the role tokens' names, the grammar of turns and the reasoning-effort texts of both releases. Text only: token ids are
`tokenizer.py`'s, and tools, tool results and response formats are not encoded here. The authority is the model repository's
`encoding/encoding_dsv4.py` (MIT); the grammar is restated in the fact sheet, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.errors import CheckpointError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK_START = "<think>"
THINK_END = "</think>"

ROLES = ("system", "user", "assistant", "developer", "latest_reminder")
ASKING_ROLES = ("user", "developer")  # the turns that the assistant answers

# Protocol constants: the model was trained on exactly these bytes (SHA-256 in the test). Origin: the reasoning-effort texts
# of `encoding/encoding_dsv4.py`, MIT licence; the first from the April release, the second added by 0731.
ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause,"
    " rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative,"
    " and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the"
    " problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying"
    " cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that"
    " no assumption remains unchecked and no error remains undiscovered.\n\n"
)

# 0731 moved every level down by one: its "high" is April's "max".
EFFORT_TEXTS = {
    "april": {"high": "", "max": ABSOLUTE_MAXIMUM},
    "0731": {"low": "", "high": ABSOLUTE_MAXIMUM, "max": BEYOND_MAXIMUM},
}
RELEASE_BY_DRAFT_STAGES = {0: "april", 1: "april", 3: "0731"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `reasoning` is what an assistant thought before `content`, without `</think>`."""

    role: str
    content: str
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"message role is {self.role!r}, expected one of {', '.join(ROLES)}")
        if self.reasoning and self.role != "assistant":
            raise ValueError(f"a {self.role} message has reasoning, expected it on assistant messages only")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation is encoded.

    `thinking` False is chat mode. `keep_reasoning` keeps the reasoning of every turn, as the model expects it once any
    message carries tools; otherwise only what follows the last user turn keeps it. `effort` None adds nothing in either
    release; chat mode checks it and adds nothing.
    """

    thinking: bool = False
    effort: str | None = None
    release: str = "april"
    keep_reasoning: bool = False

    def __post_init__(self) -> None:
        if self.release not in EFFORT_TEXTS:
            raise ValueError(f"release is {self.release!r}, expected one of {', '.join(EFFORT_TEXTS)}")
        efforts = EFFORT_TEXTS[self.release]
        if self.effort is not None and self.effort not in efforts:
            raise ValueError(
                f"reasoning effort is {self.effort!r}, expected one of {', '.join(efforts)} (release {self.release})"
            )

    @property
    def effort_text(self) -> str:
        """What stands between BOS and the first message."""
        if not self.thinking or self.effort is None:
            return ""
        return EFFORT_TEXTS[self.release][self.effort]


def release_of(num_draft_stages: int) -> str:
    """The release, "april" or "0731", of a checkpoint with so many draft stages.

    Args:
        num_draft_stages: Entries of `compress_ratios` beyond `num_hidden_layers`; 0 for a model without a draft.

    Raises:
        CheckpointError: A number that neither release has.
    """
    if num_draft_stages not in RELEASE_BY_DRAFT_STAGES:
        raise CheckpointError(
            f"config.json: compress_ratios has {num_draft_stages} entries beyond num_hidden_layers, expected 0 or 1 (April)"
            " or 3 (0731); use the config.json released with the weights"
        )
    return RELEASE_BY_DRAFT_STAGES[num_draft_stages]


def render_prompt(messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> str:
    """The text after which the model writes its answer: BOS, the effort text, the turns, and an opened assistant turn.

    BOS is part of the text: encode it without adding special tokens, or it stands twice. In chat mode, and with
    `keep_reasoning`, the text of a conversation is a prefix of the text of its continuation; otherwise in thinking mode
    it is not, because an earlier answer loses its reasoning and opens with `</think>`.

    Raises:
        ValueError: The last message is not a user's or developer's, an assistant message does not directly follow one
            of those, or a latest_reminder does.
    """
    _require_last(messages, ASKING_ROLES, "a prompt")
    return _render(messages, options)


def render_transcript(messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> str:
    """The text of a finished conversation, ending in the last answer and EOS; for training texts and for scoring.

    Raises:
        ValueError: The last message is not an assistant's, or as in `render_prompt`.
    """
    _require_last(messages, ("assistant",), "a transcript")
    return _render(messages, options)


def split_answer(text: str, thinking: bool, finished: bool = False) -> tuple[str, str]:
    """(reasoning, answer) in the model's output so far; chat mode has no reasoning.

    Both only grow as `text` grows, so a caller may print what is new: a tail that could become `</think>` is held back
    until it does or does not, or until `finished`. Without any `</think>` all of the text is reasoning. A later
    `</think>` belongs to the answer.
    """
    if not thinking:
        return "", text
    reasoning, mark, answer = text.partition(THINK_END)
    if mark or finished:
        return reasoning, answer
    return reasoning[: len(reasoning) - _open_mark_chars(reasoning)], ""


def _open_mark_chars(text: str) -> int:
    """Length of the longest end of `text` that begins `</think>`."""
    lengths = range(len(THINK_END) - 1, 0, -1)
    return next((n for n in lengths if text.endswith(THINK_END[:n])), 0)


def _require_last(messages: Sequence[Message], roles: tuple[str, ...], what: str) -> None:
    got = f"a message with role {messages[-1].role!r}" if messages else "no message"
    if not messages or messages[-1].role not in roles:
        raise ValueError(f"{what} ends in {got}, expected one with role {' or '.join(roles)}")


def _render(messages: Sequence[Message], options: ChatOptions) -> str:
    turns = _merge_user_texts(messages)
    _check_order(turns)
    last_asking = max((i for i, turn in enumerate(turns) if turn.role in ASKING_ROLES), default=-1)
    parts = [BOS, options.effort_text]
    for i, turn in enumerate(turns):
        thinks = options.thinking and (options.keep_reasoning or i >= last_asking)
        answered = i + 1 == len(turns) or turns[i + 1].role == "assistant"
        parts.append(_render_turn(turn, thinks, answered))
    return "".join(parts)


def _render_turn(turn: Message, thinks: bool, answered: bool) -> str:
    """One turn; a user's also opens the answer that follows it, so that a prompt ends where generation begins."""
    if turn.role in ASKING_ROLES:
        # A developer turn before the last user turn stays. The official encoder leaves it out in thinking mode, which
        # would lose a caller's instructions without a word; the fact sheet treats it as a user turn, and so do we.
        opening = ASSISTANT + (THINK_START if thinks else THINK_END)
        return USER + turn.content + (opening if answered else "")
    if turn.role == "assistant":
        # A kept turn without reasoning still closes its mark: `<think></think>answer`.
        return (turn.reasoning + THINK_END if thinks else "") + turn.content + EOS
    return (LATEST_REMINDER if turn.role == "latest_reminder" else "") + turn.content


def _merge_user_texts(messages: Sequence[Message]) -> list[Message]:
    """The messages, consecutive user texts joined into one turn by an empty line, as the official encoder does."""
    turns: list[Message] = []
    for message in messages:
        if turns and message.role == turns[-1].role == "user":
            turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n\n{message.content}")
        else:
            turns.append(message)
    return turns


def _check_order(turns: list[Message]) -> None:
    """Refuses the orders for which the grammar has no text: an answer nobody opened, a reminder inside an open answer."""
    for before, turn in zip([None, *turns], turns, strict=False):
        follows_question = before is not None and before.role in ASKING_ROLES
        got = before.role if before is not None else "nothing"
        if turn.role == "assistant" and not follows_question:
            raise ValueError(f"an assistant message follows {got}, expected a user or developer message before it")
        if turn.role == "latest_reminder" and follows_question:
            raise ValueError(f"a latest_reminder message follows {got}, expected it before the message it belongs to")
