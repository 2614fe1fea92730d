"""Neighbours: a block's two boundaries, point to point: activations to the next block, targets to the last.

Each swap has two rounds with each neighbour: a head, int64, with the bytes that follow, then the bytes. A
head of FAILED says that its sender gives up: nobody waits for a message that does not come.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.admm.stats import Messages
from laconic.comm.comm import Comm
from laconic.core.codec import Codec
from laconic.core.errors import NonFiniteError, PeerError
from laconic.core.turn import mix, name_key

NOTHING, FAILED = 0, -1
HEAD = 8  # bytes


class Neighbours:
    """The ends of one rank's boundaries. Rank r holds block r.

    Args:
        comm: One rank for each block.
        activations: Codec of what goes to the next block.
        targets: Codec of what goes to the block before.
        seed: Of random rounding.
    """

    def __init__(
        self, comm: Comm, activations: Codec, targets: Codec, seed: int, device: torch.device
    ) -> None:
        self.comm, self.device = comm, device
        self._codecs = {"activations": activations, "targets": targets}
        self._seed = seed
        self.messages = {"activations": Messages(), "targets": Messages()}
        self.encode_s = self.decode_s = self.waited_s = 0.0
        self.peers = [rank for rank in (comm.rank - 1, comm.rank + 1) if 0 <= rank < comm.size]

    def encode(self, kind: str, x: Tensor, number: int) -> Tensor:
        """The wire of a mini-batch's tensor. Raises `NonFiniteError` for NaN and Inf."""
        began = time.perf_counter()
        if not bool(x.isfinite().all()):
            raise NonFiniteError(
                f"block {self.comm.rank + 1} has {kind} with NaN or Inf: training has diverged; give a lower"
                " learning rate, or a larger beta"
            )
        key = mix(self._seed, name_key(f"{kind} of block {self.comm.rank}"), number)
        wire = self._codecs[kind].encode(x.detach().contiguous().view(-1), key)
        self.encode_s += time.perf_counter() - began
        self.messages[kind] = self.messages[kind].plus(sent=HEAD + wire.numel(), dense=x.numel() * 4)
        return wire

    def swap(
        self, following: Tensor | None, previous: Tensor | None, wanted: Mapping[str, torch.Size]
    ) -> dict[str, Tensor]:
        """Send wires to the next block and to the one before; receive and decode what is wanted of them.

        `wanted`: the shapes of "activations" from the block before and "targets" from the next one.

        Raises:
            PeerError: A neighbour has failed or is out of step.
            WireError: What came was not made by this codec.
        """
        rank = self.comm.rank
        going = {rank + 1: following, rank - 1: previous}
        came = self._swapped({peer: going[peer] for peer in self.peers})
        found = {}
        for kind, peer in (("activations", rank - 1), ("targets", rank + 1)):
            wire = came.get(peer)
            if (wire is None) != (kind not in wanted):
                raise PeerError(
                    f"rank {rank}: rank {peer} is out of step: all ranks call step and finish equally often,"
                    " with batches of equal size"
                )
            if wire is None:
                continue
            began, shape = time.perf_counter(), wanted[kind]
            self.messages[kind] = self.messages[kind].plus(received=HEAD + wire.numel())
            found[kind] = self._codecs[kind].decode(wire, shape.numel()).view(shape)
            self.decode_s += time.perf_counter() - began
        return found

    def hear(self) -> None:
        """Raise `PeerError` if a neighbour has failed; nothing is sent otherwise."""
        self._swapped(dict.fromkeys(self.peers))

    def give_up(self) -> None:
        """Tell the neighbours, in their next swap, that this rank has failed."""
        self._heads(dict.fromkeys(self.peers, FAILED))

    def _swapped(self, going: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
        began = time.perf_counter()
        heads = self._heads({peer: NOTHING if x is None else x.numel() for peer, x in going.items()})
        sends = {peer: x for peer, x in going.items() if x is not None and heads[peer] != FAILED}
        came = {
            peer: torch.empty(size, dtype=torch.uint8, device=self.device)
            for peer, size in heads.items()
            if size > 0
        }
        self.comm.exchange(sends, came)
        self.waited_s += time.perf_counter() - began
        lost = [peer for peer, size in heads.items() if size == FAILED]
        if lost:
            self.peers = [peer for peer in self.peers if peer not in lost]
            raise PeerError(f"rank {self.comm.rank}: rank {lost[0]} has failed, and says why")
        return came

    def _heads(self, going: Mapping[int, int]) -> dict[int, int]:
        sends = {
            peer: torch.tensor([size], device=self.device, dtype=torch.int64) for peer, size in going.items()
        }
        came = {peer: torch.zeros(1, dtype=torch.int64, device=self.device) for peer in going}
        self.comm.exchange(sends, came)
        return {peer: int(size) for peer, size in came.items()}
