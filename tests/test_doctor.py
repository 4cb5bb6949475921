"""The doctor answers on good machines and on broken ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashcourse import doctor, open_lab, probe, runtime
from flashcourse.cli import app

ROOT = Path(__file__).parents[1]


def run_doctor(*path: str, start: str = "") -> subprocess.CompletedProcess[str]:
    """The doctor in a fresh Python, with folders put first on its path and a line run first."""
    code = f"{start}\nfrom flashcourse.cli import app; app(['doctor', '--json'])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )


def finding(run: subprocess.CompletedProcess[str], name: str) -> dict[str, str]:
    report = json.loads(run.stdout)
    return next(item for item in report["findings"] if item["name"] == name)


@pytest.mark.needs_triton
def test_on_this_machine_it_says_that_the_course_runs() -> None:
    run = run_doctor()
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert report["can_run"]
    names = [item["name"] for item in report["findings"]]
    for name in ("Python", "PyTorch", "Triton", "GPU", "dtype to use", "test kernel"):
        assert name in names
    assert finding(run, "test kernel")["value"].startswith("right, by the ")
    for item in report["findings"]:  # whatever is short has a remedy, unless nothing can be done
        assert item["status"] == "ok" or item["fix"] or item["name"] == "compute capability"


@pytest.mark.parametrize(
    ("error", "value"),
    [
        ("ImportError('libcudart.so.13: cannot open shared object file')", "does not load"),
        ("OSError('libtorch_cpu.so: undefined symbol')", "does not load"),
    ],
)
def test_a_broken_torch_is_named_with_its_fix(error: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}")
    run = run_doctor(str(tmp_path))
    assert run.returncode == 1, run.stdout + run.stderr
    torch_finding = finding(run, "PyTorch")
    assert (torch_finding["status"], torch_finding["value"]) == ("broken", value)
    assert "pip install" in torch_finding["fix"]


def test_a_missing_torch_is_named_with_its_fix() -> None:
    hide = (
        "import sys; sys.modules['torch'] = None\n"
        "import flashcourse.doctor as d; known = d.installed_version\n"
        "d.installed_version = lambda p: None if p == 'torch' else known(p)"
    )
    run = run_doctor(start=hide)
    assert run.returncode == 1, run.stdout + run.stderr
    assert finding(run, "PyTorch")["value"] == "missing"


def test_an_old_torch_is_refused() -> None:
    old = types.ModuleType("torch")
    old.__version__ = "2.7.1+cu126"  # type: ignore[attr-defined]
    assert doctor.examine_torch(old).status == "broken"
    old.__version__ = "2.10.0a0"  # type: ignore[attr-defined]
    assert doctor.examine_torch(old).status == "ok"


@pytest.mark.parametrize(
    ("system", "status", "word"),
    [("darwin", "limited", "devcontainer"), ("linux", "broken", "pip")],
)
def test_missing_triton_is_a_limit_on_macos_and_a_fault_on_linux(
    system: str, status: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(sys, "platform", system)
    found = doctor.examine_triton()
    assert (found.value, found.status) == ("missing", status)
    assert word in found.fix


def test_a_broken_triton_is_found_by_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: bad ELF')")
    run = run_doctor(str(tmp_path))
    assert run.returncode == 1, run.stdout + run.stderr
    kernel = finding(run, "test kernel")
    assert (kernel["status"], kernel["value"]) == ("broken", "fails")
    assert "libtriton.so" in kernel["note"]


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashes"),
        ("raise SystemExit('no backend')", "fails"),
        ("import time; time.sleep(60)", "hangs"),
    ],
)
def test_a_kernel_that_dies_or_hangs_does_not_take_the_doctor_along(
    code: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_command", lambda: [sys.executable, "-c", code])
    found = doctor.examine_kernel(timeout=10 if value != "hangs" else 1)
    assert (found.status, found.value) == ("broken", value)
    assert found.fix


@pytest.mark.parametrize("wrong", ["zeros", "shuffled", "nan", "unmasked"])
def test_the_probe_notices_wrong_numbers(wrong: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(probe.ROWS, probe.BLOCK), torch.randn(probe.BLOCK, probe.BLOCK)
    out = torch.full((2 * probe.BLOCK, probe.BLOCK), probe.SENTINEL)
    out[: probe.ROWS] = torch.softmax(a @ b, dim=-1)
    assert probe.judge(out, a, b, "here").problem == ""
    if wrong == "zeros":
        out = torch.zeros_like(out)
    elif wrong == "shuffled":
        out[: probe.ROWS] = out[: probe.ROWS].flip(0)
    elif wrong == "nan":
        out[3, 3] = torch.nan
    else:
        out[probe.ROWS :] = 0.0
    assert probe.judge(out, a, b, "here").problem


def test_a_kernel_with_wrong_numbers_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"where": "interpreter", "error": 1.0, "problem": "its numbers are wrong"})
    code = f"print({said!r})"
    monkeypatch.setattr(doctor, "probe_command", lambda: [sys.executable, "-c", code])
    assert doctor.examine_kernel().status == "broken"


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **properties: object
) -> None:
    card = types.SimpleNamespace(name="A card", total_memory=16 * 2**30, **properties)
    monkeypatch.setattr(runtime, "has_gpu", lambda: True)
    monkeypatch.setattr(runtime, "compute_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.version, "hip", None)


def test_a_t4_gets_float16_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (7, 5), shared_memory_per_block_optin=64 * 1024)
    found = {item.name: item for item in doctor.examine_gpu(torch)}
    assert found["compute capability"].status == "limited"
    assert "plain FMA" in found["compute capability"].note
    assert found["shared memory per block"].value == "64 KiB"
    assert doctor.examine_dtype(torch)[0].value == "float16"


def test_a_newer_card_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0), shared_memory_per_block_optin=227 * 1024)
    assert {item.status for item in doctor.examine_gpu(torch)} == {"ok"}
    assert doctor.examine_dtype(torch)[0].value == "bfloat16"


def test_a_gpu_that_pytorch_cannot_use_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "has_gpu", lambda: False)
    monkeypatch.setattr(doctor, "driver_sees_a_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built for CPUs only" in doctor.examine_gpu(torch)[0].note
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver" in doctor.examine_gpu(torch)[0].fix


def test_counters_need_ncu_and_permission(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(doctor, "find_ncu", lambda: None)
    assert doctor.examine_counters(torch).value == "no ncu"
    monkeypatch.setattr(doctor, "find_ncu", lambda: "/usr/bin/ncu")
    switch = tmp_path / "params"
    monkeypatch.setattr(doctor, "COUNTER_SWITCH", switch)
    assert doctor.examine_counters(torch).status == "ok"
    switch.write_text("RmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert doctor.examine_counters(torch).value == "not allowed"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert doctor.examine_counters(torch).status == "ok"


def test_every_lesson_and_lab_has_its_needs_listed() -> None:
    for folder in ("notebooks", "labs"):
        for path in (ROOT / folder).glob("*.ipynb"):
            key = path.stem.split("_")[0] if folder == "labs" else path.stem
            assert key in doctor.NEEDS, path


def test_coverage_names_what_cannot_be_verified(tmp_path: Path) -> None:
    for name in ("notebooks/02_memory_traffic", "notebooks/03_online_softmax", "labs/lab4_kernel"):
        path = tmp_path / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    have = {"triton": True, "gpu": False, "counters": False}
    found = {item.notebook: item.missing for item in doctor.examine_notebooks(tmp_path, have)}
    assert found["notebooks/03_online_softmax"] == []
    assert "hardware counter" in found["notebooks/02_memory_traffic"][0]
    assert found["labs/lab4_kernel"] == ["the question on speed (needs a GPU)"]


@pytest.mark.parametrize("status", ["ok", "limited", "broken"])
def test_exit_status_and_screen(status: doctor.Status, monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.Finding("PyTorch", "1.0", status, "A [note].", "pip install 'torch[x]'")
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Report([found], []))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == (status == "broken")
    assert "pip install 'torch[x]'" in result.output
    assert ("cannot run here yet" in result.output) == (status == "broken")


def test_in_a_notebook_the_report_is_one_narrow_output(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display
    import rich.console

    outputs: list[object] = []
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(IPython.display, "display", outputs.append)
    found = doctor.Finding("GPU", "none", "limited", "A long note. " * 20, "Something to do.")
    coverage = [doctor.Coverage("labs/lab1"), doctor.Coverage("labs/lab4", ["speed " * 30])]
    doctor.show(doctor.Report([found], coverage))
    (output,) = outputs
    text = re.sub(r"\x1b\[[0-9;]*m", "", output._repr_mimebundle_([], [])["text/plain"])  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= doctor.NOTEBOOK_LETTERS
    assert "Something to do." in text
    assert "labs/lab1: fully verified here" in text


# --- open ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "system", "release", "word"),
    [
        ({"DISPLAY": ":0"}, "Linux", "6.1", ""),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "Linux", "6.1", ""),
        ({}, "Darwin", "24.0", ""),
        ({}, "Linux", "6.1", "no display"),
        ({"SSH_CONNECTION": "a b"}, "Darwin", "24.0", "ssh -L"),
        ({"DISPLAY": ":0"}, "Linux", "5.15-microsoft-standard-WSL2", "Windows"),
    ],
)
def test_a_browser_is_opened_only_where_there_is_one(
    env: dict[str, str], system: str, release: str, word: str
) -> None:
    reason = open_lab.why_no_browser(env, system, release)
    assert word in reason
    assert bool(reason) == bool(word)


def test_the_jupyter_command() -> None:
    command = open_lab.jupyter_command(["--port", "9999"], no_browser=True, is_root=True)
    assert command[1:4] == ["-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    assert f"--LabApp.default_url=/lab/tree/{open_lab.FIRST_LESSON}" in command
    assert command[-4:] == ["--no-browser", "--allow-root", "--port", "9999"]
    assert "--no-browser" not in open_lab.jupyter_command([], no_browser=False, is_root=False)


def test_the_course_adds_its_jupyter_settings_to_the_persons_own() -> None:
    assert (open_lab.CONFIG / "labconfig" / "page_config.json").is_file()
    assert open_lab.jupyter_environment({}) == {"JUPYTER_CONFIG_PATH": str(open_lab.CONFIG)}
    own = {"JUPYTER_CONFIG_PATH": "/own", "HOME": "/home/you"}
    joined = f"{open_lab.CONFIG}{os.pathsep}/own"
    assert open_lab.jupyter_environment(own) == {**own, "JUPYTER_CONFIG_PATH": joined}
