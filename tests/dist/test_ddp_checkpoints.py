"""torch's distributed checkpoints of an optimiser whose momentum a method keeps."""

from __future__ import annotations

import copy

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.nets import flat
from tests.dist.pool import on_ranks
from tests.dist.runs import compressed


@on_ranks(2)
def test_a_handle_that_is_loaded_last_goes_on_with_the_same_bits() -> None:
    def made() -> tuple[DistributedDataParallel, torch.optim.Optimizer, laconic.ddp.handle.Handle]:
        return compressed("dgc(density=0.1)")

    def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 3):
            rng = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
            x = torch.randn(8, 20, generator=rng)
            optimizer.zero_grad()
            cross_entropy(model(x), x[:, :5].argmax(1)).backward()
            optimizer.step()

    model, optimizer, handle = made()
    train(model, optimizer, 0)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    state, inner = copy.deepcopy((handle.state_dict(), get_optimizer_state_dict(model, optimizer)))
    train(model, optimizer, 3)
    again, other, its = made()
    again.load_state_dict(weights)
    set_optimizer_state_dict(again, other, inner, options=StateDictOptions(strict=False))
    its.load_state_dict(state)
    train(again, other, 3)
    whole, again = flat(model), flat(again)
    assert torch.equal(whole, again)
