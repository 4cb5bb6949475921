"""Attacks on the machine: its time, memory, processes, files and network."""

from __future__ import annotations

from hostile.attack import attack

# What {OUTSIDE} and {SECRET} stand for is put in by the tests.
MACHINE_ATTACKS = {
    "infinite_loop": attack(
        """
        def softmax(x):
            while True:
                pass
        """,
        "timeout",
    ),
    "deaf_loop_when_defined": attack(
        """
        import signal
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except OSError:
                pass
        while True:
            pass
        """,
        "timeout",
    ),
    "fork_bomb": attack(
        """
        import os, time
        def softmax(x):
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
                time.sleep(0.02)
        """,
        *("crashed", "out_of_memory", "timeout"),
    ),
    "memory_hog": attack(
        """
        def softmax(x):
            kept = []
            while True:
                kept.append(bytearray(b"x" * (64 << 20)))
        """,
        "out_of_memory",
    ),
    "huge_tensor": attack(
        """
        def softmax(x):
            return torch.ones(1 << 34)
        """,
        "out_of_memory",
    ),
    "huge_output": attack(
        """
        def softmax(x):
            return torch.zeros(1).expand(1 << 30)
        """,
        "failed",
    ),
    "endless_structure": attack(
        """
        def softmax(x):
            kept = []
            kept.append(kept)
            return kept
        """,
        *("failed", "crashed"),
    ),
    "huge_print": attack(
        """
        import sys
        def softmax(x):
            sys.stdout.write("x" * (8 << 20))
            sys.stderr.write("y" * (8 << 20))
            return right(x)
        """,
        "passed",
    ),
    "writes_outside": attack(
        """
        import os, pathlib
        def softmax(x):
            for place in (r"{OUTSIDE}", "/tmp", "/dev/shm", "/var/tmp", os.path.expanduser("~root"),
                          "..", "../..", "../../..", "../../../students"):
                try:
                    pathlib.Path(place, "flashcourse_was_here").write_text("x")
                except OSError:
                    pass
                try:
                    os.symlink("/etc/passwd", os.path.join(place, "flashcourse_link"))
                except OSError:
                    pass
            return right(x)
        """,
        "passed",
    ),
    "reads_secrets": attack(
        """
        import os, pathlib
        def softmax(x):
            found = [str(dict(os.environ))]
            for entry in pathlib.Path("/proc").glob("[0-9]*/environ"):
                try:
                    found.append(entry.read_bytes().decode("utf-8", "replace"))
                except OSError:
                    pass
            for name in (r"{SECRET_FILE}", r"{SOLUTION}"):
                try:
                    found.append("{SECRET}" + pathlib.Path(name).read_text()[:10])
                except OSError:
                    pass
            if any("{SECRET}" in text for text in found):
                raise RuntimeError("there was something to read")
            return right(x)
        """,
        "passed",
    ),
    "network": attack(
        """
        import socket
        def softmax(x):
            try:
                socket.create_connection(("127.0.0.1", {PORT}), 2).send(b"hello")
            except OSError:
                return right(x)
            raise RuntimeError("there was a network")
        """,
        "passed",
    ),
    "segmentation_fault": attack(
        """
        import ctypes
        def softmax(x):
            ctypes.string_at(0)
        """,
        "crashed",
    ),
}
