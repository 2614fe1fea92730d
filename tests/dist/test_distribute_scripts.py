"""`laconic.distribute` in scripts as people write them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.core.errors import AttachError, StateError
from laconic.core.spec import parse
from laconic.strategies.strategy import Strategy
from tests.dist.nets import SGD, agree, batch, flat, loss_of, momentum_for, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, distributed, scaled_step
from tests.laws.strategy_ranks import fits
from tests.laws.table import specs

STRATEGIES = [spec for spec in specs(Strategy) if fits(spec, 2)]
KINDS = [*{type(parse(spec)): spec for spec in reversed(STRATEGIES)}.values()]


def begin(model, spec, parameters=None, **options):
    """A model under a strategy, with an SGD that suits it."""
    plain = torch.optim.SGD(parameters or model.parameters(), lr=0.05, momentum=momentum_for(spec))
    return laconic.distribute(model, plain, spec, **options)


@on_ranks(2, ["dgc(density=0.1)", "local_sgd(every=2)"])
def test_a_scaler_is_taken_by_methods_and_strategies(spec):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    model = net()
    plain = torch.optim.SGD(model.parameters(), **SGD)
    model, optimizer = laconic.distribute(model, plain, spec, scaler=scaler)
    for step in range(3):
        optimizer.zero_grad()
        scaled_step(scaler, optimizer, loss_of(model, step))
    optimizer.finish()
    assert agree(model)


@on_ranks(2)
def test_a_sharded_model_is_told_what_takes_it():
    model = net()
    fully_shard(model)
    with pytest.raises(AttachError) as caught:
        begin(model, "diloco(every=2)")
    said = str(caught.value)
    assert "fully_shard" in said and "compress" in said


@on_ranks(2, ["sgp()", "topk(density=0.1)"])
def test_a_layer_that_is_unfrozen_later_is_refused(spec):
    said = []
    for held in (True, False):
        model = net()
        model[0].requires_grad_(False)
        trained = [each for each in model.parameters() if held or each.requires_grad]
        plain = torch.optim.SGD(trained, lr=0.05)
        model, optimizer = laconic.distribute(model, plain, spec)
        inner = getattr(model, "module", model)
        advance(model, optimizer, 3)
        inner[0].requires_grad_(True)
        with pytest.raises(AttachError) as caught:
            if not held:
                optimizer.add_param_group({"params": list(inner[0].parameters())})
            advance(model, optimizer, 3)
        said.append(str(caught.value))
        optimizer.remove()
        if spec == "sgp()":  # the way out
            model, optimizer = begin(model, spec)
            advance(model, optimizer, 3)
            optimizer.finish()
            assert agree(model)
    assert all("remove()" in each and "distribute()" in each for each in said)
    assert "0.weight" in said[0]


@on_ranks(2, ["sgp()", "slowmo(every=2)", "topk(density=0.1)"])
def test_parameters_of_the_model_may_be_added_later(spec):
    model = net()
    plain = torch.optim.SGD(model[1:].parameters(), lr=0.05)
    model, optimizer = laconic.distribute(model, plain, spec)
    inner = getattr(model, "module", model)
    before = flat(inner[0])
    optimizer.add_param_group({"params": list(inner[0].parameters()), "lr": 0.02})
    advance(model, optimizer, 3)
    optimizer.finish()
    assert agree(model) and not torch.equal(before, flat(inner[0])) and len(optimizer.param_groups) == 2


class Odd(nn.Module):
    """A sparse embedding, a parameter without elements and a layer in bfloat16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 8, sparse=True)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        x = self.words(x).mean(1) + self.nothing.sum()
        return self.out(self.norm(self.low(x.bfloat16()).float()))


def odd_loss(model, step):
    x, y = batch(dist.get_rank(), step)
    return nn.functional.cross_entropy(model((x[:, 6:10] * 4).long() % 30), y)


def trains_odd_models(spec):
    """And a resumed training has the same bits."""
    clocked = parse(spec).clocked
    (first, one), (second, other) = (begin(Odd(), spec) for _ in range(2))
    advance(first, one, 5, odd_loss)
    saved, trained = copy.deepcopy(one.state_dict()), copy.deepcopy(first.state_dict())
    second.load_state_dict(trained)
    other.load_state_dict(saved)
    assert torch.equal(flat(first), flat(second))
    for model, optimizer in ((first, one), (second, other)):
        advance(model, optimizer, 2, odd_loss)
        assert not torch.equal(flat(model), flat(Odd()))
        with optimizer.averaged():
            assert agree(model)
        optimizer.finish()
        assert agree(model)
    assert clocked or torch.equal(flat(first), flat(second))
    for optimizer in (one, other):
        optimizer.remove()


@on_ranks(2, KINDS, timeout_s=300)
def test_sparse_empty_and_bfloat16_parameters_train_under_every_kind_of_strategy(spec):
    trains_odd_models(spec)


@pytest.mark.nightly
@on_ranks(2, STRATEGIES, timeout_s=600)
def test_sparse_empty_and_bfloat16_parameters_train_under_every_strategy(spec):
    trains_odd_models(spec)


def small_steps():
    """Averages of bfloat16 parameters keep float32: steps too small for bfloat16 alone are not lost."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model, optimizer = laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), "sgp()")
    for _ in range(8):  # the mean of the ranks moves by 1/256 a step, half of what bfloat16 resolves at 1
        model.weight.grad = torch.full((1, 1), -1 / 128 if dist.get_rank() else 0.0, dtype=torch.bfloat16)
        optimizer.step()
    optimizer.finish()
    return float(model.weight.detach())


def test_moves_that_bfloat16_cannot_hold_add_up(pool):
    first, second = pool.run(2, small_steps)
    assert first == second == pytest.approx(1 + 8 / 256, abs=1 / 128)


@on_ranks(
    2, ["sgp()", "local_sgd(every=2)", "by_machine(local_sgd(every=2), ranks_per_node=2)"], timeout_s=240
)
def test_parameters_outside_the_model_are_exchanged_with_it(spec):
    model, scale = net(), nn.Parameter(torch.full((5,), float(1 + dist.get_rank())))
    model, optimizer = begin(model, spec, [*model.parameters(), scale])
    advance(model, optimizer, 4, lambda model, step: loss_of(model, step) * scale.square().mean())
    optimizer.finish()
    scales = [torch.empty(5) for _ in range(2)]
    dist.all_gather(scales, scale.detach())
    assert agree(model) and torch.equal(*scales) and bool((scale != 1).all())


@on_ranks(2, ["sgp()", "osgp()", "local_sgd(every=2)", "lsgd(every=2, local_every=2, ranks_per_node=1)"])
def test_ranks_with_uneven_inputs_end_together(spec):
    """Rank 0 has two batches more; both take all rounds."""
    model, optimizer = begin(net(), spec)
    with Join([optimizer]):
        advance(model, optimizer, 5 - 2 * dist.get_rank())
    optimizer.finish()
    ends = agree(model), optimizer.stats().steps
    optimizer.remove()
    assert ends == (True, 5)


def uneven_on_a_machine(short, joined):
    """`short` has no inputs for the last two of five steps: under Join, or by steps without gradients."""
    model, optimizer = begin(net(), "by_machine(local_sgd(every=2), ranks_per_node=2)")
    if joined:
        with Join([optimizer]):
            advance(model, optimizer, 3 if dist.get_rank() == short else 5)
    else:
        advance(model, optimizer, 3)
        for step in range(3, 5):
            optimizer.zero_grad()
            if dist.get_rank() != short:
                loss_of(model, step).backward()
            optimizer.step()
    optimizer.finish()
    ends = flat(model)
    optimizer.remove()
    return ends


@pytest.mark.parametrize("short", [0, 1])
def test_a_rank_without_inputs_adds_nothing_to_its_machines_gradient(pool, short):
    """Its last gradient is not taken again; and where it is the machine's first, the machine goes on."""
    ends = pool.run(2, uneven_on_a_machine, short, True)
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert torch.equal(ends[0], pool.run(2, uneven_on_a_machine, short, False)[0])


@on_ranks(2)
def test_methods_join_through_their_model():
    model, optimizer = distributed("topk(density=0.1)")
    with Join([model, optimizer]):
        advance(model, optimizer, 5 - 2 * dist.get_rank())
    assert agree(model)


class Tables(nn.Module):
    """A net with buffers that have no mean, of other values on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("angles", torch.full((3,), 1j * (rank + 1)))
        self.register_buffer("order", torch.arange(5).roll(rank))
        self.register_buffer("small", torch.tensor([rank + 1.0]).to(torch.float8_e4m3fn))
        self.register_buffer("mask", torch.tensor([[rank == 0, True]] * 3).t())
        self.register_buffer("expanded", torch.arange(2).expand(2, 2))

    def forward(self, x):
        return self.inner(x)


def buffers_of_other_kinds(spec):
    model, optimizer = begin(Tables(dist.get_rank()), spec)
    advance(model, optimizer, 3)
    optimizer.finish()
    return [each.float().tolist() if each.dtype == torch.float8_e4m3fn else each.tolist()
            for name, each in model.named_buffers() if "inner" not in name]  # fmt: skip


@pytest.mark.parametrize("spec", ["sgp()", "local_sgd(every=2)"])
def test_buffers_without_a_mean_begin_as_the_first_ranks(pool, spec):
    first, second = pool.run(2, buffers_of_other_kinds, spec)
    plain = [[1j] * 3, [0, 1, 2, 3, 4], [1.0], [[True] * 3, [True] * 3], [[0, 1]] * 2]
    assert first == second == plain


def copied(spec):
    model, optimizer = begin(net(), spec)
    for way in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(StateError, match="cannot be copied: copy its state_dict"):
            way(optimizer)
    advance(model, optimizer, 3)
    optimizer.finish()
    return flat(model)


def test_an_optimiser_that_cannot_be_copied_says_so_and_goes_on(pool):
    first, second = pool.run(2, copied, "sgp()")
    assert torch.equal(first, second)
