"""Attacks on the verdict and on the line it comes over, and all others behind them."""

from __future__ import annotations

from hostile.attack import attack
from hostile.machine_attacks import MACHINE_ATTACKS

# What {OUTSIDE} and {SECRET} stand for is put in by the tests.
ATTACKS = {
    "honest": attack("softmax = right", "passed"),
    "patched_torch": attack(
        """
        torch.equal = torch.allclose = torch.isclose = lambda *a, **k: True
        torch.Tensor.__eq__ = lambda *a: True
        torch.Tensor.double = lambda self: torch.zeros(())
        def softmax(x):
            return torch.zeros_like(x)
        """,
        *("failed", "crashed"),
    ),
    "patched_checker": attack(
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
    "friendly_equal": attack(
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
    "tensor_subclass": attack(
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
    "system_exit": attack(
        """
        import sys
        def softmax(x):
            sys.exit(0)
        """,
        *("failed", "crashed"),
    ),
    "hard_exit": attack(
        """
        import os
        def softmax(x):
            os._exit(0)
        """,
        "crashed",
    ),
    "exit_when_defined": attack("import os; os._exit(0)", "crashed"),
    "keyboard_interrupt": attack(
        """
        def softmax(x):
            raise KeyboardInterrupt
        """,
        *("failed", "crashed"),
    ),
    "printed_score": attack(
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
    "cached_answer": attack(
        """
        kept = {}
        def softmax(x):
            return kept.setdefault(x.dim(), right(x))
        """,
        "failed",
    ),
    "nan_wildcard": attack(
        """
        def softmax(x):
            return torch.full_like(x, float("nan"))
        """,
        "failed",
    ),
    "changed_input": attack(
        """
        def softmax(x):
            x.zero_()
            return right(x)
        """,
        "failed",
    ),
    "changed_input_hidden": attack(
        """
        import flashcourse.grading.observe as o
        o._changed = lambda *a: ()
        def softmax(x):
            x.zero_()
            return right(x)
        """,
        "failed",
    ),
    "forged_frames": attack(
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
    "garbage_on_the_line": attack(
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
    "forged_end": attack(
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
    "pickle_bomb": attack(
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
    "patched_codecs": attack(
        """
        import json, pickle, struct
        json.dumps = lambda *a, **k: '{"message": {"kind": "passed"}, "values": {}, "blobs": []}'
        pickle.dumps = lambda *a, **k: b""
        def softmax(x):
            return x
        """,
        *("failed", "crashed"),
    ),
    "kills_everybody": attack(
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
    "leaves_a_daemon": attack(
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
    "error_without_words": attack(
        """
        class Bad(Exception):
            def __str__(self): raise Bad()
            __repr__ = __str__
        def softmax(x):
            raise Bad()
        """,
        "failed",
    ),
    "deep_recursion": attack(
        """
        def softmax(x):
            return softmax(x)
        """,
        *("failed", "crashed"),
    ),
    "borrowed_reference": attack(
        """
        def softmax(x):
            from flashcourse.grading.questions.lab1_softmax import reference
            return reference(x).float()
        """,
        "failed",
    ),
    "input_transformer": attack(
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
    **MACHINE_ATTACKS,
}
