"""The command line: `python -m flashcourse COMMAND`. Each command imports what it needs itself."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="Tools of the FlashAttention course.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Tools of the FlashAttention course."""
