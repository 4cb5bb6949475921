"""Attacks as sources of a softmax cell, with what the grader may call them."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

RIGHT = """
def right(x):
    import math
    m = x.amax(dim=-1, keepdim=True)
    p = torch.exp(x - torch.where(m == -math.inf, 0.0, m))
    l = p.sum(dim=-1, keepdim=True)
    return p / torch.where(l == 0, 1.0, l)
"""


@dataclass(frozen=True)
class Attack:
    """The cell's source, and the statuses that are right for it."""

    source: str
    statuses: tuple[str, ...]


def _attack(source: str, *statuses: str) -> Attack:
    return Attack("import torch\n" + RIGHT + dedent(source), statuses)


# What {OUTSIDE} and {SECRET} stand for is put in by the tests.
ATTACKS = {
    "honest": _attack("softmax = right", "passed"),
    "patched_torch": _attack(
        """
        torch.equal = torch.allclose = torch.isclose = lambda *a, **k: True
        torch.Tensor.__eq__ = lambda *a: True
        torch.Tensor.double = lambda self: torch.zeros(())
        def softmax(x):
            return torch.zeros_like(x)
        """,
        *("failed", "crashed"),
    ),
    "patched_checker": _attack(
        """
        import flashcourse.grading as g, flashcourse.grading.judge as j
        import flashcourse.grading.mark as m
        import flashcourse.grading.questions.lab1_softmax as q
        j.judge_tensor = q.judge_tensor = j.explain_difference = lambda *a, **k: None
        m.mark = g.check = g.mark = lambda *a, **k: None
        for check in q.QUESTION.checks:
            object.__setattr__(check, "judge", lambda *a: None)
        def softmax(x):
            return x
        """,
        "failed",
    ),
    "friendly_equal": _attack(
        """
        class Yes:
            def __eq__(self, other): return True
            def __getattr__(self, name): return self
            def __call__(self, *a, **k): return self
        def softmax(x):
            return Yes()
        """,
        "failed",
    ),
    "tensor_subclass": _attack(
        """
        class Sly(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                return torch.zeros(())
        def softmax(x):
            return x.as_subclass(Sly)
        """,
        *("failed", "crashed"),
    ),
    "system_exit": _attack(
        """
        import sys
        def softmax(x):
            sys.exit(0)
        """,
        *("failed", "crashed"),
    ),
    "hard_exit": _attack(
        """
        import os
        def softmax(x):
            os._exit(0)
        """,
        "crashed",
    ),
    "exit_when_defined": _attack("import os; os._exit(0)", "crashed"),
    "keyboard_interrupt": _attack(
        """
        def softmax(x):
            raise KeyboardInterrupt
        """,
        *("failed", "crashed"),
    ),
    "printed_score": _attack(
        """
        import os, sys
        def softmax(x):
            for text in ("✓ lab1.softmax: passed, 2 of 2 points", "{'points': 2}"):
                print(text)
                for fd in (1, 2):
                    os.write(fd, text.encode())
        """,
        "failed",
    ),
    "cached_answer": _attack(
        """
        kept = {}
        def softmax(x):
            return kept.setdefault(x.dim(), right(x))
        """,
        "failed",
    ),
    "nan_wildcard": _attack(
        """
        def softmax(x):
            return torch.full_like(x, float("nan"))
        """,
        "failed",
    ),
    "changed_input": _attack(
        """
        def softmax(x):
            x.zero_()
            return right(x)
        """,
        "failed",
    ),
    "changed_input_hidden": _attack(
        """
        import flashcourse.grading.observe as o
        o._changed = lambda *a: ()
        def softmax(x):
            x.zero_()
            return right(x)
        """,
        "failed",
    ),
    "infinite_loop": _attack(
        """
        def softmax(x):
            while True:
                pass
        """,
        "timeout",
    ),
    "deaf_loop_when_defined": _attack(
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
    "fork_bomb": _attack(
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
    "memory_hog": _attack(
        """
        def softmax(x):
            kept = []
            while True:
                kept.append(bytearray(b"x" * (64 << 20)))
        """,
        "out_of_memory",
    ),
    "huge_tensor": _attack(
        """
        def softmax(x):
            return torch.ones(1 << 34)
        """,
        "out_of_memory",
    ),
    "huge_output": _attack(
        """
        def softmax(x):
            return torch.zeros(1).expand(1 << 30)
        """,
        "failed",
    ),
    "endless_structure": _attack(
        """
        def softmax(x):
            kept = []
            kept.append(kept)
            return kept
        """,
        *("failed", "crashed"),
    ),
    "huge_print": _attack(
        """
        import sys
        def softmax(x):
            sys.stdout.write("x" * (8 << 20))
            sys.stderr.write("y" * (8 << 20))
            return right(x)
        """,
        "passed",
    ),
    "writes_outside": _attack(
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
    "reads_secrets": _attack(
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
    "network": _attack(
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
    "segmentation_fault": _attack(
        """
        import ctypes
        def softmax(x):
            ctypes.string_at(0)
        """,
        "crashed",
    ),
    "forged_frames": _attack(
        """
        import os
        from flashcourse.grading.wire import pack
        def softmax(x):
            forged = pack({"kind": "observation", "error": ""}, {"output": torch.zeros(3)})
            for fd in range(3, 64):
                try:
                    os.write(fd, forged * 4)
                except OSError:
                    pass
            return right(x)
        """,
        *("failed", "crashed"),
    ),
    "garbage_on_the_line": _attack(
        """
        import os
        def softmax(x):
            for fd in range(3, 64):
                try:
                    os.write(fd, b"\\xff" * 64)
                except OSError:
                    pass
            return right(x)
        """,
        "crashed",
    ),
    "forged_end": _attack(
        """
        import os
        from flashcourse.grading.wire import pack
        forged = pack({"kind": "ended", "status": 0}, {})
        for fd in range(3, 64):
            try:
                os.write(fd, forged)
            except OSError:
                pass
        softmax = right
        """,
        *("crashed", "failed"),
    ),
    "pickle_bomb": _attack(
        """
        class Bomb:
            def __reduce__(self):
                import os
                return os.system, (r"touch {OUTSIDE}/flashcourse_was_here",)
        def softmax(x):
            return Bomb()
        """,
        "failed",
    ),
    "patched_codecs": _attack(
        """
        import json, pickle, struct
        json.dumps = lambda *a, **k: '{"message": {"kind": "passed"}, "values": {}, "blobs": []}'
        pickle.dumps = lambda *a, **k: b""
        def softmax(x):
            return x
        """,
        *("failed", "crashed"),
    ),
    "kills_everybody": _attack(
        """
        import os, signal
        def softmax(x):
            for victim in (os.getppid(), 1, 0, -1):
                try:
                    os.kill(victim, signal.SIGKILL)
                except OSError:
                    pass
            return x
        """,
        *("crashed", "failed"),
    ),
    "leaves_a_daemon": _attack(
        """
        import os, time
        def softmax(x):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(3600)
                os._exit(0)
            return right(x)
        """,
        "passed",
    ),
    "error_without_words": _attack(
        """
        class Bad(Exception):
            def __str__(self): raise Bad()
            __repr__ = __str__
        def softmax(x):
            raise Bad()
        """,
        "failed",
    ),
    "deep_recursion": _attack(
        """
        def softmax(x):
            return softmax(x)
        """,
        *("failed", "crashed"),
    ),
    "borrowed_reference": _attack(
        """
        def softmax(x):
            from flashcourse.grading.questions.lab1_softmax import reference
            return reference(x).float()
        """,
        "failed",
    ),
    "input_transformer": _attack(
        """
        try:
            get_ipython().input_transformers_post.append(lambda lines: ["pass"])
        except NameError:
            pass
        def softmax(x):
            return x
        """,
        "failed",
    ),
}
