"""LGC: what is exchanged in each phase, what the net learns, and that nothing grows or is lost."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.autoencoder import LAYOUT, Autoencoder, code_length, first_weights
from laconic.reducers.code_exchange import Ring, Server, Vector, common_gain, own_gain
from laconic.reducers.learned_code import LearnedCode
from laconic.strategies.method import lift

ROWS = Layout.of([("w", (40, 60))])
K = 480  # of 2400, at density 0.2
INSTANCES = ("ring", "server")
both = pytest.mark.parametrize("instance", INSTANCES)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Ranks are threads here: more of them for each small convolution only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(rank: int, step: int) -> torch.Tensor:
    """A gradient as of a layer behind a ReLU, from a few examples: what all ranks share, and their own."""
    common, own = (torch.Generator().manual_seed(1000 * step + s) for s in (999, rank))
    parts = [torch.randn(40, 2, generator=g) @ torch.randn(2, 60, generator=g).relu() for g in (common, own)]
    return (parts[0] + 0.5 * parts[1]).flatten()


def mixing(step: int, size: int, k: int) -> tuple[int, torch.Tensor]:
    return LearnedCode(0.1).bind(ROWS, Loopback.world(size)[0])._mixing(Turn(step), k)


@cache
def trained(instance: str, size: int = 2, steps: int = 60) -> dict[str, torch.Tensor]:
    """The state of a net that has been trained for some steps."""

    def play(comm: Loopback) -> dict[str, torch.Tensor]:
        bound = LearnedCode(0.2, until=steps, instance=instance, innovation=0.005).bind(ROWS, comm)
        for step in range(steps):
            x = rows(comm.rank, step)
            bound.reduce(x, ROWS, Turn(step, comm.rank), torch.empty_like(x))
        return bound.state_dict()

    return Loopback.run(size, play)[0]


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


def test_a_ring_decodes_the_average_code() -> None:
    weights = trained("ring")["once/autoencoder/weights"]
    xs, net = [rows(rank, 0)[:K] for rank in range(4)], Autoencoder(weights)

    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        done = Ring().exchange(comm, weights, Vector(xs[comm.rank], 2.0, 0, torch.ones(K)), 0)
        return done.mean, done.own

    results = Loopback.run(4, play)
    codes = net.encode(torch.stack(xs) / 2)
    base = net.decode(codes.mean(0, keepdim=True), K)[0] * 2
    mean = results[0][0]
    gain = float(mean @ base / (base @ base))
    assert 0.5 < gain < 1.5
    torch.testing.assert_close(mean, gain * base, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sum(own for _, own in results) / 4, mean, rtol=1e-5, atol=1e-5)
    left = [float((x - own).norm() / x.norm()) for x, (_, own) in zip(xs, results, strict=True)]
    assert max(left) < 0.95, "each rank's own part is about its own values"


def test_a_server_decodes_the_leaders_code_and_everyones_innovation() -> None:
    weights = trained("server")["once/autoencoder/weights"]
    xs, net = [rows(rank, 0)[:K] for rank in range(3)], Autoencoder(weights)

    def play(comm: Loopback) -> tuple[torch.Tensor, torch.Tensor]:
        done = Server(5).exchange(comm, weights, Vector(xs[comm.rank], 2.0, 0, torch.ones(K)), 1)
        return done.mean, done.own

    results = Loopback.run(3, play)
    base = net.decode(net.encode(xs[1][None] / 2), K)[0] * 2
    for x, (_, own) in zip(xs, results, strict=True):
        places, rest = x.abs().topk(5).indices, torch.ones(K)
        rest[places] = 0
        gain = float(x @ (base * rest) / (base * rest).square().sum())
        torch.testing.assert_close(own * rest, max(gain, 0.0) * base * rest, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own[places], x[places], rtol=1e-6, atol=0)
    mean = sum(own for _, own in results) / 3
    assert all(torch.equal(each, results[0][0]) for each, _ in results)
    torch.testing.assert_close(results[0][0], mean, rtol=1e-5, atol=1e-6)


def test_the_server_loss_is_the_papers_with_averages() -> None:
    net, w = Autoencoder(first_weights()), torch.stack([rows(rank, 0)[:100] for rank in range(3)])
    codes = net.encode(w)
    left = net.decode(codes[2:], 100) - w
    for row, own in zip(left, w, strict=True):
        row[own.abs().topk(4).indices] = 0
    pairs = [(codes[i] - codes[j]).square().mean() for i in range(3) for j in range(3) if i != j]
    plain = 0.5 * left.square().mean() + 0.5 * sum(pairs) / len(pairs)
    torch.testing.assert_close(Server(4).loss(net, w, 2) / 100, plain)


@pytest.mark.parametrize("seed", range(20))
def test_a_gain_is_the_best_that_lets_nothing_grow(seed: int) -> None:
    """Against a search over a grid of gains."""
    generator = torch.Generator().manual_seed(seed)
    w, noise = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator)
    p = w * 0.4 * (seed % 5) + noise
    fits = [(float(a @ b), float(b @ b)) for a, b in zip(w, p, strict=True)]
    left = [((w - gain * p).square().sum(1)) for gain in torch.linspace(0, 5, 5001)]
    allowed = [i for i, each in enumerate(left) if bool((each <= w.square().sum(1) + 1e-9).all())]
    best = min(allowed, key=lambda i: float(left[i].sum()))
    assert common_gain(fits) == pytest.approx(best / 1000, abs=1.1e-3)
    alone = min(range(5001), key=lambda i: float(left[i][0]))
    assert own_gain(fits[0]) == pytest.approx(alone / 1000, abs=1.1e-3)


@both
def test_the_net_learns_what_is_there(instance: str) -> None:
    """On gradients that it has not seen, the code keeps over a fifth of the energy, of a quarter of the
    numbers and after 60 steps only; that of an untrained net keeps next to nothing."""

    def play(comm: Loopback, weights: torch.Tensor) -> list[float]:
        kept, exchange = [], Ring() if instance == "ring" else Server(12)
        for step in range(500, 506):
            x = rows(comm.rank, step)
            x = x[rows(step % 2, step).abs().topk(K).indices.sort().values]
            vector = Vector(x, float(x.square().mean().sqrt()), 0, torch.ones(K))
            left = x - exchange.exchange(comm, weights, vector, step % 2).own
            kept.append(1 - float(left.square().sum() / x.square().sum()))
        return kept

    weights = trained(instance)["once/autoencoder/weights"]
    after = [sum(each) / 6 for each in Loopback.run(2, lambda comm: play(comm, weights))]
    before = [sum(each) / 6 for each in Loopback.run(2, lambda comm: play(comm, first_weights()))]
    innovation = 0.18 if instance == "server" else 0.0  # needs no net
    assert max(before) < innovation + 0.05
    assert min(after) > innovation + 0.2


def residuals(spec: str, steps: int, state: dict[str, torch.Tensor]) -> list[float]:
    """The mean norm over ranks of what error feedback holds, every 50 steps, for gradients that go on."""
    reducer = parse(spec)

    def play(comm: Loopback) -> list[float]:
        bound, x, out, norms = reducer.bind(ROWS, comm), torch.zeros(2400), torch.empty(2400), []
        if state:
            bound.load_state_dict(state)
        for step in range(steps):
            x += rows(comm.rank, step % 25)
            bound.reduce(x, ROWS, Turn(step, comm.rank), out).subtract_from_(x)
            if step % 50 == 49:
                norms.append(float(x.norm()))
        return norms

    return [sum(each) / 2 for each in zip(*Loopback.run(2, play), strict=True)]


@both
def test_what_stays_behind_is_bounded(instance: str) -> None:
    """The same 25 gradients over and over: after a while the residual no longer grows. Alone, the sum of them
    would, by over 1,000 in 50 steps."""
    spec = f"learned_code(0.2, until=0, instance='{instance}', innovation=0.02)"
    norms = residuals(spec, 350, trained(instance))
    sums = torch.stack([sum(rows(rank, step) for step in range(25)) * 2 for rank in range(2)])
    assert float(sums.norm(dim=1).min()) > 400
    assert max(norms[4:]) < 1.25 * norms[3], norms
    assert max(norms) < 10 * max(residuals("cltk(0.2)", 100, {})), norms


@pytest.mark.parametrize("values", [torch.zeros(2400), torch.eye(2400)[7], torch.full((2400,), 1e-42)])
@pytest.mark.parametrize("until", [0, 9])
@both
def test_little_or_nothing_goes_as_it_is_or_not_at_all(
    values: torch.Tensor, until: int, instance: str
) -> None:
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


def test_values_are_turned_round_and_in_every_second_round_flipped() -> None:
    rounds = [mixing(step, size=3, k=64) for step in range(12)]
    plain = [bool((signs == 1).all()) for _, signs in rounds]
    assert plain == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert not torch.equal(rounds[3][1], rounds[4][1])
    assert all(10 < int((signs < 0).sum()) < 54 for _, signs in rounds[3:6])
    assert len({shift for shift, _ in rounds}) > 8
    for shift, signs in rounds:
        vector = Vector(rows(0, 0)[:64], 2.0, shift, signs)
        assert torch.equal(vector.normal[shift], vector.values[0] / 2 * signs[shift])
        assert torch.equal(vector.restored(vector.normal), vector.values)


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
    assert 4 * LAYOUT.numel < results[0][2] < 4 * LAYOUT.numel + 2 * 4 * K, "the net is sent once"


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
@pytest.mark.parametrize("when", [1, 2, 5])
def test_a_void_step_changes_no_memory_in_any_phase(instance: str, when: int) -> None:
    """Inf on rank 1 in the last bucket, when two have been exchanged."""
    inf_at = MODEL["a.weight"].offset + 77
    spec = f"by_name({{'*': {LGC.format(instance)}}}, rest=dense())"

    def play(comm: Loopback) -> None:
        exchange = exchange_on(comm, spec)
        for t in range(8):
            flat, before = gradient(comm.rank, t), exchange.state_dict()
            if t == when and comm.rank == 1:
                flat[inf_at] = math.inf
            _, valid = one_step(exchange, flat, cut(MODEL, 1, 2, 1))
            assert valid == (t != when)
            after = exchange.state_dict()
            same = [torch.equal(value, after[key]) for key, value in before.items() if "once/" in key]
            learning = 2 <= t < 5 and valid
            # At 5, all take rank 0's weights; these are alike already, as all learn the same.
            assert all(same) != learning

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
@pytest.mark.parametrize("stop", [3, 5, 6])
def test_a_resumed_run_ends_with_the_same_bits(instance: str, stop: int) -> None:
    spec = LGC.format(instance)

    def play(comm: Loopback) -> list[bool]:
        unbroken, before = exchange_on(comm, spec), exchange_on(comm, spec)
        expected = [one_step(unbroken, gradient(comm.rank, t), [MODEL])[0] for t in range(8)]
        for t in range(stop):
            one_step(before, gradient(comm.rank, t), [MODEL])
        after = exchange_on(comm, spec)
        after.load_state_dict(before.state_dict(), step=stop)
        got = [one_step(after, gradient(comm.rank, t), [MODEL])[0] for t in range(stop, 8)]
        return [torch.equal(a, b) for a, b in zip(expected[stop:], got, strict=True)]

    assert everywhere(3, play) == [[True] * (8 - stop)] * 3


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


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "learned_code(until=-1)",
            r"learned_code: until must be a whole number of 0 or more, below 2\^63, got -1",
        ),
        ("learned_code(instance='star')", "instance must be 'ring' or 'server', got 'star'"),
        ("learned_code(innovation=0)", r"innovation must be a number in \(0, 1\], got 0"),
        ("learned_code(density=2)", r"density must be a number in \(0, 1\], got 2"),
        ("lgc(train_steps=0)", "train_steps must be .* got 0; an untrained net carries little"),
        ("lgc(dense_steps=0.5)", "dense_steps must be .* got 0.5"),
    ],
)
def test_wrong_arguments_are_refused(spec: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse(spec)


def test_a_damaged_announcement_is_told_with_its_rank() -> None:
    class Damaged(Loopback):
        def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
            return x.fill_(255)

    comm = Damaged(Loopback.world(1)[0].room, 0)
    bound = LearnedCode(0.2, 0).bind(ROWS, comm)
    with pytest.raises(WireError, match="the positions that rank 0 sent are damaged"):
        bound.reduce(rows(0, 0), ROWS, Turn(0), torch.empty(2400))
