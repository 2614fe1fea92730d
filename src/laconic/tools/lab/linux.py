"""Linux system calls that Python has only since 3.12 or not at all. Each function raises `OSError`.

Imports only the standard library, so that processes without tensors start in milliseconds.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import signal
import socket
import struct

NEWNS, NEWUTS = 0x00020000, 0x04000000  # CLONE_...
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
BIND = 0x1000  # MS_BIND
PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE: mounts do not spread
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
SIOCETHTOOL, SIOCGIFFLAGS = 0x8946, 0x8913
RUNNING = 0x40  # IFF_RUNNING
OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO


def unshare(kinds: int) -> None:
    """Move to new namespaces; with NEWPID, the next child becomes process 1."""
    _call("unshare", kinds)


def enter(path: str, kind: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, kind)
    finally:
        os.close(descriptor)


def mount(source: str, target: str, flags: int = 0) -> None:
    """Mount a file system of kind `source` at `target`, or with `BIND` the file `source`."""
    _call("mount", source.encode(), target.encode(), source.encode(), ctypes.c_ulong(flags), None)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Request a signal when the thread that started this process ends."""
    _call("prctl", PARENT_DEATH_SIGNAL, ctypes.c_ulong(by))


def offloads_off(interface: str) -> None:
    """Turn off offloads, as with `ethtool -K`: packets are as on a real link."""
    with socket.socket() as handle:
        for command in OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(handle, SIOCETHTOOL, request)


def running(interface: str) -> bool:
    with socket.socket() as handle:
        found = fcntl.ioctl(handle, SIOCGIFFLAGS, struct.pack("16sH22x", interface.encode(), 0))
    return bool(struct.unpack_from("H", found, 16)[0] & RUNNING)


def interface_bytes(interface: str) -> tuple[int, int]:
    with open("/proc/thread-self/net/dev") as table:  # noqa: PTH123  # pathlib takes 10 ms to import
        for line in table:
            name, _, counts = line.partition(":")
            if name.strip() == interface:
                numbers = counts.split()
                return int(numbers[8]), int(numbers[0])
    raise OSError(f"there is no interface {interface!r} here")


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
