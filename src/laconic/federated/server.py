"""Server: the public model, missing updates, and replies.

    W                the strategy's model                     P    the model that clients hold
    publish(W)       P += C_down(W - P)
    receive          W + decode(C_up(x)), x = the client's change of P plus its residual

W - P is the server's residual. If the strategy adds the mean of updates to W, this is STC (Sattler et al.
2019, arXiv:1903.02891) in both directions. Without `down`, P = W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError, StateError, WireError
from laconic.core.inference import outside_inference_mode
from laconic.core.turn import Turn, mix, name_key
from laconic.federated.cache import Cache
from laconic.federated.coding import Coding
from laconic.federated.form import Buffers, Form, Tensors
from laconic.federated.limits import check_buffers, check_fits, check_update, not_finite
from laconic.federated.message import LONGEST_SPEC, Kind, Message, Refused, digest, too_large
from laconic.federated.traffic import Traffic

FORMAT = 3


@dataclass
class Contact:
    version: int = 0
    token: int = 0
    accepted: int = 0
    met: int = 0  # messages so far


@outside_inference_mode("publish", "message_for", "receive", "state_dict", "load_state_dict")
class Server:
    """Server of a model. Published models are numbered 1, 2, ...

    Args:
        model: The first model, a `state_dict()`.
        up: Spec of the clients' updates. `stc(down=0.01)` sets `down` too.
        down, buffers, max_norm, seed, cache_nbytes: See `laconic.federated.compressed`.
        shared_start: Whether clients create the first model from a common seed; it is not sent.

    Raises:
        SpecError: An argument is invalid, or a sent tensor holds NaN or Inf.
    """

    def __init__(
        self,
        model: Mapping[str, Tensor],
        up: Any = "dense()",
        down: Any = None,
        *,
        buffers: Buffers = "send",
        max_norm: float | None = None,
        seed: int = 0,
        cache_nbytes: int | None = None,
        shared_start: bool = False,
    ) -> None:
        self.form = Form.of(model, buffers)
        self.up = Coding.up(up, self.form.layout)
        answer = Coding.answer(up, self.form.layout)
        if down is not None and answer is not None:
            raise SpecError(f"{self.up.text} sets the direction down itself: omit down={down!r}")
        self.down = answer if down is None else Coding.down(down, self.form.layout)
        for text in (self.up.text, "" if self.down is None else self.down.text):
            if len(text.encode()) > LONGEST_SPEC:
                raise SpecError(
                    f"a spec in a message has at most {LONGEST_SPEC} bytes, this one has"
                    f" {len(text.encode())}: {arguments.shown(text)}; use fewer patterns"
                )
        if max_norm is not None:
            arguments.number("max_norm", max_norm, above=0, hint="None clips nothing")
        if cache_nbytes is not None:
            arguments.whole("cache_nbytes", cache_nbytes, hint="None is the bytes of one model")
        arguments.whole("seed", seed)
        if (bad := not_finite(self.form, model)) is not None:
            raise SpecError(
                f"{bad!r} of the first model holds NaN, Inf or values beyond float32, so no update can be"
                f" added: if it is a mask or similar, keep it on the clients with buffers=[{bad!r}]"
            )
        n = self.form.layout.numel
        self._max_norm, self._seed = max_norm, seed
        self._target = self.form.flat(model)
        self._public = self._target.clone()
        self._digest = digest(self._public)
        self._others = self.form.pick(model, "sent", "local")
        self._cache = Cache(n, 4 * n if cache_nbytes is None else cache_nbytes)
        self._contacts: dict[str, Contact] = {}
        self._first_version = 1 if shared_start else 0  # held by clients before the first message
        self._identity = self.form.identity(model if shared_start else None)
        self.version = 1
        self.traffic = Traffic()
        self.traffic.begin(1)

    def publish(self, model: Mapping[str, Tensor]) -> int:
        """Publish the next version and return its number.

        Raises `SpecError` if names or shapes differ, and `WireError`, with nothing changed, for NaN or Inf.
        """
        target = self.form.flat(model)
        if (bad := not_finite(self.form, model)) is not None:
            raise WireError(f"the strategy's model holds NaN or Inf in {bad!r}: it is not published")
        self._target, self._others = target, self.form.pick(model, "sent", "local")
        before, number = self._public, self.version + 1
        update = None
        if self.down is None or self.down.lossless:
            self._public = target.clone()
        else:
            update = self.down.encode(target - before, Turn(number, seed=self._seed))
            self._public = self.down.decode_add_(update, before.clone(), number)
        self._digest = digest(self._public)
        changed = self._public.view(torch.int32) != before.view(torch.int32)  # 0.0 is not -0.0
        self._cache.add(number, update, changed)
        self.version = number
        self.traffic.begin(number)
        return number

    @property
    def public(self) -> Tensors:
        """Model of a client with the current version."""
        return self.form.whole(self._public, self._others)

    def message_for(self, client: str) -> Tensor:
        """Return the message with the current version, uint8 (m,); the client's next reply must answer it."""
        contact = self._contacts.setdefault(client, self._stranger())
        contact.met += 1
        contact.token = mix(self._seed, self.version, name_key(client), contact.met) | 1
        kind, part = self._cache.since(contact.version, self.version, self._public)
        roles = ("sent", "local") if kind is Kind.WHOLE else ("sent",)
        message = Message(
            kind=kind,
            fingerprint=self._identity,
            token=contact.token,
            accepted=contact.accepted,
            base=0 if kind is Kind.WHOLE else contact.version,
            version=self.version,
            model=self._digest,
            up=self.up.text,
            down="" if self.down is None else self.down.text,
            body=torch.cat([self.form.pack(self._others, *roles), part]),
        )
        wire = message.pack()
        self.traffic.sent_down(client, wire.numel(), kind.name.lower())
        return wire

    def receive(self, client: str, wire: Tensor) -> Tensors:
        """Return the client's proposed model: W plus its update, with its buffers if these are sent.

        `client`: its name in the transport. `wire`: its reply, uint8 (m,), not trusted. Raises `Refused`,
        counted, with nothing else changed, for an invalid, replayed, not finite or too large reply, or one of
        another round, model, spec or protocol.
        """
        self.traffic.came_up(client, wire.numel())
        try:
            return self._received(client, wire)
        except Refused as refused:
            self.traffic.refuse(client, refused.reason, str(refused))
            raise

    def noted(self, client: str, wire: Tensor) -> None:
        """Record that a client holds the sent version without training. Raises `Refused`."""
        self.traffic.came_up(client, wire.numel())
        try:
            message = self._checked(client, wire, Kind.HOLDS, 0)
        except Refused as refused:
            self.traffic.refuse(client, refused.reason, str(refused))
            raise
        contact = self._contacts[client]
        contact.version, contact.token = message.version, 0

    def _received(self, client: str, wire: Tensor) -> Tensors:
        carried = self.form.carried_nbytes
        message = self._checked(client, wire, Kind.ANSWER, carried + self.up.most_nbytes())
        try:
            others = self.form.unpack(message.body[:carried], "sent")
            update = self.up.decode_add_(message.body[carried:], torch.zeros_like(self._public), message.base)
        except WireError as error:
            raise Refused("malformed", str(error)) from error
        check_buffers(others, self._others)
        contact = self._contacts[client]
        try:
            norm = check_update(update, self._public)
            if self._max_norm is not None and norm > self._max_norm:
                update.mul_(self._max_norm / norm)
            proposed = self.form.whole(self._target + update, {**self._others, **others})
            check_fits({name: proposed[name] for name in self.form.layout.names})
        except Refused:
            contact.accepted = too_large(message.token)
            raise
        contact.version, contact.accepted, contact.token = message.version, message.token, 0
        return proposed

    def _checked(self, client: str, wire: Tensor, kind: Kind, most_nbytes: int) -> Message:
        contact = self._contacts.get(client, self._stranger())
        message = Message.unpack(wire, most_nbytes)
        if message.kind is not kind:
            raise Refused(
                "malformed", f"a message {kind.name.lower()} is expected, got {message.kind.name.lower()}"
            )
        if message.fingerprint != self._identity:
            raise Refused(
                "other model", "its names, shapes, dtypes, buffers= or first values differ from the server's"
            )
        if message.up != self.up.text:
            raise Refused("other spec", f"it sends {message.up!r}, and {self.up.text!r} was asked for")
        if message.token and message.token == contact.accepted:
            raise Refused("replayed", f"this answer of version {message.base} has been received already")
        if not contact.token or message.token != contact.token or message.base != self.version:
            raise Refused("wrong round", f"it answers version {message.base}, and {self.version} is expected")
        return message

    def forget(self, client: str) -> None:
        self._contacts.setdefault(client, self._stranger()).version = 0

    def holds(self, client: str) -> int:
        return self._contacts.get(client, self._stranger()).version

    def _stranger(self) -> Contact:
        return Contact(version=self._first_version)

    def state_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "of": self._described(),
            "version": self.version,
            "target": self._target.clone(),
            "public": self._public.clone(),
            "others": dict(self._others),
            "cache": self._cache.state_dict(),
            "contacts": {
                name: (each.version, each.token, each.accepted, each.met)
                for name, each in self._contacts.items()
            },
            "traffic": self.traffic.as_dict(),
        }

    def _described(self) -> tuple[str, str, str]:
        return self._identity.hex(), self.up.text, "" if self.down is None else self.down.text

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Raises `StateError` for another model or other specs.

        A client with a later model then gets the whole model.
        """
        if state.get("format") != FORMAT:
            raise StateError("the saved state is not a server's, or is from another version of laconic")
        identity, up, down = state["of"]
        if identity != self._identity.hex():
            raise StateError("the saved state belongs to a server of another model or other buffers=")
        if tuple(state["of"]) != self._described():
            raise StateError(
                f"the saved state belongs to a server with up={up!r} and down={down!r};"
                f" this one has {self._described()[1:]}: use the same specs"
            )
        self.version = int(state["version"])
        self._target, self._public = state["target"].clone(), state["public"].clone()
        self._digest, self._others = digest(self._public), dict(state["others"])
        self._cache.load_state_dict(state["cache"])
        self._contacts = {name: Contact(*values) for name, values in state["contacts"].items()}
        self.traffic = Traffic.read(state["traffic"])
