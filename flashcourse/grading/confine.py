"""Starts a program that can do little harm: `python confine.py SETTINGS PROGRAM ARGUMENT...`.

It stands alone (standard library only) and runs before the program it starts: it sets resource
limits, on Linux closes the file system with Landlock except for the folders named, gives up every
privilege, and then becomes the program. What it cannot do it reports with exit status 97.

Sources: landlock(7), capabilities(7) and user_namespaces(7) of the Linux manual.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any

FAILED = 97  # exit status: the confinement that was asked for is not to be had

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, equal on all machines
RULE_PATH_BENEATH = 1
# Access rights to files, in the order of the kernel's header.
(
    EXECUTE,
    WRITE_FILE,
    READ_FILE,
    READ_DIR,
    REMOVE_DIR,
    REMOVE_FILE,
    MAKE_CHAR,
    MAKE_DIR,
    MAKE_REG,
    MAKE_SOCK,
    MAKE_FIFO,
    MAKE_BLOCK,
    MAKE_SYM,
    REFER,
    TRUNCATE,
) = (1 << bit for bit in range(15))
READ = EXECUTE | READ_FILE | READ_DIR
ON_A_FILE = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096


def landlock_version() -> int:
    """The version of the kernel's Landlock, 0 if there is none."""
    if not sys.platform.startswith("linux"):
        return 0
    version = _syscall(CREATE_RULESET, None, 0, 1)
    return max(version, 0)


def close_file_system(
    readable: Iterable[str],
    writable: Iterable[str],
    listable: Iterable[str] = (),
    rewritable: Iterable[str] = (),
) -> None:
    """Allow reading below some paths and writing below others; nothing else, for good.

    Args:
        listable: below these, names can be seen, but no file can be read.
        rewritable: below these, files that are there can be written, but none made.

    Raises:
        OSError: the kernel has no Landlock, or refuses.
    """
    version = landlock_version()
    if version < 1:
        raise OSError("this kernel has no Landlock")
    every = (1 << 13) - 1 | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    scoped = SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS if version >= 6 else 0
    settings = struct.pack("QQQ", every, 0, scoped)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _checked(_syscall(CREATE_RULESET, settings, size, 0))
    try:
        granted = (
            (readable, READ),
            (writable, every),
            (listable, READ_DIR),
            (rewritable, WRITE_FILE | TRUNCATE),
        )
        for paths, rights in granted:
            for path in paths:
                _allow(rules, path, rights & every)
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        _checked(_syscall(RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no permission
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= ON_A_FILE
        _checked(_syscall(ADD_RULE, rules, RULE_PATH_BENEATH, struct.pack("=Qi", rights, place), 0))
    finally:
        os.close(place)


def _syscall(number: int, *arguments: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return int(libc.syscall(ctypes.c_long(number), *wide))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux)."""
    if sys.platform.startswith("linux"):
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (Linux)."""
    if sys.platform.startswith("linux"):
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def thread_names(own_mounts: bool) -> list[str]:
    """Where CUDA names its threads: ``/proc/PID/task/TID/comm``. Refused, it does not start.

    Landlock knows no pattern, so this is all of /proc, where a program may write what its user
    may. For root that would be the settings of the whole machine. They are made read-only, or,
    without mounts of our own, only this very process can use CUDA, and none that it starts.

    The map of user ids tells root from somebody who is root in a namespace of his own only.
    """
    with open("/proc/self/uid_map", encoding="ascii") as file:
        first_inside, first_outside = file.read().split()[:2]
    if os.geteuid() != 0 or (first_inside, first_outside) != ("0", "0"):
        return ["/proc"]
    if not own_mounts:
        return ["/proc/self/task"]
    try:
        for name in os.listdir("/proc"):
            place = os.path.join("/proc", name)
            if not name.isdigit() and not os.path.islink(place):
                _mount(place, MS_BIND)
                _mount(place, MS_BIND | MS_REMOUNT | MS_RDONLY)
    except OSError:
        return ["/proc/self/task"]
    return ["/proc"]


def _mount(place: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    where = place.encode()
    if libc.mount(where, where, None, ctypes.c_ulong(flags), None) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount of {place}: {os.strerror(error)}")


def raise_loopback() -> None:
    """Switch on 127.0.0.1 in a network of its own: Jupyter's kernels are reached through it."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 1 | 64)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(probe, 0x8914, request)  # SIOCSIFFLAGS


def drop_privileges() -> None:
    """Give up all capabilities, those that a started program could get again included."""
    for capability in range(64):
        _prctl(PR_CAPBSET_DROP, capability)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    ctypes.CDLL(None, use_errno=True).capset(header, b"\0" * 24)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def set_limits(limits: Mapping[str, int]) -> None:
    """Set resource limits by name, such as ``{"RLIMIT_FSIZE": 1000}``; never above the present."""
    for name, value in limits.items():
        if not hasattr(resource, name):
            continue
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(number, (most, most))


def main() -> None:
    """Read the settings, confine this process, become the program."""
    settings, program = json.loads(sys.argv[1]), sys.argv[2:]
    try:
        end_with_parent()
        if settings.get("own_network"):
            raise_loopback()
        set_limits(settings["limits"])
        if settings.get("landlock"):
            rewritable = thread_names(settings["own_mounts"]) if settings.get("gpu") else []
            listable = settings.get("listable", ())
            close_file_system(settings["readable"], settings["writable"], listable, rewritable)
        if sys.platform.startswith("linux"):
            drop_privileges()
        os.execv(program[0], program)
    except OSError as error:
        print(f"flashcourse: cannot confine the answer: {error}", file=sys.stderr)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
