"""Switch that delays and loses packets, for a lab on a kernel without netem.

    relay SEED      reads {"ports": ["v0", ...], "delay": [[...]], "jitter": [...], "loss": [...]} from stdin

Host k, at 02:00:00:00:00:k+1, is behind port k; packets for other addresses go to all. A packet from i to j
arrives `delay[j][i]` seconds later, plus or minus up to `jitter[j]`, uniformly drawn, but in order. A share
`loss[j]` is lost, and so are packets that a queue refuses. A later line changes the links.
"""

from __future__ import annotations

import gc
import heapq
import json
import os
import random
import select
import socket
import sys
import time
from contextlib import suppress
from typing import Any

ALL_PROTOCOLS = 0x0003  # ETH_P_ALL
PACKET_IGNORE_OUTGOING = 23
SOL_PACKET = 263
ROOM = 64 << 20  # bytes of a port's buffers
FORCED = {socket.SO_RCVBUF: 33, socket.SO_SNDBUF: 32}  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
FRAME = 1 << 16
BATCH = 64  # packets before the next port's turn


class Relay:
    def __init__(self, shape: dict[str, Any], rng: random.Random) -> None:
        self.ports = [port(name) for name in shape["ports"]]
        self.last = [[0.0] * len(self.ports) for _ in self.ports]  # latest arrival, [to][from]
        self.waiting: list[tuple[float, int, int, bytes]] = []  # time, count, destination, packet
        self.count = 0
        self.rng = rng
        self.shape = shape

    def receive(self, at: int) -> None:
        recv, to_all = self.ports[at].recv, [port for port in range(len(self.ports)) if port != at]
        for _ in range(BATCH):
            try:
                frame = recv(FRAME)
            except BlockingIOError:
                return
            to = frame[5] - 1
            single = frame[:5] == b"\x02\x00\x00\x00\x00" and 0 <= to < len(self.ports)
            for goal in (to,) if single else to_all:
                self.post(at, goal, frame)

    def post(self, at: int, to: int, frame: bytes) -> None:
        shape, random = self.shape, self.rng.random
        if shape["loss"][to] and random() < shape["loss"][to]:
            return
        jitter = shape["jitter"][to]
        due = time.monotonic() + shape["delay"][to][at] + (jitter and jitter * (2 * random() - 1))
        due = self.last[to][at] = max(due, self.last[to][at])
        self.count += 1
        heapq.heappush(self.waiting, (due, self.count, to, frame))

    def deliver(self) -> float | None:
        """Send packets that are due; return the seconds until the next, or None."""
        waiting, ports = self.waiting, self.ports
        now = time.monotonic()
        while waiting:
            if waiting[0][0] > now:
                now = time.monotonic()
                if waiting[0][0] > now:
                    return waiting[0][0] - now
            _, _, to, frame = heapq.heappop(waiting)
            with suppress(OSError):  # a full queue loses the packet
                ports[to].send(frame)
        return None


def port(name: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option, forced in FORCED.items():
        try:
            opened.setsockopt(socket.SOL_SOCKET, forced, ROOM)
        except PermissionError:  # in a user namespace, buffers are smaller
            opened.setsockopt(socket.SOL_SOCKET, option, ROOM)
    opened.bind((name, ALL_PROTOCOLS))
    opened.setblocking(False)
    return opened


def main(seed: int) -> None:
    gc.disable()  # no reference cycles
    with suppress(PermissionError):  # a user namespace may not have priority
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # hosts must not delay links
    shapes = os.fdopen(0, "rb", buffering=0)  # unbuffered, else select misses lines
    relay = Relay(json.loads(shapes.readline()), random.Random(seed))
    print("ready", flush=True)
    numbers = {port.fileno(): number for number, port in enumerate(relay.ports)}
    descriptors = [0, *numbers]
    wait: float | None = None
    while True:
        ready, _, _ = select.select(descriptors, [], [], wait)
        for descriptor in ready:
            if descriptor:
                relay.receive(numbers[descriptor])
            elif line := shapes.readline():
                relay.shape = json.loads(line)
            else:
                return
        wait = relay.deliver()


if __name__ == "__main__":
    main(int(sys.argv[1]))
