"""Client: its model and its residual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.core.errors import NonFiniteError, SpecError, StateError, WireError
from laconic.core.framing import as_numbers
from laconic.core.inference import outside_inference_mode
from laconic.core.turn import Turn
from laconic.exchange.method import lift
from laconic.federated.cache import read_updates, write_entries_
from laconic.federated.coding import Coding
from laconic.federated.form import Buffers, Form, Tensors
from laconic.federated.memory import InMemory, Memory
from laconic.federated.message import Kind, Message, NeedsWhole, Refused, digest, too_large


@outside_inference_mode("receive", "reply", "acknowledge")
class Client:
    """Client of one run.

        receive    the model, from the server's message
        reply      x = residual + (trained - model);   send C(x);   residual = x - decode(C(x))

    A lost reply is sent again with the next one: each message names the last accepted reply. An update
    refused as too large is dropped with the residual. A killed client continues as if it had missed the
    round.

    Args:
        like: The model's tensors, or their form.
        memory: Storage of the state; default: in this process.
        buffers, shared_start: As the server's; with `shared_start`, `like` is the first model.
        up, down: Specs that it accepts; default: the server's.

    Raises:
        SpecError: A spec is invalid, or `shared_start` is set and `like` has no tensors.
        StateError: The memory is damaged or of another model.
    """

    def __init__(
        self,
        like: Mapping[str, Tensor] | Form,
        memory: Memory | None = None,
        *,
        buffers: Buffers = "send",
        up: str | None = None,
        down: str | None = None,
        shared_start: bool = False,
    ) -> None:
        self.form = like if isinstance(like, Form) else Form.of(like, buffers)
        self._memory = InMemory() if memory is None else memory
        self._expected = {
            way: None if spec is None else lift(spec).text for way, spec in (("up", up), ("down", down))
        }
        self._state: dict[str, Any] = self._memory.load()
        first = None if isinstance(like, Form) or not shared_start else like
        if shared_start and first is None:
            raise SpecError("shared_start=True needs the first model, got its form: pass its tensors")
        self._identity = self.form.identity(first)
        if self._state and self._state.get("fingerprint") != self._identity.hex():
            raise StateError(f"{self._memory} belongs to another model: {self._memory.way_out}")
        if first is not None and not self._state:
            self._state = {
                "version": 1,
                "public": self.form.flat(first),
                "local": self.form.pick(first, "local"),
            }
        self._others: Tensors = {}
        self._message: Message | None = None

    @property
    def version(self) -> int:
        """Version of its model; 0: none."""
        return int(self._state.get("version", 0))

    @property
    def rounds(self) -> int:
        return int(self._state.get("rounds", 0))

    def receive(self, wire: Tensor) -> Tensors:
        """Decode a server's message and return the model.

        Raises `NeedsWhole` if this client lacks the version or values that the message updates; `Refused` if
        the message is damaged, or of another model, spec or protocol.
        """
        form = self.form
        most = 4 * form.layout.numel + form.carried_nbytes + form.local_nbytes
        message = Message.unpack(wire, most)
        if message.fingerprint != self._identity:
            raise Refused(
                "other model", "its names, shapes, dtypes, buffers= or first values differ from this client's"
            )
        for way, text in self._expected.items():
            if text is not None and text != getattr(message, way):
                raise Refused(
                    "other spec", f"the server has {way}={getattr(message, way)!r}, this client {text!r}"
                )
        if message.kind is not Kind.WHOLE and (message.base > self.version or message.version < self.version):
            raise NeedsWhole(f"it updates version {message.base}, and this client holds {self.version}")
        try:
            Coding.up(message.up, form.layout)
            public = self._public(message)
        except Refused:
            raise
        except (WireError, SpecError) as error:
            raise Refused("malformed", str(error)) from error
        if message.kind is not Kind.WHOLE and digest(public) != message.model:
            raise NeedsWhole(f"version {self.version} of this client has other values than the server's")
        self._state = {
            "fingerprint": self._identity.hex(),
            "form": form.text,
            "version": message.version,
            "public": public,
            "residual": self._owed(message.accepted),
            "pending": None,
            "local": self._local,
            "rounds": self.rounds,
        }
        self._message = message
        return form.whole(public, self._others)

    def _owed(self, accepted: int) -> Tensor | None:
        """Return the residual, plus a last reply that was not accepted; None if that was too large."""
        residual: Tensor | None = self._state.get("residual")
        pending = self._state.get("pending")
        if residual is None or pending is None or pending["token"] == accepted:
            return residual
        if too_large(pending["token"]) == accepted:
            return None
        coding = Coding.up(pending["up"], self.form.layout)
        return coding.decode_add_(pending["wire"], residual.clone(), pending["step"])

    def _public(self, message: Message) -> Tensor:
        form, body = self.form, message.body
        carried = form.carried_nbytes + (form.local_nbytes if message.kind is Kind.WHOLE else 0)
        roles = ("sent", "local") if message.kind is Kind.WHOLE else ("sent",)
        others, body = form.unpack(body[:carried], *roles), body[carried:]
        first = {name: value for name, value in others.items() if name in form.local_names}
        self._local: Tensors = {**first, **self._state.get("local", {})}
        self._others = {**others, **self._local}
        if message.kind is Kind.WHOLE:
            if body.numel() != 4 * form.layout.numel:
                raise WireError(
                    f"a model of {form.layout.numel} elements is expected, got {body.numel()} bytes"
                )
            return as_numbers(body, torch.float32).clone()
        public: Tensor = self._state["public"].clone()
        if message.kind is Kind.ENTRIES:
            return write_entries_(body, public)
        if message.kind is not Kind.UPDATES:
            raise Refused("malformed", f"a server's message is expected, got {message.kind.name.lower()}")
        updates = read_updates(body, message.base, message.version)
        if missed := [(version, update) for version, update in updates if version > self.version]:
            coding = Coding.answer(message.up, form.layout) or Coding.down(message.down, form.layout)
            for version, update in missed:
                coding.decode_add_(update, public, version)
        return public

    def reply(self, trained: Mapping[str, Tensor]) -> Tensor:
        """Encode the change of the model by training, uint8 (m,).

        Raises `NonFiniteError`, with nothing saved, for NaN or Inf; `StateError` without a message to answer,
        or if the memory could not be saved.
        """
        if self._message is None:
            raise StateError("this client has received no model to answer: call receive first")
        form, message, state = self.form, self._message, self._state
        update = form.flat(trained) - form.shown(state["public"])
        if not bool(update.isfinite().all()):
            bad = next(
                entry.name
                for entry in form.layout
                if not bool(update[entry.offset : entry.offset + entry.numel].isfinite().all())
            )
            raise NonFiniteError(
                f"training has diverged: {bad!r}, or its update in float32, holds NaN or Inf; lower the"
                " learning rate"
            )
        coding = Coding.up(message.up, form.layout)
        coding.limit_(update, message.version)
        residual = torch.zeros_like(update) if state["residual"] is None else state["residual"].clone()
        coding.correct_(residual, update)
        wire = coding.encode(residual, Turn(message.version, rank=message.token))
        coding.settle_(residual, wire, message.version)
        kept = {
            **state,
            "residual": residual if coding.remembers else None,
            "pending": (
                {"token": message.token, "wire": wire, "up": message.up, "step": message.version}
                if coding.remembers
                else None
            ),
            "local": form.pick(trained, "local"),
            "rounds": self.rounds + 1,
        }
        self._memory.save(kept)
        self._state, self._message = kept, None
        return self._answer(Kind.ANSWER, message, torch.cat([form.pack(trained, "sent"), wire]))

    def acknowledge(self) -> Tensor:
        """Encode the answer of a client that did not train, uint8 (m,). Raises `StateError`."""
        if self._message is None:
            raise StateError("this client has received no model to keep: call receive first")
        message = self._message
        self._memory.save(self._state)
        self._message = None
        return self._answer(Kind.HOLDS, message, torch.empty(0, dtype=torch.uint8, device="cpu"))

    def _answer(self, kind: Kind, message: Message, body: Tensor) -> Tensor:
        return Message(
            kind=kind,
            fingerprint=self._identity,
            token=message.token,
            accepted=0,
            base=message.version,
            version=message.version,
            model=message.model,
            up=message.up,
            down=message.down,
            body=body,
        ).pack()
