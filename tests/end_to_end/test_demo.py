"""The shipped demo model: the same held-out loss as transformers finds, an answer that ends, files of the promised size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime import open_model
from runtime.chat import Conversation
from runtime.chat_template import ChatOptions
from runtime.demo import DEMO_DIRECTORY
from runtime.engine import Session
from runtime.tokenizer import encode

CHECKPOINT = DEMO_DIRECTORY / "checkpoint"
LOSS_TOLERANCE = 1e-3  # nats per token, the bound that the demo promises
NUM_TOKENS = 1500


@pytest.fixture(scope="module")
def session() -> Session:
    return open_model("demo", device="cpu")


@pytest.fixture(scope="module")
def documents(session: Session) -> list[list[int]]:
    """The beginnings of held-out documents of different sources, as token ids after BOS."""
    lines = (DEMO_DIRECTORY / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    texts = {entry["source"]: entry["text"] for entry in map(json.loads, lines)}
    assert len(texts) >= 3
    return [[0, *encode(session.tokenizer, text)][: NUM_TOKENS // len(texts)] for text in texts.values()]


def loss(logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:]), reduction="sum")


def test_held_out_loss_is_that_of_transformers(session: Session, documents: list[list[int]]) -> None:
    from transformers import DeepseekV4ForCausalLM

    theirs = DeepseekV4ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, attn_implementation="eager").eval()
    count = sum(len(ids) - 1 for ids in documents)
    ours = sum(float(loss(session.logits(ids), ids)) for ids in documents) / count
    with torch.inference_mode():
        expected = sum(float(loss(theirs(torch.tensor([ids])).logits[0], ids)) for ids in documents) / count
    assert abs(ours - expected) <= LOSS_TOLERANCE
    assert ours < 5.0  # far from ln 8192 = 9.0: the weights that were trained are the ones that are shipped


def test_an_answer_is_text_and_ends(session: Session) -> None:
    prompt = Conversation(session.tokenizer, ChatOptions()).ask("What is a computer?")
    answers = [list(session.generate(prompt, 200, temperature=0.7, seed=seed)) for seed in range(2)]
    assert any(answer[-1] == session.config.eos_token_id for answer in answers)
    words = session.tokenizer.decode(answers[0]).split()
    assert len(words) > 5
    assert sum(word.strip(".,;:()'\"").isalpha() for word in words) > len(words) / 2


@pytest.mark.slow
@pytest.mark.parametrize("slots", [(6, 0, 0, 0), (40, 60, 0, 0)], ids=["smallest", "evicting"])
def test_streaming_the_demo_changes_nothing(documents: list[list[int]], slots: tuple[int, ...]) -> None:
    token_ids = documents[0][:60]
    held, streamed = open_model(CHECKPOINT), open_model("demo", slots=slots)
    for session in (held, streamed):
        session.prefill(token_ids[:20])
    for token_id in token_ids[20:]:
        assert torch.equal(streamed.step(token_id), held.step(token_id))


@pytest.mark.slow
def test_a_ladder_on_the_demo_stays_near_exact(session: Session, documents: list[list[int]]) -> None:
    """2,4 with warm pools on held-out text: worse than exact, far from broken."""
    token_ids = documents[0][:200]
    laddered = open_model("demo", ladder="2,4", slots=(60, 60, 60, 60))
    laddered.logits(token_ids)
    count = len(token_ids) - 1
    exact, mixed = (float(loss(each.logits(token_ids), token_ids)) / count for each in (session, laddered))
    assert exact != mixed
    assert mixed < exact + 0.5


def test_the_shipped_files_are_small() -> None:
    files = [path for path in CHECKPOINT.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 40_000_000
    assert max(path.stat().st_size for path in files) <= 16 * 2**20


def test_the_weights_are_in_the_released_dtypes() -> None:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(Path(CHECKPOINT).glob("*.safetensors")):
        tensors |= load_file(shard)
    assert tensors["layers.0.ffn.experts.0.w1.weight"].dtype == torch.int8
    assert tensors["layers.0.attn.wq_a.weight"].dtype == torch.float8_e4m3fn
