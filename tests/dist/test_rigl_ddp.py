"""Sparse training on many ranks: the same masks everywhere, by the summed gradient, and fewer bytes."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError, PeerError, StateError
from laconic.sparsity import rigl, sparsify
from laconic.sparsity.slots import slots
from tests.dist.nets import agree, batch, compress_anyway, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import MANY, advance, same, stop_and_go

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
METHODS = (
    None,
    "masked(cgx(min_size=64))",
    "masked(scatter_reduce(minmax(bits=4, block=64), feedback='both'))",
    "masked(dgc(density=0.2))",
    "topk(density=0.05)",
    "comp_ams()",
)
MORE_METHODS = (
    "masked(dense())",
    "masked(topk(density=0.2))",
    "masked(powersgd(rank=2))",
    "cgx(min_size=64)",
    "dgc(density=0.05)",
)


def optimizer_for(model, spec):
    if spec == "comp_ams()":
        return laconic.optim.AMSGrad(model.parameters(), lr=1e-3)
    if spec == "masked(dense())":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), **SGD)


def digests(sparse):
    """All ranks' masks, in one tensor each."""
    mine = torch.cat([mask.flatten() for mask in sparse.masks.values()]).int()
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


def outside_is_zero(sparse, model, optimizer):
    parameters = dict(model.named_parameters())
    return all(
        not bool(each[~mask].any())
        for name, mask in sparse.masks.items()
        for weight in (parameters[name],)
        for each in (weight.detach(), *slots(optimizer, weight))
    )


def keeps_masks_equal(spec, steps, sparsifier="rigl(density=0.2, every=5)"):
    """And zero outside; memory of dropped entries is cleared, where the last update is some steps back."""
    model = DistributedDataParallel(net(), **MANY)
    optimizer = optimizer_for(model, spec)
    first = sparsify(model, optimizer, sparsifier, steps=steps)
    start = {name: mask.clone() for name, mask in first.masks.items()}
    handle = None if spec is None else compress_anyway(model, optimizer, spec)
    for step in range(steps):
        advance(model, optimizer, [step])
        assert outside_is_zero(first, model.module, optimizer)
    masks = digests(first)
    assert agree(model) and all(torch.equal(masks[0], each) for each in masks)
    assert any(not torch.equal(mask, start[name]) for name, mask in first.masks.items()), "they have moved"
    kept = {} if handle is None else handle.exchange.state_dict()
    for key, value in kept.items() if steps == 34 else ():
        for name, mask in first.masks.items():
            if key.endswith(f"/{name}") and value.numel() == mask.numel():
                assert not bool(value.flatten()[~mask.flatten()].any()), key


@on_ranks(4, METHODS, timeout_s=300)
def test_masks_are_equal_on_all_ranks(spec):
    keeps_masks_equal(spec, 12)


@pytest.mark.nightly
@on_ranks(4, MORE_METHODS, timeout_s=300)
def test_masks_are_equal_with_other_methods(spec):
    keeps_masks_equal(spec, 23)


OTHERS = (
    "sparse_evolution(density=0.2, every=5)",
    "gradual_pruning(every=5)",
    "rigl(density=0.5, every=5, layout='2:4')",
)


@pytest.mark.nightly
@on_ranks(3, OTHERS)
def test_other_sparsifiers_keep_masks_equal_too(sparsifier):
    keeps_masks_equal("masked(topk(density=0.2))", 30, sparsifier)


@on_ranks(2, ("topk(density=0.05)", "masked(topk(density=0.2))", "dgc(density=0.05)"))
def test_memory_of_dropped_entries_is_cleared(spec):
    keeps_masks_equal(spec, 34)


@pytest.mark.soak
@on_ranks(4, timeout_s=600)
def test_masks_are_equal_on_four_ranks_after_a_thousand_steps():
    keeps_masks_equal("masked(cgx(min_size=64))", 1000)


def a_thousand_steps(folder, goes_on, dies_at=None):
    """All ranks' masks at the end, and this rank's weights; a state of each rank is kept every 100 steps."""
    rank, first = dist.get_rank(), 0
    model = DistributedDataParallel(net(), **({} if goes_on else MANY))
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparse = sparsify(model, optimizer, "rigl(density=0.2, every=50)", steps=1000)
    handle = laconic.compress(model, optimizer, "masked(topk(density=0.1))")
    if goes_on:
        saved = torch.load(folder / f"{rank}.pt", weights_only=True)
        first = saved["step"]
        for part, name in ((model.module, "model"), (optimizer, "optimizer"), (sparse, "sparse")):
            part.load_state_dict(saved[name])
        handle.load_state_dict(saved["laconic"])
    for step in range(first, 1000):
        if step == dies_at and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 100 == 0 and not goes_on:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            state |= {"sparse": sparse.state_dict(), "laconic": handle.state_dict()}
            torch.save(state, folder / f"{rank}.pt")
            dist.barrier()  # a state counts only where all have written it
        advance(model, optimizer, [step])
    return [mask.tolist() for mask in digests(sparse)], flat(model), first


@pytest.mark.soak
def test_masks_are_equal_on_four_ranks_after_a_thousand_steps_a_kill_and_a_resume(pool, tmp_path):
    whole = pool.run(4, a_thousand_steps, tmp_path, False, timeout_s=600.0)
    died = pool.fresh(4, a_thousand_steps, tmp_path, False, 555, timeout_s=600.0)
    assert died[2].exit_code == -signal.SIGKILL and all(each.value is None for each in died)
    resumed = pool.run(4, a_thousand_steps, tmp_path, True, timeout_s=600.0)
    for (masks, weights, _), (again, others, first) in zip(whole, resumed, strict=True):
        assert first == 500
        assert masks == again == [masks[0]] * 4
        assert torch.equal(weights, others)


class Cancelling(nn.Module):
    """A weight whose gradient is given: on rank 0 and 1 opposite in the first entry, equal in the second."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return self.layer(x)


@on_ranks(2)
def test_growth_is_by_the_sum_and_not_by_the_mean_of_magnitudes():
    """Entry 0 has the larger magnitude on each rank, but the ranks cancel; entry 1 has the larger sum."""
    model = DistributedDataParallel(Cancelling())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model.module.layer.weight.copy_(torch.tensor([[0.0, 0.0, 1.0, 5.0]]))
    sparse = sparsify(model, optimizer, "rigl(density=0.5, every=1, drop=0.5)", steps=1000)
    name = "layer.weight"
    used = torch.tensor([[False, False, True, True]])
    sparse._set_mask(name, used)
    with torch.no_grad():
        model.module.layer.weight.copy_(torch.tensor([[0.0, 0.0, 1.0, 5.0]]))
    sign = 1.0 if dist.get_rank() == 0 else -1.0
    model(torch.tensor([[100.0 * sign, 0.4, 0.1, 0.1]])).sum().backward()
    optimizer.step()
    masks = sparse.masks[name].tolist()
    assert masks == [[False, True, False, True]]


@on_ranks(2)
def test_two_ranks_choose_as_one_process_with_both_batches():
    """Two ranks' masks after the first update, and those of one process with both batches."""
    rank = dist.get_rank()
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparse = sparsify(model, optimizer, "rigl(density=0.3)", steps=100)
    before = flat(model)
    advance(model, optimizer, [0])
    alone = net()
    group = dist.new_group([rank], use_local_synchronization=True)
    twin_optimizer = torch.optim.SGD(alone.parameters(), **SGD)
    twin = sparsify(alone, twin_optimizer, "rigl(density=0.3)", steps=100, group=group)
    parts = [batch(each, 0) for each in range(dist.get_world_size())]
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    nn.functional.cross_entropy(alone(x), y).backward()
    twin_optimizer.step()
    assert same(sparse.masks, twin.masks)
    stats = sparse.stats()
    assert bool(
        (flat(model) == before * (flat(model) != 0)).all()
    )  # the update is in the place of the step: no weight that stays has moved
    assert stats.updates == 1
    assert stats.score_bytes == 4 * (20 * 64 + 3 * 64 * 64) + 8  # ERK leaves the last layer dense; a digest


RESUMED = [
    (None, "rigl(density=0.2, every=4)"),
    (None, "rigl(density=0.2, every=4, accumulate=3)"),
    ("masked(topk(density=0.2))", "rigl(density=0.2, every=4)"),
    ("masked(scatter_reduce(minmax(bits=4, block=64), feedback='both'))", "rigl(density=0.2, every=4)"),
    ("masked(dgc(density=0.2, warmup_steps=6))", "rigl(density=0.2, every=4)"),
    ("masked(topk(density=0.2))", "gradual_pruning(density=0.2, every=4)"),
]


@on_ranks(2, [(*case, i % 2 == 0) for i, case in enumerate(RESUMED)], timeout_s=300)
def test_a_resumed_run_ends_with_the_same_bits(spec, sparsifier, laconic_first):
    """Whichever state is loaded first."""

    def made(again):
        model = DistributedDataParallel(net(), **MANY)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        sparse = sparsify(model, optimizer, sparsifier, steps=20, seed=3)
        handle = spec and compress_anyway(model, optimizer, spec)
        return (model, optimizer, *((handle, sparse) if laconic_first else (sparse, handle)))

    whole, second = stop_and_go(made, 20, 10)
    assert torch.equal(flat(whole[0]), flat(second[0]))
    assert same(*(each[3 if laconic_first else 2].masks for each in (whole, second)))


def bytes_of(spec):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 400)))
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    sparse = rigl(model, optimizer, 0.1, steps=200, every=100)
    handle = compress_anyway(model, optimizer, spec)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(2, 200)).square().mean().backward()
        optimizer.step()
    stats = handle.stats()
    numel = sum(each.numel() for each in model.parameters())
    return (
        stats.payload_sent / stats.steps / (4 * numel),
        stats.network_sent / stats.dense,
        sparse.stats().density,
    )


def test_bytes_are_the_density_times_the_dense_ones(pool):
    for payload, network, density in pool.run(4, bytes_of, "masked(dense())"):
        assert density == pytest.approx(0.1, abs=1e-3)
        assert payload < 0.104 and network < 0.11
    for payload, _, _ in pool.run(4, bytes_of, "masked(cgx(bits=4))"):
        assert payload < 0.104 * 4.5 / 32 + 0.004  # biases in float32


def gradients_in_another_order(spec):
    """Of a model that is sparse before it is in channels_last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = sparsify(model, optimizer, "static_masks(density=0.3)", steps=10)
    together = DistributedDataParallel(model.to(memory_format=torch.channels_last))
    handle = laconic.compress(together, optimizer, spec)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        together(x).square().mean().backward()
        found.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
        optimizer.step()
    handle.remove()
    sparse.remove()
    return found


def test_masks_follow_the_order_in_memory(pool):
    masked = pool.run(2, gradients_in_another_order, "masked(dense())")
    whole = pool.run(2, gradients_in_another_order, "dense()")
    for ours, theirs in zip(masked, whole, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        assert all(bool(each.any()) for each in ours)


@on_ranks(2)
def test_what_cannot_work_is_refused_on_every_rank():
    said = []
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    with pytest.raises(AttachError) as caught:  # density differs by rank
        rigl(model, optimizer, 0.1 + 0.1 * dist.get_rank(), steps=10)
    said.append(str(caught.value))
    bad = torch.optim.SGD(net(7).parameters(), lr=0.1) if dist.get_rank() == 1 else optimizer
    with pytest.raises(AttachError) as caught:
        rigl(model, bad, 0.1, steps=10)
    said.append(str(caught.value))
    untouched = all(bool((each != 0).all()) for each in model.parameters() if each.dim() > 1)
    sparse = rigl(model, optimizer, 0.1, steps=10)
    with pytest.raises(StateError) as other:
        sparse.load_state_dict(sparse.state_dict() | {"steps": 11})
    said.append(str(other.value))
    sparse.remove()
    alone = net(dist.get_rank())  # replicas that differ
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    sparse = rigl(alone, optimizer, 0.1, steps=10)
    loss_of(alone, 0).backward()
    with pytest.raises(PeerError) as differ:
        optimizer.step()
    said.append(str(differ.value))
    sparse.remove()
    assert "the sparsifier differs" in said[0]
    assert "such as 0.weight" in said[1]
    assert "steps" in said[2] and "11" in said[2]
    assert "replicas differ" in said[3]
    assert untouched


@on_ranks(2)
def test_a_method_that_exchanges_inside_the_step_is_refused():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rigl(model, optimizer, 0.1, steps=10)
    handle = compress_anyway(model, optimizer, "onebit_adam(warmup_steps=2)")
    loss_of(model, 0).backward()
    with pytest.raises(AttachError) as caught:
        optimizer.step()
    handle.remove()
    said = str(caught.value)
    assert "exchanges inside optimizer.step()" in said
