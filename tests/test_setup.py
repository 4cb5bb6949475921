"""The set-up: its messages, its states, and the files that must agree with each other."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from flashcourse.cli import app

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "setup_env.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
Usage = namedtuple("Usage", "free")


@pytest.fixture
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_finished(setup_env: ModuleType, venv: Path, **changes: object) -> None:
    """A folder that looks like a finished .venv, with this Python inside."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "pyvenv.cfg").touch()
    stamp = {"key": setup_env.wanted_key(), "root": str(ROOT), "extras": ["test"], **changes}
    setup_env.write_stamp(str(venv), stamp)


# --- what is in the way -------------------------------------------------------------------------


def test_the_script_can_be_read_by_an_old_python() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


def test_an_old_python_is_told_what_to_type(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: name == "python3.12")
    with pytest.raises(setup_env.SetupError) as error:
        setup_env.check_python((3, 9, 18), "/usr/bin/python3", "test")
    assert "is Python 3.9.18; the course needs 3.11 or newer" in str(error.value)
    assert "make test PYTHON=python3.12" in str(error.value)
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    with pytest.raises(setup_env.SetupError, match="sudo apt install"):
        setup_env.check_python((3, 9, 18), "/usr/bin/python3", "test")
    setup_env.check_python((3, 11, 0), "/usr/bin/python3", "test")


def test_a_python_without_venv_is_told_which_package_brings_it(setup_env: ModuleType) -> None:
    with pytest.raises(setup_env.SetupError, match=r"sudo apt install python3\.12-venv"):
        setup_env.check_venv_module(lambda name: None if name == "ensurepip" else 1, (3, 12))
    setup_env.check_venv_module(lambda name: 1, (3, 12))


@pytest.mark.parametrize(
    ("os_name", "system", "machine", "word"),
    [("nt", "win32", "AMD64", "WSL2"), ("posix", "darwin", "x86_64", "Intel")],
)
def test_systems_that_cannot_work_are_told_what_to_use(
    os_name: str, system: str, machine: str, word: str, setup_env: ModuleType
) -> None:
    with pytest.raises(setup_env.SetupError, match=word):
        setup_env.check_platform(os_name, system, machine)
    setup_env.check_platform("posix", "darwin", "arm64")


def test_a_full_disk_is_noticed_before_anything_is_written(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = str(tmp_path / "deep" / ".venv")
    with pytest.raises(setup_env.SetupError, match=r"folder of the course .* has 0\.5 GB free"):
        setup_env.check_space(venv, usage=lambda path: Usage(0.5e9))
    monkeypatch.setattr(setup_env.tempfile, "gettempdir", lambda: "/small")
    with pytest.raises(setup_env.SetupError, match="TMPDIR="):
        setup_env.check_space(venv, usage=lambda path: Usage(1e9 if path == "/small" else 1e12))
    setup_env.check_space(venv, usage=lambda path: Usage(1e12))
    setup_env.check_space(".venv", usage=lambda path: Usage(1e12))  # a path without a folder
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left", "full"),
        ("Retrying after 'NewConnectionError(...): Connection refused'", "could not reach"),
        ("Temporary failure in name resolution", "could not reach"),
        (
            "ERROR: Could not find a version that satisfies the requirement setuptools>=77 "
            "(from versions: none)",
            "no release of setuptools",
        ),
        ("ERROR: ResolutionImpossible", "its own error stands above"),
    ],
)
def test_pip_failures_are_explained(log: str, word: str, setup_env: ModuleType) -> None:
    assert word in setup_env.explain_pip_failure(log)


def test_an_index_that_cannot_be_reached(tmp_path: Path) -> None:
    """The real pip against a closed port; a second try goes on where the first gave up."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    env |= {"PIP_RETRIES": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, str(SCRIPT), "--venv", str(tmp_path / "venv")]
    first, second = (
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        for _ in range(2)
    )
    assert first.returncode == second.returncode == 1
    assert "pip could not reach its package index" in first.stderr
    assert "Traceback" not in first.stderr
    assert "Making .venv" in first.stdout
    assert "Going on with the set-up" in second.stdout
    assert "Making .venv" not in second.stdout


# --- states of .venv ----------------------------------------------------------------------------


def test_a_finished_venv_is_ready_in_no_time(setup_env: ModuleType, tmp_path: Path) -> None:
    make_finished(setup_env, tmp_path / "venv")
    start = time.perf_counter()
    command = [sys.executable, str(SCRIPT), "--venv", str(tmp_path / "venv"), "--extra", "test"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("changes", "extras", "todo"),
    [
        ({}, ["test"], "ready"),
        ({}, [], "ready"),
        ({"extras": []}, ["test"], "update"),
        ({"key": "of an older pyproject.toml"}, [], "update"),
        ({"root": "/elsewhere"}, [], "make"),
    ],
)
def test_what_a_stamp_asks_for(
    changes: dict[str, object],
    extras: list[str],
    todo: str,
    setup_env: ModuleType,
    tmp_path: Path,
) -> None:
    make_finished(setup_env, tmp_path / "venv", **changes)
    assert setup_env.choose(str(tmp_path / "venv"), extras, False)[0] == todo


def test_an_unfinished_or_broken_venv_is_made_afresh(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "venv"
    assert setup_env.choose(str(venv), [], False)[0] == "make"
    make_finished(setup_env, venv)
    setup_env.write_marker(str(venv), "working")
    assert setup_env.choose(str(venv), [], False)[0] == "make"
    (venv / setup_env.MARKER).unlink()
    assert setup_env.choose(str(venv), [], True)[0] == "ready"
    monkeypatch.setattr(setup_env, "python_version", lambda path: (3, 12))
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 13, 0))
    assert setup_env.choose(str(venv), [], False)[0] == "ready"  # it works, nobody named another
    assert setup_env.choose(str(venv), [], True)[0] == "make"
    monkeypatch.setattr(setup_env, "python_version", lambda path: None)
    assert setup_env.choose(str(venv), [], False)[0] == "make"


def test_a_venv_made_by_hand_is_used_and_never_deleted(
    setup_env: ModuleType, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    make_finished(setup_env, venv)
    (venv / setup_env.STAMP).unlink()
    assert setup_env.choose(str(venv), [], False)[0] == "update"
    (venv / "bin" / "python").unlink()
    with pytest.raises(setup_env.SetupError, match=r"rm -r \.venv"):
        setup_env.choose(str(venv), [], False)


@pytest.mark.parametrize(
    ("trouble", "marker"), [(None, ""), (KeyboardInterrupt, "working"), (OSError, "working")]
)
def test_the_stamp_is_written_last(
    trouble: type[BaseException] | None,
    marker: str,
    setup_env: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    venv = str(tmp_path / "venv")
    make_finished(setup_env, Path(venv), key="old")

    def pip_install(where: str, extras: list[str]) -> None:
        assert not setup_env.read_stamp(where)
        assert setup_env.read_marker(where) == "working"
        assert extras == ["test"]  # what the tests need stays when `make lab` updates
        if trouble:
            raise trouble

    monkeypatch.setattr(setup_env, "pip_install", pip_install)
    status = setup_env.main(["--venv", venv])
    assert status == {None: 0, KeyboardInterrupt: 130, OSError: 1}[trouble]
    assert setup_env.read_marker(venv) == marker
    assert bool(setup_env.read_stamp(venv)) == (trouble is None)


def test_two_at_once_wait_for_each_other(setup_env: ModuleType, tmp_path: Path) -> None:
    make_finished(setup_env, tmp_path / "venv")
    command = [sys.executable, str(SCRIPT), "--venv", str(tmp_path / "venv")]
    with (ROOT / "pyproject.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert "Another set-up" in second.stdout.readline()
            assert second.poll() is None
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert second.wait(timeout=60) == 0


# --- files that must agree ----------------------------------------------------------------------


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> dict[str, Requirement]:
    """Every direct dependency, extras included, by name."""
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    found = {canonical(r.name): r for r in map(Requirement, lines)}
    found.pop("flashcourse")
    return found


def test_constraints_name_a_tested_version_of_every_dependency_but_triton() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        canonical(r.name): r for r in map(Requirement, filter(None, map(without_comment, lines)))
    }
    wanted = requirements()
    assert "triton" not in pins
    assert set(wanted) - {"triton"} <= set(pins)
    for name, pin in pins.items():
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        if name in wanted:
            assert wanted[name].specifier.contains(specifier.version), name


def without_comment(line: str) -> str:
    return line.split("#")[0].strip()


def test_triton_is_never_pinned() -> None:
    assert str(requirements()["triton"].specifier) == ""


def test_conda_installs_python_pip_and_the_project_alone(setup_env: ModuleType) -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, project = environment["dependencies"]
    assert pip == "pip"
    assert project == {"pip": ["--constraint constraints.txt", "--editable .[test]"]}
    offered = SpecifierSet(python.removeprefix("python"))
    needed = SpecifierSet(PROJECT["requires-python"])
    for minor in range(8, 20):
        version = Version(f"3.{minor}.0")
        tested = setup_env.OLDEST <= (3, minor) <= setup_env.NEWEST_TESTED
        assert (version in offered) == tested, version
        assert (version in needed) == ((3, minor) >= setup_env.OLDEST), version


def test_the_devcontainer_takes_a_gpu_if_there_is_one() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert settings["hostRequirements"] == {"gpu": "optional"}
    assert settings["postCreateCommand"] == "python3 tools/setup_env.py"


def test_continuous_integration_runs_the_readme_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert lines[-1] == "make test"


# --- the two commands, and everything else that is to be typed ------------------------------------


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    env.pop("PYTHON", None)
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


def test_make_alone_lists_the_commands() -> None:
    listed = make().stdout
    for target in ("lab", "test", "lint"):
        assert f"make {target} " in listed


def test_the_two_commands_do_what_they_say() -> None:
    lab, test = make("-n", "lab", "ARGS=--port 9999"), make("-n", "test")
    steps = "setup_env.py .* --target lab.*flashcourse doctor.*flashcourse open --port 9999"
    assert re.search(steps, lab.stdout, re.DOTALL)
    assert re.search(
        "setup_env.py .* --target test .*--extra test.*-m pytest", test.stdout, re.DOTALL
    )
    assert "--this-python" not in lab.stdout
    assert "--this-python" in make("-n", "lab", "PYTHON=python3.12").stdout


def test_make_without_a_python_says_so() -> None:
    run = make("lab", "PYTHON=no-such-python")
    assert run.returncode != 0
    assert "there is no no-such-python here. Install Python 3.11" in run.stderr


def typed_commands() -> list[tuple[str, str]]:
    """(file, command) for every command that the documents tell people to type."""
    found = []
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text()
        blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
        found += [(name, line.strip()) for block in blocks for line in block.splitlines()]
        inline = re.findall(r"`((?:make|python -m|conda|source) ?[^`]*)`", text)
        found += [(name, command) for command in inline]
    return found


@pytest.mark.parametrize(("name", "command"), typed_commands())
def test_every_command_in_the_documents_is_real(name: str, command: str) -> None:
    words = command.removeprefix(".venv/bin/").split()
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1:] == [] or words[1] in targets
        for word in words[2:]:
            assert word.split("=")[0] in ("ARGS", "PYTHON", "THOROUGH") or command.count('"') == 2
    elif words[:3] == ["python", "-m", "flashcourse"]:
        commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        assert words[3] in commands
        known = {option for param in commands[words[3]].params for option in param.opts}
        assert {word for word in words[4:] if word.startswith("--")} <= known
    elif words[0] == "conda":
        environment = yaml.safe_load((ROOT / "environment.yml").read_text())
        assert words[1:] in (
            ["env", "create", "-f", "environment.yml"],
            ["activate", environment["name"]],
        )
    else:
        assert command == "source .venv/bin/activate"


def test_the_readme_shows_both_commands() -> None:
    assert {("README.md", "make lab"), ("README.md", "make test")} <= set(typed_commands())


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_map_links_the_lessons_that_exist_and_calls_the_others_planned() -> None:
    rows = re.findall(r"^\| \[?(\d\d)\]?(.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [f"{n:02}" for n in range(11)]
    there = {path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb")}
    for number, rest in rows:
        assert ("planned" in rest) == (number not in there), f"lesson {number}"
