"""Steps that are thrown away, and ranks that come and go: what an exchange remembers then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.laws.table import compressors
from tests.unit.shared import for_each, refuses, same

from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, PeerError, SpecError, StateError
from laconic.core.layout import Layout
from laconic.exchange.method import lift
from laconic.integrations.transactional import TransactionalExchange

SHAPES = {"a.weight": (24, 40), "b.weight": (16, 30), "a.bias": (40,), "c.weight": (12, 20)}
LAYOUT = Layout.of(SHAPES.items())
TOPK, EF21 = "topk(density=0.05)", "ef21_sgdm(topk(density=0.05))"


def gradient(step: int, name: int) -> torch.Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(1000 * step + name))


def taken(exchange: TransactionalExchange, step: int, group: Loopback | None, **told: Any) -> torch.Tensor:
    """The mean of a step, in which a rank's gradient is that of its `name`, by default its number."""
    name, behind = told.get("name"), told.get("behind", False)
    exchange.begin(step, group, behind=behind)
    bucket = gradient(step, name) if name is not None else torch.zeros(LAYOUT.numel)
    assert exchange.mean_(bucket, LAYOUT) is None
    exchange.end()
    return bucket


def suits(spec: str) -> bool:
    try:
        TransactionalExchange(lift(spec), LAYOUT)
    except AttachError:
        return False
    return not lift(spec).adaptive  # by measured times, so that no two runs are alike


SUITED = [spec for spec in compressors() if suits(spec)]


def test_most_methods_are_suited() -> None:
    assert len(SUITED) > 40
    assert {"cgx()", "stc()", "powersgd()", "ef21_sgdm()"} <= {spec.split("(")[0] + "()" for spec in SUITED}


@for_each("spec", SUITED)
def test_a_step_that_is_thrown_away_leaves_no_trace(spec: str) -> None:
    def means(tries: dict[int, int]) -> Callable[[Loopback], tuple[list[torch.Tensor], Any]]:
        def body(comm: Loopback) -> tuple[list[torch.Tensor], Any]:
            exchange, found = TransactionalExchange(lift(spec), LAYOUT, seed=3), []
            for step in range(5):
                for _ in range(tries.get(step, 1)):
                    mean = taken(exchange, step, comm if step == 0 and not found else None, name=comm.rank)
                    found = [*found[:step], mean]
            return found, exchange.state_dict(5)["tensors"]

        return body

    plain, again = Loopback.run(2, means({})), Loopback.run(2, means({2: 3, 4: 2}))
    for (ones, memory), (others, kept) in zip(plain, again, strict=True):
        assert same(ones, others)
        assert memory.keys() == kept.keys()
        assert all(torch.equal(memory[key], kept[key]) for key in memory)


def test_a_step_may_end_before_its_last_bucket() -> None:
    """A message fails, and nobody calls end()."""

    def body(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        broken, plain = (TransactionalExchange(lift(TOPK), LAYOUT) for _ in range(2))
        taken(broken, 0, comm, name=comm.rank)
        broken.begin(1, None, behind=False)
        broken.mean_(gradient(7, comm.rank), LAYOUT)
        taken(plain, 0, comm, name=comm.rank)
        return taken(broken, 1, None, name=comm.rank), taken(plain, 1, None, name=comm.rank)

    assert all(torch.equal(*means) for means in Loopback.run(2, body))


def residual(exchange: TransactionalExchange, step: int) -> torch.Tensor:
    tensors = exchange.state_dict(step)["tensors"]
    return torch.cat([value.flatten() for key, value in sorted(tensors.items()) if "residual" in key])


def all_take(exchanges: list[TransactionalExchange], size: int = 3, *, new: bool) -> list[torch.Tensor]:
    """Every rank's mean of step 2, in a new group or in the old one."""
    return Loopback.run(
        size, lambda comm: taken(exchanges[comm.rank], 2, comm if new else None, name=comm.rank)
    )


def three_ranks(spec: str = TOPK) -> list[TransactionalExchange]:
    """Those of three ranks after two steps."""

    def body(comm: Loopback) -> TransactionalExchange:
        exchange = TransactionalExchange(lift(spec), LAYOUT)
        for step in range(2):
            taken(exchange, step, comm if step == 0 else None, name=comm.rank)
        return exchange

    return Loopback.run(3, body)


def test_the_same_ranks_in_a_new_group_keep_what_they_had() -> None:
    assert same(all_take(three_ranks(), new=True), all_take(three_ranks(), new=False))


def test_who_stays_and_who_comes_get_the_mean_of_what_is_left() -> None:
    """Rank 0 has died, another has come, and the step before was thrown away."""
    exchanges = three_ranks()
    kept = [residual(each, 2) for each in exchanges[1:]]
    all_take(exchanges, new=False)
    present = [*exchanges[1:], TransactionalExchange(lift(TOPK), LAYOUT)]

    def body(comm: Loopback) -> torch.Tensor:
        present[comm.rank].begin(2, comm, behind=comm.rank == 2)
        return residual(present[comm.rank], 2)

    for held in Loopback.run(3, body):
        assert torch.allclose(held, torch.stack(kept).mean(dim=0), atol=1e-6)


@for_each("spec", [TOPK, "powersgd(rank=1)", EF21, "lgc()"])
def test_all_agree_after_a_change(spec: str) -> None:
    exchanges = three_ranks(spec)
    present = [exchanges[2], TransactionalExchange(lift(spec), LAYOUT), exchanges[0]]

    def body(comm: Loopback) -> list[torch.Tensor]:
        exchange = present[comm.rank]
        first = taken(exchange, 2, comm, name=comm.rank, behind=comm.rank == 1)
        return [first, *(taken(exchange, step, None, name=comm.rank) for step in range(3, 6))]

    one, *others = Loopback.run(3, body)
    assert all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))


class Broken(Loopback):
    """Its peers have gone before the first sum."""

    def all_reduce(self, x: torch.Tensor, op: Any = "sum") -> torch.Tensor:
        raise PeerError("a peer died")


def test_a_group_that_breaks_as_it_is_formed_takes_no_memory_along() -> None:
    exchanges = three_ranks()
    held = [residual(each, 2) for each in exchanges]

    def broken(comm: Loopback) -> None:
        refuses(PeerError, ".", exchanges[comm.rank].begin, 2, Broken(comm.room, comm.rank), behind=False)

    Loopback.run(2, broken)
    assert all(torch.equal(residual(each, 2), own) for each, own in zip(exchanges, held, strict=True))
    all_take(exchanges, new=True)


def test_who_falls_behind_in_the_same_group_forgets() -> None:
    exchanges = three_ranks()
    held = [residual(each, 2) for each in exchanges]

    def body(comm: Loopback) -> torch.Tensor:
        exchanges[comm.rank].begin(2, None, behind=comm.rank == 1)
        return residual(exchanges[comm.rank], 2)

    now = Loopback.run(3, body)
    assert torch.equal(now[0], held[0])
    assert bool(held[1].any())
    assert not bool(now[1].any())


def test_figures_go_on_from_group_to_group() -> None:
    exchanges = three_ranks()
    before = exchanges[0].stats()
    all_take(exchanges, 2, new=True)
    after = exchanges[0].stats()
    assert (before.steps, after.steps) == (2, 3)
    assert after.network_sent > before.network_sent > 0
    assert before.dense < after.dense < 2 * before.dense
    assert TransactionalExchange(lift(TOPK), LAYOUT).stats().network_sent == 0


def test_methods_that_do_not_suit_and_states_that_do_not_belong_are_refused() -> None:
    two_level = "two_level(sum(), gather(sparse(topk(density=0.1))), ranks_per_node=1)"
    optimisers = "where steps may be thrown away: it changes how the optimiser"
    for spec, words in (
        ("dgc(density=0.01)", optimisers),
        ("onebit_adam()", optimisers),
        (two_level, "depends on the machines, which may change"),
    ):
        refuses(AttachError, words, TransactionalExchange, lift(spec), LAYOUT)
    one = Layout.of([("weight", (24, 40))])
    refuses(SpecError, "needs three or more: this model has 1", TransactionalExchange, lift("lgc()"), one)
    exchange = three_ranks()[0]
    kept, fresh = exchange.state_dict(2), TransactionalExchange(lift(TOPK), LAYOUT)
    other = TransactionalExchange(lift("topk(density=0.1)"), LAYOUT)
    for words, act, given in (
        ("load the state before the first backward pass", exchange.load_state_dict, kept),
        ("no memory to save before the first step", fresh.state_dict, 0),
        (r"of spec 'topk\(density=0.05\)', this handle has", other.load_state_dict, kept),
        ("not a state of a handle", fresh.load_state_dict, {}),
    ):
        refuses(StateError, words, act, given)
