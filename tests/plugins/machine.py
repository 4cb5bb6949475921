"""What this machine cannot verify: the one way a test says so, and the line that counts it.

A test that needs something this machine lacks carries a marker::

    @pytest.mark.needs_gpu
    @pytest.mark.needs_browser
    @pytest.mark.needs_triton
    @pytest.mark.needs_counters

A test that takes minutes and repeats what a shorter one samples carries ``thorough``: it runs with
``make test THOROUGH=1`` (``FLASHCOURSE_THOROUGH=1``). A test may also call :func:`not_verified`
with a reason of its own. The last line of a run accounts for every test that was left out, by
reason.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator
from typing import NoReturn

import pytest

from flashcourse import runtime
from flashcourse.measure.counters import find_ncu

PREFIX = "not verified on this machine: "
THOROUGH = os.environ.get("FLASHCOURSE_THOROUGH", "") not in ("", "0")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def not_verified(reason: str) -> NoReturn:
    """Leave the running test unverified, for a reason of a few words: "no GPU"."""
    pytest.skip(PREFIX + reason)


def find_browser() -> str | None:
    """The path of a Chromium that Playwright can drive, or None. CHROMIUM=path overrides."""
    wanted = os.environ.get("CHROMIUM")
    for name in (wanted,) if wanted else BROWSERS:
        if path := shutil.which(name):
            return path
    return None


def counters_usable() -> bool:
    """True if a GPU is here and NVIDIA's ncu is installed to read its hardware counters."""
    return runtime.has_gpu() and find_ncu() is not None


# marker: (is it here?, the reason where it is not)
NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "needs_gpu": (runtime.has_gpu, "no GPU"),
    "needs_triton": (runtime.triton_installed, "no Triton"),
    "needs_browser": (
        lambda: find_browser() is not None,
        "no browser (Debian: apt install chromium)",
    ),
    "thorough": (lambda: THOROUGH, "the long runs: make test THOROUGH=1"),
    "needs_counters": (counters_usable, "no hardware counters (a GPU and ncu)"),
}


def pytest_configure(config: pytest.Config) -> None:
    for marker, (_, reason) in NEEDS.items():
        config.addinivalue_line("markers", f"{marker}: left unverified where there is {reason}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (is_here, reason) in NEEDS.items():
        if item.get_closest_marker(marker) and not is_here():
            not_verified(reason)


def summary_line(reasons: list[str]) -> str:
    """One line that counts the tests not verified, by reason, the commonest first."""
    if not reasons:
        return PREFIX + "0 tests"
    counts = Counter(reason.removeprefix("Skipped: ").removeprefix(PREFIX) for reason in reasons)
    parts = "; ".join(f"{reason}: {count}" for reason, count in counts.most_common())
    return f"{PREFIX}{len(reasons)} test{'s' * (len(reasons) > 1)} ({parts})"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    yield  # the terminal reporter prints its own summary in here
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly:
        return
    # A skip's longrepr is (path, line, "Skipped: reason").
    skipped = reporter.stats.get("skipped", [])
    reporter.write_line(summary_line([report.longrepr[2] for report in skipped]))
