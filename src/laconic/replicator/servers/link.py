"""Link: a worker's state for one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.comm.metered import Metered
from laconic.core.errors import AttachError, PeerError
from laconic.core.framing import as_bytes
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.exchange.method import lift_codec
from laconic.replicator.deployment import RankContext
from laconic.replicator.parameters import dense
from laconic.replicator.servers.messages import Message, MessageKind, receive, send
from laconic.replicator.servers.optimizer_config import view
from laconic.replicator.servers.pairs import SERVER
from laconic.replicator.servers.parameter_shard import read_floats
from laconic.replicator.servers.serving import file_of
from laconic.strategies.gossip.mixing.coded import coded_matrices


class Link:
    """Connection of this worker and one server, for one optimiser.

    `flat`, `grad`, `residual`: float32 (n,), on the host. The residual has the unsent part of gradients for a
    biased codec, and all of a rejected one. `staleness`: of the last push, None if rejected. `pair`: only on
    a group's first replica.
    """

    def __init__(
        self,
        server: int,
        pair: Metered | None,
        tensors: Mapping[str, Tensor],
        compressor: str,
        seat: RankContext,
        name: str,
        seed: int,
    ) -> None:
        self.server, self.pair, self.tensors, self._rank_context = server, pair, tensors, seat
        self.layout = Layout.of((name, tuple(each.shape)) for name, each in tensors.items())
        self.codec = lift_codec(compressor)
        self.wires = coded_matrices(self.codec, self.layout, damped=False)
        self.keeps = self.codec.needs_feedback
        self.flat, self.grad = (
            torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu"),
            torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu"),
        )
        self.residual = torch.zeros(self.layout.numel if self.keeps else 0, dtype=torch.float32, device="cpu")
        self.version = 0
        self.staleness: int | None = 0
        self._name, self._seed, self._number = name, seed, 0
        self._wire = torch.empty(0, dtype=torch.uint8, device="cpu")
        for entry in self.layout:
            view(self.flat, entry).copy_(tensors[entry.name].detach())

    @property
    def dense_sent(self) -> int:
        return 0 if self.pair is None else self.pair.dense_sent(self.flat.nbytes)

    def open(self, config: Mapping[str, Any]) -> None:
        tensors = [[entry.name, list(entry.shape)] for entry in self.layout]
        self._number = int(config["number"])
        self._ask(
            Message(MessageKind.OPEN, self._number, 0, {**config, "tensors": tensors}, as_bytes(self.flat))
        )
        self._load_answer(self._receive())

    def collect(self) -> None:
        for entry in self.layout:
            given = self.tensors[entry.name].grad
            part = view(self.grad, entry)
            if given is None:
                part.zero_()
            else:
                part.copy_(dense(given))

    def encode(self, step: int) -> None:
        x = self.residual.add_(self.grad) if self.keeps else self.grad
        self._wire = self.wires.encode(x, Turn(step, self._rank_context.group, self._seed))

    def push(self, groups: Sequence[dict[str, Any]], step: int) -> None:
        self._ask(Message(MessageKind.PUSH, self._number, self.version, [list(groups), step], self._wire))

    def take_answer(self, step: int) -> None:
        answer = self._receive()
        self._load_answer(answer)
        self.staleness = None if answer.kind == MessageKind.REFUSED else answer.number
        if self.keeps and self.staleness is not None:
            self.wires.decode_add_(self._wire, self.residual, step, -1.0)

    def pull(self) -> None:
        self._ask(Message(MessageKind.PULL, self._number))
        self._load_answer(self._receive())

    def load(self) -> None:
        with torch.no_grad():
            for entry in self.layout:
                self.tensors[entry.name].copy_(view(self.flat, entry))

    def _load_answer(self, answer: Message) -> None:
        assert answer.tensors is not None
        self.flat.copy_(read_floats(answer.tensors))
        self.version = answer.version

    def _ask(self, call: Message) -> None:
        assert self.pair is not None
        try:
            send(self.pair, SERVER, call)
        except PeerError as error:
            raise PeerError(self._lost_server_message()) from error

    def _receive(self) -> Message:
        assert self.pair is not None
        try:
            answer = receive(self.pair, SERVER)
        except PeerError as error:
            raise PeerError(self._lost_server_message()) from error
        if answer.kind == MessageKind.ERROR:
            raise AttachError(f"server {self.server} says: {answer.body}")
        return answer

    def _lost_server_message(self) -> str:
        file, seat = (
            file_of(self._rank_context.terms.checkpoints, self._name, self.server),
            self._rank_context,
        )
        kept = (
            "it has no checkpoint: use Replicator(..., checkpoints=folder)"
            if file is None
            else f"its checkpoint, every {seat.terms.every} updates, is kept in {file}: start again with the"
            " same folder to continue"
        )
        return (
            f"server {self.server} of {seat.server_count} is gone after update {self.version}; it had"
            f" {len(self.layout)} tensors of {self._name!r}, the first {self.layout.names[0]!r}; {kept}"
        )
