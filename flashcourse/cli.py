"""The command line: `python -m flashcourse COMMAND`. Each command imports what it needs itself."""

from __future__ import annotations

import typer

from flashcourse.bench.command import bench
from flashcourse.course import commands as course_commands
from flashcourse.doctor import doctor
from flashcourse.grading_command import grade
from flashcourse.open_lab import open_lab

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
app.command()(doctor)
app.command()(bench)
app.command()(grade)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(name="open", context_settings=PASS_ON)(open_lab)
