"""Exchange of codes: averaged over ranks as in a ring, or from one rank to a server, played by all ranks.

A rank's vector w (K,) has its values at common positions over a common scale. With encoder E and decoder D,
the mean is the average of the ranks' parts, g p_i or p_i:

    ring      c = 1/N * sum over i of E(w_i)      p_i = D(c) + D'(c) (E(w_i) - c)     mean = g D(c)
    server    c = E(w_l) of the leader l          p_i = g_i D(c), but w_i on I_i      mean = 1/N * sum p_i
    per_node  c = E(w_l) of the leader l          p_i = g_i D_i(c), but w_i on I_i    mean = 1/N * sum p_i

I_i is the innovation: the places of the few largest |w_i|, whose values every rank sends to all. They are
exact, so that the residual shrinks in every step; in the paper the decoder reads them.

The gains are ours: g_i >= 0 minimises a rank's residual, which a bad net could enlarge; in the ring a common
g minimises the sum of squares over ranks, limited so that no rank's residual grows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.messages import sent_by
from laconic.core.framing import as_bytes, as_numbers, read_bytes
from laconic.core.layout import Segments
from laconic.reducers.entries import Entries, entries_nbytes
from laconic.reducers.learned_code.autoencoder import CHANNELS, Autoencoder, code_length

LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Vector:
    """A rank's values float32 (K,), and their common transform before the net.

    Division by `scale`, rotation by `shift` places, multiplication by signs float32 (K,).
    """

    values: Tensor
    scale: float
    shift: int
    signs: Tensor

    @property
    def normal(self) -> Tensor:
        return self.normalised(self.values)

    def normalised(self, values: Tensor) -> Tensor:
        normal = (values.cpu().double() / self.scale).clamp_(-LARGEST, LARGEST).float()
        return normal.roll(self.shift) * self.signs

    def restored(self, normal: Tensor) -> Tensor:
        values = (normal.double() * self.signs).roll(-self.shift) * self.scale
        return values.clamp_(-LARGEST, LARGEST).float().to(self.values.device)


@dataclass(frozen=True)
class Outcome:
    """Mean of all ranks, and this rank's part: float32 (K,) each."""

    mean: Tensor
    own: Tensor


class CodeExchange(ABC):
    @abstractmethod
    def loss(self, net: Autoencoder, normals: Tensor, leader: int) -> Tensor:
        """Return K times the mean loss over the entries of all ranks' vectors (N, K)."""

    @abstractmethod
    def exchange(self, comm: Comm, weights: Tensor, vector: Vector, leader: int) -> Outcome:
        """Return the approximate mean of all ranks' vectors."""

    @abstractmethod
    def nbytes(self, k: int) -> int:
        """Return the most bytes that a rank sends for k values."""


@dataclass(frozen=True)
class AveragedCode(CodeExchange):
    """Codes averaged by an all_reduce: 4 * ceil(K / 16) float32, and 16 bytes for the gain."""

    def loss(self, net: Autoencoder, normals: Tensor, leader: int) -> Tensor:
        code = net.encode(normals).mean(0, keepdim=True)
        return (net.decode(code, normals.shape[1])[0] - normals.mean(0)).square().sum()

    def exchange(self, comm: Comm, weights: Tensor, vector: Vector, leader: int) -> Outcome:
        normal, k, device = vector.normal, vector.values.numel(), vector.values.device
        code = Autoencoder(weights).encode(normal[None]).flatten()
        mean = comm.all_reduce((code / comm.size).to(device)).cpu()
        codes = [each.double().view(1, CHANNELS, -1) for each in (mean, code)]
        base, change = Autoencoder(weights.double()).decode_along(codes[0], codes[1] - codes[0], k)
        own = (base + change)[0]
        fits = [each.tolist() for each in comm.all_gather(fit(normal, own).to(device))]
        gain = common_gain(fits)
        if not gain:
            return Outcome(torch.zeros_like(vector.values), torch.zeros_like(vector.values))
        return Outcome(vector.restored(gain * base[0]), vector.restored(gain * own))

    def nbytes(self, k: int) -> int:
        return 4 * code_length(k) + 16


@dataclass(frozen=True)
class LeaderCode(CodeExchange):
    """Code broadcast by the leader; every rank sends its gain and `innovation` entries to all others."""

    innovation: int

    def loss(self, net: Autoencoder, normals: Tensor, leader: int) -> Tensor:
        size, k = normals.shape
        codes = net.encode(normals)
        decoded = [node.decode(codes[leader : leader + 1], k) for node in net.nodes()]
        left = torch.cat(decoded) - normals
        rest = torch.stack([self._rest(normal) for normal in normals])
        apart = (codes - codes.mean(0)).square().sum() * 2 / max(1, size - 1)  # mean of |e_i - e_j|^2, i != j
        return 0.5 * (left * rest).square().sum() / size + 0.5 * apart * k / codes[0].numel()

    def exchange(self, comm: Comm, weights: Tensor, vector: Vector, leader: int) -> Outcome:
        normal, k, device = vector.normal, vector.values.numel(), vector.values.device
        code = torch.empty(code_length(k), device=device, dtype=torch.float32)
        if comm.rank == leader:
            code = Autoencoder(weights).encode(normal[None]).flatten().to(device)
        code = comm.broadcast(code, leader).cpu().double().view(1, CHANNELS, -1)
        bases = [node.decode(code, k)[0] for node in Autoencoder(weights.double()).nodes()]
        base = bases[comm.rank % len(bases)]
        gain = own_gain(fit(normal, base * self._rest(normal)).tolist())
        message = torch.cat(
            [
                as_bytes(torch.tensor([gain], dtype=torch.float32, device="cpu")),
                self._largest(normal).wire(Segments.whole(k)),
            ]
        )
        total = own = torch.zeros(k, dtype=torch.float64, device="cpu")
        for rank, wire in enumerate(comm.all_gather(message.to(device))):
            with sent_by(rank):
                part = read_part(wire.cpu(), bases[rank % len(bases)])
            total = total + part / comm.size
            own = part if rank == comm.rank else own
        return Outcome(vector.restored(total), vector.restored(own))

    def nbytes(self, k: int) -> int:
        innovation = entries_nbytes(min(1.0, self.innovation / k), Segments.whole(k)) if k else 0
        return 4 * code_length(k) + 4 + innovation

    def _largest(self, normal: Tensor) -> Entries:
        return Entries.largest(
            normal,
            Segments.whole(normal.numel()),
            torch.tensor([self.innovation], dtype=torch.int64, device="cpu"),
        )

    def _rest(self, normal: Tensor) -> Tensor:
        return torch.ones_like(normal).index_fill_(0, self._largest(normal).indices.long(), 0.0)


def read_part(wire: Tensor, base: Tensor) -> Tensor:
    """Return a rank's part p_i (K,), from its message and base = D(c)."""
    head, rest = read_bytes(wire, 4, "the gain")
    gain = float(as_numbers(head, torch.float32))
    entries = Entries.read(rest, Segments.whole(base.numel()))
    part = base * gain if gain else torch.zeros_like(base)
    part[entries.indices.long()] = entries.values.double()
    return part


def fit(normal: Tensor, own: Tensor) -> Tensor:
    """Return <w, p> and |p|^2, float64 (2,)."""
    return torch.stack([normal.double() @ own, own @ own])


def own_gain(fit: Sequence[float]) -> float:
    """Return the gain g >= 0, in float32, that minimises |w - g p|; 0 if it is not finite.

    >>> own_gain((1.0, 4.0)), own_gain((-1.0, 4.0)), own_gain((1.0, 0.0)), own_gain((float("nan"), 1.0))
    (0.25, 0.0, 0.0, 0.0)
    """
    dot, square = fit
    gain = dot / square if dot > 0 and 0 < square < float("inf") else 0.0
    return float(torch.tensor(min(gain, LARGEST), dtype=torch.float32, device="cpu"))


def common_gain(fits: Sequence[Sequence[float]]) -> float:
    """Return the gain g >= 0 that minimises the sum of |w_i - g p_i|^2, with no term above |w_i|^2.

    >>> common_gain([(1.0, 1.0), (2.0, 2.0)]), common_gain([(10.0, 1.0), (1.0, 1.0)])
    (1.0, 2.0)
    >>> common_gain([(-1.0, 1.0), (2.0, 2.0)])
    0.0
    """
    total = own_gain((sum(dot for dot, _ in fits), sum(square for _, square in fits)))
    return min([total, *(2 * own_gain(each) for each in fits if each[1] != 0)])
