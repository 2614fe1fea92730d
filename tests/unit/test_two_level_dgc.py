"""DGC between machines: each is one node, as if it were a single rank with the mean of its gradients."""

from __future__ import annotations

import math

import torch
from tests.laws.method_ranks import BUCKETS, Rank
from tests.laws.worlds import MODEL, everywhere, exchange_on, gradient, one_step
from tests.unit.shared import for_each, refuses
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError
from laconic.core.spec import parse
from laconic.exchange.method import lift

STEPS, SIZE = 8, 2  # SIZE ranks a machine
DGC = [
    "dgc(density=0.05, sample_ratio=1.0)",  # so that no draw tells the two apart
    "dgc(density=0.05, sample_ratio=1.0, masking=False)",
    "dgc(density=0.05, sample_ratio=1.0, warmup_steps=6, warmup=[1.0, 0.3])",
]


class Machine(Rank):
    """A rank that has the mean of a machine's gradients for its own."""

    def gradient(self, step: int) -> Tensor:
        first = SIZE * self.comm.rank
        return sum(gradient(first + i, step) for i in range(SIZE)) / SIZE  # type: ignore[return-value]


def trained(kind: type[Rank], spec: str, size: int) -> list[Tensor]:
    def play(comm: Loopback) -> Tensor:
        rank = kind(spec, comm)
        rank.train(range(STEPS))
        return rank.flat

    return Loopback.run(size, play)


@for_each("dgc", DGC)
def test_a_machine_is_one_node(dgc: str) -> None:
    """Two machines of two ranks do what two ranks do: momentum, residual and masks are the machine's."""
    nodes = trained(Machine, dgc, 2)
    ranks = trained(Rank, f"two_level(sum(), {dgc}, ranks_per_node={SIZE})", 2 * SIZE)
    for flat in ranks:
        assert torch.equal(flat, ranks[0])
        torch.testing.assert_close(flat, nodes[0], rtol=1e-4, atol=1e-4)


def test_only_leaders_send_between_machines() -> None:
    def play(comm: Loopback) -> bool:
        rank = Rank(f"two_level(sum(), dgc(density=0.05), ranks_per_node={SIZE})", comm)
        rank.train(range(2))
        parts = rank.comm.snapshot().parts
        return any(part.payload_sent for (_, name), part in parts.items() if name == "all_gather")

    assert Loopback.run(2 * SIZE, play) == [True, False] * 2


@for_each("method", ["stc(density=0.1)", "signum()", "cgx()", "lgc(density=0.1)"])
def test_other_methods_stand_between_machines_too(method: str) -> None:
    flats = trained(Rank, f"two_level(sum(), {method}, ranks_per_node={SIZE})", 2 * SIZE)
    assert all(torch.equal(flat, flats[0]) and bool(flat.isfinite().all()) for flat in flats)
    assert len(BUCKETS) > 1


def test_it_is_a_method_and_what_does_not_fit_is_refused() -> None:
    spec = parse("two_level(sum(), dgc(density=0.05), ranks_per_node=2)")
    assert parse(repr(spec)) == spec and repr(lift(spec)) == repr(spec)
    for text, says in (
        ("two_level(sum(), onebit_adam())", "exchanges inside optimizer.step"),
        ("error_fed(two_level(sum(), dgc()))", "error_fed takes a codec, selector or reducer, got"),
        ("comp_ams(two_level(sum(), dgc()))", "takes a codec, selector or reducer, got the method"),
        ("dense_first(two_level(sum(), dgc()), steps=3)", "is a method"),
        ("two_level(dgc(), sum())", "two_level: inner must be a reducer"),
    ):
        refuses(SpecError, says, lift, text)


def test_inf_in_a_dense_step_of_the_warm_up_voids_it() -> None:
    """A sum in bfloat16 would saturate it, and trusts the momentum correction to look."""
    spec = (
        "two_level(sum(dtype='bf16'), dgc(density=0.25, warmup_steps=4, warmup=(1.0, 0.5)), ranks_per_node=2)"
    )

    def play(comm: Loopback) -> bool:
        flat = gradient(comm.rank, 0)
        flat[3] = math.inf if comm.rank == 1 else flat[3]
        return one_step(exchange_on(comm, spec), flat, [MODEL])[1]

    assert everywhere(4, play) == [False] * 4
