"""Running average (EMA, SWA) of a sparse model.

In a plain average dropped weights stay nonzero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from laconic.core import arguments
from laconic.core.errors import AttachError
from laconic.sparsity.sparse_training import SparseTraining


class MaskedAverage(AveragedModel):
    """torch's `AveragedModel` under the masks of a sparse training.

    A weight that grows again starts from zero in the average. Call `update_parameters(model)` after each
    step.

    Args:
        model: Plain or under DistributedDataParallel.
        sparse: Its handle of `laconic.sparsity.sparsify` or `rigl`.
        decay: Decay of the average, in [0, 1); None: mean of all steps (SWA).
        options: Options of `AveragedModel`.

    Raises:
        AttachError: The training is of another model.
        SpecError: `decay` is out of range.

    >>> net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 2))
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> from laconic.sparsity import rigl
    >>> average = MaskedAverage(net, rigl(net, optimizer, density=0.2, steps=100))
    >>> average.update_parameters(net)
    >>> int(average.module[0].weight.count_nonzero()) == int(net[0].weight.count_nonzero())
    True
    """

    def __init__(
        self, model: nn.Module, sparse: SparseTraining, decay: float | None = 0.999, **options: Any
    ) -> None:
        if decay is not None:
            arguments.number("decay", decay, least=0, below=1)
            options["multi_avg_fn"] = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        plain = _unwrap(model)
        own = _named(plain)
        if any(own.get(name) is not weight for name, weight in sparse.weights.items()):
            raise AttachError("this sparse training is of another model: pass the model given to sparsify()")
        super().__init__(plain, **options)
        self._sparse = (sparse,)  # a tuple hides it from the submodules

    def update_parameters(self, model: nn.Module) -> None:
        super().update_parameters(_unwrap(model))
        averages = _named(self.module)
        with torch.no_grad():
            for name, mask in self._sparse[0].masks.items():
                averages[name].masked_fill_(~mask.to(averages[name].device), 0)


def _unwrap(model: nn.Module) -> nn.Module:
    inside = next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)
    return model if inside is None else inside.module


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.replace("_orig_mod.", ""): each for name, each in model.named_parameters()}
