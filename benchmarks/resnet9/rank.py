"""One rank of a training of ResNet-9, on a CPU or a GPU: ranks are threads that meet in a Loopback.

They exchange as `laconic.compress` and `laconic.distribute` do, and bytes are counted as there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from benchmarks.common.workers import ByMethod, ByStrategy, in_turn
from benchmarks.resnet9.model import Data, augmented, resnet9
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.exchange.method import Method
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from laconic.tools.tasks.task import Recipe

PEAK, RISING, DECAY, SMOOTHING = 0.4, 0.2, 5e-4, 0.1
TESTED = 500  # images at once: they and their activations fit into a CPU's cache


class Rank:
    """A model and its optimiser, bound to the other ranks by a method or a strategy.

    `width`: channels of the first convolution. `peak`: of the learning rate. Ranks of one seed begin with the
    same weights and share each epoch's order of images, whatever the method.
    """

    def __init__(
        self,
        comm: Loopback,
        spec: str,
        images: Data,
        device: torch.device,
        batch: int,
        width: int,
        seed: int = 0,
        peak: float = PEAK,
    ) -> None:
        self.comm, self.images, self.device, self.batch, self.peak = comm, images, device, batch, peak
        self.metered = Metered(comm.split(0))
        self.model: nn.Module = in_turn(comm, lambda: resnet9(width), seed).to(device)
        self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        by = strategy_or_method(spec)
        self.optimizer = optimizer(self.model, by, peak)
        kind = ByStrategy if isinstance(by, Strategy) else ByMethod
        self.by = kind(by, self.model, self.optimizer, self.metered, seed)  # type: ignore[arg-type]
        if isinstance(self.by, ByMethod):
            self.by.bucket = self.by.bucket.to(device)
        self.metered.reset()
        self.order = torch.Generator().manual_seed(5 + 1000 * seed)  # the same on all ranks
        self.draws = torch.Generator().manual_seed(100 + comm.rank + 1000 * seed)
        self.permutation = torch.empty(0, dtype=torch.int64)

    def step(self, step: int, total: int) -> Tensor:
        """Train one step, and return the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * rate(step, total)
        chosen = self._next()
        x = augmented(self.images["train_x"][chosen], self.draws)
        y = self.images["train_y"][chosen]
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = functional.cross_entropy(self.model(x).float(), y, label_smoothing=SMOOTHING)
        loss.backward()  # type: ignore[no-untyped-call]
        self.by.step(float("nan"))
        return loss.detach()

    def _next(self) -> Tensor:
        each = self.batch * self.comm.size
        if len(self.permutation) < each:
            count = len(self.images["train_y"])
            self.permutation = torch.randperm(count, generator=self.order).to(self.device)
        chosen, self.permutation = self.permutation[:each], self.permutation[each:]
        return chosen[self.comm.rank :: self.comm.size]

    def tested(self, part: slice = slice(None)) -> tuple[float, float]:
        """Return the number of test images classified correctly and the sum of their losses.

        `part`: of the test images; default: all.
        """
        self.model.eval()
        sums = torch.zeros(2, device=self.device)
        pairs = zip(*(self.images[name][part].split(TESTED) for name in ("test_x", "test_y")), strict=True)
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            for x, y in pairs:
                out = self.model(x.float().contiguous(memory_format=torch.channels_last)).float()
                sums[0] += (out.argmax(1) == y).sum()
                sums[1] += functional.cross_entropy(out, y, reduction="sum")
        self.model.train()
        right, loss = sums.tolist()
        return right, loss

    def smaller(self, steps: int) -> float:
        """Return how many times fewer bytes a rank has sent than dense training sends."""
        count = sum(each.numel() for each in self.model.parameters())
        dense = self.metered.dense_sent(4 * count)
        return round(dense * steps / max(1, self.metered.snapshot().network_sent), 2)


def optimizer(model: nn.Module, by: Method | Strategy, peak: float) -> Optimizer:
    """Return SGD with Nesterov momentum and weight decay, or the optimiser that the method needs."""
    return Recipe(resnet9, peak, nesterov=True, weight_decay=DECAY).optimizer(model, peak, by)


def rate(step: int, total: int) -> float:
    """Return the factor on the learning rate: up for a fifth of the steps, then down to 0.

    >>> rate(0, 10), rate(1, 10), rate(9, 10)
    (0.5, 1.0, 0.125)
    """
    rising = max(1, int(RISING * total))
    return min((step + 1) / rising, (total - step) / (total - rising))
