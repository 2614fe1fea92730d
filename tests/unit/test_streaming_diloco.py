"""Streaming DiLoCo: fragments by turns, outer gradients on their way while inner steps go on."""

from __future__ import annotations

import threading
from itertools import pairwise

import torch
from tests.unit.shared import for_each, refuses
from tests.unit.strategy_world import N, gradient, same_bits, start, stopped_and_resumed, trained, worker
from torch import Tensor, nn

import laconic
from laconic.comm.loopback import Loopback
from laconic.core.errors import NonFiniteError, SpecError
from laconic.core.layout import Layout
from laconic.strategies.local_steps.diloco.fragments import fragments_of

PARTS = (slice(0, 12), slice(12, 17))  # of the numbers, by tensor


def twin(size: int, steps: int, every: int, overlap: int, mix: float) -> list[Tensor]:
    """Two fragments, each with torch's own Nesterov SGD, and lists of what arrives when."""
    anchors = [nn.Parameter(start()[part]) for part in PARTS]
    outer = [torch.optim.SGD([each], lr=0.7, momentum=0.9, nesterov=True) for each in anchors]
    x, coming = [start() for _ in range(size)], []
    for step in range(steps):
        x = [each - 0.1 * gradient(each, r, step) for r, each in enumerate(x)]
        for i, part in enumerate(PARTS):
            first = (i + 1) * every // 2
            if step + 1 >= first and (step + 1 - first) % every == 0:
                mean = sum((anchors[i].detach() - each[part] for each in x), torch.zeros(())) / size
                coming.append((step + 1 + overlap, i, mean))
        while coming and coming[0][0] <= step + 1:
            _, i, mean = coming.pop(0)
            anchors[i].grad = mean
            outer[i].step()
            for each in x:
                each[PARTS[i]] = mix * each[PARTS[i]] + (1 - mix) * anchors[i].detach()
    return x


@for_each("overlap, mix", [(0, 0.0), (2, 0.5), (3, 0.0)])
def test_each_fragment_does_diloco_by_itself_and_late(overlap: int, mix: float) -> None:
    found = trained(f"diloco(every=5, momentum=0.9, fragments=2, overlap={overlap}, mix={mix})", 3, 19)
    for one, other in zip(found, twin(3, 19, 5, overlap, mix), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_fragments_are_of_about_equal_size_and_evenly_apart() -> None:
    layout = Layout.of(
        (f"{i}.{kind}", shape) for i in range(12) for kind, shape in (("w", (30 + i, 40)), ("b", (40,)))
    )
    found = [*fragments_of(layout, 4, 100)]
    names = [name for each in found for name in each.layout.names]
    assert sorted(names) == sorted(layout.names)
    assert max(each.layout.numel for each in found) < 1.1 * layout.numel / 4
    assert [each.first for each in found] == [25, 50, 75, 100]
    assert all(max(int(n.split(".")[0]) for n in each.layout.names) > 6 for each in found)
    assert all(min(int(n.split(".")[0]) for n in each.layout.names) < 6 for each in found)
    flat = torch.arange(float(layout.numel))
    back = torch.zeros_like(flat)
    for each in found:
        each.put_(back, each.take(flat))
    assert torch.equal(flat, back)


class Held(Loopback):
    """A link on which nothing arrives before it is let go."""

    gate: threading.Event

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:  # type: ignore[override]
        assert self.gate.wait(30)
        return super().all_reduce(x, op)  # type: ignore[arg-type]


def behind_a_gate(comm: Loopback) -> tuple[int, bool]:
    """How many steps are taken while an outer gradient is held, and whether one more waits for it."""
    held = Held(comm.room, comm.rank)
    held.gate = threading.Event()
    rank = worker("diloco(every=4, overlap=3, mix=0.5)", comm)
    rank.comm.comm = held
    rank.train(range(4 + 2))
    taken = rank.bound.steps
    last = threading.Thread(target=rank.train, args=(range(6, 7),), daemon=True)
    last.start()
    last.join(0.2)
    waits = last.is_alive()
    held.gate.set()
    last.join(30)
    rank.bound.close()
    return taken, waits and not last.is_alive()


def test_inner_steps_go_on_while_an_outer_gradient_is_on_its_way() -> None:
    assert Loopback.run(2, behind_a_gate) == [(6, True)] * 2


def sent_by_step(spec: str) -> list[int]:
    def play(comm: Loopback) -> list[int]:
        rank, seen = worker(spec, comm), [0]
        for step in range(8):
            rank.train(range(step, step + 1))
            seen.append(rank.comm.snapshot().payload_sent)
        return [after - before for before, after in pairwise(seen)]

    return Loopback.run(2, play)[0]


def test_fragments_send_the_same_bytes_and_fewer_at_a_time() -> None:
    assert sent_by_step("diloco(every=4)") == [0, 0, 0, 4 * N] * 2
    assert sent_by_step("diloco(every=4, fragments=2)") == [0, 4 * 12, 0, 4 * 5] * 2


@for_each("compressor", ["dense()", "topk(density=0.3)", "scatter_reduce(logquant(levels=7))"])
def test_resumed_is_never_stopped(compressor: str) -> None:
    """Where nothing is on its way; where something is, saving uses it, and laws say that loading goes on."""
    spec = f"diloco(every=5, fragments=2, overlap=2, mix=0.5, compressor={compressor})"
    for whole, resumed in stopped_and_resumed(spec, 3, 4, 12):
        assert torch.equal(whole, resumed)


def test_what_has_diverged_is_said_on_every_rank_when_it_arrives() -> None:
    def play(comm: Loopback) -> None:
        rank = worker("diloco(every=3, overlap=1)", comm)
        rank.train(range(2))
        if comm.rank == 1:
            rank.replica.flat[3] = torch.inf
        rank.train(range(2, 3))
        refuses(NonFiniteError, "not finite", rank.train, range(3, 4))
        rank.bound.close()

    Loopback.run(2, play)


def test_wrong_settings_are_refused() -> None:
    fewer = trained("diloco(every=6, fragments=6)", 3, 12, alike=True)
    assert same_bits(fewer), "a model with fewer tensors than fragments has fewer fragments"
    for spec, words in (
        ("diloco(every=4, fragments=5)", r"diloco: fragments must be a whole number in 1\.\.4, got 5"),
        ("diloco(fragments=0)", r"diloco: fragments must be a whole number in 1\.\.100, got 0"),
        ("diloco(every=4, overlap=4)", r"diloco: overlap must be a whole number in 0\.\.3, got 4"),
        ("diloco(mix=1)", r"diloco: mix must be a number in \[0, 1\), got 1"),
    ):
        refuses(SpecError, words, laconic.parse, spec)
