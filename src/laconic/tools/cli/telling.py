"""Progress lines for a terminal: one when the phase changes, at least one every three seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console

PAUSE_S, LOOK_S = 2.5, 0.25  # between lines, and between checks of the phase


class Telling:
    def __init__(self, screen: Console, doing: Callable[[], str]) -> None:
        self._screen, self._doing = screen, doing
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Telling:
        if self._screen.is_terminal:
            self._thread = threading.Thread(target=self._tell, name="laconic-telling", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _tell(self) -> None:
        begun, told_s, last = time.monotonic(), 0.0, ""
        while True:
            now, passed_s = self._doing() or last, time.monotonic() - begun
            if now and (now != last or passed_s - told_s >= PAUSE_S):
                self._screen.print(f"{passed_s:3.0f} s  {now}", style="dim", markup=False)
                last, told_s = now, passed_s
            if self._ended.wait(LOOK_S):
                return
