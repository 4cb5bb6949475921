"""How Triton is prepared at import: each case in a fresh Python, since it is settled only once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashcourse import runtime

ROOT = Path(__file__).parents[1]
NO_GPU = "import torch; torch.cuda.is_available = lambda: False\n"
A_GPU = "import torch; torch.cuda.is_available = lambda: True\n"
NO_TRITON = "import sys; sys.modules['triton'] = None\n"
SHOW = "import os; print(os.environ.get('TRITON_INTERPRET'))\n"


def python(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python of this environment, without this process's own Triton setting."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | settings
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.needs_triton
def test_without_a_gpu_the_interpreter_goes_on_and_it_is_said_once() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import flashcourse'])\n"
    run = python(
        NO_GPU + "import flashcourse, importlib; importlib.reload(flashcourse)\n" + child + SHOW
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "1"
    assert run.stderr.count(runtime.INTERPRETER_NOTE) == 1


@pytest.mark.needs_triton
def test_triton_imported_first_is_refused_with_the_remedy() -> None:
    run = python(NO_GPU + "import triton\nimport flashcourse")
    assert run.returncode != 0
    assert "TritonImportedFirst" in run.stderr
    assert "import flashcourse first" in run.stderr


@pytest.mark.needs_triton
def test_triton_imported_first_with_its_interpreter_on_is_fine() -> None:
    run = python(NO_GPU + "import triton\nimport flashcourse", TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stderr
    assert runtime.INTERPRETER_NOTE not in run.stderr


def test_with_a_gpu_nothing_is_touched() -> None:
    run = python(A_GPU + "import flashcourse\n" + SHOW)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "None"
    assert run.stderr == ""


def test_a_setting_made_by_hand_stays() -> None:
    run = python(NO_GPU + "import flashcourse\n" + SHOW, TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "0"


def test_without_triton_the_package_works_and_a_kernel_explains() -> None:
    code = NO_TRITON + (
        "import flashcourse, torch\n"
        "from flashcourse.attention import naive_attention, tiled_attention, flash_attention\n"
        "q = torch.randn(1, 2, 5, 8)\n"
        "torch.testing.assert_close(naive_attention(q, q, q), tiled_attention(q, q, q))\n"
        "from flashcourse.probe import run_kernel\n"
        "for call in (lambda: run_kernel(q[0, 0], q[0, 0]), lambda: flash_attention(q, q, q)):\n"
        "    try: call()\n"
        "    except flashcourse.runtime.TritonMissing as error: print(error)\n"
    )
    run = python(code)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("needs Triton, which is not installed here") == 2
    assert "pip install triton" in run.stdout
    assert "Colab" in run.stdout
    assert runtime.INTERPRETER_NOTE not in run.stderr


@pytest.mark.parametrize("error", ["ImportError('gone')", "OSError('libc10.so: cannot open')"])
def test_the_package_imports_when_torch_does_not_load(error: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}")
    run = python("import flashcourse; print(flashcourse.__version__)", PYTHONPATH=str(tmp_path))
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(None, "float32"), ((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")],
)
def test_the_dtype_follows_the_compute_capability(
    capability: tuple[int, int] | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(runtime, "compute_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert runtime.compute_dtype() == getattr(torch, dtype)
