"""The source of a Triton kernel as a module of its own: to compile it elsewhere, or to change it.

On a machine without a GPU ``@triton.jit`` gives an interpreted function that cannot be compiled. So
a kernel, from a file or from a notebook cell, is written out with everything it refers to.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import linecache
import sys
import textwrap
import types
from typing import Any

HEADER = "import triton\nimport triton.language as tl\n"


def kernel_module(kernel: Any) -> str:
    """The source of a module that defines ``kernel`` and all that it uses.

    Args:
        kernel: a function under ``@triton.jit``, from a file or from a notebook cell.

    Returns:
        Python source: imports, constants, the functions that the kernel calls, the kernel.

    Raises:
        TypeError: ``kernel`` is not a function under ``@triton.jit``.
        NameError: the kernel uses a name that is neither a module, a constant nor such a function.
    """
    parts: dict[str, str] = {}
    _collect(kernel, parts)
    return HEADER + "\n\n" + "\n\n".join(parts.values()) + "\n"


def kernel_source(kernel: Any) -> str:
    """The kernel's own source text, decorator included, without its indentation.

    Raises:
        RuntimeError: its file has changed since it was imported, so that its text is not there.
    """
    function = _python_function(kernel)
    source = textwrap.dedent(inspect.getsource(function))
    if not source.startswith("@") or f"def {function.__name__}(" not in source:
        raise RuntimeError(
            f"the source of {function.__name__} is not where it was when it was imported: "
            f"{inspect.getsourcefile(function)} has changed. Restart Python and import it again"
        )
    return source


def kernel_fingerprint(kernel: Any) -> str:
    """A text that changes when what the kernel's module computes changes, not when it is laid out
    or commented in another way."""
    tree = ast.parse(kernel_module(kernel))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def with_change(kernel: Any, *changes: tuple[str, str]) -> Any:
    """The kernel with some of its text replaced: how a mistake is shown without a second copy.

    Args:
        kernel: a function under ``@triton.jit``.
        changes: pairs (what stands in the kernel's own source exactly once, what to put there).

    Returns:
        A new kernel of the same name, ready to launch.

    Raises:
        ValueError: a text does not occur exactly once.
    """
    own = kernel_source(kernel)
    changed = own
    for old, new in changes:
        if changed.count(old) != 1:
            raise ValueError(
                f"{old!r} occurs {changed.count(old)} times in {kernel_name(kernel)}; "
                "a change needs a text that occurs exactly once"
            )
        changed = changed.replace(old, new)
    module = kernel_module(kernel).replace(own.rstrip(), changed.rstrip())
    return load_kernel(module, kernel_name(kernel))


def load_kernel(source: str, name: str) -> Any:
    """Run a module's source and return the kernel called ``name``.

    Triton reads a kernel's text through :mod:`linecache`, where it is put as IPython puts a cell:
    no file is written, so none is left behind.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    module_name = f"changed_kernel_{next(_numbers)}_{digest}"
    filename = f"<{module_name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(module_name)
    module.__file__ = filename
    sys.modules[module_name] = module  # inspect asks there where a function comes from
    exec(compile(source, filename, "exec"), module.__dict__)
    return getattr(module, name)


_numbers = itertools.count()


def kernel_name(kernel: Any) -> str:
    """The name of a function under ``@triton.jit``."""
    return _python_function(kernel).__name__


def _python_function(kernel: Any) -> types.FunctionType:
    function = getattr(kernel, "fn", None)
    if not isinstance(function, types.FunctionType):
        raise TypeError(
            f"expected a function under @triton.jit, got {type(kernel).__name__}; "
            "pass the kernel itself, not its launch"
        )
    return function


def _collect(kernel: Any, parts: dict[str, str]) -> None:
    """Add the kernel to ``parts``, after all that it uses."""
    function = _python_function(kernel)
    source = kernel_source(kernel)
    definition = ast.parse(source).body[0]
    names = sorted(
        {n.id for n in ast.walk(definition) if isinstance(n, ast.Name)}
        - set(function.__code__.co_varnames)
    )
    for name in names:
        if name in function.__globals__ and name not in parts and name not in ("triton", "tl"):
            value = function.__globals__[name]
            if isinstance(getattr(value, "fn", None), types.FunctionType):
                if value is not kernel:
                    _collect(value, parts)
            else:
                parts[name] = _definition(name, value, function.__name__)
    parts[function.__name__] = source.rstrip()


def _definition(name: str, value: Any, used_by: str) -> str:
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    constant = getattr(value, "value", value)
    if isinstance(constant, bool | int | float | str | list | tuple):
        literal = f'float("{constant}")' if repr(constant) in ("inf", "-inf") else repr(constant)
        return f"{name} = {literal}" if constant is value else f"{name} = tl.constexpr({literal})"
    raise NameError(
        f"{used_by} uses {name}, a {type(value).__name__}. A kernel can use modules, constants "
        "(tl.constexpr) and functions under @triton.jit"
    )
