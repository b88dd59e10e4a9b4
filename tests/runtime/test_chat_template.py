"""The chat encoding against texts written out by hand from the fact sheet, section 4, and against their ids."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.chat_template import (
    ABSOLUTE_MAXIMUM,
    BEYOND_MAXIMUM,
    ChatOptions,
    Message,
    release_of,
    render_prompt,
    render_transcript,
    split_answer,
)
from runtime.errors import CheckpointError
from runtime.tokenizer import encode

SYSTEM = Message("system", "S")
HI = Message("user", "Hi")
ANSWER = Message("assistant", "A")
REASONED = Message("assistant", "A", reasoning="R")
QUESTION = Message("user", "Q")
DEVELOPER = Message("developer", "D")
REMINDER = Message("latest_reminder", "L")

CHAT = ChatOptions()
THINKING = ChatOptions(thinking=True)
KEPT = ChatOptions(thinking=True, keep_reasoning=True)

B = "<｜begin▁of▁sentence｜>"
E = "<｜end▁of▁sentence｜>"

# (messages, options, text)
PROMPTS = [
    ([HI], CHAT, f"{B}<｜User｜>Hi<｜Assistant｜></think>"),
    ([HI], THINKING, f"{B}<｜User｜>Hi<｜Assistant｜><think>"),
    ([HI], KEPT, f"{B}<｜User｜>Hi<｜Assistant｜><think>"),
    ([SYSTEM, HI], CHAT, f"{B}S<｜User｜>Hi<｜Assistant｜></think>"),
    ([SYSTEM, HI], THINKING, f"{B}S<｜User｜>Hi<｜Assistant｜><think>"),
    ([HI, ANSWER, QUESTION], CHAT, f"{B}<｜User｜>Hi<｜Assistant｜></think>A{E}<｜User｜>Q<｜Assistant｜></think>"),
    (
        [SYSTEM, HI, ANSWER, QUESTION],
        CHAT,
        f"{B}S<｜User｜>Hi<｜Assistant｜></think>A{E}<｜User｜>Q<｜Assistant｜></think>",
    ),
    (
        [SYSTEM, HI, REASONED, QUESTION],
        CHAT,
        f"{B}S<｜User｜>Hi<｜Assistant｜></think>A{E}<｜User｜>Q<｜Assistant｜></think>",
    ),
    (
        [SYSTEM, HI, REASONED, QUESTION],
        THINKING,
        f"{B}S<｜User｜>Hi<｜Assistant｜></think>A{E}<｜User｜>Q<｜Assistant｜><think>",
    ),
    (
        [SYSTEM, HI, REASONED, QUESTION],
        KEPT,
        f"{B}S<｜User｜>Hi<｜Assistant｜><think>R</think>A{E}<｜User｜>Q<｜Assistant｜><think>",
    ),
    (
        [HI, ANSWER, QUESTION],
        KEPT,
        f"{B}<｜User｜>Hi<｜Assistant｜><think></think>A{E}<｜User｜>Q<｜Assistant｜><think>",
    ),
    ([DEVELOPER], CHAT, f"{B}<｜User｜>D<｜Assistant｜></think>"),
    ([DEVELOPER, HI], THINKING, f"{B}<｜User｜>D<｜User｜>Hi<｜Assistant｜><think>"),
    ([REMINDER, HI], CHAT, f"{B}<｜latest_reminder｜>L<｜User｜>Hi<｜Assistant｜></think>"),
    ([HI, QUESTION], CHAT, f"{B}<｜User｜>Hi\n\nQ<｜Assistant｜></think>"),
    ([HI, QUESTION, Message("user", "")], CHAT, f"{B}<｜User｜>Hi\n\nQ\n\n<｜Assistant｜></think>"),
    ([Message("user", " two\n")], CHAT, f"{B}<｜User｜> two\n<｜Assistant｜></think>"),
]

TRANSCRIPTS = [
    ([HI, ANSWER], CHAT, f"{B}<｜User｜>Hi<｜Assistant｜></think>A{E}"),
    ([SYSTEM, HI, REASONED], CHAT, f"{B}S<｜User｜>Hi<｜Assistant｜></think>A{E}"),
    ([HI, REASONED], THINKING, f"{B}<｜User｜>Hi<｜Assistant｜><think>R</think>A{E}"),
    (
        [HI, REASONED, QUESTION, REASONED],
        THINKING,
        f"{B}<｜User｜>Hi<｜Assistant｜></think>A{E}<｜User｜>Q<｜Assistant｜><think>R</think>A{E}",
    ),
]


@pytest.mark.parametrize(("messages", "options", "text"), PROMPTS)
def test_prompt_text(messages, options, text):
    assert render_prompt(messages, options) == text


@pytest.mark.parametrize(("messages", "options", "text"), TRANSCRIPTS)
def test_transcript_text(messages, options, text):
    assert render_transcript(messages, options) == text


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE with one merge (H i → Hi, id 300) and the real special tokens at their real ids; byte b is 10 + b."""
    alphabet = byte_characters()
    vocab = {char: 10 + byte for byte, char in enumerate(alphabet)} | {"Hi": 300}
    special = {B: 0, E: 1, "<｜▁pad▁｜>": 2}
    plain = {"<｜User｜>": 128803, "<｜Assistant｜>": 128804, "<think>": 128821, "</think>": 128822}
    plain |= {"｜DSML｜": 128825, "<｜latest_reminder｜>": 128828}
    result = Tokenizer(models.BPE(vocab=vocab | special | plain, merges=[("H", "i")]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(name, special=True) for name in special])
    result.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    return result


def byte_characters():
    """The byte-level alphabet in byte order, taken from the tokenizers library and not from the code under test."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_in_text = {}
    for point in [*range(0x80), *range(0x80, 0x800, 0x40), *range(0x80, 0xC0), *range(0x1000, 0x10000, 0x1000)]:
        if 0xD800 <= point < 0xE000:
            continue
        text = chr(point)
        bytes_in_text |= dict(zip(text.encode(), byte_level.pre_tokenize_str(text)[0][0], strict=True))
    spare = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(bytes_in_text.values()))  # bytes no UTF-8 text has
    return [bytes_in_text.get(byte) or spare.pop() for byte in range(256)]


IDS = [
    ([HI], CHAT, [0, 128803, 300, 128804, 128822]),
    ([HI], THINKING, [0, 128803, 300, 128804, 128821]),
    ([SYSTEM, HI], CHAT, [0, 93, 128803, 300, 128804, 128822]),
    ([SYSTEM, HI], THINKING, [0, 93, 128803, 300, 128804, 128821]),
    ([HI, ANSWER, QUESTION], CHAT, [0, 128803, 300, 128804, 128822, 75, 1, 128803, 91, 128804, 128822]),
    ([HI, REASONED, QUESTION], THINKING, [0, 128803, 300, 128804, 128822, 75, 1, 128803, 91, 128804, 128821]),
    (
        [SYSTEM, HI, REASONED, QUESTION],
        KEPT,
        [0, 93, 128803, 300, 128804, 128821, 92, 128822, 75, 1, 128803, 91, 128804, 128821],
    ),
    ([REMINDER, HI], CHAT, [0, 128828, 86, 128803, 300, 128804, 128822]),
    ([HI, QUESTION], CHAT, [0, 128803, 300, 20, 20, 91, 128804, 128822]),
]


@pytest.mark.parametrize(("messages", "options", "ids"), IDS)
def test_prompt_ids(tokenizer, messages, options, ids):
    assert encode(tokenizer, render_prompt(messages, options)) == ids


def test_transcript_ids(tokenizer):
    ids = [0, 128803, 300, 128804, 128821, 92, 128822, 75, 1]
    assert encode(tokenizer, render_transcript([HI, REASONED], THINKING)) == ids


def test_effort_texts_are_the_models_own():
    texts = [text.encode() for text in (ABSOLUTE_MAXIMUM, BEYOND_MAXIMUM)]
    assert [len(text) for text in texts] == [476, 528]
    assert [hashlib.sha256(text).hexdigest() for text in texts] == [
        "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
        "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
    ]


EFFORTS = [
    ("april", None, ""),
    ("april", "high", ""),
    ("april", "max", ABSOLUTE_MAXIMUM),
    ("0731", None, ""),
    ("0731", "low", ""),
    ("0731", "high", ABSOLUTE_MAXIMUM),
    ("0731", "max", BEYOND_MAXIMUM),
]


@pytest.mark.parametrize(("release", "effort", "text"), EFFORTS)
def test_effort_stands_between_bos_and_system_in_thinking_mode_only(release, effort, text):
    thinking = ChatOptions(thinking=True, effort=effort, release=release)
    assert render_prompt([SYSTEM, HI], thinking) == f"{B}{text}S<｜User｜>Hi<｜Assistant｜><think>"
    chat = ChatOptions(thinking=False, effort=effort, release=release)
    assert render_prompt([SYSTEM, HI], chat) == f"{B}S<｜User｜>Hi<｜Assistant｜></think>"


@pytest.mark.parametrize(("release", "effort"), [("april", "low"), ("april", "none"), ("0731", "medium"), ("0731", "")])
@pytest.mark.parametrize("thinking", [False, True])
def test_effort_of_another_release_is_refused(release, effort, thinking):
    with pytest.raises(ValueError, match=rf"effort is '{effort}', expected one of .*max \(release {release}\)"):
        ChatOptions(thinking=thinking, effort=effort, release=release)


def test_unknown_release_is_refused():
    with pytest.raises(ValueError, match="release is 'may', expected one of april, 0731"):
        ChatOptions(release="may")


@pytest.mark.parametrize(("stages", "release"), [(0, "april"), (1, "april"), (3, "0731")])
def test_release_of(stages, release):
    assert release_of(stages) == release


@pytest.mark.parametrize("stages", [2, 4, -1])
def test_release_of_an_unknown_draft(stages):
    with pytest.raises(CheckpointError, match=f"has {stages} entries beyond num_hidden_layers, expected"):
        release_of(stages)


@pytest.mark.parametrize("role", ["tool", "User", ""])
def test_unknown_role_is_refused(role):
    with pytest.raises(ValueError, match=f"role is '{role}', expected one of system, user, assistant, developer"):
        Message(role, "x")


def test_reasoning_of_a_user_is_refused():
    with pytest.raises(ValueError, match="a user message has reasoning"):
        Message("user", "x", reasoning="y")


BAD_ORDERS = [
    (render_prompt, [], "a prompt ends in no message"),
    (render_prompt, [HI, ANSWER], "ends in a message with role 'assistant', expected one with role user or developer"),
    (render_prompt, [HI, SYSTEM], "ends in a message with role 'system'"),
    (render_transcript, [], "a transcript ends in no message"),
    (render_transcript, [HI], "ends in a message with role 'user', expected one with role assistant"),
    (render_prompt, [ANSWER, HI], "an assistant message follows nothing, expected a user or developer"),
    (render_transcript, [HI, SYSTEM, ANSWER], "an assistant message follows system"),
    (render_transcript, [HI, ANSWER, ANSWER], "an assistant message follows assistant"),
    (render_prompt, [HI, REMINDER, QUESTION], "a latest_reminder message follows user"),
]


@pytest.mark.parametrize(("render", "messages", "error"), BAD_ORDERS)
def test_orders_without_a_text_are_refused(render, messages, error):
    with pytest.raises(ValueError, match=error):
        render(messages)


@pytest.mark.parametrize("options", [CHAT, KEPT])
def test_a_conversation_begins_its_continuation(options):
    shorter = render_prompt([SYSTEM, HI], options)
    finished = render_transcript([SYSTEM, HI, REASONED], options)
    longer = render_prompt([SYSTEM, HI, REASONED, QUESTION], options)
    assert finished.startswith(shorter)
    assert longer.startswith(finished)


# (text, finished, reasoning, answer)
OUTPUTS = [
    ("", False, "", ""),
    ("Let me", False, "Let me", ""),
    ("Let me</thi", False, "Let me", ""),
    ("Let me</thi", True, "Let me</thi", ""),
    ("a < b", False, "a < b", ""),
    ("a <", False, "a ", ""),
    ("a </<", False, "a </", ""),
    ("Let me</think>", False, "Let me", ""),
    ("Let me</think>An", False, "Let me", "An"),
    ("</think>An", False, "", "An"),
    ("R</think>A</think>B", True, "R", "A</think>B"),
    ("R</think>A <", False, "R", "A <"),
]


@pytest.mark.parametrize(("text", "finished", "reasoning", "answer"), OUTPUTS)
def test_split_answer(text, finished, reasoning, answer):
    assert split_answer(text, thinking=True, finished=finished) == (reasoning, answer)


def test_chat_mode_has_no_reasoning():
    assert split_answer("A</think>B", thinking=False) == ("", "A</think>B")


@given(st.lists(st.sampled_from(["<", "/", "</think>", "</thin", "think>", "x", "k>"]), max_size=12).map("".join))
def test_split_answer_only_grows(text):
    seen = ("", "")
    parts = [split_answer(text[:n], thinking=True) for n in range(len(text) + 1)]
    for now in [*parts, split_answer(text, thinking=True, finished=True)]:
        assert now[0].startswith(seen[0])
        assert now[1].startswith(seen[1])
        seen = now
    assert f"{seen[0]}</think>{seen[1]}" in (text, f"{text}</think>")
