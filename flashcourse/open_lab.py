"""``python -m flashcourse open``: JupyterLab at the first lesson."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parents[1]
FIRST_LESSON = "notebooks/00_start_here.ipynb"
# Settings for this JupyterLab alone: its first question would be about JupyterLab's news.
CONFIG = Path(__file__).resolve().parent / "jupyter"


def why_no_browser(env: Mapping[str, str], system: str, release: str) -> str:
    """Why no browser can be opened from here, in words; empty if one can.

    Args:
        env: the environment.
        system: ``platform.system()``.
        release: ``platform.release()``; WSL2's kernel has "microsoft" in it.
    """
    if "microsoft" in release.lower():
        return "This is WSL2: open the address below in the browser of Windows."
    if env.get("SSH_CONNECTION"):
        return (
            "This is a remote machine. With PORT from the address below, type on your own:\n"
            "  ssh -L PORT:localhost:PORT this-machine\n"
            "and open the address there."
        )
    if system == "Linux" and not (env.get("DISPLAY") or env.get("WAYLAND_DISPLAY")):
        return "There is no display here: open the address below in a browser."
    return ""


def jupyter_command(arguments: list[str], no_browser: bool, is_root: bool) -> list[str]:
    """The command that starts JupyterLab; what the person passed comes last, and wins."""
    # The lesson as an address, not as an argument: that would hide every folder but its own.
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    command += [f"--LabApp.default_url=/lab/tree/{FIRST_LESSON}"]
    command += ["--no-browser"] * (no_browser and "--no-browser" not in arguments)
    command += ["--allow-root"] * (is_root and "--allow-root" not in arguments)
    return [*command, *arguments]


def jupyter_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment that JupyterLab starts in: ``env`` with the course's settings first."""
    paths = [str(CONFIG), *filter(None, [env.get("JUPYTER_CONFIG_PATH")])]
    return {**env, "JUPYTER_CONFIG_PATH": os.pathsep.join(paths)}


def open_lab(context: typer.Context) -> None:
    """Open JupyterLab at the first lesson. Options are passed on to `jupyter lab`."""
    if not (ROOT / FIRST_LESSON).is_file():
        typer.echo(
            f"There is no {FIRST_LESSON} beside the installed flashcourse: it was not installed "
            "from a clone of the course. Clone it, and type `make lab` there.",
            err=True,
        )
        raise typer.Exit(1)
    reason = why_no_browser(os.environ, platform.system(), platform.release())
    if reason:
        typer.echo(reason)
    is_root = os.geteuid() == 0
    if is_root:
        typer.echo("You are root: JupyterLab is told to allow that (--allow-root).")
    typer.echo("Stop JupyterLab with Ctrl-C.")
    sys.stdout.flush()
    os.chdir(ROOT)
    command = jupyter_command(context.args, bool(reason), is_root)
    os.execve(command[0], command, jupyter_environment(os.environ))
