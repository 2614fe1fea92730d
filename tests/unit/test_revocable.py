"""Steps that are thrown away, and ranks that come and go: what an exchange remembers then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.laws.table import compressors

from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, PeerError, SpecError, StateError
from laconic.core.layout import Layout
from laconic.exchange.method import lift
from laconic.exchange.revocable import RevocableExchange

SHAPES = {"a.weight": (24, 40), "b.weight": (16, 30), "a.bias": (40,), "c.weight": (12, 20)}
LAYOUT = Layout.of(SHAPES.items())
TOPK, EF21 = "topk(density=0.05)", "ef21_sgdm(topk(density=0.05))"


def gradient(step: int, name: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1000 * step + name)
    return torch.randn(LAYOUT.numel, generator=rng)


def taken(exchange: RevocableExchange, step: int, group: Loopback | None, **told: Any) -> torch.Tensor:
    """The mean of a step, in which a rank's gradient is that of its `name`, by default its number."""
    name, behind = told.get("name"), told.get("behind", False)
    exchange.begin(step, group, behind=behind)
    bucket = gradient(step, name) if name is not None else torch.zeros(LAYOUT.numel)
    assert exchange.mean_(bucket, LAYOUT) is None
    exchange.end()
    return bucket


def suits(spec: str) -> bool:
    try:
        RevocableExchange(lift(spec), LAYOUT)
    except AttachError:
        return False
    return not lift(spec).adaptive  # by measured times, so that no two runs are alike


SUITED = [spec for spec in compressors() if suits(spec)]


def test_most_methods_are_suited() -> None:
    assert len(SUITED) > 40
    assert {"cgx()", "stc()", "powersgd()", "ef21_sgdm()"} <= {spec.split("(")[0] + "()" for spec in SUITED}


@pytest.mark.parametrize("spec", SUITED)
def test_a_step_that_is_thrown_away_leaves_no_trace(spec: str) -> None:
    def means(tries: dict[int, int]) -> Callable[[Loopback], tuple[list[torch.Tensor], Any]]:
        def body(comm: Loopback) -> tuple[list[torch.Tensor], Any]:
            exchange, found = RevocableExchange(lift(spec), LAYOUT, seed=3), []
            for step in range(5):
                for _ in range(tries.get(step, 1)):
                    mean = taken(exchange, step, comm if step == 0 and not found else None, name=comm.rank)
                    found = [*found[:step], mean]
            return found, exchange.state_dict(5)["tensors"]

        return body

    plain, again = Loopback.run(2, means({})), Loopback.run(2, means({2: 3, 4: 2}))
    for (ones, memory), (others, kept) in zip(plain, again, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
        assert memory.keys() == kept.keys()
        assert all(torch.equal(memory[key], kept[key]) for key in memory)


def test_a_step_may_end_before_its_last_bucket() -> None:
    """A message fails, and nobody calls end()."""

    def body(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        broken, plain = (RevocableExchange(lift(TOPK), LAYOUT) for _ in range(2))
        taken(broken, 0, comm, name=comm.rank)
        broken.begin(1, None, behind=False)
        broken.mean_(gradient(7, comm.rank), LAYOUT)
        taken(plain, 0, comm, name=comm.rank)
        return taken(broken, 1, None, name=comm.rank), taken(plain, 1, None, name=comm.rank)

    assert all(torch.equal(*means) for means in Loopback.run(2, body))


def residual(exchange: RevocableExchange, step: int) -> torch.Tensor:
    tensors = exchange.state_dict(step)["tensors"]
    return torch.cat([value.flatten() for key, value in sorted(tensors.items()) if "residual" in key])


def three_ranks(spec: str = TOPK) -> list[RevocableExchange]:
    """Those of three ranks after two steps."""

    def body(comm: Loopback) -> RevocableExchange:
        exchange = RevocableExchange(lift(spec), LAYOUT)
        for step in range(2):
            taken(exchange, step, comm if step == 0 else None, name=comm.rank)
        return exchange

    return Loopback.run(3, body)


def test_the_same_ranks_in_a_new_group_keep_what_they_had() -> None:
    formed, plain = three_ranks(), three_ranks()
    new = Loopback.run(3, lambda comm: taken(formed[comm.rank], 2, comm, name=comm.rank))
    old = Loopback.run(3, lambda comm: taken(plain[comm.rank], 2, None, name=comm.rank))
    assert all(torch.equal(a, b) for a, b in zip(new, old, strict=True))


def test_who_stays_and_who_comes_get_the_mean_of_what_is_left() -> None:
    """Rank 0 has died, another has come, and the step before was thrown away."""
    exchanges = three_ranks()
    kept = [residual(each, 2) for each in exchanges[1:]]
    Loopback.run(3, lambda comm: taken(exchanges[comm.rank], 2, None, name=comm.rank))
    present = [*exchanges[1:], RevocableExchange(lift(TOPK), LAYOUT)]
    newcomer = 2

    def body(comm: Loopback) -> torch.Tensor:
        behind = comm.rank == newcomer
        present[comm.rank].begin(2, comm, behind=behind)
        return residual(present[comm.rank], 2)

    for held in Loopback.run(3, body):
        assert torch.allclose(held, torch.stack(kept).mean(dim=0), atol=1e-6)


@pytest.mark.parametrize("spec", [TOPK, "powersgd(rank=1)", EF21, "lgc()"])
def test_all_agree_after_a_change(spec: str) -> None:
    exchanges = three_ranks(spec)
    present = [exchanges[2], RevocableExchange(lift(spec), LAYOUT), exchanges[0]]

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
        with pytest.raises(PeerError):
            exchanges[comm.rank].begin(2, Broken(comm.room, comm.rank), behind=False)

    Loopback.run(2, broken)
    assert all(torch.equal(residual(each, 2), own) for each, own in zip(exchanges, held, strict=True))
    Loopback.run(3, lambda comm: taken(exchanges[comm.rank], 2, comm, name=comm.rank))


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
    Loopback.run(2, lambda comm: taken(exchanges[comm.rank], 2, comm, name=comm.rank))
    after = exchanges[0].stats()
    assert (before.steps, after.steps) == (2, 3)
    assert after.network_sent > before.network_sent > 0
    assert before.dense < after.dense < 2 * before.dense
    assert RevocableExchange(lift(TOPK), LAYOUT).stats().network_sent == 0


@pytest.mark.parametrize("spec", ["dgc(density=0.01)", "onebit_adam()"])
def test_methods_of_the_optimiser_are_refused(spec: str) -> None:
    with pytest.raises(AttachError, match="where steps may be thrown away: it changes how the optimiser"):
        RevocableExchange(lift(spec), LAYOUT)


def test_groups_within_the_group_are_refused() -> None:
    with pytest.raises(AttachError, match="machines come and go"):
        RevocableExchange(
            lift("two_level(sum(), gather(sparse(topk(density=0.1))), ranks_per_node=1)"), LAYOUT
        )


def test_a_method_that_does_not_suit_the_model_is_told_at_once() -> None:
    with pytest.raises(SpecError, match="needs three or more: this model has 1"):
        RevocableExchange(lift("lgc()"), Layout.of([("weight", (24, 40))]))


def test_states_that_do_not_belong_are_refused() -> None:
    exchange = three_ranks()[0]
    kept = exchange.state_dict(2)
    with pytest.raises(StateError, match="load the state before the first backward pass"):
        exchange.load_state_dict(kept)
    with pytest.raises(StateError, match="no memory to save before the first step"):
        RevocableExchange(lift(TOPK), LAYOUT).state_dict(0)
    with pytest.raises(StateError, match=r"of spec 'topk\(density=0.05\)', this handle has"):
        RevocableExchange(lift("topk(density=0.1)"), LAYOUT).load_state_dict(kept)
    with pytest.raises(StateError, match="no state of a handle"):
        RevocableExchange(lift(TOPK), LAYOUT).load_state_dict({})
