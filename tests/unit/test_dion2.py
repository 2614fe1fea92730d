"""Dion2 against its plain equations on the mean gradient, and against torch.optim.Muon."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim._muon import _zeropower_via_newtonschulz

from laconic import kernels
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import AttachError, SpecError
from laconic.core.turn import Turn
from laconic.ddp.handle import Handle
from laconic.exchange.method import lift
from laconic.optim.muon_adamw import MuonAdamW
from laconic.optim.newton_schulz import orthonormal

SHAPES = {"wide": (12, 40), "tall": (50, 9), "one": (1, 7), "embedding": (20, 6), "bias": (12,)}
MATRICES = ("wide", "tall", "one")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDING = 0.03  # of a step's entries: a difference of one bit in bfloat16, through five iterations
SEED = 5
Optimizers = Callable[[Mapping[str, nn.Parameter]], list[Optimizer]]


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=rng) ** 3 for name, shape in SHAPES.items()}


def mean_gradients(size: int, step: int) -> dict[str, Tensor]:
    every = [gradients(rank, step) for rank in range(size)]
    return {name: sum(each[name] for each in every) / size for name in SHAPES}


def parameters() -> dict[str, nn.Parameter]:
    rng = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=rng)) for name, shape in SHAPES.items()}


def muon_and_adamw(own: Mapping[str, nn.Parameter], **settings: Any) -> list[Optimizer]:
    settings = {"lr": 0.02, "nesterov": False, "weight_decay": 0.1, **settings}
    muon = Muon([own[name] for name in MATRICES], **settings)
    return [muon, AdamW([own[name] for name in ("embedding", "bias")], lr=0.01)]


class Trained:
    """One rank's parameters under `compress`, with fixed gradients."""

    def __init__(self, spec: str, comm: Loopback, build: Optimizers = muon_and_adamw) -> None:
        self.comm = Metered(comm.split(0))
        self.own = parameters()
        self.optimizers = build(self.own)
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.own.items()}
        self.handle = Handle(lift(spec), names, self.optimizers, self.comm, seed=SEED)

    def train(self, steps: range) -> list[dict[str, Tensor]]:
        """Return the parameters after each step."""
        seen, exchange = [], self.handle.exchange
        for step in steps:
            given = gradients(self.comm.rank, step)
            bucket = torch.cat([given[name].flatten() for name in self.handle.layout.names])
            exchange.begin()
            exchange.mean_(bucket, self.handle.layout)
            exchange.end()
            views = self.handle.layout.segments.views(bucket)
            for name, view in zip(self.handle.layout.names, views, strict=True):
                self.own[name].grad = view.view_as(self.own[name])
            for optimizer in self.optimizers:
                optimizer.step()
            seen.append({name: each.detach().clone() for name, each in self.own.items()})
        return seen

    def momenta(self) -> dict[str, Tensor]:
        state = self.handle.exchange.state_dict()
        return {name: state[f"route0/residual/{name}"] for name in MATRICES}


class Plain:
    """Dion2 of one matrix, written out: it sees whole gradients and sends nothing."""

    def __init__(self, name: str, w: Tensor, fraction: float) -> None:
        self.name, self.w, self.fraction = name, w.detach().clone(), fraction
        self.momentum = torch.zeros_like(self.w)

    def step(self, g: Tensor, step: int, lr: float, mu: float, decay: float, ratio: float) -> None:
        self.momentum += g
        rows, columns = self.w.shape
        s = min(rows, columns)
        k = math.ceil(self.fraction * s)
        key = Turn(step, 0, SEED).common(self.name)
        chosen = kernels.random_indices(torch.tensor([s]), torch.tensor([k]), [key])[0].long()
        at = (chosen, slice(None)) if rows <= columns else (slice(None), chosen)
        change = _zeropower_via_newtonschulz(self.momentum[at].contiguous(), COEFFICIENTS, 5, 1e-7)
        self.w *= 1 - lr * decay
        self.w[at] -= lr * ratio * change.float()
        self.momentum[at] *= mu


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("fraction", [0.25, 0.6])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_ranks_are_dion2_on_the_mean_gradient(size: int, fraction: float, adjust: str) -> None:
    steps, lr = 6, 0.02

    def play(comm: Loopback) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        rank = Trained(
            f"dion2(fraction={fraction})", comm, lambda own: muon_and_adamw(own, adjust_lr_fn=adjust)
        )
        return rank.train(range(steps)), rank.momenta()

    found = Loopback.run(size, play)
    for name in MATRICES:
        m, n = SHAPES[name]
        ratio = 0.2 * max(m, n) ** 0.5 if adjust == "match_rms_adamw" else max(1.0, m / n) ** 0.5
        plain = Plain(name, parameters()[name], fraction)
        for step in range(steps):
            plain.step(mean_gradients(size, step)[name], step, lr, 0.95, 0.1, ratio)
            for seen, _ in found:
                error = (seen[step][name] - plain.w).abs().max()
                assert error <= ROUNDING * (step + 1) * lr * ratio
        mean = sum(momenta[name] for _, momenta in found) / size
        torch.testing.assert_close(mean, plain.momentum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mu", [0.5, 0.95])
def test_all_rows_are_muon(mu: float) -> None:
    """`fraction=1` has the momentum M = mu * M + g, Muon's divided by 1 - mu, which Newton-Schulz removes.

    A factor that is not a power of two changes the rounding to bfloat16 of every entry.
    """
    steps, lr = 6, 0.02

    def build(own: Mapping[str, nn.Parameter]) -> list[Optimizer]:
        return muon_and_adamw(own, momentum=mu)

    found = Loopback.run(2, lambda comm: Trained("dion2(fraction=1.0)", comm, build).train(range(steps)))
    own = parameters()
    optimizers = build(own)
    for step in range(steps):
        for name, g in mean_gradients(2, step).items():
            own[name].grad = g
        for optimizer in optimizers:
            optimizer.step()
        for name, w in own.items():
            ratio = max(1.0, SHAPES[name][0] / SHAPES[name][-1]) ** 0.5
            error = (found[0][step][name] - w.detach()).abs().max()
            bound = ROUNDING * (1 if mu == 0.5 else 2) * (step + 1) * lr * ratio
            assert error <= (bound if name in MATRICES else 1e-6)


def test_only_slices_of_muons_matrices_are_compressed() -> None:
    def play(comm: Loopback) -> tuple[list[dict[str, Tensor]], int]:
        rank = Trained("dion2()", comm)
        return rank.train(range(4)), rank.comm.snapshot().payload_sent

    seen, payload = Loopback.run(2, play)[0]
    slices = 3 * 40 + 3 * 50 + 1 * 7  # a quarter of 12 rows, of 9 columns, of one row, rounded up
    assert payload == 4 * 4 * (slices + 20 * 6 + 12)
    begin = parameters()
    for name, along in (("wide", 1), ("tall", 0)):
        decayed = begin[name].detach() * (1 - 0.02 * 0.1)
        changed = (seen[0][name] - decayed).abs().amax(along) > 1e-6
        assert int(changed.sum()) == 3
    assert bool((seen[0]["embedding"] != begin["embedding"]).all()), "AdamW steps all of it"


def test_each_group_has_its_own_momentum_and_a_resumed_run_is_the_same() -> None:
    def build(own: Mapping[str, nn.Parameter]) -> list[Optimizer]:
        groups = [{"params": [own["wide"]], "momentum": 0.5}, {"params": [own["tall"], own["one"]]}]
        rest = AdamW([own["embedding"], own["bias"]], lr=0.01)
        return [Muon(groups, lr=0.02, momentum=0.9, nesterov=False), rest]

    def play(comm: Loopback) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        whole, first, second = (Trained("dion2(fraction=1.0)", comm, build) for _ in range(3))
        seen = whole.train(range(5))
        first.train(range(3))
        second.handle.load_state_dict(first.handle.state_dict())
        for name, each in second.own.items():
            each.data.copy_(first.own[name])
        for old, new in zip(first.optimizers, second.optimizers, strict=True):
            new.load_state_dict(old.state_dict())
        return seen[-1], second.train(range(3, 5))[-1], whole.momenta()

    found = Loopback.run(2, play)
    for whole, resumed, _ in found:
        assert all(torch.equal(whole[name], resumed[name]) for name in SHAPES)
    for name, mu in (("wide", 0.5), ("tall", 0.9)):
        expected = sum(mu ** (5 - step) * gradients(1, step)[name] for step in range(5))
        torch.testing.assert_close(found[1][2][name], expected, rtol=1e-5, atol=1e-5)


def test_the_union_of_two_exchanges_is_stepped() -> None:
    """Zero rows and columns do not change the others, so leaving them out of Newton-Schulz is exact."""
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(2))
    x[[1, 4, 6]] = 0
    full, small = (orthonormal(each, COEFFICIENTS, 5, 1e-7).float() for each in (x, x[[0, 2, 3, 5, 7]]))
    assert not full[[1, 4, 6]].any()
    torch.testing.assert_close(full[[0, 2, 3, 5, 7]], small, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (4, 4), (1, 6)])
def test_newton_schulz_is_torchs(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    theirs = _zeropower_via_newtonschulz(x, COEFFICIENTS, 5, 1e-7)
    assert torch.equal(orthonormal(x, COEFFICIENTS, 5, 1e-7), theirs)
    assert not orthonormal(torch.zeros(shape), COEFFICIENTS, 5, 1e-7).any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda own: [SGD(own.values(), lr=0.1)], "needs torch.optim.Muon.*no optimiser holds wide"),
        (lambda own: muon_and_adamw(own, nesterov=True), "nesterov=False"),
    ],
)
def test_other_optimisers_are_refused(build: Optimizers, message: str) -> None:
    with pytest.raises(AttachError, match=message):
        Trained("dion2()", Loopback.world(1)[0], build)


def test_a_transposed_weight_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 3).T)
    with pytest.raises(AttachError, match="row-major"):
        Handle(lift("dion2()"), {weight: "w"}, Muon([weight], nesterov=False), Metered(Loopback.world(1)[0]))


def test_matrices_of_adamw_are_summed_inside_a_policy() -> None:
    spec = "by_name({'bias': cast('bf16')}, rest=dion2())"
    comm = Loopback.world(1)[0]
    rank = Trained(spec, comm)
    rank.train(range(2))
    assert {key for key in rank.handle.exchange.state_dict() if "embedding" in key} == set()


@pytest.mark.parametrize("fraction", [0, 1.5, "all"])
def test_the_fraction_is_checked(fraction: Any) -> None:
    with pytest.raises(SpecError, match="dion2: fraction"):
        lift(f"dion2(fraction={fraction!r})")


def test_a_copy_of_muon_with_adamw_steps_alike() -> None:
    weights = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))]
    made = MuonAdamW(weights, lr=0.1)
    copied_weights, copied = copy.deepcopy((weights, made))
    for parameters_, optimizer in ((weights, made), (copied_weights, copied)):
        for each in parameters_:
            each.grad = torch.arange(float(each.numel())).view_as(each)
        optimizer.step()
    for one, other in zip(weights, copied_weights, strict=True):
        assert torch.equal(one, other) and bool((one != 1).any())
