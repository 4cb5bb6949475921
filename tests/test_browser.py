"""What a learner sees: `make lab` opens JupyterLab, lesson 03 runs in it, and its widget moves.

The browser is a real one. Saving is intercepted, so that the lessons stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect, sync_playwright

ROOT = Path(__file__).parents[1]
FIRST, WITH_WIDGET = "00_start_here", "03_online_softmax"
START_SECONDS, RUN_SECONDS = 240, 240
BROWSER_OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
ERRORS = '[data-mime-type="application/vnd.jupyter.error"]'
STDERR = '[data-mime-type="application/vnd.jupyter.stderr"]'
PICTURE = ".jupyter-widgets.widget-html img"


def start_command() -> list[str]:
    """`make lab`, or where this is not the environment that it uses, what it starts."""
    environment = ROOT / ".venv"
    # Only an environment that make has finished: `make lab` would mend or replace any other.
    if Path(sys.prefix) == environment and (environment / "flashcourse-ready.json").exists():
        return ["make", "lab"]
    return [sys.executable, "-m", "flashcourse", "open"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start JupyterLab as a learner does on a server without a display; the address it prints."""
    folder = tmp_path_factory.mktemp("jupyterlab")
    settings = {
        # JupyterLab drops the cells that are scrolled away from the page; here all are looked at.
        "notebook-extension/tracker": {"windowingMode": "none"},
        "docmanager-extension/plugin": {"autosave": False},
    }
    for name, values in settings.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    environment = {k: v for k, v in os.environ.items() if not k.endswith("DISPLAY")}
    # The test's own process may have switched the interpreter on; a learner's shell has not.
    environment.pop("TRITON_INTERPRET", None)
    environment |= {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
    }
    log = folder / "log.txt"
    with log.open("wb") as output:
        server = subprocess.Popen(
            start_command(),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield wait_for_address(server, log)
    finally:
        stop(server)


def wait_for_address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        found = re.search(r"https?://(?:localhost|127\.0\.0\.1):\d+/\S*token=\w+", text)
        if found:
            return found.group()
        if server.poll() is not None:
            break
        time.sleep(0.2)
    pytest.fail(f"{' '.join(start_command())} printed no address:\n{log.read_text()}")


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and everything it started; it stops its kernels when told to end."""
    for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(patience)


@pytest.fixture(scope="module")
def browser_page(request: pytest.FixtureRequest) -> Iterator[Page]:
    from plugins.machine import NEEDS, find_browser, not_verified

    path = find_browser()
    if path is None:
        not_verified(NEEDS["needs_browser"][1])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_OPTIONS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.route("**/api/contents/**", keep_files)
        yield page
        browser.close()


def keep_files(route: Route) -> None:
    """Let nothing be written: no save, and not the checkpoint that opening a notebook makes."""
    if route.request.method == "GET":
        route.continue_()
    elif route.request.url.partition("?")[0].endswith("/checkpoints"):
        route.fulfill(status=201, json={"id": "none", "last_modified": "2026-01-01T00:00:00Z"})
    else:
        route.abort()


def open_notebook(page: Page, address: str, name: str) -> None:
    page.goto(address)
    tab = page.locator(".lm-DockPanel-tabBar .lm-TabBar-tab", has_text=f"{name}.ipynb")
    expect(tab).to_be_visible(timeout=60_000)
    expect(page.locator(".jp-Notebook .jp-MarkdownOutput h1").first).to_be_visible(timeout=60_000)


def choose(page: Page, menu: str, entry: str) -> None:
    """Choose from a menu, opening it again until JupyterLab has enabled the entry."""
    item = page.locator(".lm-Menu-item", has_text=re.compile(f"^{entry}"))
    for _ in range(60):
        page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
        item.wait_for()
        if "lm-mod-disabled" not in (item.get_attribute("class") or ""):
            item.click()
            return
        page.keyboard.press("Escape")
        page.wait_for_timeout(500)
    pytest.fail(f"{menu} > {entry} stays disabled")


def run_all(page: Page) -> None:
    """Clear what was saved, run every cell, and wait until each has run or one has failed."""
    choose(page, "Edit", "Clear Outputs of All Cells")
    page.wait_for_function(f"() => !document.querySelector('{PICTURE}')")
    expect(page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]')).to_have_count(
        1, timeout=60_000
    )
    choose(page, "Run", "Run All Cells")
    page.wait_for_function(
        """errors => document.querySelector(errors) ||
            [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')].every(cell =>
                /\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').textContent))""",
        arg=ERRORS,
        timeout=RUN_SECONDS * 1000,
    )


def test_make_lab_opens_at_the_first_lesson(browser_page: Page, address: str) -> None:
    assert f"{FIRST}.ipynb" in address
    open_notebook(browser_page, address, FIRST)


def test_a_lesson_runs_and_its_widget_moves(browser_page: Page, address: str) -> None:
    page, path = browser_page, ROOT / "notebooks" / f"{WITH_WIDGET}.ipynb"
    before = path.read_bytes()
    open_notebook(page, address.replace(FIRST, WITH_WIDGET), WITH_WIDGET)
    run_all(page)
    assert page.locator(ERRORS).all_inner_texts() == []

    picture, handle = page.locator(PICTURE).first, page.locator(".noUi-handle").first
    expect(picture).to_be_visible(timeout=30_000)
    assert picture.get_attribute("alt")
    old, old_value = picture.get_attribute("src"), handle.get_attribute("aria-valuenow")
    handle.focus()
    page.keyboard.press("ArrowRight")
    expect(handle).not_to_have_attribute("aria-valuenow", old_value or "", timeout=10_000)
    expect(picture).not_to_have_attribute("src", old or "", timeout=30_000)
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    assert page.locator(ERRORS).all_inner_texts() == []
    assert path.read_bytes() == before
