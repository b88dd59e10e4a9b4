"""The installed commands on a random checkpoint with a tiny tokenizer: what a user types, what comes out, how it fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from random_checkpoint import write_random_checkpoint
from tiny_tokenizer import build_tokenizer

BIN = Path(sys.executable).parent
LIMIT_SECONDS = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli")
    write_random_checkpoint(root / "checkpoint", max_position_embeddings=256)
    build_tokenizer().save(str(root / "checkpoint" / "tokenizer.json"))
    (root / "checkpoint" / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.8}')
    run("prep", "layout", root / "checkpoint", root / "model", check=True)
    return root / "model"


def run(*command: object, check: bool = False, stdin: str = "") -> subprocess.CompletedProcess[str]:
    name, *arguments = map(str, command)
    return subprocess.run(
        [BIN / name, *arguments], capture_output=True, text=True, check=check, input=stdin, timeout=LIMIT_SECONDS
    )


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_generate_prints_the_text_alone_and_follows_the_seed(model: Path) -> None:
    options = ("generate", model, "--prompt", "hello", "--max-new-tokens", 12, "--device", "cpu")
    first, again, other = (run("runtime", *options, "--seed", seed, check=True) for seed in (1, 1, 2))
    assert first.stdout == again.stdout != other.stdout
    assert "tokens/s" not in first.stdout


def test_raw_continues_the_text_after_bos(model: Path) -> None:
    options = ("generate", model, "--prompt", "hello", "--max-new-tokens", 8, "--temperature", 0)
    assert run("runtime", *options, check=True).stdout != run("runtime", *options, "--raw", check=True).stdout


def test_chat_answers_one_prompt_with_timing_and_stats(model: Path, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    done = run("runtime", "chat", model, "--prompt", "hello", "--max-new-tokens", 6, "--stats", stats, check=True)
    assert done.stdout.endswith("\n")
    assert "first token after" in done.stderr.splitlines()[-1]
    assert json.loads(stats.read_text())["prefill_tokens"] > 0


def test_chat_talks_over_a_pipe(model: Path) -> None:
    done = run("runtime", "chat", model, "--max-new-tokens", 4, check=True, stdin="hello\n/reset\nhello\n")
    assert done.stderr.count("first token after") == 2


def test_a_full_context_is_said_and_the_answer_kept(model: Path) -> None:
    done = run("runtime", "chat", model, "--prompt", "hello", "--context", 16, "--temperature", 0, check=True)
    assert "expected at most 16 in all" in done.stderr


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(model: Path) -> None:
    command = [BIN / "runtime", "chat", model, "--temperature", "0", "--max-new-tokens", "200"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write("hello\n")
        process.stdout.read(5)  # the answer has begun
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("/stats\nhello\n", timeout=LIMIT_SECONDS)
    assert "stopped; the conversation is kept" in err
    assert err.count("first token after") == 2
    assert process.returncode == 0
    assert out


@pytest.mark.parametrize(
    ("content", "found"), [(b"", "empty"), (b"\xff\xfe\x00\x01", "is not UTF-8"), (b"a\x00b", "not text")]
)
def test_a_prompt_file_that_is_no_text(model: Path, tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    line = error_line(run("runtime", "generate", model, "--prompt-file", path))
    assert str(path) in line
    assert found in line


def test_bytes_that_are_no_text_and_no_place_to_print_to(model: Path) -> None:
    shell = f"{BIN / 'runtime'} chat {model} --max-new-tokens 2"
    for command, found in (
        (f"printf '\\xff\\n' | LC_ALL=C {shell}", "stdin: bytes that are not text"),
        (f"{shell} --prompt hello --system $'\\xff'", "--system: bytes that are not text"),
        (f"{shell} --prompt hello > /dev/full", "stdout: No space left on device"),
        (f"{shell} --prompt hello >&-", "stdout: it is closed"),
    ):
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
        )
        assert found in error_line(done), command


def test_usage_errors_exit_with_2(model: Path) -> None:
    for options in (
        ["generate", model],
        ["chat", model, "--top-p", "7"],
        ["chat", model, "--think", "--effort", "low"],
    ):
        assert run("runtime", *options).returncode == 2, options


def test_a_context_beyond_the_model_is_refused(model: Path) -> None:
    assert "context is 999 tokens, expected 1 to 256" in error_line(
        run("runtime", "chat", model, "--prompt", "hello", "--context", 999)
    )


def test_help_needs_no_torch() -> None:
    script = "import sys, runtime.cli, prep.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=LIMIT_SECONDS).returncode == 0
