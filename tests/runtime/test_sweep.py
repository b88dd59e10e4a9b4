"""`runtime eval`: its rows, a run that is cut off and goes on, the table and the picture, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_checkpoint import write_random_checkpoint
from tiny_tokenizer import build_tokenizer

from kernels.formats import CODES
from prep.layout import layout
from prep.released_config import V4_FLASH
from prep.requant import requant
from runtime.artifact import stage_command
from runtime.cli import main
from runtime.config import ModelConfig
from runtime.errors import StrawError
from runtime.eval_rows import ARTICLE_SLOTS, Model, Row, read_model, scaled_slots, sweep_rows, v4_flash_bytes
from runtime.eval_state import EvalState
from runtime.evaluation import STATISTICS
from runtime.ladder import parse_ladder
from runtime.store.pools import Shares
from runtime.store.tuned import Tuned, write_tuned
from runtime.sweep import EvalSettings, Evaluation, run
from runtime.sweep_report import HEADINGS, Speed, _draw, draw, read_speeds, speed_names, speed_of, table, with_speeds
from runtime.sweep_speed import speed_of_answers

NUM_PICKS, NUM_LAYERS = 2, 3
NUM_SEQUENCES = 4  # of the text, in this context
ROWS = (
    Row("int2", "exact"),
    Row("int2", "1,2", residency="replay:9,0,3,0"),
    Row("int2", "0,0", renormalise=False),
    Row("split", "1,1", residency="cold"),
    Row("split", "0,2", residency="all"),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(
        directory,
        compress_ratios=[0] * (NUM_LAYERS + 1),
        hidden_size=128,
        max_position_embeddings=256,
        num_experts_per_tok=NUM_PICKS,
        num_hash_layers=1,
        num_hidden_layers=NUM_LAYERS,
    )
    build_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def directory(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sweep") / "model"
    layout(checkpoint, made)
    requant(made, "clip")
    requant(made, "split")
    return made


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return read_model(str(directory))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "held_out.jsonl"
    texts = ["hello world " * 4, "world hello 我们", "x1 y2 z3 " * 3]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def settings(text: Path) -> EvalSettings:
    return EvalSettings((text,), context=20, document_tokens=25)


@pytest.fixture(scope="module")
def results(model: Model, settings: EvalSettings) -> list[dict[str, Any]]:
    return run(model, settings, ROWS, pytest.fail)


def test_every_row_against_exact(results: list[dict[str, Any]]) -> None:
    exactly = {"loss_difference": 0, "perplexity_ratio": 1, "kl_mean": 0, "agreement": 1}
    assert [{name: row[name]["value"] for name in exactly} == exactly for row in results] == [True, *[False] * 3, True]
    assert len({row["exact_loss"]["value"] for row in results}) == 1
    assert [row["code"] for row in results] == [row.code for row in ROWS]
    assert all(row["clusters_are"] == "documents" and row["clusters"] == 3 for row in results)


def test_uses_reads_and_bytes_of_a_row(results: list[dict[str, Any]], model: Model) -> None:
    picks = NUM_LAYERS * NUM_PICKS
    assert [sum(row["uses_per_token"].values()) for row in results] == pytest.approx([picks] * len(results))
    assert results[2]["uses_per_token"] == pytest.approx({"FP4": 0, "2-bit": NUM_LAYERS, "dropped": NUM_LAYERS})
    replay, cold, known = results[1], results[3], [row["reads_per_token"] is not None for row in results]
    assert known == [False, True, False, True, False]
    assert set(replay["reads_per_token"]) <= {"fp4", "int2"} and set(cold["reads_per_token"]) <= {"base", "residual"}
    for row in (replay, cold):
        reads = row["reads_per_token"]
        assert row["nvme_bytes_per_token"] == sum(n * model.slab_bytes[plane] for plane, n in reads.items()) > 0
        full = sum(n * v4_flash_bytes(plane) for plane, n in reads.items()) * 43 / NUM_LAYERS
        assert row["v4_flash_nvme_bytes_per_token"] == pytest.approx(full)


def test_slabs_of_v4_flash() -> None:
    planes = ("fp4", "int2", "quad2", "base", "residual")
    assert [v4_flash_bytes(plane) for plane in planes] == [13_369_344, *[7_077_888] * 3, 6_291_456]


@pytest.mark.parametrize("num_passes", [pytest.param(2, marks=pytest.mark.slow), 10])
def test_a_run_that_is_cut_off_goes_on(
    model: Model, settings: EvalSettings, results: list[dict[str, Any]], num_passes: int, tmp_path: Path
) -> None:
    """In the exact pass and inside a row; what is finished is not measured again, and the results are those of one run."""
    saved, rows = replace(settings, out=tmp_path / "out.json"), ROWS[1:4]
    first, ended = Evaluation(model, saved, rows, pytest.fail), list[str]()

    def cut_off(name: str) -> None:
        ended.append(name)
        if len(ended) == num_passes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(cut_off)
    first.close()
    second = Evaluation(model, saved, rows, pytest.fail)
    again: list[str] = []
    assert second.run(again.append) == results[1:4]
    second.close()
    assert Counter(ended + again) - Counter(exact=len(ended + again)) == {row.name: NUM_SEQUENCES for row in rows}
    assert run(model, saved, rows, pytest.fail) == results[1:4]
    assert Evaluation(model, saved, rows, pytest.fail).num_passes == 0


@pytest.mark.parametrize(("change", "message"), [({"context": 21}, "begun with context 20, expected 21"), ({"document_tokens": 9}, "begun with document_tokens 25")])  # fmt: skip
def test_another_runs_state_is_not_taken(
    model: Model, settings: EvalSettings, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    saved = replace(settings, out=tmp_path / "out.json")
    run(model, saved, ROWS[:1], pytest.fail)
    with pytest.raises(StrawError, match=message):
        Evaluation(model, replace(saved, **change), ROWS, pytest.fail)  # type: ignore[arg-type]


def test_two_runs_at_once(model: Model, settings: EvalSettings, tmp_path: Path) -> None:
    saved = replace(settings, out=tmp_path / "out.json")
    first = Evaluation(model, saved, ROWS, pytest.fail)
    with pytest.raises(StrawError, match="another run writes it"):
        Evaluation(model, saved, ROWS, pytest.fail)
    first.close()
    Evaluation(model, saved, ROWS, pytest.fail).close()


@pytest.mark.parametrize(
    "content", ["", "[]", "5", '{"rows": {}}', '{"settings": {}, "rows": {}, "sha256": "0"}', "[" * 100_000]
)
def test_a_damaged_state(model: Model, settings: EvalSettings, tmp_path: Path, content: str) -> None:
    (tmp_path / "out.state.json").write_text(content)
    with pytest.raises(StrawError, match=r"damaged or no state of a measurement .*; remove it"):
        Evaluation(model, replace(settings, out=tmp_path / "out.json"), ROWS, pytest.fail)


@pytest.mark.parametrize("wrong", [5, {}, {"scores": []}, {"result": 5}])
def test_a_state_that_is_well_formed_and_wrong(
    model: Model, settings: EvalSettings, tmp_path: Path, wrong: Any
) -> None:
    saved = replace(settings, out=tmp_path / "out.json")
    run(model, saved, ROWS[:1], pytest.fail)
    state = json.loads((tmp_path / "out.state.json").read_text())
    state["rows"][ROWS[0].name] = wrong
    (tmp_path / "out.state.json").write_text(json.dumps(state))
    with pytest.raises(StrawError, match=r"out\.state\.json: damaged .*its digest is of other content"):
        Evaluation(model, saved, ROWS[:1], pytest.fail)


def test_a_row_on_real_pools_hangs_on_them_and_not_on_runtime_toml(
    model: Model, settings: EvalSettings, tmp_path: Path
) -> None:
    row = Row("int2", "1,2", residency="cold")
    saved = replace(settings, out=tmp_path / "out.json", vram="4MB", ram="4GB")
    first = Evaluation(model, saved, [row], pytest.fail)
    toml = model.directory / "runtime.toml"

    def cut_off(name: str) -> None:
        if name == row.name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(cut_off)
    first.close()
    try:
        write_tuned(model.directory, Tuned(Shares(0.2, 0.2)))
        (result,) = run(model, saved, [row], pytest.fail)
    finally:
        toml.unlink()
    assert "int2 3 VRAM" in result["pools"]
    state = EvalState(None, {})
    state.check_pools("a", "slots 3")
    with pytest.raises(StrawError, match="row a begun with slots 3, now slots 4; give --slots"):
        state.check_pools("a", "slots 4")


def test_the_rows_of_a_sweep(model: Model) -> None:
    """For K = 6 the ladders of the issue; each that can drop also without renormalising; for fewer picks no row twice."""
    full = replace(model, config=replace(model.config, num_experts_per_tok=6), codes=tuple(CODES))
    rows = sweep_rows(full)
    assert len({row.name for row in rows}) == len(rows)
    own = [row for row in rows if row.code == "quad2" and row.residency == "none"]
    assert len(own) * 2 * len(CODES) == len(rows)
    assert [row.ladder for row in own if row.renormalise] == [
        *("exact", "4,6", "3,6", "2,6", "2,4", "4,4", "1,6", "1,4", "0,6", "0,0"),
        *("mass:0.7,0.95", "mass:0.5,0.9", "mass:0.3,0.8"),
    ]
    dropping = {"2,4", "4,4", "1,4", "0,0", "mass:0.5,0.9", "mass:0.3,0.8", "mass:0.7,0.95"}
    assert {row.ladder for row in own if not row.renormalise} == dropping
    assert len({row.name for row in sweep_rows(model)}) == len(sweep_rows(model))


@pytest.mark.parametrize(
    ("ladder", "slots"),
    [("2,4", ARTICLE_SLOTS), ("exact", (1103, 1515, 0, 0)), ("0,6", (0, 0, 2083, 2861)), ("0,0", (0, 0, 2083, 2861))],
)
def test_slots_to_scale(ladder: str, slots: tuple[int, ...]) -> None:
    """V4-Flash itself has the article's; a ladder of one precision has the bytes of the other's, to half a slot."""
    config = ModelConfig.from_json(dict(V4_FLASH), Path("config.json"))
    found = scaled_slots(config, parse_ladder(ladder, 6))
    assert found == slots
    one_expert = (13_369_344, 13_369_344, 7_077_888, 7_077_888)
    num_bytes = [sum(n * size for n, size in zip(one, one_expert, strict=True)) for one in (found, ARTICLE_SLOTS)]
    assert abs(num_bytes[0] - num_bytes[1]) <= 13_369_344


def test_the_table(results: list[dict[str, Any]]) -> None:
    speeds = {"1,2": Speed(7.75), "split 0,2": Speed(12.9, "looped")}
    head, *lines, note = table(results, speeds)
    assert head.endswith(f"{HEADINGS} tokens/s") and "over 3 documents" in note
    assert len(lines) == len(ROWS) and len({line.index(".") for line in lines}) == 1  # columns stand under each other
    assert lines[1].endswith(" 7.75") and lines[4].endswith("invalid: looped") and lines[0].endswith("–")
    assert f"{results[1]['perplexity_ratio']['value']:.4f}" in lines[1]


def test_the_picture(results: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    _draw(results, {"1,2": Speed(7.75), "1,1": Speed(12.9, "looped")}, tmp_path / "a.png")
    by_bytes, by_speed = drawn[0].axes
    assert len(by_bytes.lines) == 2  # the rows that know their reads
    crosses = [line.get_xydata().tolist() for line in by_speed.lines if line.get_marker() == "x"]
    assert crosses == [[[12.9, results[3]["loss_difference"]["value"]]]]
    assert [text.get_text() for text in by_speed.texts] == ["1,2", "1,1"]
    monkeypatch.undo()
    assert "ladder.png" in draw(results, {}, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_speeds_by_ladder_or_code(tmp_path: Path) -> None:
    (tmp_path / "speeds.json").write_text(
        '{"2,4": {"tokens_per_second": 7}, "quad2 2,4": {"tokens_per_second": 9, "invalid": "looped"},'
        ' "2,4 no-renormalise": {"tokens_per_second": 8}}'
    )
    row: dict[str, Any] = {"code": "int2", "ladder": "2,4", "renormalise": True}
    rows = [Row(code, "2,4", on) for code in ("int2", "quad2") for on in (True, False)]
    speeds = read_speeds(tmp_path / "speeds.json", rows)
    assert speed_of(row, speeds) == Speed(7.0)
    assert speed_of(row | {"code": "quad2"}, speeds) == Speed(9.0, "looped")
    assert speed_of(row | {"renormalise": False}, speeds) == Speed(8.0)
    assert speed_of(row | {"ladder": "1,4"}, speeds) is None
    assert with_speeds([row], speeds)[0]["speed"] == {"tokens_per_second": 7.0, "invalid": None}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"2,4": 7}', "something else than"),
        ('{"2,5": {"tokens_per_second": 7}}', "'2,5' is no ladder of this sweep"),
        ('{"2,4": {"tokens_per_second": -1}}', "has -1 tokens per second"),
        ('{"2,4": {"tokens_per_second": NaN}}', "has nan tokens per second"),
        ('{"2,4": {"tokens_per_second": 1, "invalid": true}}', "has True as invalid"),
        ('{"2,4": {"tokens_per_second": 1, "loss": 1}}', "something else than"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_speeds_that_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "speeds.json").write_text(content)
    with pytest.raises(StrawError, match=f"speeds.json: cannot be read as speeds .*{reason}"):
        read_speeds(tmp_path / "speeds.json", [Row("int2", "2,4")])


def test_a_ladders_speed_is_of_its_valid_answers() -> None:
    valid, broken = ({"tokens_per_second": speed, "invalid": why} for speed, why in ((4.0, None), (9.0, "a loop")))
    assert speed_of_answers([broken, valid, broken]) == Speed(4.0)
    assert speed_of_answers([broken, broken]) == Speed(9.0, "a loop")


Command = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `runtime eval`: exit code, lines on stdout, stderr."""

    def called(*arguments: object) -> tuple[int, list[str], str]:
        with pytest.raises(SystemExit) as ended:
            main(["eval", *map(str, arguments)])
        captured = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, captured.out.splitlines(), captured.err

    return called


def options(values: Mapping[str, object]) -> list[object]:
    return [part for name, value in values.items() for part in (f"--{name}", value)]


def test_the_command_ends_with_one_json_document(command: Command, directory: Path, text: Path, tmp_path: Path) -> None:
    given = options({"text": text, "tokens": 9, "context": 20, "device": "cpu", "out": tmp_path / "out.json"})
    code, lines, _ = command(directory, *given, "--ladder", "1,1", "--ladder", "exact", "--residency", "random:0.5")
    document = json.loads(lines[-1])
    assert code == 0 and document == json.loads((tmp_path / "out.json").read_text())
    assert [row["ladder"] for row in document["results"]] == ["1,1", "exact"]
    assert document["command"].startswith("runtime") and set(STATISTICS) <= set(document["results"][0])


@pytest.mark.slow
def test_the_command_sweeps_and_times_answers(command: Command, directory: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text(json.dumps([{"name": "a", "prompt": "hello", "tokens": 4}]))
    given = options({"text": text, "tokens": 2, "context": 30, "device": "cpu", "out": tmp_path / "new" / "out.json"})
    given += ["--sweep", "--prompts", tmp_path / "set.json", "--speed-prompt", "a"]
    code, lines, err = command(directory, *given)
    assert code == 0, err
    document = json.loads(lines[-1])
    assert len(document["results"]) == len(sweep_rows(read_model(str(directory))))
    for row in document["results"]:
        answers = document["answers"][speed_names(row)[0]]
        assert len(answers) == 3
        assert Speed(**row["speed"]) == speed_of_answers(answers)
    assert (tmp_path / "new" / "ladder.png").exists()
    assert json.loads(command(directory, *given)[1][-1])["results"] == document["results"]  # nothing is timed again


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ladder": "3,9"}, "--ladder 3,9: expected a,b with 0 <= a <= b <= 2"),
        ({"ladder": "exact", "residency": "hot"}, "--residency hot: expected none, all"),
        ({"ladder": "1,2", "code": "quad2"}, "--code quad2: "),
        ({"ladder": "exact", "slots": "9,9,9,9"}, "--slots: no row uses the real pools"),
        ({"ladder": "1,2", "code": "int2", "residency": "replay:9,9,0,1"}, "expected at least 3, one a layer"),
        ({"ladder": "exact", "text": "missing.txt"}, "missing.txt: cannot be read"),
        ({"ladder": "exact", "context": 0}, "context is 0, expected at least 2"),
        ({"ladder": "exact", "residency": "replay:1,2"}, "--residency replay:1,2: expected four counts"),
        ({"ladder": "exact", "context": 999}, "context is 999 tokens, expected 1 to 256"),
        ({"ladder": "exact", "dtype": "float8"}, "dtype is 'float8'"),
    ],
)
def test_bad_input_is_one_line(
    command: Command, directory: Path, text: Path, given: dict[str, object], message: str
) -> None:
    code, lines, err = command(directory, *options({"text": text, "context": 20, "device": "cpu"} | given))
    assert (code, lines) == (1, [])
    assert message in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("given", [[], ["--sweep", "--ladder", "1,2"], ["--vectors", "v.json"], ["--sweep", "--code", "int2"], ["--ladder", "1,2", "--speeds", "s.json"], ["--sweep", "--prompts", "p.json"], ["--ladder", "1,2", "--out", "."]])  # fmt: skip
def test_options_that_do_not_go_together(command: Command, directory: Path, text: Path, given: list[str]) -> None:
    assert command(directory, "--text", text, *given)[0] == 2


def test_nothing_that_is_read_is_overwritten(command: Command, directory: Path, text: Path, tmp_path: Path) -> None:
    before = text.read_bytes()
    state = tmp_path / "a.state.json"
    shutil.copy(text, state)
    for source, out in ((text, text), (text, text.parent / "." / text.name), (state, tmp_path / "a.json")):
        code, _, err = command(directory, "--text", source, "--ladder", "exact", "--out", out)
        assert code == 2 and "it would overwrite" in " ".join(err.replace("│", " ").split())
    assert text.read_bytes() == state.read_bytes() == before
    assert command(directory, "--vectors", text, "--out", text)[0] == 2


def test_an_interrupt_is_one_line(
    command: Command, directory: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.sweep.run", interrupted)
    code, lines, err = command(directory, "--text", text, "--ladder", "exact", "--out", tmp_path / "out.json")
    assert (code, lines, err) == (1, [], "error: interrupted; the same command goes on where it stopped\n")


def test_models_that_cannot_be_measured(
    command: Command, checkpoint: Path, directory: Path, text: Path, tmp_path: Path
) -> None:
    _, _, err = command(checkpoint, "--text", text, "--ladder", "exact")
    assert "no manifest.json in it, expected a model directory" in err
    layout(checkpoint, tmp_path / "fp4")
    _, _, err = command(tmp_path / "fp4", "--text", text, "--sweep")
    assert f"no 2-bit precision of the experts, expected one to sweep over; run: {stage_command('requant', tmp_path / 'fp4')}" in err  # fmt: skip
    _, _, err = command(tmp_path / "fp4", "--text", text, "--ladder", "1,2")
    assert "--ladder 1,2 needs a 2-bit precision" in err
    shutil.copytree(directory, tmp_path / "mute")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    _, _, err = command(tmp_path / "mute", "--text", text, "--ladder", "exact")
    assert "tokenizer.json" in err.splitlines()[-1]
