"""Autotune finds what pays on a link, and again when the link changes; its search over virtual clocks."""

from __future__ import annotations

import logging
import random

import torch
from tests.unit.shared import for_each
from tests.unit.slow_link import Clock, SlowLink

from laconic.comm.loopback import Loopback
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.exchange.method import lift
from laconic.reducers.autotune import CANDIDATES, Autotune, BoundAutotune
from laconic.reducers.autotune.search import FEW, LESS, LONG_S, MORE, WAIT_S, Search, Timed

LIST = (*CANDIDATES[:4], lift("sampled_topk(density=0.01)").routes[0].reducer, CANDIDATES[5])
MODEL = Layout.of([("a", (100, 100)), ("b", (100,)), ("c", (200, 100)), ("d", (300, 100)), ("e", (50,))])
BUCKETS = [Layout.of((name, MODEL[name].shape) for name in part) for part in (("e", "d"), ("c", "b"), ("a",))]
FORWARD_S, READY_S, UPDATE_S = 0.02, (0.01, 0.02, 0.03), 0.005  # of a step without the others
ALONE_S = FORWARD_S + READY_S[-1] + UPDATE_S
GBIT = 1.25e8  # bytes a second
RATES = {"fast": 100 * GBIT, "hidden": GBIT / 2, "middling": GBIT / 20, "slow": GBIT / 5000}


class Rank:
    """One rank that trains in the world of slow links; `step` takes it one step further."""

    def __init__(self, comm, rate, spec=Autotune(LIST)):  # noqa: B008  # frozen
        self.clock = Clock()
        self.link = SlowLink(comm, self.clock, rate)
        self.bound = BoundAutotune(spec, MODEL, self.link, self.clock)
        self.main, self.steps = 0.0, 0

    def step(self, gradient, bad=False):
        """The means of the buckets (or None if skipped); the clock shows what the step took."""
        began = self.main
        means = []
        for bucket, ready in zip(BUCKETS, READY_S, strict=True):
            self.clock.now = max(self.clock.now, began + FORWARD_S + ready)
            x = (
                torch.zeros(bucket.numel)
                if gradient is None
                else gradient(self.link.rank, self.steps, bucket)
            )
            turn, out = Turn(self.steps, self.link.rank), torch.zeros(bucket.numel)
            sent = self.bound.reduce(None if bad else x, bucket, turn, out)
            means.append(None if sent is None else out)
            if sent is None:
                break
        self.main = max(self.clock.now, began + FORWARD_S + READY_S[-1]) + UPDATE_S
        self.steps += 1
        return means, self.main - began

    def train(self, steps):
        for _ in range(steps):
            self.step(noise)

    @property
    def chosen(self):
        return self.bound.autotuner.chosen


def noise(rank, step, bucket):
    return torch.randn(bucket.numel, generator=torch.Generator().manual_seed(97 * step + rank)) ** 3


def decided(rank, most=150):
    while rank.chosen is None and rank.steps < most:
        rank.step(noise)
    return rank.chosen


def settled(rank, steps=3):
    return sorted(rank.step(noise)[1] for _ in range(steps))[steps // 2]


@for_each("rate", RATES.values())
def test_all_ranks_take_the_least_lossy_candidate_that_is_about_as_fast_as_the_fastest(rate):
    """Beside every candidate alone."""

    def body(comm):
        rank = Rank(comm, rate)
        chosen = decided(rank)
        return chosen, settled(rank)

    def fixed(comm):
        found = []
        for candidate in range(len(LIST)):
            rank = Rank(comm, rate)
            rank.bound.autotuner.resume(candidate, 0.0)
            found.append(settled(rank))
        return found

    results = Loopback.run(3, body)
    assert len({chosen for chosen, _ in results}) == 1
    chosen, step_s = results[0]
    alone = Loopback.run(3, fixed)[0]
    assert step_s <= 1.06 * min(alone)
    assert all(slower > 1.04 * min(alone) for slower in alone[:chosen])


def test_on_a_fast_link_nothing_is_compressed_and_it_says_so(caplog):
    with caplog.at_level(logging.INFO, "laconic"):
        found = Loopback.run(2, lambda comm: decided(Rank(comm, RATES["fast"])))
    assert found == [0] * 2
    assert "sum()" in caplog.text and "this link needs no compression" in caplog.text


def test_on_a_fast_link_nothing_is_ever_lost():
    """Where the dense exchange is a small part of the step, no other candidate is even tried."""

    def body(comm):
        rank, used = Rank(comm, RATES["fast"], Autotune(LIST, every=30)), set()
        for _ in range(100):
            rank.step(noise)
            used.add(rank.bound.autotuner.current)
        return used

    assert Loopback.run(2, body) == [{0}] * 2


def test_where_the_exchange_hides_behind_backward_it_ends_dense():
    """It takes more than the least gain, so two others and a sparse one are tried. They save nothing."""

    def body(comm):
        rank, used = Rank(comm, RATES["hidden"]), set()
        while rank.chosen is None:
            rank.step(noise)
            used.add(rank.bound.autotuner.current)
        return rank.chosen, used

    assert Loopback.run(2, body) == [(0, {0, 1, 2, 4})] * 2


def test_on_a_slow_link_the_gradient_is_sent_whole_twice_and_never_again(caplog):
    """At 200 kbit/s that takes nearly 10 s a step. Two steps say enough, of lossier candidates too, and later
    searches do without."""
    spec = Autotune(LIST, every=60)

    def body(comm):
        rank, seconds = Rank(comm, RATES["slow"], spec), []
        for _ in range(200):
            seconds.append(rank.step(noise)[1])
        return rank.chosen, seconds

    with caplog.at_level(logging.INFO, "laconic"):
        (chosen, seconds), _ = Loopback.run(2, body)
    assert chosen == 5
    assert min(seconds[:2]) > 9.0
    assert max(seconds[2:]) < 5.0 and max(seconds[16:]) < 2.0
    assert sum(seconds[:16]) < 4 * seconds[0]
    assert "times as fast as sum()" in caplog.text
    assert "times as fast as scatter_reduce" in caplog.text, "which is as far up as it looks again"


def test_a_link_that_drops_is_noticed_within_fifty_steps_and_one_that_recovers_too(caplog):
    def body(comm):
        rank = Rank(comm, RATES["fast"])
        decided(rank)
        rank.train(20)
        found = [rank.chosen]
        for rate in (RATES["slow"], RATES["fast"]):
            rank.link.bytes_a_second = rate
            rank.train(50)
            found.append(rank.chosen)
        return found

    with caplog.at_level(logging.INFO, "laconic"):
        results = Loopback.run(2, body)
    assert results[0] == results[1] == [0, 5, 0]
    assert caplog.text.count("the exchange takes") == 2


def test_a_link_that_trembles_changes_nothing(caplog):
    """A fifth more and less from step to step: no second search in 120 steps."""

    def body(comm):
        rank = Rank(comm, RATES["middling"])
        chosen = decided(rank)
        for step in range(120):
            rank.link.bytes_a_second = RATES["middling"] * (0.8, 1.2, 1.0)[step % 3]
            rank.step(noise)
        return chosen, rank.chosen

    with caplog.at_level(logging.INFO, "laconic"):
        assert all(before == after for before, after in Loopback.run(2, body))
    assert len([each for each in caplog.records if "searching again" in each.message]) == 0


def test_it_looks_again_after_so_many_steps_and_keeps_what_is_nearly_as_good(caplog):
    spec = Autotune(LIST, every=64)

    def body(comm):
        rank = Rank(comm, RATES["middling"], spec)
        chosen = decided(rank)
        rank.train(100)
        return chosen, rank.chosen

    with caplog.at_level(logging.INFO, "laconic"):
        (before, after), _ = Loopback.run(2, body)
    assert before == after
    assert sum("regular search is due" in each.message for each in caplog.records) == 1


def test_nothing_is_lost_from_candidate_to_candidate():
    """Sum of all gradients = size * sum of all means + what is left in the residuals, from the first search
    on to the dense steps that empty them. (Of candidates that do not round the mean itself.)"""
    spec = Autotune((*LIST[::4], LIST[5]))

    def body(comm):
        rank = Rank(comm, RATES["hidden"], spec)
        given, got = torch.zeros(MODEL.numel), torch.zeros(MODEL.numel)
        left = []
        for step in range(40):
            means, _ = rank.step(noise)
            for bucket, mean in zip(BUCKETS, means, strict=True):
                for entry in bucket:
                    at = slice(MODEL[entry.name].offset, MODEL[entry.name].offset + entry.numel)
                    here = slice(entry.offset, entry.offset + entry.numel)
                    given[at] += noise(comm.rank, step, bucket)[here]
                    got[at] += mean[here]
            residual = torch.zeros(MODEL.numel)
            for key, value in rank.bound.state_dict().items():
                if key.startswith("residual/"):
                    at = MODEL[key.removeprefix("residual/")].offset
                    residual[at : at + value.numel()] = value.flatten()
            left.append(residual)
        return given, got, left, rank.chosen

    results = Loopback.run(2, body)
    assert results[0][3] == 0
    total = sum(given for given, *_ in results)
    assert torch.equal(results[0][1], results[1][1])
    assert float(results[0][2][8].abs().max()) > 0.1
    assert all(float(left[-1].abs().max()) == 0 for _, _, left, _ in results)
    torch.testing.assert_close(2 * results[0][1], total, rtol=1e-4, atol=1e-3)


def drift(rank, step, bucket):
    """Mostly the same at every step and on every rank, so that what is left behind adds up."""
    always = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(bucket.numel))
    return always + 0.1 * noise(rank, step, bucket)


def test_what_is_left_behind_bleeds_out_in_steps_of_at_most_twice_the_gradients_norm():
    """A search on a link that hides a dense exchange leaves several gradients behind."""
    spec = Autotune(LIST[::4])

    def body(comm):
        rank = Rank(comm, RATES["hidden"], spec)
        seen, most, left = [], 0.0, torch.zeros(1)
        for step in range(40):
            means, _ = rank.step(drift)
            plain = [torch.cat([drift(each, step, bucket) for bucket in BUCKETS]) for each in range(2)]
            if rank.bound.autotuner.current == 0:
                seen.append(float(torch.cat(means).norm() / (sum(plain) / 2).norm()))
            state = rank.bound.state_dict()
            left = torch.cat([state[key].flatten() for key in state if key.startswith("residual/")])
            most = max(most, float(left.norm() / plain[0].norm()))
        return seen, most, float(left.norm())

    for seen, most, left in Loopback.run(2, body):
        assert most > 3 and left == 0
        assert max(seen) < 2.01


def test_a_void_step_counts_for_nothing_and_leaves_what_was_kept():
    def body(comm):
        rank = Rank(comm, RATES["slow"])
        rank.train(4)
        before = rank.bound.state_dict()
        means, _ = rank.step(noise, bad=comm.rank == 1)
        after = rank.bound.state_dict()
        return means, before, after, decided(rank)

    for means, before, after, chosen in Loopback.run(2, body):
        assert means == [None]
        assert before.keys() == after.keys()
        untouched = [key for key in before if key.startswith("residual/") and key != "residual/d"]
        assert all(torch.equal(before[key], after[key]) for key in untouched)
        assert any(bool(before[key].any()) for key in untouched)
        assert chosen == 5


def test_a_void_step_on_the_dense_candidate_sends_nothing_twice():
    """What the first dense step has sent stays sent, though a later step is skipped."""

    def body(comm):
        rank = Rank(comm, RATES["hidden"])
        decided(rank)
        rank.step(noise)
        rank.step(noise)
        means, _ = rank.step(noise, bad=comm.rank == 1)
        state = rank.bound.state_dict()
        return rank.chosen, means, [value for key, value in state.items() if key.startswith("residual/")]

    for chosen, means, residuals in Loopback.run(2, body):
        assert chosen == 0 and means == [None]
        assert residuals and all(not bool(value.any()) for value in residuals)


def test_looks_that_change_nothing_do_not_blind_it():
    """After many of them, and long before the next, a link that drops is noticed as soon as ever."""
    spec = Autotune(LIST, every=60)

    def body(comm):
        rank = Rank(comm, RATES["fast"], spec)
        looked = 0
        while looked < 6 or rank.bound.autotuner.windows != 2:
            before = rank.bound.autotuner.windows
            rank.step(noise)
            looked += rank.bound.autotuner.windows < before
        chosen = rank.chosen
        rank.link.bytes_a_second = RATES["slow"]
        rank.train(45)
        return chosen, rank.chosen

    assert Loopback.run(2, body) == [(0, 5)] * 2


def test_a_resumed_run_on_another_link_looks_again():
    def body(comm):
        rank = Rank(comm, RATES["fast"])
        decided(rank)
        rank.train(10)
        other = Rank(comm, RATES["slow"])
        other.bound.load_state_dict({key: value.clone() for key, value in rank.bound.state_dict().items()})
        other.steps = rank.steps
        before = other.chosen
        other.train(50)
        return before, other.chosen

    assert Loopback.run(2, body) == [(0, 5)] * 2


def test_a_resumed_run_goes_on_with_what_was_decided():
    def body(comm):
        rank = Rank(comm, RATES["middling"])
        decided(rank)
        state = {key: value.clone() for key, value in rank.bound.state_dict().items()}
        other = Rank(comm, RATES["middling"])
        other.bound.load_state_dict(state)
        other.steps = rank.steps
        pairs = [(rank.step(noise)[0], other.step(noise)[0]) for _ in range(3)]
        return rank.chosen, other.chosen, pairs

    for ours, theirs, pairs in Loopback.run(2, body):
        assert ours == theirs is not None
        assert all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


def test_what_was_left_behind_bleeds_out_after_a_resume_too():
    """The dense candidate has been decided on, and much is left behind: no step adds all of it."""
    spec = Autotune(LIST[::4])

    def body(comm):
        rank = Rank(comm, RATES["hidden"], spec)
        decided(rank)
        state = {key: value.clone() for key, value in rank.bound.state_dict().items()}
        for key in state:
            if key.startswith("residual/"):
                state[key] = torch.full_like(state[key], 100.0)
        other = Rank(comm, RATES["hidden"], spec)
        other.bound.load_state_dict(state)
        other.steps = rank.steps
        means, _ = other.step(drift)
        plain = torch.cat(
            [sum(drift(each, rank.steps, bucket) for each in range(2)) / 2 for bucket in BUCKETS]
        )
        return rank.chosen, float(torch.cat(means).norm() / plain.norm())

    for chosen, grown in Loopback.run(2, body):
        assert chosen == 0 and 1.1 < grown < 2.1


JITTER = 0.2  # standard deviation, of a step
NOTHING_PAYS = {"all alike": [1.0] * 6, "lossier ones a little slower": [1.0, 1.01, 1.02, 1.03, 1.03, 1.03]}
SOMETHING_PAYS = {  # the part of a dense step that is exchange: half, four fifths, nearly all
    "half": [1.0, 0.75, 0.625, 0.5625, 0.51, 0.501],
    "four fifths": [1.0, 0.6, 0.4, 0.3, 0.22, 0.202],
    "nearly all": [1.0, 0.515, 0.2725, 0.15, 0.04, 0.03],
    "halves do not": [1.0, 1.02, 0.5, 0.52, 0.25, 0.26],
}


def searched(seconds, jitter=0.0, seed=0, used=0, ways=(MORE,), exchange=0.5, gain=0.05, ranks=2):
    """The candidate kept, and those that were in use, step by step."""
    rng = random.Random(seed)
    run = Search(gain, len(seconds) - 1).run(used, ways)
    in_use = [next(run)]
    while True:
        draws = [max(0.2, rng.gauss(1, jitter)) for _ in range(ranks)]
        took = seconds[in_use[-1]] * max(draws)
        try:
            in_use.append(run.send(Timed(exchange * took, took)))
        except StopIteration as end:
            return end.value, in_use


@for_each("seconds", NOTHING_PAYS.values())
def test_where_nothing_pays_at_most_1_run_in_50_ends_lossy(seconds):
    assert sum(searched(seconds, JITTER, seed)[0] > 0 for seed in range(50)) <= 1


@for_each("seconds", SOMETHING_PAYS.values())
def test_where_something_pays_98_runs_in_100_end_within_a_tenth_of_the_best(seconds):
    kept = [seconds[searched(seconds, JITTER, seed)[0]] for seed in range(50)]
    assert sum(each <= 1.1 * min(seconds) for each in kept) >= 49


def test_from_a_lossy_candidate_it_comes_back_where_nothing_pays():
    found = [searched([1.0] * 6, JITTER, seed, used=5, ways=(LESS,))[0] for seed in range(20)]
    assert found.count(0) >= 19


@for_each("seconds", [*NOTHING_PAYS.values(), *SOMETHING_PAYS.values()])
def test_steps_that_take_the_same_time_need_a_short_search(seconds):
    kept, in_use = searched(seconds)
    assert seconds[kept] <= 1.1 * min(seconds)
    assert len(in_use) <= 75


def test_it_starts_with_what_loses_nothing_and_goes_down_while_each_pays():
    _, in_use = searched([1.0, 0.6, 0.4, 0.3, 0.3, 0.3])
    firsts = list(dict.fromkeys(in_use))
    assert firsts == [0, 1, 2, 3, 4, 5]
    _, in_use = searched([1.0, 1.0, 1.0, 0.3, 0.2, 0.1])
    assert set(in_use) == {0, 1, 2}, "two running that do not pay end it"


def test_an_exchange_that_is_a_small_part_of_a_step_needs_no_search():
    kept, in_use = searched([1.0] * 6, exchange=0.04)
    assert kept == 0 and set(in_use) == {0}


@for_each("gain, kept", [(0.05, 2), (0.25, 1), (0.6, 0)])
def test_each_step_down_must_save_the_least_gain(gain, kept):
    assert searched([1.0, 0.5, 0.4], gain=gain)[0] == kept


def test_what_sends_a_small_part_of_the_gradient_must_save_twice_as_much():
    def kept(*seconds):
        run, took = Search(0.05, 1, twice=[1]).run(0, (MORE,)), 0.0
        candidate = next(run)
        while True:
            took = seconds[candidate]
            try:
                candidate = run.send(Timed(0.5 * took, took))
            except StopIteration as end:
                return end.value

    assert [kept(1.0, 0.92), kept(1.0, 0.88)] == [0, 1]


@for_each("dense_s, steps", [(4 * WAIT_S, 1), (4 * LONG_S, FEW)])
def test_a_slow_link_carries_few_dense_gradients(dense_s, steps):
    _, in_use = searched([dense_s, dense_s / 2, dense_s / 4, dense_s / 8, 0.2, 0.2], exchange=0.9)
    assert in_use.count(0) == steps
    assert in_use.count(1) == steps


@for_each("when", [30, 100, 300])
def test_a_link_that_drops_during_a_search_is_seen_in_it(when):
    """Nothing pays, for so many steps, which jitter; then nearly all of a step is exchange."""
    rng = random.Random(when)
    before, after = NOTHING_PAYS["all alike"], SOMETHING_PAYS["nearly all"]
    run = Search(0.05, 5).run(0, (MORE,))
    in_use, kept = [next(run)], None
    while kept is None:
        seconds = before if len(in_use) < when else [10 * each for each in after]
        took = seconds[in_use[-1]] * rng.gauss(1, JITTER)
        try:
            in_use.append(run.send(Timed(0.5 * took, took)))
        except StopIteration as end:
            kept = end.value
    assert kept == 5
    assert all(each > 3 for each in in_use[when + 50 :])


def test_steps_apart_do_not_count():
    """Dense ones that also send what others left behind take longer, and say nothing about the dense one."""
    run = Search(0.05, 1).run(0, (MORE,))
    in_use, before = [next(run)], 0
    kept = None
    while kept is None:
        now = in_use[-1]
        apart = now == 0 and before == 1
        before = now
        try:
            in_use.append(run.send(Timed(0.5, 1.5 if apart else 1.0, apart)))
        except StopIteration as end:
            kept = end.value
    assert kept == 0
