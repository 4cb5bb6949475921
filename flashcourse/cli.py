"""The command line: `python -m flashcourse COMMAND`. Each command imports what it needs itself."""

from __future__ import annotations

import typer

from flashcourse.course import commands as course_commands

app = typer.Typer(
    help="Tools of the FlashAttention course.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Tools of the FlashAttention course."""


app.command()(course_commands.notebooks)
app.command()(course_commands.labs)
app.command()(course_commands.colab)
