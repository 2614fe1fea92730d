"""ZeroFL: clients train with sparse weights, and send part of each sparse layer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import nn

from laconic.codecs.selectors.topk import TopK
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.federated.form import Tensors
from laconic.federated.schemes import Scheme
from laconic.federated.zerofl import DiffOnTopWeights, TopDiff, UplinkMask

if TYPE_CHECKING:
    from laconic.sparsity import Swat

Mask = Literal["top_diff", "diff_on_top_weights"]
MASKS: dict[str, type[UplinkMask]] = {"top_diff": TopDiff, "diff_on_top_weights": DiffOnTopWeights}


@dataclass(frozen=True, repr=False)
class ZeroFL(Scheme):
    """Local training by `laconic.sparsity.swat`; w += sum over clients k of n_k / n * (w_k - w) on a mask.

    Qiu et al. 2022, arXiv:2208.02507. Clients train, and the server evaluates, with the largest 1 - sparsity
    of each sparse layer's weights; the first layer is dense. A client sends rho = 1 - sparsity + mask_ratio
    of each sparse layer: the largest changes ("top_diff"), or the changes of the largest weights
    ("diff_on_top_weights"). Other entries are lost. The model is sent uncompressed.

    Args:
        sparsity: Of local training, in (0, 1); default: 0.9.
        mask_ratio: Share of entries to send beyond 1 - sparsity, in [0, sparsity]; default: 0.1.
        mask: "top_diff" (default) or "diff_on_top_weights".
        keep: Modules that stay dense, with children.

    >>> ZeroFL(mask_ratio=0.2)
    zerofl(mask_ratio=0.2)
    """

    sparsity: float = 0.9
    mask_ratio: float = 0.1
    mask: Mask = "top_diff"
    keep: tuple[str, ...] = ()

    name: ClassVar[str] = "zerofl"
    paper: ClassVar[str] = "Qiu et al. 2022, arXiv:2208.02507"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("zerofl(sparsity=0.9, mask_ratio=0.1)",)
    _swat: ClassVar[Swat | None] = None

    def __post_init__(self) -> None:
        arguments.choice("mask", self.mask, get_args(Mask))
        arguments.names("keep", self.keep, "head")
        _ = self._uplink  # checks arguments

    @property
    def _uplink(self) -> UplinkMask:
        return MASKS[self.mask](self.sparsity, self.mask_ratio)

    @property
    def up(self) -> Any:
        select = TopK(density=self._uplink.density)
        return f"by_name({dict.fromkeys(self._attached.weights, select)!r}, rest=dense())"

    @property
    def _attached(self) -> Swat:
        if self._swat is None:
            raise SpecError(
                "zerofl needs the model that clients train: call attached(model), or use `laconic federate`;"
                " in your own Flower app, send with laconic.federated.zerofl.Uplink"
            )
        return self._swat

    def attached(self, net: nn.Module) -> Scheme:
        from laconic.sparsity import swat

        made = copy.copy(self)
        object.__setattr__(made, "_swat", swat(net, self.sparsity, keep=self.keep))
        object.__setattr__(made, "_fresh", made._attached.state_dict())
        return made

    def begin(self) -> None:
        fresh: Any = vars(self)["_fresh"]
        self._attached.load_state_dict(fresh)  # each client computes its own thresholds

    def shared(self, model: Tensors, trained: Tensors) -> Tensors:
        return trained | {name: self._masked(model[name], trained[name]) for name in self._attached.weights}

    def _masked(self, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Return `end` where it is sent, else `start`: a client's residual stays zero."""
        content = self._uplink.content(start.flatten(), end.flatten(), Segments.whole(start.numel()))
        chosen = self._uplink.codec.select.select(content, 0).long()
        sent = torch.zeros_like(content).index_copy_(0, chosen, content[chosen])
        return torch.where(sent.view_as(start) != 0, end, start)
