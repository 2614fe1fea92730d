"""Sharded training in real processes over gloo: a compressed reduce-scatter under `fully_shard`."""

from __future__ import annotations

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

import laconic
from laconic.core.errors import AttachError, SpecError, StateError
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.ddp.shard_models import scatter_of, scattering
from tests.dist.nets import GPT, text

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


def train(spec: str | None, steps: int = STEPS) -> tuple[list[float], Any, Tensor]:
    model, optimizer = sharded_gpt()
    handle = None if spec is None else laconic.compress(model, optimizer, spec)
    losses = [step_on(model, optimizer, step) for step in range(steps)]
    return losses, handle and handle.stats(), whole(model)


@pytest.mark.parametrize("size", [2, 4])
def test_a_sharded_gpt_trains_to_the_dense_loss(pool: Any, size: int) -> None:
    """Within 1 %, of the mean over the last 10 steps; in 8 bits and the scales, of 32."""
    dense = pool.run(size, train, None, timeout_s=LONG)[0][0]
    for losses, stats, _ in pool.run(size, train, "cgx(bits=8)", timeout_s=LONG):
        assert sum(dense[-10:]) < 0.6 * sum(dense[:10]), "it does learn"
        assert sum(losses[-10:]) == pytest.approx(sum(dense[-10:]), rel=0.01)
        assert losses != dense
        assert stats.steps == STEPS
        assert 3 < stats.ratio < 4  # with headers


def first_gradients(spec: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of one step: put together from the shards; and the mean of those of the plain model."""
    model, optimizer = sharded_gpt()
    laconic.compress(model, optimizer, spec)
    loss_of(model, 0).backward()
    got = [p.grad.full_tensor() for p in model.parameters()]
    torch.manual_seed(0)
    plain = GPT()
    loss_of(plain, 0).backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return got, [p.grad for p in plain.parameters()]


@pytest.mark.parametrize("spec", ["scatter_reduce(dense())", "cgx(bits=8)", "cgx(bits=8, pattern='ring')"])
def test_the_gradients_are_the_mean(pool: Any, spec: str) -> None:
    """An exact codec gives the plain mean; 8 bits of 512 elements, within 1 % of the largest."""
    loose = 1e-6 if "dense" in spec else 0.01
    for got, plain in pool.run(3, first_gradients, spec, timeout_s=LONG):
        largest = max(float(part.abs().max()) for part in plain)
        for one, other in zip(got, plain, strict=True):
            assert (one - other).abs().max() <= loose * largest


def stop_and_go(spec: str) -> tuple[Tensor, Tensor]:
    """Parameters after 6 steps; and after 3 and 3 more, with a new handle and the state of the first."""
    unbroken = train(spec, 6)[2]
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
    other = {**state, "seed": 5}
    with pytest.raises(StateError, match="seed 5, this handle has 0"):
        handle.load_state_dict(other)
    return unbroken, whole(model)


@pytest.mark.parametrize("spec", ["cgx(bits=3, rounding='stochastic')", FED])
def test_a_resumed_run_ends_with_the_same_bits(pool: Any, spec: str) -> None:
    for one, other in pool.run(2, stop_and_go, spec, timeout_s=LONG):
        assert torch.equal(one, other)


def counted() -> list[int]:
    """The handle's steps after torch's state-dict functions, which step optimisers, and after real ones."""
    model, optimizer = sharded_gpt()
    handle = laconic.compress(model, optimizer, "cgx()")
    found = []
    state = get_optimizer_state_dict(model, optimizer)
    found.append(handle.stats().steps)
    step_on(model, optimizer, 0)
    found.append(handle.stats().steps)
    set_optimizer_state_dict(model, optimizer, state)
    step_on(model, optimizer, 1)
    return [*found, handle.stats().steps]


def test_a_step_without_gradients_is_not_counted(pool: Any) -> None:
    assert pool.run(2, counted, timeout_s=LONG) == [[0, 1, 2]] * 2


def loaded_first(machines: bool) -> list[int]:
    """Steps where a handle's state is loaded before the optimiser's, and after a real step in place."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1) if machines else (2,), mesh_dim_names=("a", "b")[: 1 + machines])

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer, laconic.compress(model, optimizer, "cgx(bits=4)")

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    model, optimizer, handle = made()
    for _ in range(3):
        step(model, optimizer)
    state, inner = handle.state_dict(), get_optimizer_state_dict(model, optimizer)
    step(model, optimizer)
    handle.load_state_dict(state)
    step(model, optimizer)
    found = [handle.stats().steps]
    model, optimizer, handle = made()
    handle.load_state_dict(state)
    set_optimizer_state_dict(model, optimizer, inner)
    return [*found, handle.stats().steps]


@pytest.mark.parametrize("machines", [False, True])
def test_steps_go_on_from_a_loaded_state(pool: Any, machines: bool) -> None:
    assert pool.run(2, loaded_first, machines, timeout_s=LONG) == [[4, 3]] * 2


def discarded() -> tuple[int, int, bool]:
    """Residuals before and after they are thrown away, and whether training goes on."""
    model, optimizer = sharded_gpt()
    handle = laconic.compress(model, optimizer, FED)
    step_on(model, optimizer, 0)
    before = len(handle.state_dict()["memory"])
    handle.discard()
    after = len(handle.state_dict()["memory"])
    return before, after, step_on(model, optimizer, 1) > 0


def test_what_is_held_back_can_be_thrown_away(pool: Any) -> None:
    for before, after, goes_on in pool.run(2, discarded, timeout_s=LONG):
        assert before > 0 == after and goes_on


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
        assert nothing == "a state of a handle is a dictionary, got None"
        assert same
    with pytest.raises(StateError, match="resize takes no states of a model under fully_shard"):
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


def by_turns() -> tuple[list[float], list[str]]:
    """The relative error of each layer's summed gradient after 20 steps of each, and what was warned of."""
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
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]
    return errors, [str(each.message) for each in told if "several sets" in str(each.message)]


def test_what_is_left_of_one_parameter_does_not_go_to_another(pool: Any) -> None:
    for errors, told in pool.run(2, by_turns):
        assert max(errors) < 0.01
        assert len(told) == 1 and "the model has gradients for 1,024 of 2,048 elements" in told[0]


def thawed() -> float:
    """The largest entry of a gradient that is zero, after another layer of its size was trained."""
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
    return float(model[1].weight.grad.full_tensor().abs().max())


def test_what_is_left_of_a_layer_that_is_frozen_does_not_go_to_the_one_that_thaws(pool: Any) -> None:
    assert pool.run(2, thawed) == [0.0, 0.0]


def test_with_error_feedback_the_error_of_the_mean_falls(pool: Any) -> None:
    """Without it the mean of 40 equal gradients is as wrong as each of them."""
    for spec, most in ((FED, 1 / 20), ("cgx(bits=2)", 2.0)):
        first = pool.run(2, mean_of_gradients, spec, 1, timeout_s=LONG)
        last = pool.run(2, mean_of_gradients, spec, 40, timeout_s=LONG)
        for before, after in zip(first, last, strict=True):
            assert before > 0.02
            assert after < most * before
            assert spec == FED or after > 0.5 * before


def removed() -> tuple[Tensor, Tensor, int, bool]:
    plain = train(None, 2)[2]
    model, optimizer = sharded_gpt()
    before = [scatter_of(module) for _, module in scattering(model)]
    handle = laconic.compress(model, optimizer, "cgx(bits=2)")
    handle.remove()
    after = [scatter_of(module) for _, module in scattering(model)]
    for step in range(2):
        step_on(model, optimizer, step)
    same = all(one is other for one, other in zip(before, after, strict=True))
    return plain, whole(model), handle.stats().payload_sent, same


def test_removed_it_is_plain_sharded_training(pool: Any) -> None:
    for plain, after, payload, same in pool.run(2, removed, timeout_s=LONG):
        assert torch.equal(plain, after) and payload == 0 and same


def inf_on_one_rank() -> tuple[list[bool], bool]:
    model, optimizer = sharded_gpt()
    laconic.compress(model, optimizer, "cgx(bits=4)")
    loss = loss_of(model, 0)
    if dist.get_rank() == 1:
        loss = loss + model.head(torch.full((32,), 1e38)).sum() * 1e38
    loss.backward()
    grads = [p.grad.to_local() for p in model.parameters()]
    bad = [not bool(grad.isfinite().all()) for grad in grads if grad.numel()]
    optimizer.zero_grad()
    step_on(model, optimizer, 1)
    return bad, bool(whole(model).isfinite().all())


def test_inf_on_one_rank_is_seen_on_all(pool: Any) -> None:
    """As a NaN in the shard of each, so that whoever looks skips the step; the next one is as ever."""
    for bad, finite in pool.run(2, inf_on_one_rank, timeout_s=LONG):
        assert any(bad) and finite


class Mine:
    """A reduce-scatter that a user has made."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *_: Any, **__: Any) -> None: ...


def refusals() -> list[str]:
    model, optimizer = sharded_gpt()
    said = []
    for spec in (
        "topk(density=0.01)",
        "dgc(density=0.01)",
        "onebit_adam(warmup_steps=3)",
        "terngrad()",
        "dense()",
        "cgx(bits=99)",
    ):
        try:
            laconic.compress(model, optimizer, spec)
        except (AttachError, SpecError) as error:
            said.append(str(error))
    mine = "cgx(bits=4)" if dist.get_rank() else "cgx(bits=5)"
    late = torch.optim.SGD(GPT().parameters(), lr=0.1)
    for spec, steps in ((mine, optimizer), ("cgx()", late), ("cgx()", [optimizer, late])):
        try:
            laconic.compress(model, steps, spec)
        except AttachError as error:
            said.append(str(error))
    layer, scaler = model.layers[0], torch.amp.GradScaler("cpu")
    own = scatter_of(layer)
    for set_on, given in ((Mine(), None), (own, scaler)):
        layer.set_custom_reduce_scatter(set_on)
        try:
            laconic.compress(model, optimizer, "cgx()", scaler=given)
        except AttachError as error:
            said.append(str(error))
    handle = laconic.compress(model, [optimizer], "cgx()")  # as trainers hold it
    try:
        laconic.compress(model, optimizer, "cgx(bits=8)")
    except AttachError as error:
        said.append(str(error))
    return [*said, repr(handle)]


def test_what_cannot_be_sharded_is_refused_on_every_rank(pool: Any) -> None:
    expected = (
        "topk(density=0.01) cannot be sharded: gather(",
        "dgc(density=0.01) cannot be sharded: ",
        "onebit_adam(warmup_steps=3) cannot be sharded: it",
        "terngrad() cannot be sharded: shared_scale() has no first half",
        "dense() cannot be sharded: it sums, as fully_shard does",
        "cgx: minmax: bits must be a whole number in 1..8, got 99",
        "nothing was attached: the spec differs",
        "this optimiser is over none of the model's parameters",
        "a model under fully_shard takes one optimiser, got 2",
        "layers.0 has a custom reduce-scatter already, Mine, and takes one",
        "scaler= is for a memory that is kept unscaled, and that of sharded models is not",
        "this model is compressed already, with cgx()",
    )
    for *said, name in pool.run(2, refusals, timeout_s=LONG):
        assert len(said) == len(expected)
        for message, start in zip(said, expected, strict=True):
            assert message.startswith(start), message
        assert name.startswith("<cgx() on ") and name.endswith("of 2>")


def by_hand(codec_spec: str) -> tuple[Tensor, Tensor]:
    """This rank's shard of one layer's gradient, and what the definition makes of all ranks' gradients."""
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
    return model.weight.grad.to_local().flatten(), expected


@pytest.mark.parametrize("size", [2, 4])
def test_a_shard_is_what_the_definition_makes_of_it(pool: Any, size: int) -> None:
    """Its own part exactly, the others' as they decode; to the rounding of two ways to multiply matrices."""
    for got, expected in pool.run(size, by_hand, "minmax(bits=3, rounding='stochastic')", timeout_s=LONG):
        assert ((got - expected).abs() > 1e-3).sum() <= 2  # an entry may round the other way
