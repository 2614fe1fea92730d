"""Link: what a worker keeps for one server: its tensors there, a residual, and the version it works from."""

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
from laconic.replicator.deployment import Seat
from laconic.replicator.parameters import dense
from laconic.replicator.servers.calls import Call, Kind, receive, send
from laconic.replicator.servers.described import view
from laconic.replicator.servers.pairs import SERVER
from laconic.replicator.servers.serving import file_of
from laconic.replicator.servers.share import read_floats
from laconic.strategies.gossip.mixing.coded import coded_matrices


class Link:
    """This worker and one server, for one optimiser.

    `flat`, `grad`, `residual`: float32 (n,) of the tensors there, on the host. A biased codec's residual
    keeps what was not sent; of a refused gradient that is all of it. `staleness`: of the last push, or
    None if it was refused. `pair` is None on replicas that leave the talking to the first of their group.
    """

    def __init__(
        self,
        server: int,
        pair: Metered | None,
        tensors: Mapping[str, Tensor],
        compressor: str,
        seat: Seat,
        name: str,
        seed: int,
    ) -> None:
        self.server, self.pair, self.tensors, self._seat = server, pair, tensors, seat
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
        """Bytes on the wire of a gradient in float32."""
        return 0 if self.pair is None else self.pair.dense_sent(self.flat.nbytes)

    def open(self, told: Mapping[str, Any]) -> None:
        """Agree with the server on the optimiser; its tensors, if it has them already, are taken over."""
        tensors = [[entry.name, list(entry.shape)] for entry in self.layout]
        self._number = int(told["number"])
        self._ask(Call(Kind.OPEN, self._number, 0, {**told, "tensors": tensors}, as_bytes(self.flat)))
        self._take(self._hear())

    def collect(self) -> None:
        """Copy the parameters' gradients to `grad`; zeros where a parameter has none."""
        for entry in self.layout:
            given = self.tensors[entry.name].grad
            part = view(self.grad, entry)
            if given is None:
                part.zero_()
            else:
                part.copy_(dense(given))

    def encode(self, step: int) -> None:
        """Encode the gradient, and what earlier ones have left behind."""
        x = self.residual.add_(self.grad) if self.keeps else self.grad
        self._wire = self.wires.encode(x, Turn(step, self._seat.group, self._seed))

    def push(self, groups: Sequence[dict[str, Any]], step: int) -> None:
        """Send what was encoded, with the settings of the optimiser's groups."""
        self._ask(Call(Kind.PUSH, self._number, self.version, [list(groups), step], self._wire))

    def take_answer(self, step: int) -> None:
        """Take the server's answer to a push: was the gradient applied?"""
        answer = self._hear()
        self._take(answer)
        self.staleness = None if answer.kind == Kind.REFUSED else answer.number
        if self.keeps and self.staleness is not None:
            self.wires.decode_add_(self._wire, self.residual, step, -1.0)

    def pull(self) -> None:
        """Take the server's tensors as they are now."""
        self._ask(Call(Kind.PULL, self._number))
        self._take(self._hear())

    def load(self) -> None:
        """Copy the tensors to the parameters."""
        with torch.no_grad():
            for entry in self.layout:
                self.tensors[entry.name].copy_(view(self.flat, entry))

    def _take(self, answer: Call) -> None:
        assert answer.tensors is not None
        self.flat.copy_(read_floats(answer.tensors))
        self.version = answer.version

    def _ask(self, call: Call) -> None:
        assert self.pair is not None
        try:
            send(self.pair, SERVER, call)
        except PeerError as error:
            raise PeerError(self._gone()) from error

    def _hear(self) -> Call:
        assert self.pair is not None
        try:
            answer = receive(self.pair, SERVER)
        except PeerError as error:
            raise PeerError(self._gone()) from error
        if answer.kind == Kind.ERROR:
            raise AttachError(f"server {self.server} says: {answer.told}")
        return answer

    def _gone(self) -> str:
        """What to say of a server that is gone."""
        file, seat = file_of(self._seat.terms.checkpoints, self._name, self.server), self._seat
        kept = (
            "it kept no checkpoint, as Replicator(..., checkpoints=folder) was not given one"
            if file is None
            else f"its checkpoint, one each {seat.terms.every} updates, is kept in {file}: start again with"
            " the same folder to go on from there"
        )
        return (
            f"server {self.server} of {seat.server_count} is gone after update {self.version}; it held"
            f" {len(self.layout)} tensors of {self._name!r}, the first {self.layout.names[0]!r}; {kept}"
        )
