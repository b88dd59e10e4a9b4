"""The command line `prep`: checkpoint in, model directory out. Parses, calls one function, prints; holds no logic."""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from runtime.console import run_cli
from runtime.errors import StrawError


class _Commands(TyperGroup):
    """The commands; Ctrl-C ends each by one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted; run the same command again, it continues where it stopped", file=sys.stderr)
            raise typer.Exit(1) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Codec(StrEnum):
    """Ways to a 2-bit precision."""

    CLIP = "clip"
    QUAD = "quad"
    SPLIT = "split"


class Code(StrEnum):
    """2-bit precisions."""

    INT2 = "int2"
    QUAD2 = "quad2"
    SPLIT = "split"


class SynthCodec(StrEnum):
    """Ways to the 2-bit precision of a synthetic model; none leaves it at FP4."""

    QUAD = "quad"
    CLIP = "clip"
    SPLIT = "split"
    NONE = "none"


class PredictorKind(StrEnum):
    """Predictors that are trained."""

    MLP = "mlp"
    LINEAR = "linear"


class SynthConfig(StrEnum):
    """Released models whose shape can be made."""

    V4_FLASH = "v4-flash"


Model = Annotated[Path, typer.Argument(help='A model directory, or "demo", the shipped model.')]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print sizes, time and free disk, write nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before something is removed.")]


@app.callback()
def prep() -> None:
    """Prepare a DeepSeek-V4 checkpoint for the runtime: checkpoint in, model directory out."""


@app.command("layout")
def layout_command(
    checkpoint: Annotated[Path, typer.Argument(help="Released checkpoint: config.json, index, safetensors shards.")],
    model: Annotated[Path, typer.Argument(help="Model directory to make, complete or repair.")],
    dry_run: DryRun = False,
    consume: Annotated[
        bool, typer.Option("--consume", help="Remove each source shard once all that is needed of it is read back.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Write the experts as FP4 slabs and everything else beside them. A run that was cut off goes on where it stopped."""
    from prep.layout import describe_layout, layout

    if dry_run:
        print(describe_layout(checkpoint, model))
        return
    if consume:
        _confirm(f"the shards of {checkpoint}, draft stages with them,", yes)
    plan = layout(checkpoint, model, consume=consume)
    print(f"{model}: complete, wrote {plan.todo_bytes:,} bytes in {len(plan.todo)} files")


@app.command("requant")
def requant_command(
    model: Model = Path("demo"),
    codec: Annotated[Codec | None, typer.Option("--codec", help="Way to the 2-bit precision; default: quad.")] = None,
    code: Annotated[Code | None, typer.Option("--code", help="Only choose a 2-bit precision that is there.")] = None,
    layers: Annotated[str | None, typer.Option("--layers", help="Only these, A or A-B.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:i; default: cuda if any.")] = None,
    dry_run: DryRun = False,
    consume: Annotated[
        bool, typer.Option("--consume", help="With split: remove each fp4 file once its planes are read back.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Write a 2-bit precision of every expert beside its FP4. A run that was cut off goes on where it stopped."""
    if code and (codec or layers or consume or dry_run):
        raise typer.BadParameter("--code only chooses; give it without other options")
    if consume and codec is not Codec.SPLIT:
        raise typer.BadParameter("--consume needs --codec split: the other codes do not hold the FP4 values")
    wanted = _layers(layers)
    from prep.requant import DEFAULT_CODEC, describe_requant, requant, use_code
    from runtime.devices import compute_device

    directory = _directory(model)
    if code:
        use_code(directory, code.value)
        print(f"{directory}: code {code.value} in use")
        return
    name, place = codec.value if codec else DEFAULT_CODEC, compute_device(device)
    if dry_run:
        print(describe_requant(directory, name, layers=wanted, device=place))
        return
    if consume:
        _confirm(f"the fp4 files of {directory}", yes)
    plan = requant(directory, name, layers=wanted, device=place, consume=consume)
    print(f"{directory}: {plan.code}, solved {plan.num_experts:,} experts, wrote {plan.write_bytes:,} bytes")


@app.command("verify")
def verify_command(
    model: Annotated[Path, typer.Argument(help='A model directory, a released checkpoint, or "demo".')] = Path("demo"),
    deep: Annotated[bool, typer.Option("--deep", help="Quantise a sample of experts again and compare.")] = False,
) -> None:
    """Compare every byte with its checksum. Prints each damage; exit code 1 if there is any."""
    from prep.verify import verify

    directory = _directory(model)
    findings = verify(directory, deep=deep)
    for finding in findings[:-1]:
        print(finding)
    if findings:
        raise StrawError(findings[-1])
    print(f"{directory}: whole")


@app.command("synth")
def synth_command(
    model: Annotated[Path, typer.Argument(help="Model directory to make or complete.")],
    config: Annotated[SynthConfig, typer.Option("--config", help="Whose shape.")] = SynthConfig.V4_FLASH,
    unique_layers: Annotated[
        int, typer.Option("--unique-layers", help="Layers whose experts exist; the others are hard links to them.")
    ] = 1,
    layers: Annotated[int | None, typer.Option("--layers", help="Only the first so many.")] = None,
    experts: Annotated[
        int | None, typer.Option("--experts", help="Of a layer, at least 6; default: as released.")
    ] = None,
    vocab: Annotated[int | None, typer.Option("--vocab", help="Tokens; default: as released.")] = None,
    codec: Annotated[SynthCodec, typer.Option("--codec", help="Way to the 2-bit precision.")] = SynthCodec.QUAD,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:i; default: cuda if any.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Make a model of real geometry from random weights, without a download. A run that was cut off goes on."""
    from prep.synth import synth
    from prep.synth_plan import SynthSettings, describe_synth
    from runtime.devices import compute_device

    name = None if codec is SynthCodec.NONE else codec.value
    settings = SynthSettings(config.value, unique_layers, layers, experts, vocab, name, seed)
    if dry_run:
        print(describe_synth(model, settings))
        return
    plan = synth(model, settings, compute_device(device))
    print(f"{model}: complete, {plan.config.num_hidden_layers} layers in {plan.disk_bytes:,} bytes")


@app.command("train-predictor")
def train_predictor_command(
    model: Model = Path("demo"),
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Directory of prep trace; default: MODEL/trace.")
    ] = None,
    kind: Annotated[PredictorKind, typer.Option("--kind", help="What is trained to be kept.")] = PredictorKind.MLP,
    epochs: Annotated[float, typer.Option("--epochs", help="Passes over the training tokens.")] = 10.0,
    steps: Annotated[int | None, typer.Option("--steps", help="Batches to train on, instead of --epochs.")] = None,
    batch: Annotated[int, typer.Option("--batch", help="Tokens of a batch, each in all of its layers.")] = 256,
    width: Annotated[int, typer.Option("--width", help="Of the two hidden layers.")] = 1536,
    held_out: Annotated[float, typer.Option("--held-out", help="Share of the tokens to measure on.")] = 0.1,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:i; default: cuda if any.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; default: MODEL/predictor.safetensors.")
    ] = None,
) -> None:
    """Train on a routing trace which experts the layers ahead will need. A run that was cut off starts over."""
    import json

    from prep.predictor_report import describe, draw, to_json
    from prep.train_predictor import Settings, train_predictor

    settings = Settings(trace, out, epochs, steps, batch, width, device, seed, held_out, kind.value)
    outcome = train_predictor(_directory(model), settings)
    print(describe(outcome))
    print(draw(outcome))
    print(json.dumps(to_json(outcome)))


@app.command("trace")
def trace_command(
    model: Model = Path("demo"),
    text: Annotated[
        list[Path], typer.Option("--text", help="A text file, one document; or .jsonl, one a line with the key text.")
    ] = [],  # noqa: B006 - typer copies it
    tokens: Annotated[int | None, typer.Option("--tokens", help="At most so many, over all documents.")] = None,
    generate: Annotated[
        int, typer.Option("--generate", help="Tokens of its own that the model adds to each document's beginning.")
    ] = 0,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="That beginning, with --generate.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="With --generate; 0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="With --generate, of the sampler.")] = 0,
    routing_only: Annotated[bool, typer.Option("--routing-only", help="Leave the hidden states out.")] = False,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:i; default: cuda if any.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16; default: float32 on cpu.")] = None,
    ladder: Annotated[str, typer.Option("--ladder", help="a,b or exact or mass:hi,lo.")] = "exact",
    vram: Annotated[str | None, typer.Option("--vram", help="Budget for all the process uses there.")] = None,
    ram: Annotated[str | None, typer.Option("--ram", help="Budget for all the process uses there.")] = None,
    slots: Annotated[str | None, typer.Option("--slots", help="F,R,f,r as of runtime generate.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Trace directory; default: trace in the model's.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print what the trace says; alone, of one made before.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Run the model on text and record what each router saw and chose. A run that was cut off goes on."""
    if not text and (dry_run or not report):
        raise typer.BadParameter("expected --text FILE, or --report for a trace made before")
    directory = _directory(model)
    from prep.trace import TraceOptions, describe_trace, trace
    from prep.trace_report import print_lines
    from runtime.manifest import TRACE

    place = out or directory / TRACE
    options = TraceOptions(
        tokens=tokens,
        generate=generate,
        prompt_tokens=prompt_tokens,
        temperature=temperature,
        seed=seed,
        routing_only=routing_only,
        device=device,
        dtype=dtype,
        ladder=ladder,
        vram=vram,
        ram=ram,
        slots=slots,
    )
    if dry_run:
        print(describe_trace(directory, text, options, place))
        return
    if text:
        made = trace(directory, text, options, place)
        size_bytes = made.num_tokens * made.record.token_bytes
        print(
            f"{place}: complete, {made.num_tokens:,} tokens of {len(made.documents):,} documents in {size_bytes:,} bytes"
        )
    if report:
        for lines in print_lines(place):
            print(lines)


@app.command("all")
def all_command(
    checkpoint: Annotated[Path, typer.Argument(help="Released checkpoint: config.json, index, safetensors shards.")],
    model: Annotated[Path, typer.Argument(help="Model directory to make, complete or repair.")],
    text: Annotated[
        list[Path], typer.Option("--text", help="For the trace: a text file, or .jsonl with one document a line.")
    ],
    codec: Annotated[Codec | None, typer.Option("--codec", help="Way to the 2-bit precision; default: quad.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Of the trace, over all documents.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:i; default: cuda if any.")] = None,
    dry_run: DryRun = False,
) -> None:
    """layout, requant, trace and train-predictor, one after the other. What is finished is skipped."""
    from prep.all_stages import AllOptions, describe_all, run_all
    from runtime.devices import compute_device

    options = AllOptions(codec.value if codec else None, tokens, compute_device(device))
    if dry_run:
        print(describe_all(checkpoint, model, text, options))
        return
    for line in run_all(checkpoint, model, text, options):
        print(line)


def _directory(model: Path) -> Path:
    from runtime.demo import DEMO_NAME, prepared_demo

    return prepared_demo() if str(model) == DEMO_NAME and not model.exists() else model


def _layers(text: str | None) -> range | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    if match is None:
        raise typer.BadParameter(f"--layers is {text!r}, expected one layer or A-B")
    first = int(match[1])
    return range(first, int(match[2] or first) + 1)


def _confirm(what: str, yes: bool) -> None:
    """Returns if the user agrees to the removal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise StrawError(f"--consume removes {what} and stdin is no terminal, expected one to ask; add --yes to agree")
    typer.confirm(f"Remove {what} once what replaces them is read back?", abort=True)


def main(arguments: list[str] | None = None) -> None:
    """Runs `prep`; ends by SystemExit."""
    run_cli(app, arguments)
