"""Autotune moves SGD's momentum before the exchange and back, without a jump and without a loss."""

from __future__ import annotations

import copy
import importlib
import logging

import pytest
import torch
from tests.unit.shared import for_each
from tests.unit.test_autotune import BUCKETS, LIST, MODEL, RATES, Rank

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.ddp.optimiser import Optimisers
from laconic.exchange.attached import Attached
from laconic.exchange.method import Route, everything, lift, routes
from laconic.methods.auto import SAFE, SAFE_WITH_SGD
from laconic.reducers.autotune import CANDIDATES, Autotune, BoundAutotune, bound
from laconic.reducers.sum import Sum

RANKS, RATE, M = 3, 0.1, 0.9
SHAPES = {"a": (6, 5), "b": (7,), "c": (4, 2, 3)}
DENSE, BITS, SPARSE, ALL = (
    "sum()",
    "gather(minmax(bits=4))",
    "topk(density=0.2)",
    "gather(dense())",
)
FORMS = {
    "heavy ball": {"momentum": M},
    "nesterov": {"momentum": M, "nesterov": True},
    "maximize": {"momentum": M, "maximize": True},
}


class Worker:
    """One rank that trains by SGD, with the candidates that the test chooses."""

    def __init__(self, comm, candidates, method=None, **settings):
        self.rank, self.steps = comm.rank, 0
        self.weights = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
        self.optimizer = torch.optim.SGD(self.weights.values(), lr=RATE, **settings)
        self.layout = Layout.of(SHAPES.items())
        reducers = tuple(lift(each).routes[0].reducer for each in candidates)
        method = method or routes(Route(everything, Autotune(reducers)))
        optimisers = Optimisers(self.optimizer, {w: name for name, w in self.weights.items()}, ())
        self.exchange = Attached(method, self.layout, Metered(comm), optimisers)
        self.bound = self.exchange._routes[0].reducer

    def use(self, candidate, searching=False):
        tuner = self.bound.autotuner
        tuner.current = tuner.chosen = candidate
        tuner.begin = lambda step, device: None
        tuner._looked, tuner._trial = None, iter(()) if searching else None

    def step(self, bad=False):
        self.optimizer.zero_grad()
        self.backward(bad)
        if not bad and self.exchange.skip_reason is None:
            self.optimizer.step()

    def backward(self, bad=False):
        bucket = gradient(self.rank, self.steps)
        if bad:
            bucket[0] = torch.nan
        self.exchange.begin()
        self.exchange.mean_(bucket, self.layout)
        self.exchange.end()
        self.steps += 1
        for view, weight in zip(self.layout.segments.views(bucket), self.weights.values(), strict=True):
            mean = view.view(weight.shape)
            weight.grad = mean.clone() if weight.grad is None else weight.grad + mean

    def train(self, candidates, searching=False):
        for candidate in candidates:
            self.use(candidate, searching)
            self.step()

    @property
    def local(self):
        return self.bound.momentum_names != ()

    @property
    def flat(self):
        return torch.cat([each.detach().flatten() for each in self.weights.values()])

    def memory(self):
        """Residuals and velocities by "<kind>/<tensor name>"."""
        return self.bound.state_dict()

    def owed(self, form):
        """All later updates of the matrices without further gradients: of momentum and residuals."""
        state = self.memory()
        residual = torch.cat([state[f"residual/{name}"].flatten() for name in ("a", "c")])
        if self.local:
            velocity = torch.cat([state[f"velocity/{name}"].flatten() for name in ("a", "c")])
            return residual + M / (1 - M) * velocity
        buffers = [self.optimizer.state[self.weights[name]].get("momentum_buffer") for name in ("a", "c")]
        buffer = torch.cat([torch.zeros(1) if each is None else each.flatten() for each in buffers])
        sign = -1 if form.get("maximize") else 1
        return residual / (1 - M) + sign * (M**2 if form.get("nesterov") else M) / (1 - M) * buffer


def gradient(rank, step):
    drawn = torch.randn(61, generator=torch.Generator().manual_seed(97 * step + rank)) ** 3
    return drawn + torch.linspace(-1, 1, 61)


def matrices(flat):
    return torch.cat([flat[:30], flat[37:]])


@for_each("form", FORMS.values())
def test_with_all_entries_sent_a_run_that_switches_twice_is_sgd(form, monkeypatch):
    """Weight decay included; the rate changes on the way. The second candidate counts as sparse."""
    for module in (importlib.import_module("laconic.reducers.autotune"), bound):
        monkeypatch.setattr(module, "sends_all", lambda candidate, matrices: candidate == Sum())

    def body(comm):
        settings = form | {"weight_decay": 0.1}
        worker = Worker(comm, (DENSE, ALL), **settings)
        plain = torch.nn.Parameter(torch.ones(61))
        sgd = torch.optim.SGD([plain], lr=RATE, **settings)
        pairs, where = [], []
        for step, candidate in enumerate([0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0]):
            for group in (*worker.optimizer.param_groups, *sgd.param_groups):
                group["lr"] = RATE / (1 + step)
            plain.grad = sum(gradient(rank, step) for rank in range(comm.size)) / comm.size
            sgd.step()
            worker.train([candidate])
            where.append(worker.local)
            pairs.append((worker.flat, plain.detach().clone()))
        return where, pairs

    for where, pairs in Loopback.run(RANKS, body):
        assert where == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3 + [False] * 3
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@for_each("form", FORMS.values())
def test_updates_and_all_that_is_owed_are_the_momentum_updates_of_all_gradients(form):
    """At every step, through both switches."""
    order = [0, 1, 1, 1, 2, 2, 1, 1, 2, 2, 0, 0, 2, 1, 1, 0, 0, 2, 2, 1, 1, 0, 0, 0]
    searches = [3 < step < 14 for step in range(len(order))]

    def body(comm):
        worker = Worker(comm, (DENSE, BITS, SPARSE), **form)
        start, given, rows = worker.flat, torch.zeros(61), []
        for step, (candidate, searching) in enumerate(zip(order, searches, strict=True)):
            worker.train([candidate], searching)
            given += sum(gradient(rank, step) for rank in range(comm.size)) / comm.size
            applied = (start - worker.flat) / RATE * (-1 if form.get("maximize") else 1)
            owed = comm.all_reduce(worker.owed(form)) / comm.size
            rows.append((matrices(applied), owed, matrices(given) / (1 - M), worker.local))
        return rows

    for rows in Loopback.run(RANKS, body):
        assert [step for step, row in enumerate(rows) if row[3]] == [*range(4, 14), 17, 18]
        for step, (applied, owed, expected, _) in enumerate(rows):
            torch.testing.assert_close(applied + owed, expected, rtol=2e-3, atol=2e-3 * (1 + step))


@for_each("passes", [(2, 2), (2, 0), (0, 2), (2, 2, 0)])
def test_nothing_is_lost_in_a_step_of_many_passes(passes):
    """Nor applied twice, if the candidate changes between them."""

    def body(comm):
        worker = Worker(comm, (DENSE, BITS, SPARSE), momentum=M)
        start, given = worker.flat, torch.zeros(61)
        for each in ((0,), (2,), (2,), passes, (2,), (0,), (0,)):
            worker.optimizer.zero_grad()
            for candidate in each:
                given += sum(gradient(rank, worker.steps) for rank in range(comm.size)) / comm.size
                worker.use(candidate)
                worker.backward()
            worker.optimizer.step()
        owed = comm.all_reduce(worker.owed({})) / comm.size
        return matrices((start - worker.flat) / RATE) + owed, matrices(given) / (1 - M)

    for total, expected in Loopback.run(RANKS, body):
        torch.testing.assert_close(total, expected, rtol=2e-3, atol=0.02)


def test_a_skipped_switch_is_undone_bit_for_bit():
    def body(comm):
        worker = Worker(comm, (DENSE, BITS, SPARSE), momentum=M, nesterov=True)
        worker.train([0, 1, 1])
        worker.use(2)
        before = worker.exchange.state_dict(), worker.flat
        worker.step(bad=comm.rank == 1)
        after, local = (worker.exchange.state_dict(), worker.flat), worker.local
        worker.train([2])
        return before, after, local, worker.local

    for (state, weights), (state_after, weights_after), local, later in Loopback.run(RANKS, body):
        assert not local and later
        assert state.keys() == state_after.keys()
        assert all(torch.equal(state[key], state_after[key]) for key in state)
        assert torch.equal(weights, weights_after)


@for_each("before", [[0, 1, 2, 2], [0, 2, 2, 0, 0], [0, 1]])
def test_a_resumed_run_goes_on_with_the_same_bits(before):
    def body(comm):
        one = Worker(comm, (DENSE, BITS, SPARSE), momentum=M, weight_decay=0.1)
        one.train(before)
        other = Worker(comm, (DENSE, BITS, SPARSE), momentum=M, weight_decay=0.1)
        for mine, theirs in zip(other.weights.values(), one.weights.values(), strict=True):
            mine.data.copy_(theirs.data)
        other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
        state = {key: value.clone() for key, value in one.exchange.state_dict().items()}
        other.exchange.load_state_dict(state, one.steps)
        other.steps = one.steps
        pairs = []
        for candidate in (2, 2, 1, 0, 0):
            one.train([candidate])
            other.train([candidate])
            pairs.append((one.flat, other.flat, one.local, other.local))
        return pairs

    for pairs in Loopback.run(RANKS, body):
        for one, other, local, other_local in pairs:
            assert local == other_local
            assert torch.equal(one, other)


def test_the_log_names_both_switches(caplog):
    def body(comm):
        worker = Worker(comm, (DENSE, SPARSE), momentum=M)
        worker.train([0, 1, 1, 0, 0])

    with caplog.at_level(logging.INFO, "laconic"):
        Loopback.run(2, body)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "from step 1 on: SGD's momentum is applied before the exchange, for sparse steps",
        "SGD's momentum is back in the optimiser",
    ]


def test_a_script_that_changes_gradients_gets_momentum_back_and_no_sparse_candidate(caplog):
    def body(comm):
        worker = Worker(comm, CANDIDATES, momentum=M)
        worker.bound._spec = Autotune(CANDIDATES, lossiest=SAFE, lossiest_local=SAFE_WITH_SGD)
        worker.train([0, 4, 4])
        worker.exchange.momentum.release("gradients are clipped")
        found = []
        for _ in range(3):
            worker.step()
            found.append((worker.local, worker.bound.autotuner.current))
        return found

    with caplog.at_level(logging.INFO, "laconic"):
        results = Loopback.run(2, body)
    assert results == [[(False, 3)] * 3] * 2
    assert "gradients are clipped" in caplog.text


@for_each("form", FORMS.values())
def test_a_pinned_sparse_candidate_is_its_method_bit_for_bit(form):
    def body(comm):
        reducer = lift(SPARSE).routes[0].reducer
        pinned = routes(Route(everything, Autotune((Sum(), reducer), pinned=reducer)))
        workers = [Worker(comm, (DENSE,), method, **form) for method in (pinned, lift(SPARSE))]
        for _ in range(8):
            for worker in workers:
                worker.step()
        return [worker.flat for worker in workers]

    for one, other in Loopback.run(RANKS, body):
        assert torch.equal(one, other)


def sgd(weights):
    return torch.optim.SGD(weights, lr=RATE, momentum=M)


def some_without(weights):
    first, *others = weights
    return torch.optim.SGD([{"params": [first], "momentum": 0.0}, {"params": others}], lr=RATE, momentum=M)


@pytest.mark.parametrize(
    ("optimizer", "lossiest"),
    [(sgd, SAFE_WITH_SGD), (torch.optim.AdamW, SAFE), (some_without, SAFE)],
)
def test_by_default_only_sgd_with_momentum_gets_the_sparse_candidate(optimizer, lossiest):
    def body(comm):
        weights = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
        optimisers = Optimisers(optimizer([*weights.values()]), {w: name for name, w in weights.items()}, ())
        exchange = Attached(parse("auto()"), Layout.of(SHAPES.items()), Metered(comm), optimisers)
        return exchange._routes[0].reducer.autotuner._search.last

    assert Loopback.run(2, body) == [CANDIDATES.index(lossiest)] * 2


class Settings:
    """An SGD with momentum that counts how often it gets its momentum back."""

    def __init__(self):
        self.given_back = 0

    def is_local(self, name):
        return True

    def settings(self, name):
        return {"momentum": M}

    def momentum_buffer(self, name):
        return None

    def continue_momentum(self, name, velocity):
        self.given_back += 1


class Searching(Rank):
    """A rank of the world of slow links, with momentum before the exchange where it is sparse."""

    def __init__(self, comm, rate):
        super().__init__(comm, rate)
        self.optimised = Settings()
        self.bound = BoundAutotune(Autotune(LIST), MODEL, self.link, self.clock, self.optimised)

    def step(self, gradient, bad=False):
        self.bound.begin_pass(stepped=True)
        found = super().step(gradient, bad)
        for bucket in BUCKETS:
            self.bound.accept(bucket)
        return found


def test_a_link_that_drops_and_recovers_takes_momentum_there_and_back():
    def body(comm):
        rank = Searching(comm, RATES["fast"])
        found = []
        for rate in (RATES["fast"], RATES["slow"], RATES["fast"]):
            rank.link.bytes_a_second = rate
            rank.train(70)
            found.append((rank.chosen, len(rank.bound.momentum_names), rank.optimised.given_back))
        state = rank.bound.state_dict()
        left = [value for key, value in state.items() if key.startswith(("residual/", "velocity/"))]
        return found, all(not bool(value.any()) for value in left)

    for found, empty in Loopback.run(2, body):
        assert found == [(0, 0, 0), (5, 3, 0), (0, 0, 3)]
        assert empty


def test_one_rank_is_dense_at_once_and_says_so(caplog):
    def body(comm):
        worker = Worker(comm, CANDIDATES, momentum=M)
        for _ in range(3):
            worker.step()
        return worker.bound.autotuner.chosen, worker.bound.autotuner.searching

    with caplog.at_level(logging.INFO, "laconic"):
        assert Loopback.run(1, body) == [(0, False)]
    assert caplog.text.count("one rank: sum() from step 0 on") == 1


def test_what_one_rank_decided_is_searched_again_among_more():
    def body(comm):
        worker = Worker(comm, CANDIDATES, momentum=M)
        worker.step()
        return worker.exchange.state_dict()

    def resumed(comm):
        worker = Worker(comm, CANDIDATES, momentum=M)
        worker.exchange.load_state_dict(alone, 1)
        return worker.bound.autotuner.chosen, worker.bound.autotuner.searching

    alone = Loopback.run(1, body)[0]
    assert Loopback.run(2, resumed) == [(None, True)] * 2


def test_dense_steps_with_local_momentum_take_buckets_of_vectors_alone():
    """Each tensor in a bucket of its own gives the same as all in one."""

    def body(comm):
        ends = []
        for apart in (False, True):
            worker = Worker(comm, (DENSE, SPARSE), momentum=M)
            parts = [worker.layout.named([name]) for name in SHAPES] if apart else [worker.layout]
            for candidate in (1, 0, 0):
                worker.use(candidate, searching=True)
                bucket = gradient(worker.rank, worker.steps)
                worker.exchange.begin()
                for part in parts:
                    worker.exchange.mean_(bucket, part)
                worker.exchange.end()
                worker.steps += 1
            assert worker.local
            ends.append(bucket)
        return ends

    for whole, apart in Loopback.run(2, body):
        torch.testing.assert_close(whole, apart)


def test_a_state_with_local_momentum_does_not_revive_momentum_that_was_released():
    def body(comm):
        worker = Worker(comm, (DENSE, SPARSE), momentum=M)
        worker.train([1, 1])
        state = {key: value.clone() for key, value in worker.bound.state_dict().items()}
        worker.exchange.momentum.release("a test")
        worker.step()
        worker.bound.load_state_dict(state)
        return worker.local, worker.bound._residual.local

    assert Loopback.run(2, body) == [(False, False)] * 2


def test_a_rank_without_velocity_resumes_as_the_others_do():
    def body(comm):
        worker = Worker(comm, (DENSE, SPARSE), momentum=M)
        worker.use(1)
        worker.exchange.begin()
        worker.exchange.mean_(torch.zeros(61), worker.layout)
        worker.exchange.end()
        second = Worker(comm, (DENSE, SPARSE), momentum=M)
        second.bound.load_state_dict(worker.bound.state_dict())
        return second.local

    assert Loopback.run(2, body) == [True, True]


def test_no_momentum_is_given_to_an_optimiser_that_does_not_hold_the_tensor():
    def body(comm):
        worker = Worker(comm, (DENSE, SPARSE), momentum=M)
        worker.train([1, 1])
        frozen = worker.optimizer.param_groups[0]["params"].pop()
        worker.optimizer.state.pop(frozen, None)
        worker.use(0)
        worker.exchange.begin()
        return frozen in worker.optimizer.state, len(worker.optimizer.state_dict()["state"])

    assert all(not held and states == 2 for held, states in Loopback.run(2, body))
