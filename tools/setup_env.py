"""Make or refresh .venv for `make lab` and `make test`. Needs nothing but Python.

The syntax stays at Python 3.6, so that a Python too old for the course can still say so.

A finished set-up leaves a stamp, written last and in one piece. Its key hashes everything that
decides what is installed, so a second call reads two small files and is done. Until then there
is a marker instead: a set-up that was killed half-way is made afresh (pip's cache keeps what was
downloaded), one that pip itself gave up is gone on with. pip's own configuration is honoured.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STAMP, MARKER, LOG = "flashcourse-ready.json", "flashcourse-unfinished", "flashcourse-setup.log"
OLDEST, NEWEST_TESTED = (3, 11), (3, 14)
GB = 1e9
LEAST_SPACE = 4 * GB  # PyTorch for the CPU, Triton, JupyterLab and the rest: 2.6 GB, and a cache
GPU_SPACE = 12 * GB  # PyTorch with NVIDIA's libraries, once packed and once unpacked


class SetupError(Exception):
    """Something the person at the keyboard can mend; the message says how."""


def say(text):
    print(text, flush=True)


def dotted(version):
    return ".".join(str(part) for part in version)


# --- before anything is written ---------------------------------------------------------------


def check_platform(os_name, system, machine):
    """Refuse the two systems that PyTorch or the set-up itself does not serve."""
    if os_name == "nt":
        raise SetupError("Windows: use WSL2 or the devcontainer (README.md says how).")
    if system == "darwin" and machine == "x86_64":
        raise SetupError(
            "PyTorch has no current release for Macs with an Intel processor. "
            "Use the devcontainer or Colab (README.md says how)."
        )


def check_python(version, executable, make_target):
    """Refuse a Python older than the course needs; point to a newer one if one is on the PATH."""
    if tuple(version[:2]) >= OLDEST:
        return
    minors = range(NEWEST_TESTED[1], OLDEST[1] - 1, -1)
    found = [name for name in map("python3.{}".format, minors) if shutil.which(name)]
    if found:
        way_out = f"A newer one is here. Type:\n    make {make_target} PYTHON={found[0]}"
    else:
        way_out = (
            "Install a newer one (Debian, Ubuntu: sudo apt install python3.11 python3.11-venv;\n"
            "macOS: brew install python@3.13; anywhere: conda env create -f environment.yml),\n"
            f"then type, with its name:\n    make {make_target} PYTHON=python3.13"
        )
    raise SetupError(
        f"{executable} is Python {dotted(version[:3])}; "
        f"the course needs {dotted(OLDEST)} or newer.\n{way_out}"
    )


def check_venv_module(find_spec, version):
    """Debian splits venv and ensurepip from Python; say which package brings them back."""
    missing = [name for name in ("venv", "ensurepip") if find_spec(name) is None]
    if missing:
        raise SetupError(
            "This Python comes without its {} module, which makes .venv.\n"
            "Debian, Ubuntu: sudo apt install python{}-venv\n"
            "Elsewhere: install Python from your system's full package or from python.org.".format(
                " and ".join(missing), dotted(version[:2])
            )
        )


def existing_parent(path):
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def check_space(venv, needed=LEAST_SPACE, usage=shutil.disk_usage):
    """Refuse to start where the installation cannot fit: beside .venv, or where pip unpacks."""
    places = [
        ("the folder of the course", existing_parent(venv), "Free some, or move the course."),
        (
            "the folder for temporary files",
            tempfile.gettempdir(),
            "Free some, or name another folder: TMPDIR=/path/with/space make lab",
        ),
    ]
    for what, path, way_out in places:
        free = usage(path).free
        if free < needed:
            raise SetupError(
                f"The disk is too full: {what} ({path}) has {free / GB:.1f} GB free, "
                f"the course needs {needed / GB:.0f} GB.\n{way_out}"
            )
    free = usage(places[0][1]).free
    if sys.platform.startswith("linux") and free < GPU_SPACE:
        say(
            f"Note: {free / GB:.1f} GB free. That is enough for PyTorch without GPU libraries; "
            f"with them, {GPU_SPACE / GB:.0f} GB are needed."
        )


# --- what is there already --------------------------------------------------------------------


def wanted_key():
    """A hash of what decides the contents of .venv; the place too, since .venv cannot be moved."""
    digest = hashlib.sha256(ROOT.encode())
    for name in ("pyproject.toml", "constraints.txt"):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(name.encode() + b"\0" + file.read())
    return digest.hexdigest()


def read_stamp(venv):
    """The stamp of a finished set-up, or an empty dict."""
    try:
        with open(os.path.join(venv, STAMP)) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv, stamp):
    """Whole or not at all: a reader sees the old stamp, none, or this one."""
    path = os.path.join(venv, STAMP)
    with open(path + ".part", "w") as file:
        json.dump(stamp, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def python_of(venv):
    return os.path.join(venv, "bin", "python")


def python_version(executable):
    """(major, minor) of the Python at this path, or None if it does not run."""
    code = "import sys; print(sys.version_info[0], sys.version_info[1])"
    try:
        output = subprocess.check_output([executable, "-c", code], stderr=subprocess.DEVNULL)
        major, minor = output.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


# --- installing -------------------------------------------------------------------------------

OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|Max retries exceeded|ConnectTimeoutError|"
    r"ReadTimeoutError|ProxyError|SSLError|Temporary failure in name resolution|"
    r"Network is unreachable|Connection refused|Could not fetch URL"
)
NOTHING = re.compile(r"satisfies the requirement ([\w.-]+).*\(from versions: none\)")
FULL = re.compile(r"No space left on device|Errno 28|Disk quota exceeded|Errno 122")


def explain_pip_failure(log):
    """What to do about a failed pip run, from its log. pip's own error is on the screen already."""
    if FULL.search(log):
        return (
            "The disk became full while pip installed. "
            f"Free {LEAST_SPACE / GB:.0f} GB ({GPU_SPACE / GB:.0f} GB for PyTorch with GPU "
            "libraries;\n`pip cache purge` empties pip's cache) and type the command again."
        )
    if OFFLINE.search(log):
        return (
            "pip could not reach its package index. Check the network; behind a proxy, set "
            "HTTPS_PROXY;\nwith an index of your own, set PIP_INDEX_URL or `pip config`. Then type "
            "the command again:\nwhat was downloaded is kept."
        )
    nothing = NOTHING.search(log)
    if nothing:
        return (
            f"pip's package index offered no release of {nothing.group(1)}: it cannot be reached, "
            "or it serves\nnothing for this Python. Check the network and `pip config list`, then "
            "type the command again."
        )
    return (
        "pip could not install the course; its own error stands above. Then type the command again."
    )


def read_marker(venv):
    """What an unfinished set-up was doing: "working", "gave up", or "" if there is none."""
    try:
        with open(os.path.join(venv, MARKER)) as file:
            return file.read()
    except OSError:
        return ""


def write_marker(venv, doing):
    with open(os.path.join(venv, MARKER), "w") as file:
        file.write(doing)


def make_venv(python, venv):
    """An empty virtual environment, marked as unfinished before there is anything in it."""
    say(f"Making .venv with {python} ...")
    if os.path.isdir(venv):
        for name in os.listdir(venv):
            path = os.path.join(venv, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.remove(path)
    os.makedirs(venv, exist_ok=True)
    write_marker(venv, "working")
    process = subprocess.run([python, "-m", "venv", venv])
    if process.returncode != 0:
        raise SetupError("Python could not make .venv; its own error stands above.")


def pip_install(venv, extras):
    """Install the project in the tested versions: progress on the screen, reasons in a log."""
    log = os.path.join(venv, LOG)
    if os.path.exists(log):
        os.remove(log)
    what = ROOT + ("[" + ",".join(extras) + "]" if extras else "")
    command = [python_of(venv), "-m", "pip", "install", "--log", log]
    command += ["--constraint", os.path.join(ROOT, "constraints.txt"), "--editable", what]
    say("Installing the course into .venv. PyTorch is large: the first time takes minutes.")
    process = subprocess.run(command, cwd=ROOT)
    if process.returncode != 0:
        text = ""
        if os.path.exists(log):
            with open(log, errors="replace") as file:
                text = file.read()
        if process.returncode > 0 and not FULL.search(text):
            write_marker(venv, "gave up")  # pip has put things back as they were
        raise SetupError(explain_pip_failure(text))


def choose(venv, extras, this_python):
    """What has to be done: ("ready" | "update" | "make", a sentence for the person, or "")."""
    if not os.path.isdir(venv):
        return "make", ""
    marker, stamp = read_marker(venv), read_stamp(venv)
    if marker == "working":
        return "make", "The last set-up was interrupted: making .venv afresh."
    version = python_version(python_of(venv))
    ours = bool(stamp or marker or not os.listdir(venv))
    problem = ""
    if version is None:
        problem = "Its Python no longer runs"
    elif version < OLDEST:
        problem = f"Its Python is {dotted(version)}, older than the course needs"
    elif this_python and version != tuple(sys.version_info[:2]):
        problem = f"It was made with Python {dotted(version)}"
    elif stamp and stamp.get("root") != ROOT:
        problem = "It was made in another folder"
    if problem and not ours:
        raise SetupError(
            f"There is a .venv that this set-up did not make. {problem}.\n"
            "Remove it (rm -r .venv) and type the command again."
        )
    if problem:
        return "make", f"{problem}: making .venv afresh."
    if not stamp:
        return "update", "Going on with the set-up." if marker else "Using the .venv that is here."
    if stamp.get("key") != wanted_key():
        return "update", "What the course needs has changed: updating .venv."
    if not set(extras) <= set(stamp.get("extras", [])):
        return "update", "Adding what the tests need to .venv."
    return "ready", ""


def set_up(venv, extras, this_python, make_target):
    todo, why = choose(venv, extras, this_python)
    if todo == "ready":
        return
    if why:
        say(why)
    if todo == "make":
        check_python(sys.version_info, sys.executable, make_target)
        from importlib.util import find_spec

        check_venv_module(find_spec, sys.version_info)
        if tuple(sys.version_info[:2]) > NEWEST_TESTED:
            say(
                f"Note: Python {dotted(sys.version_info[:2])} is newer than the newest the course "
                f"was tested with, {dotted(NEWEST_TESTED)}."
            )
        check_space(venv)
        make_venv(sys.executable, venv)
    stamp = read_stamp(venv)
    write_marker(venv, "working")
    if stamp:
        os.remove(os.path.join(venv, STAMP))
    keep = sorted(set(extras) | set(stamp.get("extras", [])))
    pip_install(venv, keep)
    write_stamp(venv, {"key": wanted_key(), "root": ROOT, "extras": keep})
    os.remove(os.path.join(venv, MARKER))
    say("Set-up finished.")


def lock_and_set_up(arguments):
    """One set-up at a time: a second one waits for the first, and then finds it finished."""
    import fcntl

    with open(os.path.join(ROOT, "pyproject.toml")) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("Another set-up of this course is running: waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        set_up(
            os.path.abspath(arguments.venv),
            arguments.extra,
            arguments.this_python,
            arguments.target,
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description="Make or refresh the course's .venv.")
    parser.add_argument("--venv", default=os.path.join(ROOT, ".venv"), help="where to make it")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
    parser.add_argument("--target", default="lab", help="the make target that called, for messages")
    parser.add_argument(
        "--this-python", action="store_true", help="make it afresh if it has another Python version"
    )
    try:
        check_platform(os.name, sys.platform, platform.machine())
        lock_and_set_up(parser.parse_args(argv))
    except (SetupError, OSError) as error:
        sys.stderr.write(f"\nset-up: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nset-up: stopped. Type the command again to go on.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
