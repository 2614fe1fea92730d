"""LGC: what is exchanged in each phase, that ranks stay alike, and that no step and no state is lost."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from tests.unit.lgc_world import ROWS, K, both, rows, trained
from tests.unit.lgc_world import one_thread as one_thread
from tests.unit.shared import for_each, refuses, same

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.exchange.method import lift
from laconic.reducers.learned_code import LearnedCode
from laconic.reducers.learned_code.autoencoder import DECODER, LAYOUT, code_length


@both
def test_before_the_switch_the_mean_is_the_leaders_largest_as_they_are(instance: str) -> None:
    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        out, x = torch.empty(2400), rows(comm.rank, 7)
        bound = LearnedCode(0.2, until=8, instance=instance).bind(ROWS, comm)
        sent = bound.reduce(x, ROWS, Turn(7, comm.rank), out)
        return out, sent.add_to_(torch.zeros(2400))

    results = Loopback.run(3, play)
    xs = torch.stack([rows(rank, 7) for rank in range(3)])
    chosen = torch.zeros(2400, dtype=torch.bool)
    chosen[xs[7 % 3].abs().topk(K).indices] = True
    for rank, (out, share) in enumerate(results):
        torch.testing.assert_close(out, torch.where(chosen, xs.mean(0), 0.0))
        assert torch.equal(share, torch.where(chosen, xs[rank], torch.zeros(())))


@for_each("values", [torch.zeros(2400), torch.eye(2400)[7], torch.full((2400,), 1e-42)])
@for_each("until", [0, 9])
@both
def test_little_or_nothing_goes_as_it_is_or_not_at_all(values, until, instance):
    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(2400)
        bound = LearnedCode(0.2, until, instance).bind(ROWS, comm)
        sent = bound.reduce(values * (comm.rank + 1), ROWS, Turn(3, comm.rank), out)
        assert all(bool(value.isfinite().all()) for value in bound.state_dict().values())
        return out, sent.add_to_(torch.zeros(2400))

    for out, share in Loopback.run(2, play):
        assert out.isfinite().all() and share.isfinite().all()
        if int(values.count_nonzero()) < 5:
            torch.testing.assert_close(out, values * 1.5)


@both
def test_a_rank_far_larger_than_the_leader_does_no_harm(instance: str) -> None:
    """Its values overflow in units of the leader's scale: all of them wait, and every memory stays finite."""

    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        out, x = torch.empty(2400), rows(comm.rank, 0) * (1e30 if comm.rank else 1e-30)
        bound = LearnedCode(0.2, 0, instance).bind(ROWS, comm)
        bound.load_state_dict(trained(instance))
        left = bound.reduce(x, ROWS, Turn(0, comm.rank), out).subtract_from_(x.clone())
        assert left.norm(dtype=torch.float64) <= x.norm(dtype=torch.float64) * (1 + 1e-6)
        return out, left

    for out, left in Loopback.run(2, play):
        assert out.isfinite().all() and left.isfinite().all()


@both
def test_all_ranks_take_rank_0s_net_when_training_ends(instance: str) -> None:
    """One rank's weights are pushed off before the switch: after it all are alike again, and so the mean."""
    state = trained(instance)

    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor, int]:
        meter, out = Metered(comm), torch.empty(2400)
        bound = LearnedCode(0.2, 60, instance).bind(ROWS, meter)
        weights = state["once/autoencoder/weights"] + (0.01 if comm.rank else 0.0)
        bound.load_state_dict({**state, "once/autoencoder/weights": weights})
        for step in (60, 61):
            bound.reduce(rows(comm.rank, step), ROWS, Turn(step, comm.rank), out)
        return out, bound.state_dict()["once/autoencoder/weights"], meter.snapshot().payload_sent

    results = Loopback.run(2, play)
    for out, weights, _ in results:
        assert torch.equal(out, results[0][0])
        assert torch.equal(weights, state["once/autoencoder/weights"])
    size = state["once/autoencoder/weights"].numel()
    assert size == LAYOUT.numel + (DECODER if instance == "per_node" else 0)
    assert 4 * size < results[0][2] < 4 * size + 2 * 4 * K, "the net is sent once"


def test_a_rank_that_has_learned_nothing_takes_rank_0s_net_too() -> None:
    """On another kind of CPU a gradient of the net can overflow alone; nobody may wait for it for ever."""

    def play(comm: Loopback) -> torch.Tensor:
        out, bound = torch.empty(2400), LearnedCode(0.2, 2).bind(ROWS, comm)
        if comm.rank == 1:
            bound._net.teach = lambda *_: None
        for step in range(4):
            bound.reduce(rows(comm.rank, step), ROWS, Turn(step, comm.rank), out)
        return out

    assert torch.equal(*Loopback.run(2, play, timeout_s=20.0))


LGC = "lgc(density=0.1, innovation=0.01, dense_steps=2, train_steps=3, instance={!r})"


@both
def test_a_void_step_changes_no_memory_in_any_phase(instance: str) -> None:
    """Inf on rank 1 in the last bucket, when two have been exchanged."""
    voids, inf_at = (1, 2, 5), MODEL["a.weight"].offset + 77
    spec = f"by_name({{'*': {LGC.format(instance)}}}, rest=dense())"

    def play(comm: Loopback) -> None:
        exchange = exchange_on(comm, spec)
        for t in range(8):
            flat, before = gradient(comm.rank, t), exchange.state_dict()
            if t in voids and comm.rank == 1:
                flat[inf_at] = math.inf
            _, valid = one_step(exchange, flat, cut(MODEL, 1, 2, 1))
            assert valid == (t not in voids)
            after = exchange.state_dict()
            kept = [torch.equal(value, after[key]) for key, value in before.items() if "once/" in key]
            # Ranks learn at 2 to 4. At 5, all take rank 0's weights, which are alike already.
            assert all(kept) != (2 <= t < 5 and valid), f"step {t}"

    everywhere(2, play)


@both
def test_the_order_of_tensors_in_a_bucket_does_not_matter(instance: str) -> None:
    spec = f"learned_code(density=0.1, until=3, instance='{instance}', innovation=0.01)"

    def play(comm: Loopback) -> list[bool]:
        one, other = exchange_on(comm, spec), exchange_on(comm, spec)
        same = []
        for t in range(6):
            buckets = [cut(MODEL, len(MODEL)), [MODEL]]
            means = [
                one_step(exchange, gradient(comm.rank, t), bucket)[0]
                for exchange, bucket in zip((one, other), buckets, strict=True)
            ]
            same.append(torch.equal(*means))
        return same

    assert everywhere(2, play) == [[True] * 6] * 2


@both
def test_a_resumed_run_ends_with_the_same_bits_in_any_phase(instance: str) -> None:
    spec, stops = LGC.format(instance), (3, 5, 6)

    def play(comm: Loopback) -> dict[int, bool]:
        unbroken, expected, states = exchange_on(comm, spec), [], []
        for t in range(8):
            states.append(copy.deepcopy(unbroken.state_dict()))
            expected.append(one_step(unbroken, gradient(comm.rank, t), [MODEL])[0])
        found = {}
        for stop in stops:
            after = exchange_on(comm, spec)
            after.load_state_dict(states[stop], step=stop)
            got = [one_step(after, gradient(comm.rank, t), [MODEL])[0] for t in range(stop, 8)]
            found[stop] = same(expected[stop:], got)
        return found

    assert everywhere(3, play) == [dict.fromkeys(stops, True)] * 3


def test_first_and_last_layers_are_summed_as_they_are() -> None:
    inner, rest = lift("lgc()").assign(MODEL)
    assert inner.names == ("b.weight",)
    assert rest.names == ("a.weight", "a.bias", "c.weight")
    assert lift("lgc()").warm_at == 500
    with pytest.raises(SpecError, match=r"three or more: this model has 2; use learned_code\(\)"):
        lift("lgc()").assign(Layout.of([("a", (3, 3)), ("b", (3, 3)), ("c", (9,))]))


def test_what_codes_cost() -> None:
    """Of 10,000 entries, a quarter as many numbers of each rank; positions, from the leader alone."""
    layout = Layout.of([("w", (1000, 1000))])
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))

    def play(comm: Loopback) -> int:
        meter = Metered(comm)
        LearnedCode(0.01, until=0).bind(layout, meter).reduce(x, layout, Turn(0), torch.empty_like(x))
        return meter.snapshot().payload_sent

    leader, other = Loopback.run(2, play)
    assert code_length(10_000) == 2500
    assert other == 4 * 2500 + 16 + 8
    assert 10_000 < 8 * (leader - other - 4 - 4) / math.log2(100) < 13_500


@for_each(
    "spec, said",
    [
        (
            "learned_code(until=-1)",
            r"learned_code: until must be a whole number of 0 or more, below 2\^63, got -1",
        ),
        ("learned_code(instance='star')", "instance must be 'ring', 'server' or 'per_node', got 'star'"),
        ("learned_code(innovation=0)", r"innovation must be a number in \(0, 1\], got 0"),
        ("learned_code(density=2)", r"density must be a number in \(0, 1\], got 2"),
        ("lgc(train_steps=0)", "train_steps must be .* got 0; an untrained net carries little"),
        ("lgc(dense_steps=0.5)", "dense_steps must be .* got 0.5"),
    ],
)
def test_wrong_arguments_are_refused(spec: str, said: str) -> None:
    refuses(SpecError, said, parse, spec)


def test_a_damaged_announcement_is_told_with_its_rank() -> None:
    class Damaged(Loopback):
        def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
            return x.fill_(255)

    comm = Damaged(Loopback.world(1)[0].room, 0)
    bound = LearnedCode(0.2, 0).bind(ROWS, comm)
    with pytest.raises(WireError, match="the message that rank 0 sent is damaged"):
        bound.reduce(rows(0, 0), ROWS, Turn(0), torch.empty(2400))


def test_the_last_layer_sends_its_largest_entries_where_asked_to() -> None:
    """By positions that the ranks take turns to choose, its rest kept for later; and dense in phase 1."""
    spec, entry = LGC.format("ring")[:-1] + ", last_layer='topk')", MODEL["c.weight"]
    assert [part.names for part in lift(spec).assign(MODEL)][1] == (entry.name,)
    k = math.ceil(0.1 * entry.numel)
    where = slice(entry.offset, entry.offset + entry.numel)

    def play(comm: Loopback) -> tuple[list[torch.Tensor], torch.Tensor]:
        exchange = exchange_on(comm, spec)
        means = [one_step(exchange, gradient(comm.rank, t), [MODEL])[0][where].clone() for t in range(6)]
        kept = [value for key, value in exchange.state_dict().items() if key.endswith(f"/{entry.name}")]
        return means, kept[0].flatten()

    results = everywhere(2, play)
    given = torch.stack([sum(gradient(rank, t)[where] for rank in range(2)) / 2 for t in range(6)])  # type: ignore[misc]
    means = torch.stack(results[0][0])
    torch.testing.assert_close(means[:2], given[:2])
    assert [int(mean.count_nonzero()) for mean in means[2:]] == [k] * 4
    waiting = torch.stack([kept for _, kept in results]).mean(0)
    torch.testing.assert_close(means.sum(0) + waiting, given.sum(0), rtol=1e-5, atol=1e-5)
    refuses(SpecError, "last_layer must be 'dense' or 'topk', got 'top'", parse, "lgc(last_layer='top')")
