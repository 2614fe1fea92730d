"""Ctrl-C waits until what is being written down is written, and then ends the command."""

from __future__ import annotations

import signal

import pytest

from laconic.cli.interrupts import SIGNALS, Interrupts


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_for_what_is_held_and_then_interrupts(number: signal.Signals) -> None:
    before, written = signal.getsignal(number), []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        for event in range(5):
            with interrupts.held():
                if event == 2:
                    signal.raise_signal(number)
                written.append(event)
    assert written == [0, 1, 2]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", SIGNALS)
def test_elsewhere_it_interrupts_at_once(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(number)


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_what_is_held_is_not_lost() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(ValueError, match="a fault"), interrupts.held():
            raise ValueError("a fault")
        with interrupts.held():  # and the next is held as before
            pass
