"""What the first cell of a notebook does on Colab, once the library can be imported.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

# Part of the machine rather than of the course: Colab's kernel, its widgets and its build of
# PyTorch fit each other. JupyterLab is a front end, and Colab is one.
NEVER_INSTALLED = ("torch", "triton", "ipywidgets", "ipykernel", "jupyterlab")
# Held at what is there while something else is installed. NumPy is among them because a kernel
# that has loaded it cannot change to another.
FROZEN = ("torch", "triton", "ipywidgets", "ipykernel", "numpy")


class SetupFailed(RuntimeError):
    """The notebook cannot be prepared here; the text says what to do."""


def on_colab() -> bool:
    """True in a Colab kernel."""
    return "COLAB_RELEASE_TAG" in os.environ or "google.colab" in sys.modules


def prepare() -> None:
    """Make the library visible to child processes, and install what it needs and is missing.

    Raises:
        SetupFailed: something could not be installed, or may not be (away from Colab).
    """
    home = Path(__file__).resolve().parents[2]
    _share_with_children(home)
    with (home / "pyproject.toml").open("rb") as file:
        requirements = tomllib.load(file)["project"]["dependencies"]
    missing = missing_requirements(requirements, installed_version)
    if not missing:
        return
    if not on_colab():
        wanted = " ".join(f"'{requirement}'" for requirement in missing)
        raise SetupFailed(f"this notebook needs packages that are missing: pip install {wanted}")
    _install(missing)


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_requirements(
    requirements: Iterable[str], version_of: Callable[[str], str | None]
) -> list[str]:
    """Those of the requirements that pip should install here.

    Args:
        requirements: as written in ``pyproject.toml``, such as ``"rich>=13.7"``.
        version_of: the installed version of a distribution, None if it is not there.

    Returns:
        the requirements that are absent, or older than the lowest version they allow; never one
        of :data:`NEVER_INSTALLED`.
    """
    missing = []
    for requirement in requirements:
        bare = requirement.split(";")[0].strip()
        found = re.match(r"[A-Za-z0-9._-]+", bare)
        if found is None:
            raise ValueError(f"not a requirement: {requirement!r}")
        name = found.group()
        if name.lower() in NEVER_INSTALLED:
            continue
        version = version_of(name)
        lowest = re.search(r">=\s*([0-9.]+)", bare)
        if version is None or (lowest and _numbers(version) < _numbers(lowest.group(1))):
            missing.append(bare)
    return missing


def constraints(version_of: Callable[[str], str | None]) -> str:
    """A pip constraints file that keeps every :data:`FROZEN` package as it is."""
    pairs = [(name, version_of(name)) for name in FROZEN]
    return "".join(f"{name}=={version}\n" for name, version in pairs if version)


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version, padded so that 8 equals 8.0: "2.8.0+cu126" -> (2, 8, 0)."""
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(part) for part in release.group().split(".")] if release else []
    return tuple(numbers + [0] * (4 - len(numbers)))


def _share_with_children(home: Path) -> None:
    """`!python -m flashcourse` and the course's own worker processes find the library too."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(home) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(home), *paths])


def _install(missing: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        frozen = Path(folder) / "constraints.txt"
        frozen.write_text(constraints(installed_version))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(frozen)]
        print("Installing", ", ".join(missing), flush=True)
        done = subprocess.run([*command, *missing], capture_output=True, text=True)
    if done.returncode:
        raise SetupFailed(
            f"pip could not install {', '.join(missing)}. It said:\n{done.stderr.strip()}\n"
            "If the network failed, run this cell again. If versions conflict, choose "
            "Runtime > Disconnect and delete runtime, then run the notebook from the top."
        )
