"""Sharded training in real processes over gloo: a compressed reduce-scatter under `fully_shard`."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.core.errors import AttachError, SpecError, StateError
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.fsdp.models import scatter_of, sharded_modules
from tests.dist.nets import GPT, text
from tests.dist.pool import on_ranks
from tests.dist.runs import advance

STEPS = 40
FED = "error_fed(scatter_reduce(minmax(bits=2, block=16)))"
LONG = 300.0  # the first import of fully_shard takes each worker seconds


def sharded_gpt(lr: float = 3e-3) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = text(dist.get_rank(), step)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Mean loss over ranks of one step."""
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def whole(model: nn.Module) -> Tensor:
    """All parameters, from all ranks."""
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def train(spec: str | None, parameters: str | None = None, steps: int = STEPS) -> Any:
    """Losses, the handle's figures and all parameters."""
    model, optimizer = sharded_gpt()
    handle = None if spec is None else laconic.compress(model, optimizer, spec, parameters=parameters)
    losses = [step_on(model, optimizer, step) for step in range(steps)]
    return losses, handle and handle.stats(), whole(model)


def trains_to_the_dense_loss(pool: Any, size: int) -> None:
    """Within 1 %, of the mean over the last 10 steps; in 8 bits and the scales, of 32. All-gathers in 8 bits
    are 3.5 times smaller, with headers, and train to the loss of exact ones."""
    cases = ((None,), ("cgx(bits=8)",), ("cgx(bits=8)", "minmax(bits=8)"))
    dense, coded, gathered = (found for _, found in pool.each(size, train, cases, timeout_s=2 * LONG))
    plain, exact = dense[0][0], coded[0][0]
    assert sum(plain[-10:]) < 0.6 * sum(plain[:10]), "it does learn"
    for losses, stats, _ in coded:
        assert sum(losses[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.01) and losses != plain
        assert stats.steps == STEPS
        assert 3 < stats.ratio < 4  # with headers
    for (losses, stats, _), (_, without, _) in zip(gathered, coded, strict=True):
        assert sum(losses[-10:]) == pytest.approx(sum(exact[-10:]), rel=0.01) and losses != exact
        sent, dense = stats.network_sent - without.network_sent, stats.dense - without.dense
        low = 3.5 if size == 2 else 3.2  # headers weigh more in smaller shards
        assert low < dense / sent < 4 and stats.ratio > low - 0.2
        payload = [nbytes for phase, nbytes in stats.phases.items() if phase.startswith("parameters")]
        copies = size - 1  # payload counts one
        assert payload and sent * 0.7 < copies * sum(payload) < sent


def test_a_sharded_gpt_trains_to_the_dense_loss_whatever_is_compressed(pool: Any) -> None:
    trains_to_the_dense_loss(pool, 2)


@pytest.mark.nightly
def test_a_gpt_in_four_shards_trains_to_the_dense_loss_whatever_is_compressed(pool: Any) -> None:
    trains_to_the_dense_loss(pool, 4)


@on_ranks(3, ("scatter_reduce(dense())", "cgx(bits=8)", "cgx(bits=8, pattern='ring')"), timeout_s=LONG)
def test_the_gradients_are_the_mean(spec: str) -> None:
    """An exact codec gives the plain mean; 8 bits of 512 elements, within 1 % of the largest."""
    model, optimizer = sharded_gpt()
    laconic.compress(model, optimizer, spec)
    torch.manual_seed(0)
    plain = GPT()
    for each in (model, plain):
        loss_of(each, 0).backward()
    close_to_the_mean(model, plain, 1e-6 if "dense" in spec else 0.01)


def close_to_the_mean(model: nn.Module, plain: nn.Module, loose: float) -> None:
    """Check gradients, put together from shards, against the mean of the plain models'."""
    means = [parameter.grad for parameter in plain.parameters()]
    for mean in means:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    largest = max(float(mean.abs().max()) for mean in means)
    for parameter, mean in zip(model.parameters(), means, strict=True):
        assert (parameter.grad.full_tensor() - mean).abs().max() <= loose * largest


@on_ranks(2, ("cgx(bits=3, rounding='stochastic')", FED), timeout_s=LONG)
def test_a_resumed_run_ends_with_the_same_bits(spec: str) -> None:
    """After 6 steps; and after 3 and 3 more, with a new handle and the state of the first."""
    unbroken = train(spec, steps=6)[2]
    model, optimizer = sharded_gpt()
    handle = laconic.compress(model, optimizer, spec)
    for step in range(3):
        step_on(model, optimizer, step)
    state = handle.state_dict()
    handle.remove()
    handle = laconic.compress(model, optimizer, spec)
    handle.load_state_dict(state)
    for step in range(3, 6):
        step_on(model, optimizer, step)
    assert torch.equal(unbroken, whole(model))
    with pytest.raises(StateError, match="seed 5, this handle has 0"):
        handle.load_state_dict({**state, "seed": 5})


@on_ranks(2, timeout_s=LONG)
def test_a_step_without_gradients_is_not_counted() -> None:
    """Torch's state-dict functions step optimisers."""
    model, optimizer = sharded_gpt()
    handle = laconic.compress(model, optimizer, "cgx()")
    state = get_optimizer_state_dict(model, optimizer)
    assert handle.stats().steps == 0
    step_on(model, optimizer, 0)
    assert handle.stats().steps == 1
    set_optimizer_state_dict(model, optimizer, state)
    step_on(model, optimizer, 1)
    assert handle.stats().steps == 2


@on_ranks(2, (False, True), timeout_s=LONG)
def test_steps_go_on_from_a_loaded_state(machines: bool) -> None:
    """After a real step in place, and where a handle's state is loaded before the optimiser's."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1) if machines else (2,), mesh_dim_names=("a", "b")[: 1 + machines])

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, laconic.compress(model, optimizer, "cgx(bits=4)")

    def go(steps: int) -> None:
        advance(model, optimizer, steps, lambda model, _: model(torch.ones(2, 8)).sum())

    model, optimizer, handle = made()
    go(3)
    state, inner = handle.state_dict(), get_optimizer_state_dict(model, optimizer)
    go(1)
    handle.load_state_dict(state)
    go(1)
    assert handle.stats().steps == 4
    model, optimizer, handle = made()
    handle.load_state_dict(state)
    set_optimizer_state_dict(model, optimizer, inner)
    assert handle.stats().steps == 3


@on_ranks(2, timeout_s=LONG)
def test_what_is_held_back_can_be_thrown_away() -> None:
    model, optimizer = sharded_gpt()
    handle = laconic.compress(model, optimizer, FED)
    step_on(model, optimizer, 0)
    assert handle.state_dict()["memory"]
    handle.discard()
    assert not handle.state_dict()["memory"]
    assert step_on(model, optimizer, 1) > 0, "training goes on"


def foreign_states() -> tuple[list[str], bool, dict[str, Any]]:
    """What is said of states that belong elsewhere, whether the memory is as before, and the rank's state."""
    states = []
    for width in (24, 16):
        model = nn.Linear(width, 4)
        fully_shard(model)
        handle = laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), FED)
        model(torch.ones(2, width)).sum().backward()
        states.append(handle.state_dict())
    other, own = states
    of_replicas = {**own, "memory": {"route0/residual/weight": torch.zeros(3)}}
    parts = [{k: v for k, v in own.items() if k != key} for key in ("memory", "step")]
    wrong = [other, of_replicas, *parts, None]
    said = []
    for state in wrong:
        with pytest.raises(StateError) as caught:
            handle.load_state_dict(state)
        said.append(str(caught.value))
    before, after = own["memory"], handle.state_dict()["memory"]
    same = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    return said, same, own


def test_a_state_that_belongs_elsewhere_is_refused(pool: Any) -> None:
    found = pool.run(2, foreign_states, timeout_s=LONG)
    for (model, replicas, memory, step, nothing), same, _ in found:
        assert "2 tensors, 100 elements" in model and "this handle has '2 tensors, 68 elements" in model
        assert "route0/residual/weight is no residual of shards" in replicas
        assert "has no 'memory'" in memory and "has no 'step'" in step
        assert nothing == "a state of a handle must be a dictionary, got None"
        assert same
    with pytest.raises(StateError, match="resize does not support states of a model under fully_shard"):
        laconic.resize([state for *_, state in found], 4)


def mean_of_gradients(spec: str, steps: int) -> float:
    """How far the mean of the same gradient over these steps is from what is sent in float32."""
    found = []
    for each in (spec, "scatter_reduce(dense())"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 33))
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        handle = laconic.compress(model, optimizer, each)
        x = torch.randn(7, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
        total = torch.zeros(sum(p.to_local().numel() for p in model.parameters()))
        for _ in range(steps if each is spec else 1):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            total += torch.cat([p.grad.to_local().flatten() for p in model.parameters()])
        found.append(total / (steps if each is spec else 1))
        handle.remove()
    return float((found[0] - found[1]).norm() / found[1].norm())


class Turns(nn.Module):
    """Two layers of one shape, used by turns, in one group of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)])
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        return self.layers[self.turn % 2](x)


@on_ranks(2, timeout_s=LONG)
def test_what_is_left_of_one_parameter_does_not_go_to_another() -> None:
    """The summed gradient of each layer is right after 20 steps of each."""
    torch.manual_seed(0)
    model = Turns()
    fully_shard(model)
    fed = "error_fed(scatter_reduce(minmax(bits=8, block=16)))"
    handle = laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.0), fed)
    scales = (1.0, 100.0)
    got, wanted = ([torch.zeros(32, 32) for _ in scales] for _ in range(2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(40):
            which = (model.turn + 1) % 2
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(model.turn))
            model.zero_grad()
            (scales[which] * model(x)).sum().backward()
            wanted[which] += scales[which] * x.sum(0).expand(32, 32)
            got[which] += model.layers[which].weight.grad.full_tensor()
    handle.remove()
    assert max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)) < 0.01
    (said,) = (str(each.message) for each in told if "several sets" in str(each.message))
    assert "the model has gradients for 1,024 of 2,048 elements" in said


@on_ranks(2, timeout_s=LONG)
def test_what_is_left_of_a_layer_that_is_frozen_does_not_go_to_the_one_that_thaws() -> None:
    """Which has its size, and a gradient of zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    fully_shard(model)
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    laconic.compress(model, optimizer, "error_fed(scatter_reduce(minmax(bits=2, block=16)))")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model.zero_grad()
        (100 * model(x)).square().mean().backward()
    model[1].weight.requires_grad_(True)
    model[0].weight.requires_grad_(False)
    model.zero_grad()
    (0 * model(x)).sum().backward()
    assert not model[1].weight.grad.full_tensor().any()


@on_ranks(2, ((FED, 1 / 20), ("cgx(bits=2)", 2.0)), timeout_s=LONG)
def test_with_error_feedback_the_error_of_the_mean_falls(spec: str, most: float) -> None:
    """Without it the mean of 40 equal gradients is as wrong as each of them."""
    before = mean_of_gradients(spec, 1)
    after = mean_of_gradients(spec, 40)
    assert before > 0.02
    assert after < most * before
    assert spec == FED or after > 0.5 * before


@on_ranks(2, timeout_s=LONG)
def test_removed_it_is_plain_sharded_training() -> None:
    plain = train(None, steps=2)[2]
    model, optimizer = sharded_gpt()
    before = [scatter_of(module) for _, module in sharded_modules(model)]
    handle = laconic.compress(model, optimizer, "cgx(bits=2)")
    handle.remove()
    after = [scatter_of(module) for _, module in sharded_modules(model)]
    for step in range(2):
        step_on(model, optimizer, step)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert torch.equal(plain, whole(model)) and handle.stats().payload_sent == 0


@on_ranks(2, timeout_s=LONG)
def test_inf_on_one_rank_is_seen_on_all() -> None:
    """As a NaN in the shard of each, so that whoever looks skips the step; the next one is as ever."""
    model, optimizer = sharded_gpt()
    laconic.compress(model, optimizer, "cgx(bits=4)")
    loss = loss_of(model, 0)
    if dist.get_rank() == 1:
        loss = loss + model.head(torch.full((32,), 1e38)).sum() * 1e38
    loss.backward()
    grads = [p.grad.to_local() for p in model.parameters()]
    assert any(not bool(grad.isfinite().all()) for grad in grads)
    optimizer.zero_grad()
    step_on(model, optimizer, 1)
    assert whole(model).isfinite().all()


def checkpointed(reentrant: bool | None, replicated: bool = False) -> nn.Module:
    """Four layers under `fully_shard`, with activation checkpointing around each but for None."""
    torch.manual_seed(0)
    names = ("machines", "shards")
    mesh = init_device_mesh("cpu", (2, 1) if replicated else (1, 2), mesh_dim_names=names)
    mesh = mesh if replicated else mesh["shards"]
    layers = [fully_shard(nn.Linear(16, 16), mesh=mesh) for _ in range(4)]
    return fully_shard(Checkpointed(layers, reentrant), mesh=mesh)


class Checkpointed(nn.Module):
    def __init__(self, layers: list[nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(layers), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x * 1.0


REENTRANT = [(None,), (False,), (True,)]


@on_ranks(2, REENTRANT, timeout_s=LONG)
def test_a_skipped_step_restores_the_residuals_of_checkpointed_layers(reentrant: bool | None) -> None:
    """Reentrant checkpointing runs a backward pass per layer inside the outer one."""
    model = checkpointed(reentrant)
    handle = laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), FED)
    x = torch.randn(8, 16, requires_grad=True)

    def memory(spoilt: bool) -> dict[str, Tensor]:
        hook = model.layers[0].register_full_backward_pre_hook(lambda _, grads: (grads[0] * math.inf,))
        if not spoilt:
            hook.remove()
        model(x).square().sum().backward()
        hook.remove()
        assert not scatter._old, "freed once the step is decided"
        return {key: wire.clone() for key, wire in handle.state_dict()["memory"].items()}

    scatter = handle._gradients.memory
    before = memory(False)
    after = memory(True)
    assert len(before) == 4 and before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(not torch.equal(before[key], wire) for key, wire in memory(False).items())


@on_ranks(2, REENTRANT, timeout_s=LONG)
def test_replicas_count_one_exchange_of_checkpointed_layers(reentrant: bool | None) -> None:
    model = checkpointed(reentrant, replicated=True)
    handle = laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk(density=0.1)")
    x = torch.randn(8, 16, requires_grad=True)
    for _ in range(3):
        model(x).sum().backward()
    assert handle.state_dict()["exchanges"] == 3


class Mine:
    """A reduce-scatter that a user has made."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *_: Any, **__: Any) -> None: ...


@on_ranks(2, timeout_s=LONG)
def test_what_cannot_be_sharded_is_refused_on_every_rank() -> None:
    model, optimizer = sharded_gpt()
    mine = "cgx(bits=4)" if dist.get_rank() else "cgx(bits=5)"
    late = torch.optim.SGD(GPT().parameters(), lr=0.1)

    def refused(start: str, spec: str, steps: Any = optimizer, **options: Any) -> None:
        with pytest.raises((AttachError, SpecError)) as caught:
            laconic.compress(model, steps, spec, **options)
        assert str(caught.value).startswith(start)

    refused("topk(density=0.01) cannot be sharded: gather(", "topk(density=0.01)")
    refused("dgc(density=0.01) cannot be sharded: ", "dgc(density=0.01)")
    refused("onebit_adam(warmup_steps=3) cannot be sharded: it", "onebit_adam(warmup_steps=3)")
    refused("terngrad() cannot be sharded: shared_scale() has no first half", "terngrad()")
    refused("dense() cannot be sharded: fully_shard already sums", "dense()")
    refused("cgx: minmax: bits must be a whole number in 1..8, got 99", "cgx(bits=99)")
    refused("nothing was attached: the spec differs", mine)
    refused("this optimiser has none of the model's parameters", "cgx()", late)
    refused("a model under fully_shard takes one optimiser, got 2", "cgx()", [optimizer, late])
    layer = model.layers[0]
    own = scatter_of(layer)
    layer.set_custom_reduce_scatter(Mine())
    refused("layers.0 already has the custom reduce-scatter Mine, and only one is possible", "cgx()")
    layer.set_custom_reduce_scatter(own)
    unscaled = "scaler= is not supported for sharded models, whose residuals would contain the scale"
    refused(unscaled, "cgx()", scaler=torch.amp.GradScaler("cpu"))
    handle = laconic.compress(model, [optimizer], "cgx()")  # as trainers hold it
    refused("this model is compressed already, with cgx()", "cgx(bits=8)")
    assert repr(handle).startswith("<cgx() on ") and repr(handle).endswith("of 2>")


@on_ranks((2, 4), timeout_s=LONG)
def test_a_shard_is_what_the_definition_makes_of_it() -> None:
    """Its own part exactly, the others' as they decode; to the rounding of two ways to multiply matrices."""
    codec_spec = "minmax(bits=3, rounding='stochastic')"
    torch.manual_seed(0)
    model = nn.Linear(40, 32, bias=False)
    start = model.weight.detach().clone()
    fully_shard(model)
    laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), f"scatter_reduce({codec_spec})")
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [torch.randn(7, 40, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    model(inputs[rank]).square().sum().backward()
    codec, n = parse(codec_spec), 1280 // size
    where = slice(rank * n, (rank + 1) * n)
    grads = [(2 * (x @ start.T).T @ x).flatten()[where] for x in inputs]
    expected = grads[rank] / size
    for r, grad in enumerate(grads):
        if r != rank:
            key = Turn(0, r).own(f"shards of [{where.start}:{where.stop}]")
            codec.decode_add_(codec.encode(grad.contiguous(), key), expected, 1 / size)
    got = model.weight.grad.to_local().flatten()
    assert ((got - expected).abs() > 1e-3).sum() <= 2  # an entry may round the other way
