"""The options that several commands of `runtime` have, as typer's types. Owns their names and help, and no default.

An option that one command has alone is written out there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help='A model directory, a released checkpoint that fits in memory, or "demo".')]
Prompt = Annotated[str | None, typer.Option("--prompt", help="One user turn; answer it and end.")]
PromptFile = Annotated[Path | None, typer.Option("--prompt-file", help="Read the user turn from a text file.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:i; default: cuda if there is one.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16; default: float32 on the CPU.")]
Context = Annotated[int | None, typer.Option("--context", help="Tokens of the longest conversation.")]
Ladder = Annotated[
    str,
    typer.Option(
        "--ladder", help="a,b or exact or mass:hi,lo; auto: as tuned, else exact if all experts fit, else 2,4."
    ),
]
Renormalise = Annotated[
    bool,
    typer.Option("--renormalise/--no-renormalise", help="Whether what is left carries the weight of what is dropped."),
]
Code = Annotated[str | None, typer.Option("--code", help="int2, quad2 or split; default: the model directory's.")]
Slots = Annotated[
    str | None, typer.Option("--slots", help="F,R,f,r: experts at FP4 in VRAM and RAM, then at 2-bit only.")
]
Vram = Annotated[str | None, typer.Option("--vram", help="Budget for all the process uses there, e.g. 24GB.")]
Ram = Annotated[str | None, typer.Option("--ram", help="Budget for all the process uses there, e.g. 24GB.")]
Prefetch = Annotated[
    str,
    typer.Option(
        "--prefetch", help="off, hash or predictor: what is read before it is asked for; auto: as tuned, else off."
    ),
]
VerifyReads = Annotated[bool, typer.Option("--verify-reads", help="Check the CRC-32 of every slab that is read.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, help="0 is greedy; default: the model's generation_config.json.")
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Default: the model's generation_config.json.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the sampler.")]
Guard = Annotated[
    bool, typer.Option("--guard/--no-guard", help="Roll back and go on exactly when the text turns to junk.")
]
Junk = Annotated[
    list[str],
    typer.Option("--junk", help="A text that counts as junk wherever it appears, within a word too; may be repeated."),
]
Stats = Annotated[Path | None, typer.Option("--stats", help="Write the session's counters to this JSON file.")]
Mirrors = Annotated[
    list[Path], typer.Option("--mirror", help="Another directory with the same experts/ files, best on another drive.")
]


def refuse_options(way: str, options: dict[str, object]) -> None:
    """Raises BadParameter if one of the options, which mean nothing in this way to run, is given."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"{name} means nothing with {way}")
