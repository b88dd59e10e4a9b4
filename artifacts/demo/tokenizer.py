"""The demo's tokenizer: a byte-level BPE of 8,192 entries, trained on the corpus.

The special tokens carry the names of the released model, because the chat encoding is written in those names; their
ids are the first ones of this small vocabulary. Only BOS, EOS and padding are flagged special, as in the release:
a decoder that skips special tokens must still show `</think>` and the tool-call marker, which a parser needs.
"""

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 8192
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
FLAGGED = (BOS, EOS, PAD)
NAMES = (
    *FLAGGED, "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", USER, ASSISTANT, THINK, END_THINK, "｜DSML｜",
    "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>",
)  # fmt: skip

# Up to three digits; a word with the blank before it; a run of punctuation; line ends; other blanks.
PIECES = r"\p{N}{1,3}| ?[\p{L}\p{M}]+(?:'[a-z]{1,2}\b)?| ?[^\s\p{L}\p{M}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def corpus_texts(path: Path, share: float) -> Iterator[str]:
    """Yield the text of a random `share` of the corpus, each document cut at 40,000 characters."""
    chance = random.Random(0)
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if chance.random() < share:
                yield json.loads(line)["text"][:40_000]


def train(texts: Iterator[str]) -> Tokenizer:
    """A trained tokenizer whose first ids are NAMES in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(NAMES),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, with the release's `special` flags, and tokenizer_config.json."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in FLAGGED
    text = json.dumps(state, ensure_ascii=False, indent=1)
    (directory / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    text = json.dumps(settings, ensure_ascii=False, indent=1)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Train on half of the corpus and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="train.jsonl.xz: one JSON object with a `text` a line")
    parser.add_argument("out", type=Path, help="directory that gets tokenizer.json and tokenizer_config.json")
    parser.add_argument("--share", type=float, default=0.5, help="share of the documents that is read")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    save(train(corpus_texts(args.corpus, args.share)), args.out)


if __name__ == "__main__":
    main()
