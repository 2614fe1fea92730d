"""ZeroFL's uplink masks: the part of a model that a client sends.

    rho = 1 - sparsity + mask_ratio, for every sparse layer; other tensors are sent in full
    TopWeights         w_E         on the top-rho of |w_E|          w_{t+1} = sum_k n_k/n w^k
    DiffOnTopWeights   w_E - w_t   on the top-rho of |w_E|          w_{t+1} = w_t + sum_k n_k/n d^k
    TopDiff            w_E - w_t   on the top-rho of |w_E - w_t|    w_{t+1} = w_t + sum_k n_k/n d^k

w_t: the server's weights at the start of a round, w_E: a client's after its local epochs by
`laconic.sparsity.swat`. Unsent entries count as zero. Qiu et al. 2022, arXiv:2208.02507 (ICLR): masks,
averages and sizes as in the paper; there is no public code.

Nonzero entries are sent by `sparse(topk(density=rho), indices=golomb())`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.dense import Dense
from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.sparse import Sparse
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.layout_codec import LayoutCodec, Part
from laconic.core.selector import kept
from laconic.core.turn import Turn

NO_DRAWS = Turn(0, 0, 0)


@dataclass(frozen=True)
class UplinkMask(ABC):
    """Selection of the entries of sparse layers to send.

    Args:
        sparsity: Of local training, in (0, 1); default: 0.9.
        mask_ratio: Share of entries to send beyond 1 - sparsity, in [0, sparsity]; default: 0.1.

    Raises:
        SpecError: One is out of range.
    """

    sparsity: float = 0.9
    mask_ratio: float = 0.1

    additive: ClassVar[bool]  # whether the server adds the average, or replaces its weights

    def __post_init__(self) -> None:
        arguments.number("sparsity", self.sparsity, above=0, below=1)
        hint = "the share sent is 1 - sparsity + mask_ratio, at most 1"
        arguments.number("mask_ratio", self.mask_ratio, least=0, most=self.sparsity, hint=hint)

    @property
    def density(self) -> float:
        return min(1.0, round(1 - self.sparsity + self.mask_ratio, 12))

    @property
    def codec(self) -> Sparse:
        return Sparse(TopK(density=self.density), indices=GOLOMB)

    @abstractmethod
    def content(self, start: Tensor, end: Tensor, segments: Segments) -> Tensor:
        """Return the tensor whose nonzero entries are sent, float32 (n,).

        Args:
            start: w_t, float32 (n,).
            end: w_E, float32 (n,).
            segments: The sparse layers, each masked alone.
        """

    def rest(self, start: Tensor, end: Tensor) -> Tensor:
        """Return the weights or differences of all other tensors."""
        return end - start if self.additive else end


@dataclass(frozen=True)
class TopWeights(UplinkMask):
    """Top-K-Weights: the largest weights. An entry that no client sends becomes zero."""

    additive: ClassVar[bool] = False

    def content(self, start: Tensor, end: Tensor, segments: Segments) -> Tensor:
        return end


@dataclass(frozen=True)
class DiffOnTopWeights(UplinkMask):
    """Diff on Top-K-Weights: the changes of the largest weights."""

    additive: ClassVar[bool] = True

    def content(self, start: Tensor, end: Tensor, segments: Segments) -> Tensor:
        indices, counts = self.codec.select.select_segments(end, segments, [0] * len(segments))
        first = (
            torch.tensor(segments.starts, dtype=torch.int64, device="cpu")
            .repeat_interleave(counts)
            .to(end.device)
        )
        chosen, masked = first + indices, torch.zeros_like(end)
        masked[chosen] = end[chosen] - start[chosen]
        return masked


@dataclass(frozen=True)
class TopDiff(UplinkMask):
    """Top-K-Weights Diff: the largest changes."""

    additive: ClassVar[bool] = True

    def content(self, start: Tensor, end: Tensor, segments: Segments) -> Tensor:
        return end - start


class Uplink:
    """Encoder and decoder of clients' messages.

    Wire: all dense tensors of the layout, buffers included, float32, in its order; then one message of
    `mask.codec` with the sparse tensors.

    Args:
        mask: `TopWeights`, `DiffOnTopWeights` or `TopDiff`.
        layout: Positions of tensors in n weights.
        sparse: Names of sparse tensors: `Swat.weights`.

    Raises:
        SpecError: A sparse name is not in the layout, or `sparse` is empty.

    >>> layout = Layout.of([("weight", (2, 4)), ("bias", (2,))])
    >>> uplink = Uplink(TopDiff(sparsity=0.75, mask_ratio=0.0), layout, ["weight"])
    >>> start, end = torch.zeros(10), torch.arange(10.0)
    >>> wire = uplink.encode(start, end)
    >>> uplink.decode(wire).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 6.0, 7.0, 8.0, 9.0]
    """

    def __init__(self, mask: UplinkMask, layout: Layout, sparse: Collection[str]) -> None:
        if missing := sorted(set(sparse) - set(layout.names)):
            raise SpecError(f"sparse: the layout has no {missing[0]!r}; pass the names of Swat.weights")
        if not sparse:
            raise SpecError("sparse: no tensor is masked; pass the names of Swat.weights")
        self.mask, self.layout = mask, layout
        masked = layout.named(sparse)
        rest = layout.where(lambda entry: entry.name not in frozenset(sparse))
        self._masked = masked.segments
        self._wires = LayoutCodec((Part(rest, Dense()), Part(masked, mask.codec)))

    def encode(self, start: Tensor, end: Tensor) -> Tensor:
        """Encode w_t and w_E, float32 (n,) and finite, to uint8 (m,)."""
        content, x = self.mask.content(start, end, self._masked), self.mask.rest(start, end).clone()
        for own, sent in zip(self._masked.views(x), self._masked.views(content), strict=True):
            own.copy_(sent)
        return self._wires.encode(x, NO_DRAWS)

    def decode(self, wire: Tensor) -> Tensor:
        """Decode a message to float32 (n,), zero where not sent. Raises `WireError`."""
        out = torch.zeros(self.layout.segments.end, dtype=torch.float32, device="cpu")
        return self._wires.decode_add_(wire, out, NO_DRAWS.step)

    def next_weights(self, start: Tensor, wires: Sequence[Tensor], examples: Sequence[int]) -> Tensor:
        """Return w_{t+1}, float32 (n,), from w_t and one message per client.

        Args:
            start: w_t, float32 (n,).
            wires: The messages, summed in this order.
            examples: Number of each client's examples.

        Raises:
            SpecError: There is no message, or a client has no examples.
            WireError: A message is invalid.
        """
        if len(wires) != len(examples) or min(examples, default=0) < 1:
            raise SpecError(
                f"examples must be 1 or more for each message, got {[*examples]} for {len(wires)}"
                " messages: omit clients that did not train"
            )
        total, mean = sum(examples), torch.zeros_like(start)
        for wire, count in zip(wires, examples, strict=True):
            mean.add_(self.decode(wire), alpha=count / total)
        return start + mean if self.mask.additive else mean


def csr_nbytes(shapes: Mapping[str, Sequence[int]], sparse: Collection[str], density: float) -> int:
    """Return a message's bytes as the paper counts them: every tensor in CSR.

    A tensor is a matrix of shape[0] rows, or of one row: float32 values, an int32 column each, and int32 row
    pointers, 8 k + 4 (rows + 1). It gives the paper's sizes, in units of 1,024,000 bytes, for ResNet-18 with
    all 3 x 3 convolutions but the first sparse.

    >>> csr_nbytes({"weight": (4, 8), "bias": (4,)}, ["weight"], density=0.25)
    124
    """
    total = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        total += 8 * (kept(density, size) if name in sparse else size) + 4 * (rows + 1)
    return total
