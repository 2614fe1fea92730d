"""Laws of feedback: nothing is lost, bucket cuts do not matter, a resumed run draws the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Layout
from laconic.exchange.method import lift
from laconic.feedback.error_feedback import AHEAD, ErrorFeedback
from tests.cases import over
from tests.laws.table import listed
from tests.laws.worlds import MODEL, Settings, cut, everywhere, exchange_on, gradient, one_step, take

KEEPING = listed("""
topk(density=0.05); sampled_topk(density=0.05); randomk(density=0.05); threshold(value=2.0)
micro(density=0.05); exdyna(density=0.05); cast('bf16')
gather(sparse(topk(density=0.05), values=cast('fp16')))
""")
ALL = [*KEEPING, "dgc(density=0.05)", "dgc(density=0.02, warmup_steps=4)", "dense()", "fp16()"]
STEPS = 6


def mass(state: dict[str, Tensor], kind: str) -> Tensor:
    """The memory of one kind, flat in the model's order; zeros for tensors that have none."""
    flat = torch.zeros(MODEL.numel, dtype=torch.float64)
    for key, value in state.items():
        name = key.split("/")[-1]
        if f"/{kind}/" in key:
            entry = MODEL[name]
            flat[entry.offset : entry.offset + entry.numel] = value.flatten().double()
    return flat


@over(spec=KEEPING, size=(1, 2, 4, 5))
def test_error_feedback_is_exact(spec: str, size: int) -> None:
    """All gradients = N * all means + what is still remembered. Tolerance: float32 sums of 6 steps."""

    def play(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, spec, Settings(momentum=0.0))
        means = [one_step(exchange, gradient(comm.rank, t), [MODEL])[0] for t in range(STEPS)]
        return means, exchange.state_dict()

    results = everywhere(size, play)
    given = sum(gradient(r, t).double() for r in range(size) for t in range(STEPS))
    applied = size * sum(mean.double() for mean in results[0][0])
    remembered = sum(mass(state, "residual") for _, state in results)
    assert (given - applied - remembered).abs().max() <= 1e-5 * given.abs().max()
    for means, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(means, results[0][0], strict=True))


@over(spec=ALL)
def test_buckets_do_not_matter(spec: str) -> None:
    """However DDP cuts its buckets, also when it regroups them in mid-run: the same bits."""

    def play(comm):  # type: ignore[no-untyped-def]
        whole, pieces = exchange_on(comm, spec), exchange_on(comm, spec)
        early, late = cut(MODEL, 1, 3), cut(MODEL, 2, 1, 1)
        same = []
        for t in range(STEPS):
            expected, _ = one_step(whole, gradient(comm.rank, t), [MODEL])
            got, _ = one_step(pieces, gradient(comm.rank, t), early if t < 2 else late)
            same.append(torch.equal(expected, got))
        return same, whole.state_dict(), pieces.state_dict()

    for same, whole, pieces in everywhere(2, play):
        assert all(same)
        assert whole.keys() == pieces.keys()
        assert all(torch.equal(whole[key], pieces[key]) for key in whole)


@over(spec=ALL)
def test_resume_draws_the_same_bits(spec: str) -> None:
    def play(comm):  # type: ignore[no-untyped-def]
        unbroken, before = exchange_on(comm, spec), exchange_on(comm, spec)
        expected = [one_step(unbroken, gradient(comm.rank, t), [MODEL])[0] for t in range(STEPS)]
        for t in range(3):
            one_step(before, gradient(comm.rank, t), [MODEL])
        after = exchange_on(comm, spec)
        after.load_state_dict(before.state_dict(), step=before.step)
        got = [one_step(after, gradient(comm.rank, t), cut(MODEL, 2, 2))[0] for t in range(3, STEPS)]
        return [torch.equal(a, b) for a, b in zip(expected[3:], got, strict=True)]

    assert all(all(same) for same in everywhere(3, play))


@over(spec=("dgc(density=0.05, sample_ratio=1.0)", "topk(density=0.05)"), nesterov=(False, True))
def test_local_momentum_is_the_stated_recursion(spec: str, nesterov: bool) -> None:
    """Against the definitions, tensor by tensor; the selection is exact. To float32."""
    density, size, mu = 0.05, 2, 0.9

    def play(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, spec, Settings(mu, nesterov))
        return [one_step(exchange, gradient(comm.rank, t), [MODEL])[0] for t in range(STEPS)]

    got = everywhere(size, play)[0]
    entries = [entry for entry in MODEL if len(entry.shape) > 1]
    u = {(r, e.name): torch.zeros(e.numel) for r in range(size) for e in entries}
    v = {(r, e.name): torch.zeros(e.numel) for r in range(size) for e in entries}
    for t in range(STEPS):
        for entry in entries:
            where = slice(entry.offset, entry.offset + entry.numel)
            mean = torch.zeros(entry.numel)
            for r in range(size):
                g, key = gradient(r, t)[where], (r, entry.name)
                u[key] = mu * (u[key] + g) if nesterov else mu * u[key] + g
                waits = v[key].abs() > u[key].abs() / 4
                v[key] = v[key] + u[key] + g if nesterov else v[key] + u[key]
                if not spec.startswith("dgc"):
                    v[key] += torch.where(waits, AHEAD * mu / (1 - mu) * u[key], 0)
                    u[key] *= torch.where(waits, 1 - AHEAD, 1)
                k = math.ceil(density * entry.numel)
                chosen = v[key].abs().topk(k).indices
                mean[chosen] += v[key][chosen] / size
                v[key][chosen] = 0
                u[key][chosen] *= not spec.startswith("dgc")
            assert torch.allclose(got[t][where], mean, rtol=1e-4, atol=1e-4), (t, entry.name)


@over(spec=("topk(density=0.05)", "dgc(density=0.05)"), when=(0, 1, 2))
def test_an_infinite_gradient_on_one_rank_voids_the_step_on_all(spec: str, when: int) -> None:
    """Eight tensors, Inf in the fifth on rank 1: all skip the step, and no mass of the others is lost.

    Also in the first step, and in the one in which DDP has regrouped its buckets: step 1 here.
    """
    layout = Layout.of((f"w{i}", (20, 30)) for i in range(8))
    inf_at = 4 * 600 + 77

    def play(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, spec, Settings(momentum=0.0), layout)
        early, late = cut(layout, *[1] * 8), cut(layout, 2, 1, 1, 1, 1, 2)
        out = []
        for t in range(4):
            flat = gradient(comm.rank, t, layout)
            if t == when and comm.rank == 1:
                flat[inf_at] = math.inf
            out.append(one_step(exchange, flat, early if t == 0 else late))
        return out, exchange.state_dict()

    results = everywhere(3, play)
    assert [[valid for _, valid in out] for out, _ in results] == [[t != when for t in range(4)]] * 3
    assert all(torch.isfinite(value).all() for _, state in results for value in state.values())
    for out, _ in results:
        void = take(out[when][0], layout, Layout.of([(f"w{i}", (20, 30)) for i in range(4)]))
        assert void.isnan().all(), "the later buckets are NaN, so that GradScaler skips the step"
    given = sum(gradient(r, t, layout).double() for r in range(3) for t in range(4) if t != when)
    applied = 3 * sum(results[0][0][t][0].double() for t in range(4) if t != when)
    held = torch.zeros_like(given)
    for _, state in results:
        for key, value in state.items():
            if "/residual/" in key:
                at = layout[key.split("/")[-1]].offset
                held[at : at + value.numel()] += value.flatten().double()
    assert (given - applied - held).abs().max() <= 1e-5 * given.abs().max()


def test_clipping_limits_even_enormous_gradients() -> None:
    """The norm of all tensors is at most clip / sqrt(N), also where a float32 norm would overflow."""

    def play(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, "dgc(density=0.9, clip=1.0)", Settings(momentum=0.0))
        mean, valid = one_step(exchange, torch.full((MODEL.numel,), 1e25), [MODEL])
        state = exchange.state_dict()
        return valid, float(mean.norm()), state

    for valid, norm, _ in everywhere(4, play):
        assert valid
        assert 0.4 < norm <= 0.5 + 1e-6


def test_a_state_loaded_into_a_dense_warm_up_takes_the_momentum_again() -> None:
    def play(comm):  # type: ignore[no-untyped-def]
        settings = Settings(0.9, buffers={"a.weight": torch.ones(40, 30)})
        exchange = exchange_on(comm, "dgc(density=0.05, warmup_steps=4, warmup=[1.0, 0.5])", settings)
        start = exchange.state_dict()
        for _t in range(3):
            one_step(exchange, torch.zeros(MODEL.numel), [MODEL])
        settings.give("a.weight", torch.ones(40, 30))
        exchange.load_state_dict(start, step=0)
        for _t in range(3):
            one_step(exchange, torch.zeros(MODEL.numel), [MODEL])
        return exchange.state_dict()["route0/velocity/a.weight"]

    assert everywhere(1, play)[0].abs().sum() > 0


def test_error_feedback_refuses_what_makes_it_diverge() -> None:
    class Wild(type(lift("cast('bf16')").routes[0].reducer.feedback_codec())):  # type: ignore[misc]
        unbiased = True

        def omega(self, n: int) -> float:
            return n / 49

    with pytest.raises(SpecError, match="omega must be below 1"):
        ErrorFeedback().gain(Wild("bf16"), MODEL)
    assert ErrorFeedback(damped=True).gain(Wild("bf16"), MODEL) == pytest.approx(1 / (1 + 1200 / 49))


SCALE = "depends on the largest rank's scale"
REFUSED = {
    "majority_vote()": r"majority_vote\(\) takes no error_feedback\(.*\): .* not an average of the sent",
    "shared_scale(levels=100, clip=0)": SCALE,
    "dense_first(shared_scale(), steps=3)": SCALE,
}


@over(spec=[*REFUSED], damped=(False, True))
def test_error_feedback_is_refused_where_no_rank_knows_its_loss(spec: str, damped: bool) -> None:
    with pytest.raises(SpecError, match=REFUSED[spec]):
        everywhere(2, lambda comm: exchange_on(comm, f"error_fed({spec}, damped={damped})"))
    everywhere(2, lambda comm: exchange_on(comm, spec))


def test_a_state_of_another_model_is_refused_and_nothing_changes() -> None:
    def play(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, "topk(density=0.05)")
        one_step(exchange, gradient(0, 0), [MODEL])
        before = exchange.state_dict()
        wrong = {**before, "route0/residual/a.weight": torch.zeros(3, 3)}
        with pytest.raises(StateError, match=r"a\.weight has shape \(3, 3\)"):
            exchange.load_state_dict(wrong, step=1)
        extra = {**before, "route0/residual/zzz": torch.zeros(3)}
        with pytest.raises(StateError, match="zzz"):
            exchange.load_state_dict(extra, step=1)
        missing = {key: value for key, value in before.items() if "a.weight" not in key}
        with pytest.raises(StateError, match=r"residual/a\.weight has shape None in the saved state"):
            exchange.load_state_dict(missing, step=1)
        after = exchange.state_dict()
        return all(torch.equal(before[key], after[key]) for key in before)

    assert everywhere(1, play) == [True]


DENSE_PHASES = listed("""
lgc(density=0.05, dense_steps=20); error_fed(dense_first(gather(sparse(topk(density=0.05))), steps=20))
error_fed(cast('bf16')); dense_first(gather(sign()), steps=20)
dgc(density=0.05, warmup_steps=40, warmup=(1.0, 0.5))
""")


@over(spec=DENSE_PHASES, nesterov=(False, True))
def test_a_phase_in_which_every_entry_is_sent_is_sgd_with_momentum(spec: str, nesterov: bool) -> None:
    """What the optimiser gets is the mean of the velocities, or of the gradients where it has the momentum.

    Tolerance: bfloat16's rounding, which error feedback makes up for, and float32 sums elsewhere.
    """
    mu, steps = 0.9, 12

    def play(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, spec, Settings(mu, nesterov))
        means = [one_step(exchange, gradient(comm.rank, t), [MODEL])[0] for t in range(steps)]
        return means, exchange.momentum.names(0)

    means, local = everywhere(2, play)[0]
    assert local or "dgc" in spec
    moved, wanted, velocity = (torch.zeros(MODEL.numel) for _ in range(3))
    for t in range(steps):
        g = (gradient(0, t) + gradient(1, t)) / 2
        velocity = mu * velocity + g
        for entry in MODEL:
            where = slice(entry.offset, entry.offset + entry.numel)
            step = g + mu * velocity if nesterov else velocity
            wanted[where] += step[where] if entry.name in local else g[where]
        moved += means[t]
    loose = "bf16" in spec
    assert (moved - wanted).abs().max() <= (1e-2 if loose else 1e-5) * wanted.abs().max()


SHARES = {
    "topk(density=0.1)": 0.5,
    "stc()": 0.5,
    "sketchml()": 0.5,
    "oktopk()": 0.5,
    "dense_first(gtopk(density=0.1), steps=2)": 0.5,
    "two_level(sum(), gather(sparse(topk(density=0.1))))": 0.5,
    "two_level(sum(dtype='bf16'), deft(density=0.1))": 0.75,
    "dense_first(micro(density=0.1), steps=2)": 0.75,
    "masked(exdyna(density=0.1))": 0.75,
    "error_fed(deft(density=0.1), ahead=0.25)": 0.25,
    "sign()": 0.0,
    "masked(sign())": 0.0,
    "error_fed(cast('bf16'))": 0.0,
}


def test_defaults_of_ahead() -> None:
    found = {spec: getattr(lift(spec).routes[0].feedback, "ahead", None) for spec in SHARES}
    assert found == SHARES


def test_a_later_change_of_momentum_from_zero_stays_in_the_optimiser() -> None:
    def play(comm):  # type: ignore[no-untyped-def]
        plain, changed = Settings(0.0), Settings(0.0)
        exchanges = [exchange_on(comm, "topk(density=0.05)", each) for each in (plain, changed)]
        changed.settings("a.weight")["momentum"] = 0.9
        means = [[one_step(each, gradient(0, t), [MODEL])[0] for t in range(3)] for each in exchanges]
        return [torch.equal(a, b) for a, b in zip(*means, strict=True)]

    assert everywhere(1, play) == [[True] * 3]


@over(spec=("topk(density=0.05)", "sign()", "oktopk(density=0.05)", "stc(density=0.05)"))
def test_momentum_in_the_optimiser_leaves_plain_error_feedback(spec: str) -> None:
    """Bit for bit, and so does an SGD without momentum."""
    inner = "stc(density=0.05, momentum='optimizer')" if "stc" in spec else None
    literal = inner or f"error_fed({spec}, momentum='optimizer')"

    def play(comm):  # type: ignore[no-untyped-def]
        means = []
        for each, momentum in ((spec, 0.0), (literal, 0.9), (spec, 0.9)):
            exchange = exchange_on(comm, each, Settings(momentum))
            means.append([one_step(exchange, gradient(comm.rank, t), [MODEL])[0] for t in range(STEPS)])
        none, left, local = means
        pairs = zip(none, left, strict=True)
        return all(torch.equal(a, b) for a, b in pairs), torch.equal(none[-1], local[-1])

    assert everywhere(2, play) == [(True, False)] * 2


@over(spec=("topk(density=0.05)", "dgc(density=0.05)", "sign()"))
def test_a_state_without_velocity_loads_with_zeros(spec: str) -> None:
    def play(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, spec, Settings())
        for t in range(3):
            one_step(exchange, gradient(comm.rank, t), [MODEL])
        state = exchange.state_dict()
        older = {key: value for key, value in state.items() if "/velocity/" not in key}
        assert older.keys() < state.keys()
        exchange.load_state_dict(older, step=3)
        again = exchange.state_dict()
        without = exchange_on(comm, spec, Settings(0.0))
        without.load_state_dict(state, step=3)
        same = [torch.equal(again[key], without.state_dict()[key]) for key in older]
        return again.keys() == state.keys() and not mass(again, "velocity").any() and all(same)

    assert everywhere(1, play) == [True]


def test_velocity_goes_on_from_the_optimisers_momentum() -> None:
    """Attached in mid-training, DGC starts from SGD's momentum buffers; the step makes SGD forget them."""
    start = torch.ones(40, 30)

    def play(comm):  # type: ignore[no-untyped-def]
        settings = Settings(0.9, buffers={"a.weight": start})
        exchange = exchange_on(comm, "dgc(density=0.05)", settings)
        one_step(exchange, torch.zeros(MODEL.numel), [MODEL])
        return exchange.state_dict()["route0/velocity/a.weight"]

    velocity = everywhere(1, play)[0]
    kept = velocity[velocity != 0]
    assert kept.numel() == 1200 - 60
    assert torch.allclose(kept, torch.full_like(kept, 0.9))
