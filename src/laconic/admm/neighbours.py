"""Point-to-point messages: activations to the next block, targets to the previous one.

Each swap exchanges an int64 header, the number of bytes or FAILED, then the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.message_counts import NONE
from laconic.core.codec import Codec
from laconic.core.errors import NonFiniteError, PeerError
from laconic.core.turn import mix, name_key

EMPTY, FAILED = 0, -1
HEAD = 8  # bytes


class Neighbours:
    def __init__(
        self, comm: Comm, activations: Codec, targets: Codec, seed: int, device: torch.device
    ) -> None:
        self.comm, self.device = comm, device
        self._codecs = {"activations": activations, "targets": targets}
        self._seed = seed
        self.messages = {"activations": NONE, "targets": NONE}
        self.encode_s = self.decode_s = self.waited_s = 0.0
        self.peers = [rank for rank in (comm.rank - 1, comm.rank + 1) if 0 <= rank < comm.size]

    def encode(self, kind: str, x: Tensor, number: int) -> Tensor:
        """Return the wire of a tensor. Raises `NonFiniteError` for NaN and Inf."""
        began = time.perf_counter()
        if not bool(x.isfinite().all()):
            raise NonFiniteError(
                f"block {self.comm.rank + 1} has {kind} with NaN or Inf: training has diverged; use a lower"
                " learning rate or a larger beta"
            )
        key = mix(self._seed, name_key(f"{kind} of block {self.comm.rank}"), number)
        wire = self._codecs[kind].encode(x.detach().contiguous().view(-1), key)
        self.encode_s += time.perf_counter() - began
        self.messages[kind] = self.messages[kind].plus(sent=HEAD + wire.numel(), dense=x.numel() * 4)
        return wire

    def swap(
        self, following: Tensor | None, previous: Tensor | None, wanted: Mapping[str, torch.Size]
    ) -> dict[str, Tensor]:
        """Send wires to both neighbours; receive and decode the messages in `wanted`.

        `wanted`: shapes of "activations" from the previous block and "targets" from the next block. Raises
        `PeerError` if a neighbour has failed or is out of step, `WireError` for a damaged message.
        """
        rank = self.comm.rank
        outgoing = {rank + 1: following, rank - 1: previous}
        received = self._exchange({peer: outgoing[peer] for peer in self.peers})
        found = {}
        for kind, peer in (("activations", rank - 1), ("targets", rank + 1)):
            wire = received.get(peer)
            if (wire is None) != (kind not in wanted):
                raise PeerError(
                    f"rank {rank}: rank {peer} is out of step: all ranks must call step and finish equally"
                    " often, with batches of equal size"
                )
            if wire is None:
                continue
            began, shape = time.perf_counter(), wanted[kind]
            self.messages[kind] = self.messages[kind].plus(received=HEAD + wire.numel())
            found[kind] = self._codecs[kind].decode(wire, shape.numel()).view(shape)
            self.decode_s += time.perf_counter() - began
        return found

    def check_peers(self) -> None:
        self._exchange(dict.fromkeys(self.peers))

    def abort(self) -> None:
        """Report failure to the neighbours in their next swap."""
        self._exchange_sizes(dict.fromkeys(self.peers, FAILED))

    def _exchange(self, outgoing: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
        began = time.perf_counter()
        heads = self._exchange_sizes(
            {peer: EMPTY if x is None else x.numel() for peer, x in outgoing.items()}
        )
        sends = {peer: x for peer, x in outgoing.items() if x is not None and heads[peer] != FAILED}
        received = {
            peer: torch.empty(size, dtype=torch.uint8, device=self.device)
            for peer, size in heads.items()
            if size > 0
        }
        self.comm.exchange(sends, received)
        self.waited_s += time.perf_counter() - began
        lost = [peer for peer, size in heads.items() if size == FAILED]
        if lost:
            self.peers = [peer for peer in self.peers if peer not in lost]
            raise PeerError(f"rank {self.comm.rank}: rank {lost[0]} has failed: see its error")
        return received

    def _exchange_sizes(self, outgoing: Mapping[int, int]) -> dict[int, int]:
        sends = {
            peer: torch.tensor([size], device=self.device, dtype=torch.int64)
            for peer, size in outgoing.items()
        }
        received = {peer: torch.zeros(1, dtype=torch.int64, device=self.device) for peer in outgoing}
        self.comm.exchange(sends, received)
        return {peer: int(size) for peer, size in received.items()}
