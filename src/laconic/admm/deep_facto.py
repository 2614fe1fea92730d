"""DeepFacto: what passes between two blocks is a non-negative matrix of low rank, by multiplicative updates.

Khorram et al. 2021, arXiv:2105.00339. A reconstruction from the abstract: the rules are those of Lee and
Seung (2001), and the running sums by which the parts follow mini-batches are ours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.admm.proximal import Proximal
from laconic.core import arguments
from laconic.core.errors import AttachError

TINY = 1e-8  # keeps quotients finite


class DeepFacto(Proximal):
    """X = S M with S, M >= 0: each sample's code S (rank,) times parts M (rank, features) that all share.

        V = max(x, 0)                                           rows x features
        S <- S * (V M^T) / (S M M^T + e)                        `updates` times, from equal entries
        A <- decay A + S^T S,  B <- decay B + S^T V,  M <- M * B / (A M + e)      in training alone

    Everything stays non-negative, as only non-negative factors multiply it. A layer without parameters that
    back-propagation cannot train: it begins a block, and its parts are buffers.

    Args:
        features: Elements of a sample, the product of its dimensions.
        rank: How many parts.
        updates: Of the code, for each batch.
        decay: How much the running sums of past mini-batches keep, in [0, 1).
        seed: Of the parts at the start.
        device: Of the parts, which are float32; default: torch's.

    >>> x = torch.rand(5, 8)
    >>> facto = DeepFacto(features=8, rank=3)
    >>> facto.code(x).shape, facto.parts.shape, facto(x).shape
    (torch.Size([5, 3]), torch.Size([3, 8]), torch.Size([5, 8]))
    """

    parts: Tensor
    codes: Tensor
    products: Tensor

    def __init__(
        self,
        features: int,
        rank: int,
        *,
        updates: int = 10,
        decay: float = 0.99,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(nn.Identity())
        arguments.whole("features", features, 1)
        arguments.whole("rank", rank, 1, features, "a higher rank than there are features constrains nothing")
        arguments.whole("updates", updates, 1)
        arguments.number("decay", decay, least=0, below=1)
        self.features, self.rank, self.updates, self.decay = features, rank, updates, decay
        rng = torch.Generator("cpu").manual_seed(seed)
        parts = 0.01 + torch.rand(rank, features, generator=rng, dtype=torch.float32, device="cpu")
        self.register_buffer(
            "parts", torch.empty(rank, features, dtype=torch.float32, device=device).copy_(parts)
        )
        self.register_buffer("codes", torch.zeros(rank, rank, dtype=torch.float32, device=device))  # A
        self.register_buffer("products", torch.zeros(rank, features, dtype=torch.float32, device=device))  # B

    @torch.no_grad()
    def code(self, x: Tensor) -> Tensor:
        """The code of each sample: x (rows, ...) of `features` elements to float32 (rows, rank), >= 0."""
        return self._coded(self._positive(x))

    def error(self, x: Tensor) -> float:
        """|max(x, 0) - S M| / |max(x, 0)|: what the factorisation loses of these samples."""
        v = self._positive(x)
        return float((v - self._coded(v) @ self.parts).norm() / v.norm().clamp(min=TINY))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """S M, of the shape of x."""
        return (self.code(x) @ self.parts).view_as(x).to(x.dtype)

    @torch.no_grad()
    def learn(self, x: Tensor) -> Tensor:
        """S M, after the parts have had an update."""
        v = self._positive(x)
        code = self._coded(v)
        self.codes.mul_(self.decay).add_(code.T @ code)
        self.products.mul_(self.decay).add_(code.T @ v)
        self.parts.mul_(self.products / (self.codes @ self.parts + TINY))
        self.parts.clamp_(min=TINY)  # from 0 no product leads back, and a feature may come later
        return (code @ self.parts).view_as(x).to(x.dtype)

    def extra_repr(self) -> str:
        return f"features={self.features}, rank={self.rank}"

    def _positive(self, x: Tensor) -> Tensor:
        flat = x.detach().flatten(1).float()
        if flat.shape[1] != self.features:
            raise AttachError(
                f"deep_facto has {self.features} features, and a sample of {tuple(x.shape[1:])} has"
                f" {flat.shape[1]}: DeepFacto(features={flat.shape[1]}, rank={self.rank})"
            )
        return flat.clamp(min=0)

    def _coded(self, v: Tensor) -> Tensor:
        """From entries whose products have the mean of v, so that few updates are enough."""
        start = v.mean(1, keepdim=True) / (self.parts.mean() * self.rank + TINY)
        code = start.expand(-1, self.rank).clone()
        wanted, gram = v @ self.parts.T, self.parts @ self.parts.T
        for _ in range(self.updates):
            code = code * wanted / (code @ gram + TINY)
        return code
