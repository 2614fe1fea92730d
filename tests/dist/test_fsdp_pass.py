"""The backward pass of a model under `fully_shard` ends after the last gradient that FSDP2 reduces."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import laconic
from tests.dist.pool import on_ranks
from tests.dist.test_fsdp import FED, LONG, close_to_the_mean

SPECS = {False: FED, True: "topk(density=0.2)"}  # by whether shards have replicas


class Words(nn.Module):
    """A layer under an embedding, whose input has no gradient: FSDP2 reduces that of the embedding last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(8, 16), nn.Linear(16, 16)
        self.spoils = False  # whether the embedding's gradient is infinite

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.embed(tokens)
        if self.spoils:
            found.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call]
        out: Tensor = self.layer(found)
        return out


def sharded_words(replicated: bool, output_dtype: torch.dtype | None) -> tuple[nn.Module, nn.Module]:
    """The model in shards on two ranks, or replicated on them; and the same model, plain."""
    torch.manual_seed(0)
    model, plain = Words(), Words()
    plain.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (2, 1) if replicated else (1, 2), mesh_dim_names=("machines", "shards"))
    options: dict[str, Any] = {"mesh": mesh if replicated else mesh["shards"]}
    fully_shard(model.layer, **options)
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=output_dtype), **options), plain


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randint(8, (5,), generator=generator)).square().sum().backward()


# With output_dtype, gradients reach the output before they reach FSDP2, whose last callback then comes
# after one of ours.
CASES = [(replicated, dtype) for replicated in (False, True) for dtype in (None, torch.float64)]


@on_ranks(2, CASES, timeout_s=LONG)
def test_the_gradient_that_is_reduced_last_is_the_mean(
    replicated: bool, output_dtype: torch.dtype | None
) -> None:
    model, plain = sharded_words(replicated, output_dtype)
    spec = "sum()" if replicated else "scatter_reduce(dense())"
    laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), spec)
    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        backward(model, step)
        backward(plain, step)
        close_to_the_mean(model, plain, 1e-6)


@on_ranks(2, CASES, timeout_s=LONG)
def test_the_gradient_that_is_reduced_last_can_skip_the_step(
    replicated: bool, output_dtype: torch.dtype | None
) -> None:
    model, _ = sharded_words(replicated, output_dtype)
    handle = laconic.compress(model, torch.optim.SGD(model.parameters(), lr=0.1), SPECS[replicated])

    def memory(step: int, spoilt: bool) -> dict[str, Tensor]:
        model.zero_grad()
        model.spoils = spoilt and dist.get_rank() == 1
        backward(model, step)
        spoilt_all = all(bool(each.grad.to_local().isnan().all()) for each in model.parameters())
        assert spoilt_all == spoilt
        return {key: each.clone() for key, each in handle.state_dict()["memory"].items()}

    before = memory(0, spoilt=False)
    after = memory(1, spoilt=True)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    later = memory(2, spoilt=False)
    assert any(not torch.equal(before[key], later[key]) for key in before)
