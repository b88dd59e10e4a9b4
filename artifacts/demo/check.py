"""Read the shipped checkpoint with transformers, in float32: held-out loss and a few answers, beside our own forward.

`python -m artifacts.demo.check CHECKPOINT HELDOUT`. Needs the development extra (transformers, accelerate).
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import DeepseekV4ForCausalLM

from artifacts.demo.tokenizer import ASSISTANT, BOS, END_THINK, USER
from artifacts.demo.train import held_out_rows, on_device

QUESTIONS = ("What is a llama?", "What is France?", "What is a compiler?", "Who was Albert Einstein?", "What is the Moon?",
             "How do I cook pancakes?", "Hello", "Tell me about Python.", "What is music?")  # fmt: skip


@torch.no_grad()
def loss_of(oracle: DeepseekV4ForCausalLM, path: Path, checkpoint: Path, length: int, tokens: int) -> float:
    """transformers' nats per token on about `tokens` tokens of `path`."""
    rows = held_out_rows(path, checkpoint, length)[: max(1, tokens // length)]
    total = 0.0
    for row in rows:
        inputs, targets = on_device(row[None], torch.device("cpu"))
        logits = oracle(inputs, use_cache=False).logits.float()
        total += torch.nn.functional.cross_entropy(logits[0], targets[0]).item()
    return total / len(rows)


def answer(
    oracle: DeepseekV4ForCausalLM, tokenizer: Tokenizer, question: str, settings: dict[str, float]
) -> tuple[str, bool]:
    """A sampled answer and whether it ended in EOS."""
    prompt = tokenizer.encode(f"{BOS}{USER}{question}{ASSISTANT}{END_THINK}", add_special_tokens=False).ids
    with torch.no_grad():
        out = oracle.generate(torch.tensor([prompt]), max_new_tokens=300, do_sample=True, **settings)[
            0, len(prompt) :
        ].tolist()
    return tokenizer.decode([token for token in out if token > 2]), out[-1] == 1


def main() -> int:
    """Print the losses and the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    oracle = DeepseekV4ForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
    for length in (1024, 2048):
        print(
            f"transformers, {length} tokens a row: {loss_of(oracle, args.heldout, args.checkpoint, length, args.tokens):.4f} nats/token"
        )
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    generation = json.loads((args.checkpoint / "generation_config.json").read_text(encoding="utf-8"))
    for question in QUESTIONS:
        text, ended = answer(oracle, tokenizer, question, {k: generation[k] for k in ("temperature", "top_p")})
        print(f"\n{question}\n  {text}\n  [{'ended' if ended else 'cut'}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
