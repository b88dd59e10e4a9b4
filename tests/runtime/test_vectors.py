"""`runtime eval --vectors`: a file made from the demo agrees with it, a damaged one does not, and what cannot be used is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import open_model
from runtime.chat import Conversation, require_tokenizer
from runtime.chat_template import ChatOptions
from runtime.cli import main
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.tokenizer import token_bytes
from runtime.vectors import compare, lines, read_vectors, reader_of

DEMO = Path(__file__).parents[2] / "artifacts" / "demo" / "checkpoint"
PROMPT = "Which command lists the files of a directory?"
STEPS, TOP = 5, 4
READER = reader_of(str(DEMO), 128)
EXACTLY = 1e-4  # a prefill in one chunk against steps


@pytest.fixture(scope="module")
def session() -> Session:
    return open_model(DEMO, context=128)


@pytest.fixture(scope="module")
def record(session: Session) -> dict[str, Any]:
    """As ds4 publishes them: tokens by bytes; the last step's as ids, which our own files may have."""
    logits = session.extend(Conversation(require_tokenizer(session), ChatOptions()).ask(PROMPT))
    steps = []
    for number in range(STEPS):
        top = logits.log_softmax(-1).topk(TOP)
        ids = top.indices.tolist()
        names = ids if number == STEPS - 1 else [spelled(session, token_id) for token_id in ids]
        pairs = [{"token": name, "logprob": value} for name, value in zip(names, top.values.tolist(), strict=True)]
        steps.append({"token": names[0], "top_logprobs": pairs})
        logits = session.step(ids[0])
    return {"id": "demo", "prompt": PROMPT, "steps": steps}


def spelled(session: Session, token_id: int) -> dict[str, list[int]] | int:
    """The bytes of a token that is text by itself; the id of one that is not."""
    text = require_tokenizer(session).decode([token_id], skip_special_tokens=False)
    return token_id if "\ufffd" in text else {"bytes": list(text.encode())}


@pytest.fixture
def compared(session: Session, tmp_path: Path) -> Callable[[Any], list[dict[str, Any]]]:
    def called(content: Any) -> list[dict[str, Any]]:
        (tmp_path / "vectors.json").write_text(json.dumps(content))
        return [compare(session, vector) for vector in read_vectors(tmp_path / "vectors.json", READER)]

    return called


def test_the_demos_own_vectors_agree(record: dict[str, Any], compared: Callable[..., Any]) -> None:
    (found,) = compared(record)
    assert isinstance(record["steps"][0]["token"], dict)
    assert (found["tokens"], found["agreeing"], found["first_other"]) == (STEPS, STEPS, None)
    assert found["compared"] == STEPS * TOP and found["largest_difference"] <= EXACTLY
    assert lines([found])[-1].startswith(f"agreement 100.0% of {STEPS} tokens")


def test_damaged_vectors_are_seen(record: dict[str, Any], compared: Callable[..., Any]) -> None:
    worse = copy.deepcopy(record)
    worse["steps"][1]["top_logprobs"][0]["logprob"] -= 0.25
    worse["steps"][-1]["token"] = worse["steps"][-1]["top_logprobs"][1]["token"]
    (found,) = compared(worse)
    assert (found["agreeing"], found["first_other"]) == (STEPS - 1, STEPS - 1)
    assert found["largest_difference"] == pytest.approx(0.25, abs=EXACTLY)
    assert found["mean_difference"] == pytest.approx(0.25 / found["compared"], abs=EXACTLY)


def test_what_is_unlikely_counts_apart(record: dict[str, Any], compared: Callable[..., Any]) -> None:
    """A log-probability below 1 % has its own figure; one that the API does not give has none."""
    other = copy.deepcopy(record)
    other["steps"][0]["top_logprobs"][-1]["logprob"] = -12.0
    other["steps"][1]["top_logprobs"][-1]["logprob"] = -9999.0
    (found,) = compared([other])
    assert found["compared"] == STEPS * TOP - 1
    assert found["largest_difference"] > 1 and found["largest_likely_difference"] <= EXACTLY


def test_prompt_ids_in_the_place_of_text(
    session: Session, record: dict[str, Any], compared: Callable[..., Any]
) -> None:
    ids = Conversation(require_tokenizer(session), ChatOptions()).ask(PROMPT)
    by_ids = {"prompt_ids": ids, "steps": record["steps"]}
    assert [one["agreeing"] for one in compared([record, by_ids])] == [STEPS, STEPS]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no record in it"),
        ({"steps": []}, "record 0: no 'prompt'"),
        ({"prompt": "a", "steps": []}, "record 0: no prompt or no step"),
        ([{"prompt": "a"}], "record 0: no 'steps'"),
        ({"prompt": 3, "steps": []}, "record 0: "),
        ({"prompt_ids": [0, 99999], "steps": []}, "token id 99999, expected one below 8,192"),
        ({"prompt": "a", "steps": [{"token": {"bytes": [1, 2, 3, 4]}}]}, "is not in the model's vocabulary"),
        ({"prompt": "a", "steps": [{"token": True}]}, "token id True"),
        ({"prompt": "a", "steps": [{"token": 5, "top_logprobs": [{"token": 5}]}]}, "record 0: no 'logprob'"),
        ("text", "record 0: "),
        ({"prompt": " ", "steps": [{"token": 5}]}, "prompt ' ', expected text"),
        ({"prompt": 7, "steps": [{"token": 5}]}, "prompt 7, expected text"),
        ({"prompt": "a", "steps": [{"token": {"bytes": 99999999999999}}]}, "bytes 99999999999999, expected a list"),
        (
            {"prompt": "a", "steps": [{"token": 5, "top_logprobs": [{"token": 5, "logprob": float("nan")}]}]},
            "logprob nan, expected a finite number",
        ),
        (
            {"prompt": "a", "steps": [{"token": 5, "top_logprobs": [{"token": 5, "logprob": float("-inf")}]}]},
            "logprob -inf, expected a finite number",
        ),
    ],
)
def test_what_cannot_be_used(compared: Callable[..., Any], content: Any, message: str) -> None:
    with pytest.raises(StrawError, match="cannot be used as vectors") as caught:
        compared(content)
    assert message in str(caught.value)


def test_a_vector_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "long.json").write_text(
        json.dumps([{"id": "x", "prompt_ids": [5] * 100, "steps": [{"token": 5}] * 30}])
    )
    with pytest.raises(StrawError, match=r"long\.json: record 0 \(x\) takes 129 tokens, the context has 128"):
        read_vectors(tmp_path / "long.json", READER)
    assert read_vectors(tmp_path / "long.json", READER._replace(context=129))


def test_every_token_of_the_vocabulary_by_its_bytes() -> None:
    """Against the tokenizer's own decoder, where a token is text by itself."""
    tokenizer = READER.tokenizer
    assert tokenizer is not None
    texts = tokenizer.decode_batch([[n] for n in range(READER.vocab_size)], skip_special_tokens=False)
    spelled = token_bytes(tokenizer)
    assert all(own == text.encode() for own, text in zip(spelled, texts, strict=False) if "\ufffd" not in text)
    assert {bytes([byte]) for byte in range(256)} <= set(spelled)


def test_vectors_are_read_before_the_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    monkeypatch.setattr("runtime.opening.open_model", lambda *_, **__: pytest.fail("opened"))
    for options in (["--vectors", str(tmp_path / "deep.json")], ["--vectors", str(tmp_path / "none.json")]):
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(DEMO), *options])
        assert ended.value.code == 1
        assert "cannot be used as vectors" in capsys.readouterr().err


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"prompt": "a", "ste')
    for name, reason in (("half.json", "Unterminated string"), ("missing.json", "No such file")):
        with pytest.raises(StrawError, match=reason):
            read_vectors(tmp_path / name, READER)


def test_the_command(
    session: Session, record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vectors.json").write_text(json.dumps([record]))
    options = ["--vectors", str(tmp_path / "vectors.json"), "--device", "cpu", "--context", "128"]
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(session.directory), *options])
    assert not ended.value.code
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"demo: {STEPS} of {STEPS} tokens agree; log-probabilities differ by at most 0.00")
    assert json.loads(printed[-1])["results"][0]["agreeing"] == STEPS
