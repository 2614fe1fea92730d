"""What is trained in `benchmarks.steps`: a small GPT, and a tall stack of square layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.tools.tasks import digits

VOCABULARY, CONTEXT = 65, 256  # as many characters as Shakespeare's plays have, and positions
Step = Callable[[nn.Module], Tensor]  # a model's loss on a batch


@dataclass(frozen=True)
class Workload:
    """A training on so many hosts. `make`: the model, the same on every rank, and its loss on a batch."""

    name: str
    hosts: int
    about: str
    make: Callable[[], tuple[nn.Module, Step]]


class GPT(nn.Module):
    """A decoder of characters: blocks of masked attention and a layer that is four times as wide."""

    def __init__(self, depth: int, width: int, heads: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = torch.triu(torch.full((length, length), -torch.inf), diagonal=1)
        x = self.characters(text) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        head: Tensor = self.head(self.norm(x))
        return head


def gpt(
    depth: int = 6, width: int = 384, heads: int = 6, batch: int = 8, length: int = 64
) -> tuple[GPT, Step]:
    """10.8 million parameters, on characters drawn at random: what is measured does not depend on them."""
    torch.manual_seed(0)
    model = GPT(depth, width, heads)
    text = torch.randint(VOCABULARY, (batch, length + 1))

    def loss(called: nn.Module) -> Tensor:
        return F.cross_entropy(called(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return model, loss


def square(depth: int = 23, width: int = 1024, batch: int = 8) -> tuple[nn.Module, Step]:
    """24.1 million parameters with little to compute: links are all that matters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
    x, y = torch.randn(batch, width), torch.randn(batch, width)

    def loss(called: nn.Module) -> Tensor:
        return F.mse_loss(called(x), y)

    return nn.Sequential(*layers[:-1]), loss


def digits_net(batch: int = 32) -> tuple[nn.Module, Step]:
    """A step of milliseconds, so that what a message costs shows."""
    torch.manual_seed(0)
    x, y = torch.randn(batch, 1, 8, 8), torch.randint(10, (batch,))

    def loss(called: nn.Module) -> Tensor:
        return F.cross_entropy(called(x), y)

    return digits.wide(), loss


WORKLOADS = {
    each.name: each
    for each in (
        Workload("gpt", 2, "a GPT, 6 layers of width 384, batches of 8 x 64 characters", gpt),
        Workload("gpt-4", 4, "the same GPT", gpt),
        Workload("square", 4, "23 linear layers of 1024 x 1024, batches of 8", square),
        Workload("digits", 4, "the net of `laconic demo`, 2.2 million parameters, batches of 32", digits_net),
    )
}
