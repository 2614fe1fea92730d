"""Momentum before compression in scripts as people write them: none is refused, all train, replicas agree."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import laconic
from tests.dist.nets import agree, compress_anyway, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import MANY, advance
from tests.unit.wrappers import Negated

SPECS = ("topk(density=0.1)", "sign()", "deft(density=0.1)", "dgc(density=0.1)")
PINNED = "auto(pinned=gather(sparse(topk(density=0.01), values=signmean(), indices=golomb())))"
PLAIN: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}
STEPS = 6


def literal(spec: str) -> str:
    """The same compression with all momentum in the optimiser; DGC's selection is the sampled one."""
    inner = "sampled_topk(density=0.1)" if spec.startswith("dgc") else spec
    return f"error_fed({inner}, momentum='optimizer')"


def buckets(spec: Any) -> dict[str, Any]:
    """Many buckets; one for deft, which shares the tensors of each bucket among the ranks."""
    return {} if "deft" in str(spec) else MANY


class Trained:
    """The end of a script: weights, whether replicas agree, losses, and what was logged on this rank."""

    def __init__(
        self,
        spec: Any,
        build: Callable[[nn.Module], list[Any]],
        act: Callable[[nn.Module, list[Any], int], None] | None = None,
        steps: int = STEPS,
    ) -> None:
        self.logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.logged.append(record.getMessage())  # type: ignore[method-assign]
        log = logging.getLogger("laconic")
        level = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            model = DistributedDataParallel(net(), **buckets(spec))
            optimizers = build(model)
            given = optimizers if len(optimizers) > 1 else optimizers[0]
            self.handle = compress_anyway(model, given, spec)
            self.first = float(loss_of(model.module, 0).detach())
            for step in range(steps):
                for each in optimizers:
                    each.zero_grad()
                if act is None:
                    loss_of(model, 0 if step % 2 else 1).backward()
                else:
                    act(model, optimizers, step)
                for each in optimizers:
                    each.step()
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        self.model, self.optimizers = model, optimizers
        self.weights, self.agree = flat(model), agree(model)
        self.local = bool(self.handle.exchange.momentum.names(self.handle.exchange.step))
        self.told = [text for text in self.logged if "momentum" in text]

    def check(self, *, local: bool) -> None:
        """Local momentum, or one line that says why not."""
        assert self.agree and self.local == local
        wanted = 0 if local or dist.get_rank() else 1
        assert len(self.told) == wanted, self.told


def sgd(**more: Any) -> Callable[[nn.Module], list[Any]]:
    return lambda model: [SGD(model.parameters(), **{**PLAIN, **more})]


def own_step(model: nn.Module) -> list[Any]:
    return [Negated(model.parameters(), **PLAIN)]


@on_ranks(2, SPECS)
def test_a_subclass_with_its_own_step_keeps_its_momentum(spec: str) -> None:
    trained, other = Trained(spec, own_step), Trained(literal(spec), own_step)
    trained.check(local=False)
    assert torch.equal(trained.weights, other.weights)


@on_ranks(2, SPECS)
def test_a_fused_sgd_steps_as_a_plain_one(spec: str) -> None:
    """Also with weight decay and Nesterov's momentum. Tolerance: the order of sums in fused kernels."""
    more = {"weight_decay": 0.01, "nesterov": True}
    fused, plain = Trained(spec, sgd(fused=True, **more)), Trained(spec, sgd(**more))
    fused.check(local=True)
    torch.testing.assert_close(fused.weights, plain.weights, rtol=1e-4, atol=1e-5)


@on_ranks(2, SPECS)
def test_dampened_momentum_stays_in_the_optimiser(spec: str) -> None:
    trained, other = Trained(spec, sgd(dampening=0.3)), Trained(literal(spec), sgd(dampening=0.3))
    trained.check(local=False)
    assert torch.equal(trained.weights, other.weights)


def mixed(model: nn.Module) -> list[Any]:
    parameters = [*model.parameters()]
    return [SGD([{"params": parameters[::2], "nesterov": True}, {"params": parameters[1::2]}], **PLAIN)]


@on_ranks(2, SPECS)
def test_groups_may_differ_in_nesterov(spec: str) -> None:
    trained = Trained(spec, mixed)
    trained.check(local=True)


def two_kinds(model: nn.Module) -> list[Any]:
    parameters = [*model.parameters()]
    half = len(parameters) // 2
    return [SGD(parameters[:half], **PLAIN), torch.optim.AdamW(parameters[half:], lr=1e-3)]


@on_ranks(2, SPECS)
def test_sgd_beside_adamw(spec: str) -> None:
    """The momentum of SGD's tensors is local, that of the others stays where it is."""
    trained = Trained(spec, two_kinds)
    assert trained.agree and trained.local
    assert len(trained.told) == (dist.get_rank() == 0)
    assert all("AdamW" in text for text in trained.told)


def two_passes(model: nn.Module, optimizers: list[Any], step: int) -> None:
    loss_of(model, 2 * step).backward()
    loss_of(model, 2 * step + 1).backward()


@on_ranks(2, SPECS)
def test_two_passes_without_no_sync(spec: str) -> None:
    """Bit for bit as with momentum in the optimiser, where it is from the second pass on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "two exchanged backward passes")
        trained = Trained(spec, sgd(weight_decay=0.01), two_passes)
    trained.check(local=False)
    assert torch.equal(trained.weights, Trained(literal(spec), sgd(weight_decay=0.01), two_passes).weights)


def clipped(model: nn.Module, optimizers: list[Any], step: int) -> None:
    loss_of(model, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


@on_ranks(2, SPECS)
def test_clipped_gradients(spec: str) -> None:
    """Bit for bit as with momentum in the optimiser, where it is from the first clipped step on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the gradient of .* was changed")
        trained, ahead = Trained(spec, sgd(), clipped), Trained(spec, sgd(nesterov=True), clipped)
    trained.check(local=False)
    ahead.check(local=False)
    assert torch.equal(trained.weights, Trained(literal(spec), sgd(), clipped).weights)


def clipped_later(model: nn.Module, optimizers: list[Any], step: int) -> None:
    loss_of(model, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2 if step == 3 else 1e6)


@on_ranks(2, SPECS)
def test_gradients_that_are_clipped_in_mid_training(spec: str) -> None:
    """Momentum is the optimiser's from the next step on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the gradient of .* was changed")
        Trained(spec, sgd(weight_decay=0.01), clipped_later).check(local=False)


def uneven(model: nn.Module, optimizers: list[Any], step: int) -> None:
    """Three epochs; rank 1 has more batches. Momentum of the optimiser is not synchronised by Join."""
    optimizer = optimizers[0]
    for epoch in range(3):
        with model.join():
            for batch in range(3 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                loss_of(model, 10 * epoch + batch).backward()
                optimizer.step()


@on_ranks(2, [*SPECS, PINNED])
def test_epochs_of_join(spec: str) -> None:
    """A rank without inputs takes no steps of its own, so momentum stays where it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = Trained(spec, sgd(), uneven, steps=1)
    assert trained.local
    assert [text for text in trained.told if "goes back" in text] == []


def clipped_when_alone(model: nn.Module, optimizers: list[Any], step: int) -> None:
    """Rank 1 clips in its last batch, when rank 0 has no inputs; then both have some."""
    optimizer = optimizers[0]
    for batches, last in ((3 + 3 * dist.get_rank(), 5), (4, None)):
        with contextlib.nullcontext() if last is None else model.join():
            for batch in range(batches):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                if batch == last:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()


@on_ranks(2, SPECS)
def test_clipping_while_another_rank_has_no_inputs(spec: str) -> None:
    """Only one rank sees it; matrices stay equal, while Join leaves the momentum of vectors unequal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the gradient of .* was changed")
        trained = Trained(spec, sgd(), clipped_when_alone, steps=1)
    assert not trained.local
    for each in trained.model.parameters():
        first = each.detach().clone()
        dist.broadcast(first, 0)
        assert each.dim() == 1 or torch.equal(first, each)


@on_ranks(2, SPECS)
def test_torchs_functions_for_checkpoints_resume_bit_for_bit(spec: str) -> None:
    build = sgd(weight_decay=0.01, nesterov=True)
    trained = Trained(spec, build)
    trained.check(local=True)
    saved = copy.deepcopy(get_optimizer_state_dict(trained.model, trained.optimizers[0]))
    weights = {key: value.clone() for key, value in trained.model.state_dict().items()}
    memory = trained.handle.state_dict()
    advance(trained.model, trained.optimizers[0], 4)

    again = DistributedDataParallel(net(seed=5), **buckets(spec))
    optimizer = build(again)[0]
    handle = compress_anyway(again, optimizer, spec)
    again.load_state_dict(weights)
    handle.load_state_dict(memory)
    set_optimizer_state_dict(again, optimizer, saved)
    advance(again, optimizer, 4)
    assert torch.equal(flat(again), flat(trained.model)) and agree(again)


@on_ranks(2, SPECS)
def test_a_script_that_left_local_momentum_resumes_without_it(spec: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "two exchanged backward passes")
        trained = Trained(spec, sgd(), two_passes)
        memory, saved = trained.handle.state_dict(), copy.deepcopy(trained.optimizers[0].state_dict())
        weights = {key: value.clone() for key, value in trained.model.state_dict().items()}
        again = DistributedDataParallel(net(seed=5), **buckets(spec))
        optimizer = sgd()(again)[0]
        handle = compress_anyway(again, optimizer, spec)
        again.load_state_dict(weights)
        handle.load_state_dict(memory)
        optimizer.load_state_dict(saved)
        for model, own in ((trained.model, trained.optimizers[0]), (again, optimizer)):
            for step in range(3):
                own.zero_grad()
                two_passes(model, [own], 10 + step)
                own.step()
    assert torch.equal(flat(again), flat(trained.model))


@on_ranks(2)
def test_the_optimiser_keeps_no_momentum_between_steps() -> None:
    """So a plain script that reads its checkpoint does not repeat the last update."""
    trained = Trained("topk(density=0.1)", sgd(weight_decay=0.01))
    state = trained.optimizers[0].state
    for name, parameter in trained.model.module.named_parameters():
        assert bool(state[parameter]["momentum_buffer"].any()) == (parameter.dim() == 1), name


@on_ranks(2, ["topk(density=0.999)", "error_fed(cast('bf16'))", "dgc(density=0.999, masking=False)"])
def test_nearly_all_entries_are_nearly_sgd_with_momentum(spec: str) -> None:
    build = sgd(weight_decay=0.01, nesterov=True)
    dense, near = Trained("dense()", build), Trained(spec, build)
    assert near.local
    apart = (near.weights - dense.weights).norm() / (dense.weights - flat(net())).norm()
    assert float(apart) < 0.05


@on_ranks(2)
def test_a_scaler_changes_no_bit() -> None:
    """Powers of two; a fused step gets scaled gradients."""
    ends = []
    for scaled in (False, True):
        model = DistributedDataParallel(net(), **MANY)
        optimizer = sgd(nesterov=True, weight_decay=0.01, fused=True)(model)[0]
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=scaled)
        laconic.compress(model, optimizer, "topk(density=0.1)", scaler=scaler if scaled else None)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(flat(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("spec", ["powersgd(rank=2)", "error_fed(powersgd(rank=2))", "cgx(min_size=100)"])
def test_methods_that_leave_momentum_alone(pool: Any, spec: str) -> None:
    pool.run(2, left_alone, spec)


def left_alone(spec: str) -> None:
    trained = Trained(spec, sgd())
    assert trained.agree and not trained.local and not trained.told
