"""The line that counts what a machine could not verify."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from plugins.machine import PREFIX, summary_line

ROOT = Path(__file__).parents[1]


def test_the_line_counts_by_reason() -> None:
    reasons = [f"Skipped: {PREFIX}no GPU"] * 2 + [f"Skipped: {PREFIX}no browser"]
    assert summary_line([]) == PREFIX + "0 tests"
    assert summary_line(reasons) == PREFIX + "3 tests (no GPU: 2; no browser: 1)"


def test_it_is_the_last_line_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from plugins.machine import not_verified\n"
        "def test_passes(): pass\n"
        "def test_cannot(): not_verified('no moon')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(ROOT), "-p", "plugins.machine", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed, 1 skipped" in run.stdout
    assert run.stdout.strip().splitlines()[-1] == PREFIX + "1 test (no moon: 1)"
