"""Momentum goes back to SGD in mid-training, without a jump and without a loss."""

from __future__ import annotations

import torch
from tests.unit.shared import for_each
from tests.unit.test_switched_momentum import FORMS, RANKS, RATE, M, Worker, gradient, matrices

from laconic.comm.loopback import Loopback
from laconic.exchange.method import lift

METHODS = {
    "topk": "topk(density=0.2)",
    "stc": "stc(density=0.2)",
    "deft": "deft(density=0.2)",
    "dgc": "dgc(density=0.2, masking=False)",
    "all entries": "error_fed(gather(dense()))",
}


class Released(Worker):
    """A rank that trains by a method with local momentum."""

    def __init__(self, comm, spec, **form):
        super().__init__(comm, (), lift(spec), **form)
        self.momentum = self.exchange.momentum

    @property
    def local(self):
        return bool(self.momentum.names(self.steps))

    def memory(self):
        return {key.removeprefix("route0/"): value for key, value in self.exchange.state_dict().items()}


@for_each("spec", METHODS.values())
def test_updates_and_all_that_is_owed_are_the_momentum_updates_of_all_gradients(spec):
    """At every step, for each form of momentum, which goes back after step 5."""

    def body(comm):
        rows = []
        for form in FORMS.values():
            worker = Released(comm, spec, **form)
            start, given = worker.flat, torch.zeros(61)
            for step in range(12):
                if step == 6:
                    worker.momentum.release("a test")
                worker.step()
                given += sum(gradient(rank, step) for rank in range(comm.size)) / comm.size
                applied = (start - worker.flat) / RATE * (-1 if form.get("maximize") else 1)
                owed = comm.all_reduce(worker.owed(form)) / comm.size
                rows.append((step, matrices(applied), owed, matrices(given) / (1 - M), worker.local))
        return rows

    for rows in Loopback.run(RANKS, body):
        assert [local for *_, local in rows] == [step < 6 for step, *_ in rows]
        for step, applied, owed, expected, _ in rows:
            torch.testing.assert_close(applied + owed, expected, rtol=2e-3, atol=2e-3 * (1 + step))


def test_a_step_of_two_passes_is_taken_before_momentum_goes_back():
    """Its gradients are sums with a velocity, which SGD must not take for plain gradients."""

    def body(comm):
        worker, given = Released(comm, "topk(density=0.2)", momentum=M), torch.zeros(61)
        start, found = worker.flat, []
        for passes in (1, 1, 1, 2, 2, 1):
            worker.optimizer.zero_grad()
            for number in range(passes):
                if number:
                    worker.momentum.release("two passes")
                given += sum(gradient(rank, worker.steps) for rank in range(comm.size)) / comm.size
                worker.backward()
            worker.optimizer.step()
            applied, owed = (start - worker.flat) / RATE, comm.all_reduce(worker.owed({})) / comm.size
            found.append((worker.local, matrices(applied) + owed, matrices(given) / (1 - M)))
        return found

    for found in Loopback.run(RANKS, body):
        assert [local for local, *_ in found] == [True] * 4 + [False] * 2
        for _, total, expected in found:
            torch.testing.assert_close(total, expected, rtol=2e-3, atol=0.02)


def test_as_much_velocity_is_applied_later_as_clipping_has_left():
    def body(comm):
        worker = Released(comm, "error_fed(gather(dense()))", momentum=M)
        for _ in range(3):
            worker.step()
        before = comm.all_reduce(worker.owed({})) / comm.size
        worker.momentum.release("gradients are clipped", kept=0.25)
        worker.optimizer.zero_grad()
        worker.exchange.begin()
        return before, comm.all_reduce(worker.owed({})) / comm.size

    for before, after in Loopback.run(RANKS, body):
        torch.testing.assert_close(after, 0.25 * before, rtol=1e-5, atol=1e-6)
