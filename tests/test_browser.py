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
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect, sync_playwright
from plugins.machine import NEEDS, find_browser, not_verified

ROOT = Path(__file__).parents[1]
FIRST, WITH_WIDGET = "00_start_here", "03_online_softmax"
START_SECONDS, RUN_SECONDS = 240, 240
BROWSER_OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
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


class Disk:
    """Stands between the page and the files: nothing is written, what would be is kept here."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def answer(self, route: Route) -> None:
        request, now = route.request, "2026-01-01T00:00:00Z"
        path = request.url.partition("?")[0].partition("/api/contents/")[2]
        if request.method == "GET":
            route.continue_()
        elif path.endswith("/checkpoints"):  # which opening a notebook makes
            route.fulfill(status=201, json={"id": "none", "last_modified": now})
        elif request.method == "PUT":
            model = request.post_data_json
            self.saved = model["content"]
            told = {"name": path.rpartition("/")[2], "path": path, "created": now}
            told |= {"last_modified": now, "content": None, "format": None, "mimetype": None}
            route.fulfill(json={**model, **told, "writable": True})
        else:
            route.abort()


@pytest.fixture(scope="module")
def disk() -> Disk:
    return Disk()


@pytest.fixture(scope="module")
def browser_page(disk: Disk) -> Iterator[Page]:
    path = find_browser()
    if path is None:
        not_verified(NEEDS["needs_browser"][1])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_OPTIONS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.route("**/api/contents/**", disk.answer)
        yield page
        browser.close()


def open_notebook(page: Page, address: str, name: str) -> None:
    page.goto(address)
    tabs = page.locator(".lm-DockPanel-tabBar .lm-TabBar-tab")
    expect(tabs).to_have_text([re.compile(f"{name}.ipynb")], timeout=60_000)  # and no other
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
    """Clear what was saved, run every cell, and wait until all have run or one has failed."""
    choose(page, "Edit", "Clear Outputs of All Cells")
    page.wait_for_function(f"() => !document.querySelector('{PICTURE}')")
    expect(page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]')).to_have_count(
        1, timeout=60_000
    )
    choose(page, "Run", "Run All Cells")
    # All cells wait as [*] at once; a cell that fails sets those after it back to [ ].
    page.wait_for_function(
        """() => {
            const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
            const texts = prompts.map(prompt => prompt.textContent);
            return texts.some(t => /\\d/.test(t)) && !texts.some(t => t.includes('*'));
        }""",
        timeout=RUN_SECONDS * 1000,
    )


def what_went_wrong(page: Page, disk: Disk) -> list[str]:
    """Save, and look into what JupyterLab would have written: errors, and cells that did not run.

    On the page itself an error looks like anything else that is written to stderr.
    """
    disk.saved = {}
    choose(page, "File", "Save Notebook(?! As)")
    for _ in range(100):
        if disk.saved:
            break
        page.wait_for_timeout(100)
    assert disk.saved, "File > Save Notebook sent nothing"
    cells = [cell for cell in disk.saved["cells"] if cell["cell_type"] == "code"]
    wrong = [
        f"{cell['id']}: {output['ename']}: {output['evalue']}"
        for cell in cells
        for output in cell["outputs"]
        if output["output_type"] == "error"
    ]
    return wrong + [f"{cell['id']} did not run" for cell in cells if not cell["execution_count"]]


def test_make_lab_opens_at_the_first_lesson(browser_page: Page, address: str) -> None:
    assert f"{FIRST}.ipynb" in address
    open_notebook(browser_page, address, FIRST)
    browser_page.wait_for_timeout(2_000)  # JupyterLab's own first questions come after the page
    expect(browser_page.get_by_role("alert")).to_have_count(0)


def test_a_lesson_runs_and_its_widget_moves(browser_page: Page, address: str, disk: Disk) -> None:
    page, path = browser_page, ROOT / "notebooks" / f"{WITH_WIDGET}.ipynb"
    before = path.read_bytes()
    # In a workspace of its own: the other one would open with the first lesson's tab as well.
    lesson = address.replace("/lab/tree/", "/lab/workspaces/widget/tree/")
    open_notebook(page, lesson.replace(FIRST, WITH_WIDGET), WITH_WIDGET)
    run_all(page)
    assert what_went_wrong(page, disk) == []

    picture, handle = page.locator(PICTURE).first, page.locator(".noUi-handle").first
    expect(picture).to_be_visible(timeout=30_000)
    assert picture.get_attribute("alt")
    old, old_value = picture.get_attribute("src"), handle.get_attribute("aria-valuenow")
    handle.focus()
    page.keyboard.press("ArrowRight")
    expect(handle).not_to_have_attribute("aria-valuenow", old_value or "", timeout=10_000)
    page.wait_for_function(  # not expect(): it would print both pictures
        "([picture, old]) => document.querySelector(picture).src !== old",
        arg=[PICTURE, old],
        timeout=30_000,
    )
    picture = page.locator(PICTURE).first
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    assert what_went_wrong(page, disk) == []
    assert path.read_bytes() == before
