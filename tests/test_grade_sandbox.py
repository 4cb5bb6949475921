"""What the sandbox leaves to an answer: enough for CUDA and for Python, and nothing that lasts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashcourse.grading import confine, limits
from flashcourse.grading.limits import (
    Limits,
    Sandbox,
    SandboxError,
    choose_sandbox,
    command_line,
    environment,
)
from flashcourse.grading.process import StartFailed, Workshop

ROOT = Path(__file__).parents[1]
LANDLOCK = [
    Sandbox("landlock", namespaces=own)
    for own in (False, True)
    if not own or choose_sandbox("auto").namespaces
]
needs_landlock = pytest.mark.skipif(
    confine.landlock_version() < 1, reason="not verified on this machine: no Landlock"
)
# Tries to write to each file named, and tells which could be opened. TASK is a thread's own name.
WRITES = """
import json, sys, threading
def can(path):
    try:
        own = f"/proc/self/task/{threading.get_native_id()}/comm"
        open(path.replace("TASK", own), "r+b").close()
        return True
    except OSError:
        return False
found = []
thread = threading.Thread(target=lambda: found.append(can("TASK")))
thread.start()
thread.join()
print(json.dumps({path: can(path) for path in sys.argv[1:]} | {"thread": found[0]}))
"""
SETTINGS = [
    "/proc/sys/kernel/domainname",
    "/proc/sys/vm/swappiness",
    "/proc/irq/default_smp_affinity",
]


def run(sandbox, folder, *words, gpu=False, **changes):
    program = [sys.executable, "-P", *words]
    line = command_line(sandbox, Limits(), folder, program, gpu=gpu)
    return subprocess.run(
        line, cwd=folder, env=environment(folder) | changes, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip


@needs_landlock
@pytest.mark.parametrize("sandbox", LANDLOCK, ids=lambda s: "own" if s.namespaces else "shared")
def test_cuda_may_name_its_threads_and_change_no_setting(tmp_path, sandbox):
    words = ["-c", WRITES, "TASK", *SETTINGS, "/proc/self/mem"]
    with_gpu = json.loads(run(sandbox, tmp_path, *words, gpu=True))
    assert with_gpu["TASK"]
    assert with_gpu["thread"]
    assert not any(with_gpu[path] for path in SETTINGS)
    without = json.loads(run(sandbox, tmp_path, *words))
    assert not any(without.values())


@needs_landlock
@pytest.mark.parametrize("sandbox", LANDLOCK, ids=lambda s: "own" if s.namespaces else "shared")
def test_a_course_that_is_not_installed_is_found_but_not_read(tmp_path, sandbox, monkeypatch):
    package = tmp_path / "course" / "flashcourse"
    (tmp_path / "course" / "solutions").mkdir(parents=True)
    (tmp_path / "course" / "solutions" / "secret.txt").write_text("x")
    package.mkdir()
    (package / "__init__.py").write_text("here = True")
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.setattr(limits, "PACKAGE", package)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "course"))
    text = run(
        sandbox, folder, "-c",
        "import sys, flashcourse\nprint(flashcourse.here)\n"
        "try:\n    print(open(sys.argv[1]).read())\nexcept PermissionError:\n    print('closed')",
        str(tmp_path / "course" / "solutions" / "secret.txt"),
        gpu=True,
    )  # fmt: skip
    assert text.split() == ["True", "closed"]


def test_what_lies_below_tmp_stays_there_in_bubblewrap(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/tmp/site")
    words = command_line(Sandbox("bwrap"), Limits(), tmp_path, ["python"], gpu=True)
    assert words.index("--tmpfs") < words.index("/tmp/site") < words.index("--bind")


def test_the_environment_keeps_what_triton_needs_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "gcc-13")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("A_TOKEN", "secret")
    variables = environment(tmp_path)
    assert (variables["CC"], variables["NCCL_NVLS_ENABLE"]) == ("gcc-13", "0")
    assert "secret" not in str(variables)


def test_packages_of_this_user_alone_are_found(tmp_path, monkeypatch):
    theirs = tmp_path / "user-site"
    theirs.mkdir()
    monkeypatch.setattr(limits.site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(limits.site, "getusersitepackages", lambda: str(theirs))
    folder = tmp_path / "folder"
    folder.mkdir()
    words = command_line(Sandbox("landlock"), Limits(), folder, ["python"], gpu=False)
    assert str(theirs) in json.loads(words[4])["readable"]
    assert str(theirs) in environment(folder)["PYTHONPATH"].split(os.pathsep)


LOOPS = """
import sys
from pathlib import Path
from flashcourse.grading.limits import Limits, choose_sandbox
from flashcourse.grading.process import Workshop
workshop = Workshop(Path(sys.argv[1]), choose_sandbox(sys.argv[2]), Limits())
print("starts", flush=True)
workshop.define({"a": "open('looping', 'w').close(); exec('while True: pass')"}, "a")
"""


def processes_in(folder):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in os.readlink(entry / "cwd"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="not verified on this machine: processes are not listed"
)
@pytest.mark.parametrize("kind", ["auto", "none"])
def test_an_answer_ends_with_a_grader_that_is_killed(tmp_path, kind):
    grader = subprocess.Popen(
        [sys.executable, "-c", LOOPS, str(tmp_path), kind], stdout=subprocess.PIPE
    )
    try:
        assert grader.stdout.readline() == b"starts\n"
        deadline = time.monotonic() + 60
        while not (tmp_path / "looping").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_in(tmp_path)
    finally:
        grader.send_signal(signal.SIGKILL)
        grader.wait()
        grader.stdout.close()
    deadline = time.monotonic() + 10
    while processes_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize(("status", "error"), [(3, StartFailed), (confine.FAILED, SandboxError)])
def test_a_start_that_fails_says_whether_the_sandbox_was_to_blame(tmp_path, status, error):
    command = (
        f"{sys.executable} -c 'import sys; print(\"so\", file=sys.stderr); sys.exit({status})'"
    )
    sandbox = Sandbox("command", command=f"{command} {{command}}")
    with Workshop(tmp_path, sandbox, Limits()) as workshop, pytest.raises(error, match="so"):
        workshop.define({"a": "x = 1"}, "x")


STRAYS = """
import os, subprocess, sys, time
from flashcourse.grading.confine import adopt_orphans
from flashcourse.grading.limits import descendants, end_strays
adopt_orphans()
kept = subprocess.Popen(["sleep", "60"])
# A child that leaves a grandchild in a session of its own and ends.
left = "import subprocess; subprocess.Popen(['sleep', '61'], start_new_session=True)"
subprocess.run([sys.executable, "-c", left], check=True)
names = lambda: sorted(
    open(f"/proc/{pid}/cmdline").read().split(chr(0))[1] for pid in descendants(os.getpid())
)
print(names())
end_strays([kept.pid])
print(names(), kept.poll())
kept.kill()
"""


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="not verified on this machine: processes are not listed"
)
def test_what_was_left_behind_is_found_and_ended():
    said = subprocess.run(
        [sys.executable, "-c", STRAYS], capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines() == ["['60', '61']", "['60'] None"]
