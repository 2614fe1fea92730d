"""The all-gather of parameters under `fully_shard`, in few bits."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError, SpecError, StateError
from laconic.core.spec import parse
from laconic.fsdp.models import gather_of, sharded_modules
from tests.dist.pool import on_ranks
from tests.dist.runs import advance
from tests.dist.test_fsdp import LONG, sharded_gpt, step_on, whole


@on_ranks(2, ("minmax(bits=8)", "rotated(minmax(bits=4))", "cast('bf16')"), timeout_s=LONG)
def test_a_module_computes_with_decoded_shards(spec: str) -> None:
    """And its shards stay as they were."""
    torch.manual_seed(0)
    plain = nn.Linear(16, 16, bias=False)
    rows = plain.weight.detach().chunk(dist.get_world_size())
    wanted = torch.cat(
        [parse(spec).decode(parse(spec).encode(each.flatten()), each.numel()) for each in rows]
    )
    model = fully_shard(nn.Sequential(plain))
    before = whole(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laconic.compress(model, optimizer, "cgx(bits=8)", parameters=spec)
    model.unshard()
    computed = plain.weight.detach().clone().flatten()
    model.reshard()
    assert torch.equal(computed, wanted) and torch.equal(whole(model), before)


@on_ranks(2, timeout_s=LONG)
def test_a_resumed_run_has_the_same_bits() -> None:
    """Stochastic rounding draws by step and rank, so a resumed run is the same. Removed, FSDP's is back."""
    spec = "minmax(bits=4, rounding='stochastic')"
    model, optimizer = sharded_gpt()
    own = {name: gather_of(module) for name, module in sharded_modules(model)}
    handle = laconic.compress(model, optimizer, "cgx(bits=8)", parameters=spec)
    for step in range(3):
        step_on(model, optimizer, step)
    kept = (
        [p.detach().clone() for p in model.parameters()],
        deepcopy(optimizer.state_dict()),
        handle.state_dict(),
    )
    for step in range(3, 6):
        step_on(model, optimizer, step)
    end = whole(model)
    handle.remove()
    back = all(gather_of(module) is own[name] for name, module in sharded_modules(model))

    again, optimizer = sharded_gpt()
    handle = laconic.compress(again, optimizer, "cgx(bits=8)", parameters=spec)
    with torch.no_grad():
        for parameter, value in zip(again.parameters(), kept[0], strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(kept[1])
    handle.load_state_dict(kept[2])
    for step in range(3, 6):
        step_on(again, optimizer, step)
    assert torch.equal(whole(again), end) and back


@on_ranks(2, timeout_s=LONG)
def test_a_state_of_another_codec_is_refused() -> None:
    model, optimizer = sharded_gpt()
    handle = laconic.compress(model, optimizer, "cgx(bits=8)", parameters="minmax(bits=8)")
    state = handle.state_dict()
    handle.remove()
    plain = laconic.compress(model, optimizer, "cgx(bits=8)")
    with pytest.raises(StateError, match=r"(?s)parameters.*minmax|minmax.*parameters"):
        plain.load_state_dict(state)
    plain.remove()


@on_ranks(2, timeout_s=LONG)
def test_what_cannot_gather_parameters_is_refused() -> None:
    sharded = sharded_gpt()
    replicated = DistributedDataParallel(nn.Linear(2, 2))
    sgd = torch.optim.SGD(replicated.parameters(), lr=0.1)
    for given, spec, words in (
        (sharded, "topk(density=0.1)", r"(?s)must be a codec.*minmax\(bits=8\)"),
        (sharded, "sparse(topk(density=0.1))", "does not send all parameters"),
        ((replicated, sgd), "minmax(bits=8)", "omit it"),
    ):
        with pytest.raises((AttachError, SpecError), match=words):
            laconic.compress(*given, "cgx(bits=8)", parameters=spec)


@on_ranks(2, timeout_s=LONG)
def test_a_shard_that_is_not_finite_is_seen_on_all() -> None:
    """As NaN, and no rank waits for another."""
    torch.manual_seed(0)
    plain = nn.Linear(16, 16, bias=False)
    model = fully_shard(nn.Sequential(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laconic.compress(model, optimizer, "cgx(bits=8)", parameters="minmax(bits=8)")
    if dist.get_rank() == 1:
        plain.weight.data.to_local().fill_(torch.inf)
    model.unshard()
    computed = plain.weight.detach()
    assert computed[8:].isnan().all() and computed[:8].isfinite().all()
    model.reshard()


class Adapted(nn.Module):
    """A frozen base in bf16 with a float32 adapter beside it, in one sharded module."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32, dtype=torch.bfloat16).requires_grad_(False)
        self.adapter = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.bfloat16()).float() + self.adapter(x)


@on_ranks(2, timeout_s=LONG)
def test_parameters_of_several_dtypes_go_as_they_are_and_count() -> None:
    torch.manual_seed(0)
    model = Adapted()
    plain = deepcopy(model)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = laconic.compress(model, optimizer, "cgx(bits=8)", parameters="minmax(bits=8)")
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(x), plain(x))
    model(x).sum().backward()
    phases = handle.stats().phases.items()
    nbytes = 32 * 33 * (2 + 4)
    assert sum(sent for name, sent in phases if name.startswith("parameters")) >= nbytes / 2, (
        "a rank has half"
    )


@on_ranks(4, timeout_s=LONG)
def test_a_smaller_group_after_forward_has_its_own_gather() -> None:
    """Training goes on where a module is gathered again in a smaller group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    laconic.compress(model, optimizer, "cgx(bits=8)", parameters="minmax(bits=8)")
    advance(model, optimizer, 2, lambda model, step: model(torch.ones(2, 32) * step).sum())
    assert all(bool(each.full_tensor().isfinite().all()) for each in model.parameters())
