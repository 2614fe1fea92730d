"""Link between an emulated host and the others."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core.errors import SpecError
from laconic.core.units import bits_a_second, seconds, share

FREE = "free"
LONGEST_S = 10.0


@dataclass(frozen=True)
class Link:
    """Link of a host, with units: `Link("1gbit", delay="2ms", jitter="1ms", loss="1%")`.

    A round trip takes the delays of both hosts.

    Args:
        rate: Bits per second each way; default: None, as fast as memory.
        delay: Of packets to this host, one way, at most 10s; default: "0ms".
        jitter: Uniform variation of the delay, at most `delay`; default: "0ms".
        loss: Share of lost packets to this host, below 100%; default: "0%".
        up: Sent bits per second; default: `rate`.
        down: Received bits per second; default: `rate`.

    Raises:
        SpecError: A quantity has no unit, or is outside its range.

    >>> Link("100mbit", up="10mbit").bits_up
    10000000.0
    >>> Link(delay="2ms", jitter="5ms")
    Traceback (most recent call last):
    laconic.core.errors.SpecError: jitter must be at most the delay, 2ms, got '5ms'
    """

    rate: str | None = None
    delay: str = "0ms"
    jitter: str = "0ms"
    loss: str = "0%"
    up: str | None = None
    down: str | None = None

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            self._bits(name)
        if self.delay_s > LONGEST_S:
            raise SpecError(f"delay must be at most {LONGEST_S:g}s, got {self.delay!r}")
        if self.loss_share >= 1:
            raise SpecError(f"loss must be below 100%, got {self.loss!r}")
        if self.jitter_s > self.delay_s:
            raise SpecError(f"jitter must be at most the delay, {self.delay}, got {self.jitter!r}")

    @property
    def bits_up(self) -> float | None:
        """Sent bits per second; None: unlimited."""
        return self._bits("up")

    @property
    def bits_down(self) -> float | None:
        """Received bits per second; None: unlimited."""
        return self._bits("down")

    @property
    def delay_s(self) -> float:
        return seconds("delay", self.delay, least=0)

    @property
    def jitter_s(self) -> float:
        return seconds("jitter", self.jitter, least=0)

    @property
    def loss_share(self) -> float:
        return share("loss", self.loss)

    @property
    def direct(self) -> bool:
        return self.delay_s == 0 and self.loss_share == 0

    def __str__(self) -> str:
        """Describe the link.

        >>> print(Link("100mbit", up="10mbit", delay="15ms", loss="1%"))
        10mbit up, 100mbit down, delay 15ms, loss 1%
        """
        up, down = self.up or self.rate or FREE, self.down or self.rate or FREE
        words = [up if up == down else f"{up} up, {down} down"]
        words += [f"delay {self.delay}"] if self.delay_s else []
        words += [f"jitter {self.jitter}"] if self.jitter_s else []
        words += [f"loss {self.loss}"] if self.loss_share else []
        return ", ".join(words)

    def _bits(self, name: str) -> float | None:
        given: str | None = getattr(self, name)
        text, name = (self.rate, "rate") if given is None else (given, name)
        return None if text is None or text == FREE else bits_a_second(name, text)
