"""DeepFacto: non-negative low-rank factorisation of the activations between two blocks.

Khorram et al. 2021, arXiv:2105.00339; a reconstruction from the abstract, with the updates of Lee and Seung
(2001). The running sums are ours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laconic.admm.proximal import Proximal
from laconic.core import arguments
from laconic.core.errors import AttachError

TINY = 1e-8  # keeps quotients finite


class DeepFacto(Proximal):
    """X = S M with S, M >= 0: a code S (rank,) per sample times shared parts M (rank, features).

        V = max(x, 0), e = 1e-8                                 rows x features
        S <- S * (V M^T) / (S M M^T + e)                        `updates` times, from equal entries
        A <- decay A + S^T S,  B <- decay B + S^T V,  M <- M * B / (A M + e)      only in training

    The layer begins a block. Its parts are buffers, not trained by back-propagation.

    Args:
        features: Elements of a sample.
        rank: Number of parts.
        updates: Updates of the code per batch.
        decay: Decay of the running sums per mini-batch, in [0, 1).
        seed: Seed of the initial parts.
        device: Device of the parts (float32); default: torch's.

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
        """Return the codes float32 (rows, rank), >= 0, of x (rows, ...)."""
        return self._encode(self._nonnegative(x))

    def error(self, x: Tensor) -> float:
        """Return the relative error |max(x, 0) - S M| / |max(x, 0)|."""
        v = self._nonnegative(x)
        return float((v - self._encode(v) @ self.parts).norm() / v.norm().clamp(min=TINY))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return (self.code(x) @ self.parts).view_as(x).to(x.dtype)

    @torch.no_grad()
    def learn(self, x: Tensor) -> Tensor:
        v = self._nonnegative(x)
        code = self._encode(v)
        self.codes.mul_(self.decay).add_(code.T @ code)
        self.products.mul_(self.decay).add_(code.T @ v)
        self.parts.mul_(self.products / (self.codes @ self.parts + TINY))
        self.parts.clamp_(min=TINY)  # a part of 0 could never grow again
        return (code @ self.parts).view_as(x).to(x.dtype)

    def extra_repr(self) -> str:
        return f"features={self.features}, rank={self.rank}"

    def _nonnegative(self, x: Tensor) -> Tensor:
        flat = x.detach().flatten(1).float()
        if flat.shape[1] != self.features:
            raise AttachError(
                f"deep_facto has {self.features} features, and a sample of {tuple(x.shape[1:])} has"
                f" {flat.shape[1]}: DeepFacto(features={flat.shape[1]}, rank={self.rank})"
            )
        return flat.clamp(min=0)

    def _encode(self, v: Tensor) -> Tensor:
        """Return the codes, from equal entries: S M has the mean of v."""
        start = v.mean(1, keepdim=True) / (self.parts.mean() * self.rank + TINY)
        code = start.expand(-1, self.rank).clone()
        wanted, gram = v @ self.parts.T, self.parts @ self.parts.T
        for _ in range(self.updates):
            code = code * wanted / (code @ gram + TINY)
        return code
