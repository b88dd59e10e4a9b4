"""`prep trace`: what is recorded is what the routers computed, whatever cut the run off, and bad input is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from tiny_tokenizer import build_tokenizer
from torch import Tensor

import prep.trace
import prep.trace_report
from predictor.errors import PredictorError
from predictor.trace_files import RECORD, TraceRecord, TraceShape
from predictor.traces import Trace
from prep import trace_recorder
from prep.cli import main
from prep.layout import layout
from prep.trace import TraceOptions, plan_trace, trace
from prep.trace_recorder import Recorder
from prep.trace_report import HEAT_PICTURE, report
from prep.verify import verify
from runtime.artifact import ModelDirectory
from runtime.config import ModelConfig
from runtime.documents import token_sequences
from runtime.engine import PREFILL_CHUNK, Session
from runtime.errors import StrawError
from runtime.manifest import HEAT
from runtime.opening import open_model
from runtime.sampler import Sampler

Capture = pytest.CaptureFixture[str]
TOKEN_BYTES = 3 * 2 * 6 + 4 + 3 * 256 * 2
SHARD_TOKENS = 40
OPTIONS = TraceOptions(device="cpu", shard_bytes=SHARD_TOKENS * TOKEN_BYTES)
WORDS = "we wrote 我们 hello world, and it was not the same 🙂 each time; "
GENERATING = TraceOptions(device="cpu", shard_bytes=10 * TOKEN_BYTES, generate=6, prompt_tokens=8, seed=5)
TEXTS = [WORDS[start:] * count for start, count in ((0, 2), (3, 7), (9, 1), (5, 2))]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("original")
    write_random_checkpoint(root / "source", num_hidden_layers=3, n_routed_experts=5)
    build_tokenizer().save(str(root / "source" / "tokenizer.json"))
    layout(root / "source", root / "model")
    return root / "model"


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    return write_texts(tmp_path)


def write_texts(directory: Path) -> list[Path]:
    """A file of one document, then one of three."""
    (directory / "a.txt").write_text(TEXTS[0])
    (directory / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]))
    return [directory / "a.txt", directory / "b.jsonl"]


def traced(model: Path, texts: list[Path], options: TraceOptions) -> dict[str, bytes]:
    trace(model, texts, options)
    return files(model)


def files(model: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in (model / "trace").iterdir() if path.name != ".lock"}
    return found | {HEAT: (model / HEAT).read_bytes()}


class Observed:
    """All that the routers of a session compute, joined per layer."""

    def __init__(self, session: Session) -> None:
        self._parts: list[list[list[Tensor]]] = [[[], [], []] for _ in range(session.config.num_hidden_layers)]
        session.observer = self

    def __call__(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        for parts, seen in zip(self._parts[layer_idx], (x, topk_ids, topk_weights), strict=True):
            parts.append(seen.clone())

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [n, L, D] as recorded, ids and weights [n, L, K]."""
        hidden, ids, weights = (torch.stack([torch.cat(layer[kind]) for layer in self._parts], 1) for kind in range(3))
        return hidden.bfloat16(), ids, weights


def assert_recorded(made: Trace, observed: Observed, token_ids: list[int]) -> None:
    tokens = torch.arange(made.num_tokens)
    hidden, ids, weights = observed.joined()
    assert made.token_ids(tokens).tolist() == token_ids
    assert torch.equal(made.ids(tokens), ids)
    assert torch.equal(made.weights(tokens), weights)
    if made.has_hidden:
        assert torch.equal(made.hidden(tokens), hidden)


def read_texts(session: Session) -> list[int]:
    """Prefills TEXTS as documents; their token ids."""
    assert session.tokenizer is not None
    read = []
    for text in TEXTS:
        (sequence,) = token_sequences(session.tokenizer, text, session.context)
        session.reset()
        session.prefill(sequence)
        read += sequence
    assert max(map(len, [token_sequences(session.tokenizer, text, 4096)[0] for text in TEXTS])) > PREFILL_CHUNK
    return read


@pytest.mark.parametrize("routing_only", [False, True])
def test_prefill_is_recorded_bit_for_bit(model: Path, texts: list[Path], routing_only: bool) -> None:
    made = trace(model, texts, TraceOptions(device="cpu", shard_bytes=40_000, routing_only=routing_only))
    session = open_model(model, slots="6,0,0,0")  # another way to the same experts: streaming changes nothing
    observed = Observed(session)
    assert_recorded(made, observed, read_texts(session))
    assert made.has_hidden is not routing_only
    assert [document.name for document in made.documents] == ["a.txt", "b.jsonl:1", "b.jsonl:2", "b.jsonl:3"]
    session.close()


def test_generation_is_recorded_bit_for_bit(model: Path, texts: list[Path]) -> None:
    made = trace(model, texts, GENERATING)
    session, read = open_model(model), list[int]()
    assert session.tokenizer is not None
    observed = Observed(session)
    for number, text in enumerate(TEXTS):
        prompt = token_sequences(session.tokenizer, text, session.context)[0][:8]
        session.reset()
        sampler, logits = Sampler(1.0, seed=5 + number), session.prefill(prompt)
        read += prompt
        for _ in range(6):
            if (token_id := sampler(logits)) == session.config.eos_token_id:
                break
            read.append(token_id)
            logits = session.step(token_id)
    assert len(read) > 4 * 8
    assert_recorded(made, observed, read)
    session.close()


@pytest.mark.usefixtures("stand_in")
def test_generation_ends_with_eos(model: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """EOS is no token that the routers saw."""
    monkeypatch.setattr(prep.trace, "Sampler", lambda *arguments, **named: iter_sampler([7, 8, 1]))
    made = trace(model, texts, TraceOptions(device="cpu", generate=9, prompt_tokens=3))
    assert [document.num_tokens for document in made.documents] == [5] * 4
    assert made.token_ids(torch.tensor([3, 4])).tolist() == [7, 8]


def iter_sampler(token_ids: list[int]) -> Callable[[Tensor], int]:
    rest = iter(token_ids)
    return lambda logits: next(rest)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("limit", [1, 70, SHARD_TOKENS * 2, 10_000])
def test_limit(model: Path, texts: list[Path], limit: int) -> None:
    full = plan_trace(model, texts, OPTIONS).num_tokens
    made = trace(model, texts, TraceOptions(tokens=limit, device="cpu", shard_bytes=OPTIONS.shard_bytes))
    assert made.num_tokens == min(limit, full)
    assert full > 4 * PREFILL_CHUNK / 2
    cut = trace(model, texts, TraceOptions(tokens=limit, device="cpu", generate=2), model / "cut")
    assert cut.num_tokens <= limit


def test_a_long_document_is_read_in_sequences(model: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep.trace, "DEFAULT_CONTEXT", 50)
    made = trace(model, texts[:1], OPTIONS)
    (document,) = made.documents
    ids = made.token_ids(torch.arange(document.num_tokens))
    session = open_model(model, context=50)
    assert session.tokenizer is not None
    observed = Observed(session)
    sequences = token_sequences(session.tokenizer, TEXTS[0], 50)
    assert len(sequences) > 1 and all(sequence[0] == 0 for sequence in sequences)
    for sequence in sequences:
        session.reset()
        session.prefill(sequence)
    assert_recorded(made, observed, [token_id for sequence in sequences for token_id in sequence])
    assert ids[50] == 0
    session.close()


class StandIn:
    """A session whose routers compute from the last two token ids, at once: what cuts a run off has nothing to do with them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.observer = config, None
        self._token_ids: list[int] = []

    def reset(self) -> None:
        self._token_ids = []

    def prefill(self, token_ids: list[int]) -> Tensor:
        assert self.observer is not None
        for chunk in torch.tensor(token_ids).split(PREFILL_CHUNK):
            self._token_ids += chunk.tolist()
            before = torch.tensor([0, *self._token_ids])[-len(chunk) - 1 : -1]
            mixed = torch.sin(chunk + 0.1 * before)
            for layer_idx in range(3):
                x = (mixed + layer_idx)[:, None] * torch.linspace(1, 2, 256)
                weights = x[:, :2].sigmoid().sort(descending=True).values
                self.observer(layer_idx, x, (chunk[:, None] + torch.tensor([0, 1 + layer_idx])) % 5, weights)
        return torch.sin(mixed[-1] * torch.arange(512))

    def step(self, token_id: int) -> Tensor:
        return self.prefill([token_id])

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def _stand_in_config(original: Path) -> ModelConfig:
    with ModelDirectory(original) as model:
        return model.config


@pytest.fixture
def stand_in(_stand_in_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep.trace, "open_model", lambda *arguments, **named: StandIn(_stand_in_config))


@pytest.fixture(scope="module")
def whole(original: Path, _stand_in_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of the stand-in's uninterrupted trace of TEXTS, with HEAT."""
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prep.trace, "open_model", lambda *arguments, **named: StandIn(_stand_in_config))
        return traced(Path(shutil.copytree(original, root / "model")), write_texts(root), OPTIONS)


def fail_on_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, *, after: bool = False) -> None:
    """The `nth` call raises KeyboardInterrupt, its work undone or, with `after`, done."""
    real, calls = getattr(owner, name), iter(range(1, 1_000_000))

    def failing(*arguments: Any, **named: Any) -> Any:
        is_last = next(calls) == nth
        if is_last and not after:
            raise KeyboardInterrupt
        result = real(*arguments, **named)
        if is_last:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, failing)


def interruptions() -> Iterator[tuple[Any, str, int, bool]]:
    """Before and after each shard, record and layer of some forwards, and before heat."""
    for nth in (1, 2, 5, 10**6):
        yield trace_recorder, "write_shard", nth, False
        yield trace_recorder, "write_shard", nth, True
        yield trace_recorder, "write_record", nth, True
    for nth in (1, 2, 5, 8, 13):
        yield Recorder, "__call__", nth, False
    yield Recorder, "end_document", 1, True
    yield Recorder, "end_document", 3, False
    yield Recorder, "finish", 1, False
    yield prep.trace, "write_record", 1, False
    yield prep.trace, "write_heat", 1, False


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("owner", "name", "nth", "after"), list(interruptions()))
def test_an_interrupted_trace_ends_with_the_same_bytes(
    model: Path, texts: list[Path], whole: dict[str, bytes], owner: Any, name: str, nth: int, after: bool
) -> None:
    num_shards = sum(name.startswith("shard") for name in whole)
    with pytest.MonkeyPatch.context() as patch:
        fail_on_call(patch, owner, name, min(nth, num_shards), after=after)
        with pytest.raises(KeyboardInterrupt):
            trace(model, texts, OPTIONS)
    assert not (model / HEAT).exists()
    trace(model, texts, OPTIONS)
    assert files(model) == whole
    assert not list(model.rglob("*.partial"))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("options", [OPTIONS, GENERATING], ids=["read", "generated"])
def test_a_trace_interrupted_at_every_shard_ends_with_the_same_bytes(
    model: Path, texts: list[Path], options: TraceOptions
) -> None:
    uninterrupted = traced(model, texts, options)
    (model / HEAT).unlink()
    shutil.rmtree(model / "trace")
    num_shards = sum(name.startswith("shard") for name in uninterrupted)
    assert num_shards > 4
    for _ in range(num_shards):
        with pytest.MonkeyPatch.context() as patch:
            fail_on_call(patch, trace_recorder, "write_record", 1, after=True)
            with pytest.raises(KeyboardInterrupt):
                trace(model, texts, options)
    assert traced(model, texts, options) == uninterrupted


def test_an_interrupted_trace_of_the_model_ends_with_the_same_bytes(model: Path, texts: list[Path]) -> None:
    options = replace(GENERATING, tokens=30)
    with pytest.MonkeyPatch.context() as patch:
        fail_on_call(patch, trace_recorder, "write_record", 2, after=True)
        with pytest.raises(KeyboardInterrupt):
            trace(model, texts, options)
    resumed = traced(model, texts, options)
    shutil.rmtree(model / "trace")
    assert traced(model, texts, options) == resumed


@pytest.mark.usefixtures("stand_in")
def test_a_finished_trace_runs_no_model_again(model: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made = trace(model, texts, OPTIONS)
    (model / HEAT).unlink()
    monkeypatch.setattr(prep.trace, "open_model", lambda *arguments, **named: pytest.fail("opened"))
    trace(model, texts, OPTIONS)
    with ModelDirectory(model) as opened:
        heat = opened.read_heat()
    assert heat is not None
    assert torch.equal(heat[0], made.uses())
    assert heat[1] == made.num_tokens


@pytest.mark.usefixtures("stand_in")
def test_nothing_else_of_the_model_directory_changes(model: Path, texts: list[Path]) -> None:
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in model.rglob("*") if path.is_file() and path.parent.name != "trace"}

    before = content()
    trace(model, texts, OPTIONS)
    after = content()
    assert set(after) - set(before) == {model / HEAT}
    assert all(after[path] == before[path] for path in before)
    assert verify(model) == verify_without_vocabulary(model)


def verify_without_vocabulary(model: Path) -> list[str]:
    """What `verify` says of the tiny tokenizer, whatever else there is."""
    return [line for line in verify(model) if "tokenizer" in line]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"tokens": 50}, "begun with tokens None, expected 50"),
        ({"routing_only": True}, "begun with has_hidden True, expected False"),
        ({"dtype": "bfloat16"}, "begun with dtype float32, expected bfloat16"),
        ({"shard_bytes": 80 * TOKEN_BYTES}, "begun with shard_tokens 40, expected 80"),
    ],
)
def test_other_settings_are_refused_by_name(model: Path, texts: list[Path], changed: dict[str, Any], line: str) -> None:
    trace(model, texts, OPTIONS)
    before = files(model)
    with pytest.raises(PredictorError, match=line):
        trace(model, texts, TraceOptions(**{"device": "cpu", "shard_bytes": OPTIONS.shard_bytes, **changed}))
    texts[0].write_text("other words")
    with pytest.raises(PredictorError, match="begun with texts "):
        trace(model, texts, OPTIONS)
    assert files(model) == before


@pytest.mark.usefixtures("stand_in")
def test_another_models_trace_is_refused(model: Path, texts: list[Path], tmp_path: Path) -> None:
    trace(model, texts, OPTIONS)
    content = json.loads((model / "trace" / RECORD).read_text())
    (model / "trace" / RECORD).write_text(json.dumps(content | {"fingerprint": "another"}))
    with pytest.raises(PredictorError, match=r"fingerprint is another, expected [0-9a-f]+; it is the trace of another"):
        trace(model, texts, OPTIONS)
    (model / "trace" / RECORD).unlink()
    with pytest.raises(PredictorError, match=r"shards without trace\.json"):
        trace(model, texts, OPTIONS)


def run(capsys: Capture, *arguments: object) -> tuple[Any, str, str]:
    """Exit code, stdout and stderr of `prep` in this process."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


BAD_TEXTS = [
    ("no file", "x.txt", None, "x.txt: cannot be read (No such file or directory), expected a text file"),
    ("no file of lines", "x.jsonl", None, "x.jsonl: cannot be read (No such file or directory)"),
    ("empty", "x.txt", b"", "x.txt: empty, expected a document in words"),
    ("blank", "x.txt", b" \n", "x.txt: empty, expected a document in words"),
    ("latin-1", "x.txt", "Grün".encode("latin-1"), "x.txt: byte 2 is not UTF-8"),
    ("no lines", "x.jsonl", b"", "x.jsonl: empty, expected one document a line"),
    ("no json", "x.jsonl", b'{"text": "a"}\nhello\n', 'x.jsonl:2: no JSON object with "text"'),
    ("no text", "x.jsonl", b'{"words": "a"}\n', 'x.jsonl:1: no JSON object with "text"'),
    ("a number", "x.jsonl", b'{"text": 5}\n', 'x.jsonl:1: no JSON object with "text"'),
    ("an empty line's text", "x.jsonl", b'{"text": ""}\n', "x.jsonl:1: empty, expected a document"),
    ("a surrogate", "x.jsonl", b'{"text": "a\\ud800"}\n', "x.jsonl:1: half a surrogate pair"),
    ("latin-1 lines", "x.jsonl", b'{"text": "a\xfc"}\n', "x.jsonl:1: byte 11 is not UTF-8"),
]


@pytest.mark.parametrize(
    ("name", "content", "line"), [case[1:] for case in BAD_TEXTS], ids=[case[0] for case in BAD_TEXTS]
)
def test_a_bad_text_is_one_line(
    model: Path, tmp_path: Path, capsys: Capture, name: str, content: bytes | None, line: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert_refused(capsys, model, line, "--text", tmp_path / name)


BAD_OPTIONS = [
    (["--tokens", "0"], "tokens is 0, expected at least 1; correct --tokens"),
    (["--prompt-tokens", "0"], "prompt_tokens is 0, expected at least 1; correct --prompt-tokens"),
    (["--generate", "4096"], "generate is 4,096, expected less than 4,096, the context"),
    (["--temperature", "inf"], "temperature is inf, expected a finite number"),
    (["--seed", "-1"], "seed is -1, expected an integer"),
    (["--device", "cuda:77"], "device is 'cuda:77'"),
]


@pytest.mark.parametrize(("options", "line"), BAD_OPTIONS)
def test_a_bad_option_is_one_line(
    model: Path, texts: list[Path], capsys: Capture, options: list[str], line: str
) -> None:
    assert_refused(capsys, model, line, "--text", texts[0], *options)


@pytest.mark.parametrize("option", [["--dtype", "float8"], ["--ladder", "9,1"], ["--slots", "1,0,0,0"]])
def test_a_run_that_never_began_binds_no_other(
    model: Path, texts: list[Path], capsys: Capture, stand_in: None, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    """What the model refuses when it is opened leaves nothing that the corrected command would have to agree with."""
    command = ("trace", model, "--text", texts[0], "--device", "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(prep.trace, "open_model", open_model)
        code, out, err = run(capsys, *command, *option)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert option[1].split(",")[0] in err
    assert run(capsys, *command)[0] == 0


def test_no_tokenizer_and_no_room_are_one_line(
    model: Path, texts: list[Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1234))
        assert_refused(capsys, model, "1,234 bytes free", "--text", texts[0], "--device", "cpu")
    monkeypatch.setattr(prep.trace, "load_tokenizer", lambda directory: None)
    assert_refused(capsys, model, "tokenizer.json: file is missing, expected the model's tokenizer", "--text", texts[0])


def assert_refused(capsys: Capture, model: Path, line: str, *options: object) -> None:
    code, out, err = run(capsys, "trace", model, *options)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert line in err
    assert not (model / "trace").exists()


def test_usage(capsys: Capture, model: Path, texts: list[Path]) -> None:
    assert run(capsys, "trace", model)[0] == 2
    assert run(capsys, "trace", model, "--report", "--dry-run")[0] == 2
    assert run(capsys, "trace", model, "--report")[2].startswith(f"error: {model}/trace/trace.json: cannot be read")


def test_dry_run_prints_sizes_and_writes_nothing(model: Path, texts: list[Path], capsys: Capture) -> None:
    num_tokens = plan_trace(model, texts, OPTIONS).num_tokens
    code, out, err = run(capsys, "trace", model, "--text", texts[0], "--text", texts[1], "--dry-run")
    assert (code, err) == (0, "")
    rows = {line[:18].strip(): line[18:].split()[0] for line in out.splitlines()}
    assert rows["tokens"] == f"{num_tokens:,}"
    assert rows["still to write"] == rows["whole trace"] == f"{num_tokens * TOKEN_BYTES:,}"
    assert rows["documents"] == "4" and "free disk" in rows
    assert not (model / "trace").exists()


@pytest.mark.usefixtures("stand_in")
def test_command_and_report(model: Path, texts: list[Path], capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--text", texts[0], "--text", texts[1], "--out", out, "--device", "cpu"]
    code, printed, _ = run(capsys, "trace", model, *options)
    assert code == 0
    assert printed.startswith(f"{out}: complete, ")
    code, printed, _ = run(capsys, "trace", model, "--report", "--out", out)
    assert code == 0
    assert json.loads(printed.splitlines()[-1]) == report(out)
    assert f"{out / HEAT_PICTURE}: drawn" in printed
    assert (out / HEAT_PICTURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("stand_in")
def test_report_without_matplotlib(model: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    trace(model, texts[:1], OPTIONS)
    monkeypatch.setattr(prep.trace_report.importlib.util, "find_spec", lambda name: None)
    line = prep.trace_report.draw_heat(model / "trace")
    assert line == "heat.png: not drawn, matplotlib is not installed; pip install straw[plot]"
    assert not (model / "trace" / HEAT_PICTURE).exists()


@pytest.mark.usefixtures("stand_in")
def test_report_figures_by_counting(model: Path, texts: list[Path]) -> None:
    made = trace(model, texts, OPTIONS)
    figures = report(model / "trace")
    ids = made.ids(torch.arange(made.num_tokens)).tolist()
    places = [range(d.first_token, d.first_token + d.num_tokens) for d in made.documents]
    for layer_idx in range(3):
        picks = [[set(ids[token][layer_idx]) for token in place] for place in places]
        pairs = [len(one & two) / 2 for sets in picks for one, two in pairwise(sets)]
        assert figures["repeat"]["layers"][layer_idx] == pytest.approx(sum(pairs) / len(pairs), abs=1e-4)
        for size in (2, 3, 4):
            unions = [
                len(set.union(*sets[start : start + size])) / 2
                for sets in picks
                for start in range(len(sets) - size + 1)
            ]
            found = figures["union"][str(size)]["layers"][layer_idx]
            assert found == pytest.approx(sum(unions) / len(unions), abs=1e-4)
    assert sum(figures["weight_by_rank"]) == pytest.approx(1, abs=1e-3)
    assert figures["weight_by_rank"][0] > figures["weight_by_rank"][1]
    assert [pool["resident"] for pool in figures["hit_rate"]] == sorted(
        pool["resident"] for pool in figures["hit_rate"]
    )
    assert figures["hit_rate"][0]["lfu"] < figures["hit_rate"][-1]["lfu"] <= 1


def test_the_recorder_holds_one_buffer(tmp_path: Path) -> None:
    """Its tensors stay the same, a shard and a chunk long, however many tokens pass."""
    shape = TraceShape(hidden_size=16, num_experts=8, num_layers=2, num_picks=2)
    recorder = Recorder(tmp_path, TraceRecord(shape, "fp", True, 100, {}))
    places = {name: part.data_ptr() for name, part in recorder._buffer.items()}
    for number in range(40):
        recorder.expect([number] * 70)
        for layer_idx in range(2):
            recorder(layer_idx, torch.full((70, 16), number), torch.full((70, 2), 3), torch.ones(70, 2))
    recorder.end_document("d")
    recorder.finish()
    assert {name: part.data_ptr() for name, part in recorder._buffer.items()} == places
    assert len(recorder._buffer["ids"][0]) == 100 + PREFILL_CHUNK
    tokens = torch.arange(40 * 70)
    assert torch.equal(Trace.open(tmp_path).token_ids(tokens), tokens // 70)
    assert torch.equal(Trace.open(tmp_path).hidden(tokens)[:, 1, 7].long(), tokens // 70)


def test_a_plan_is_refused_before_the_model_is_opened(tmp_path: Path, texts: list[Path]) -> None:
    with pytest.raises(StrawError, match="no such directory"):
        trace(tmp_path / "nowhere", texts, OPTIONS)
    assert not (tmp_path / "nowhere").exists()
