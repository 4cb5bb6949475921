"""Keeps nbval honest and quick: dead kernels, hung cells, errors that did not come.

nbval (0.11) waits out a cell's whole time limit when its kernel has died, marks the cells after
a time-out as expected failures, lets a cell tagged ``raises-exception`` pass when nothing is
raised, and may leave kernels behind. Each of these is put right here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from queue import Empty

import nbval.plugin
import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

POLL_SECONDS = 0.5  # how often a kernel that is at work is looked at
STOPPED = pytest.StashKey[str]()  # on a notebook: why its remaining cells do not run
_groups: set[int] = set()  # process groups of the kernels that may be running


class KernelDied(RuntimeError):
    """The kernel's process ended while a cell ran."""


class GuardedKernel(RunningKernel):
    """nbval's kernel, in a process group of its own that ends with it, and watched."""

    group: int | None = None

    def _ensure_iopub_up(self) -> None:
        # The first thing nbval does with a started kernel. Jupyter starts a kernel in a session
        # of its own, so the group's id is the kernel's.
        pid = self.km.provisioner.pid
        if os.getpgid(pid) != pid:
            raise RuntimeError(f"kernel {pid} has no process group of its own to be ended with")
        self.group = pid
        _groups.add(pid)
        super()._ensure_iopub_up()

    def await_reply(self, msg_id: str, timeout: float | None = None) -> None:
        """Wait for the reply in short steps, and look after each whether the kernel lives.

        Raises:
            Empty: the time is over; nbval then interrupts the cell.
            KernelDied: there will be no reply.
        """
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while True:
            alive = self.is_alive()  # before reading: a last reply may still be on its way
            try:
                return super().await_reply(
                    msg_id, max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))
                )
            except Empty:
                if not alive:
                    raise KernelDied(_how_it_died(self)) from None
                if time.monotonic() >= deadline:
                    raise

    def stop(self) -> None:
        """Stop the kernel and whatever it started."""
        try:
            if hasattr(self, "km"):
                super().stop()
        finally:
            _kill_group(self.group)


def _how_it_died(kernel: RunningKernel) -> str:
    process = getattr(kernel.km.provisioner, "process", None)
    status = process.poll() if process is not None else None
    if status is None:
        return "the kernel died"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"the kernel was killed by {signal.Signals(-status).name}"
    return f"the kernel ended with exit status {status}"


def _kill_group(group: int | None) -> None:
    if group is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    _groups.discard(group)


def pytest_configure() -> None:
    nbval.plugin.RunningKernel = GuardedKernel


def pytest_unconfigure() -> None:
    for group in list(_groups):
        _kill_group(group)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if isinstance(item, IPyNbCell):
        # nbval would mark this cell as expected to fail; it fails with a reason instead.
        item.parent.timed_out = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    if not isinstance(item, IPyNbCell):
        return (yield)
    if STOPPED in item.parent.stash:
        item.raise_cell_error(item.parent.stash[STOPPED])
    try:
        if not item.parent.kernel.is_alive():
            raise KernelDied(_how_it_died(item.parent.kernel))
        result = yield
    except KernelDied as death:
        item.parent.stash[STOPPED] = f"not run: {death} in cell {_name(item)}"
        item.parent.kernel.stop()
        item.raise_cell_error(str(death))
    finally:
        if item.parent.timed_out and STOPPED not in item.parent.stash:
            limit = item.config.option.nbval_cell_timeout
            item.parent.stash[STOPPED] = (
                f"not run: cell {_name(item)} did not finish within {limit:g} s"
            )
    if item.options["check_exception"] and not _raised(item):
        item.raise_cell_error("it is tagged raises-exception and raised nothing")
    return result


def _raised(item: IPyNbCell) -> bool:
    return any(output["output_type"] == "error" for output in item.test_outputs or [])


def _name(item: IPyNbCell) -> str:
    return item.cell.get("id", str(item.cell_num))
