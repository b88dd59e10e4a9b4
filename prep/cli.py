"""The command line `prep`: checkpoint in, model directory out. Parses, calls one function, prints; holds no logic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runtime.console import run_cli

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def prep() -> None:
    """Prepare a DeepSeek-V4 checkpoint for the runtime: checkpoint in, model directory out."""


@app.command("layout")
def layout_command(
    checkpoint: Annotated[Path, typer.Argument(help="Released checkpoint: config.json, index, safetensors shards.")],
    model: Annotated[Path, typer.Argument(help="Model directory to make, complete or repair.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes and free disk, write nothing.")] = False,
) -> None:
    """Write the experts as FP4 slabs and everything else beside them. A run that was cut off goes on where it stopped."""
    from prep.layout import describe_layout, layout

    if dry_run:
        print(describe_layout(checkpoint, model))
        return
    plan = layout(checkpoint, model)
    print(f"{model}: complete, wrote {plan.todo_bytes:,} bytes in {len(plan.todo)} files")


def main(arguments: list[str] | None = None) -> None:
    """Runs `prep`; ends by SystemExit."""
    run_cli(app, arguments)
