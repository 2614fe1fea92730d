"""Client side: a mod.

    receive   the wire  -> the model, for the app          (train and evaluate)
    reply     the app's model -> the wire of its update    (train)
              a report that this version is held           (evaluate)

The state is in a file per run and node: Flower's `Context.state` ends with its process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from logging import WARNING
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from laconic.core.errors import LaconicError, SpecError, WireError
from laconic.core.layout import Layout
from laconic.federated.client import Client
from laconic.federated.coding import Coding
from laconic.federated.flower.records import (
    FORM,
    NEEDS_WHOLE,
    SECAGG,
    WIRE,
    form_in,
    is_packed,
    only_arrays,
    packed,
    record_of,
    tensors_of,
    unpacked,
)
from laconic.federated.form import Form
from laconic.federated.memory import KEEP_DAYS, InFile
from laconic.federated.message import NeedsWhole, Refused

SMALL = Layout.of([("w", (1, 1))])  # test model for specs
CallNext = Callable[[Message, Context], Message]


def default_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "laconic" / "federated"


class Mod:
    """Client mod. See `laconic.federated.mod`.

    It holds no state, as different processes may handle messages.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        up: str | None = None,
        down: str | None = None,
        keep_days: float = KEEP_DAYS,
    ) -> None:
        if up is not None:
            Coding.up(up, SMALL)
        if down is not None and Coding.answer(down, SMALL) is None:
            Coding.down(down, SMALL)
        self._folder = None if folder is None else Path(folder)
        self._up, self._down, self._keep_days = up, down, keep_days

    def __call__(self, message: Message, context: Context, call_next: CallNext) -> Message:
        """Answer a message; errors become error replies."""
        secret = [name for name in SECAGG if message.has_content() and name in message.content]
        if secret:
            return _error(
                "secure aggregation sums masked integers of clients, and compressed updates are not integers:"
                " use laconic.federated.mod() or secaggplus_mod, not both",
                message,
            )
        if not message.has_content() or not any(map(is_packed, message.content.array_records.values())):
            return call_next(message, context)
        try:
            return self._answered(message, context, call_next)
        except NeedsWhole as needs:
            return _error(f"{NEEDS_WHOLE}: {needs}", message)
        except LaconicError as error:
            log(WARNING, "laconic: node %s: %s", context.node_id, error)
            return _error(f"{type(error).__name__}: {error}", message)

    def _answered(self, message: Message, context: Context, call_next: CallNext) -> Message:
        name, record = only_arrays(message.content)
        client = self._client(form_in(message.content), context)
        plain = record_of(client.receive(unpacked(record)))
        records = {key: value for key, value in message.content.items() if key not in (name, FORM)}
        message.content = RecordDict({name: plain, **records})
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        if message.metadata.message_type.split(".")[0] == "train":
            try:
                name, trained = only_arrays(reply.content)
            except Refused as error:
                raise SpecError(f"the app's reply to a train message: {error}") from error
            reply.content[name] = packed(client.reply(tensors_of(trained)))
        else:
            for name in list(reply.content.array_records):
                del reply.content[name]
            reply.content[WIRE] = packed(client.acknowledge())
        return reply

    def _client(self, form: Form | None, context: Context) -> Client:
        memory = InFile(
            self._folder or default_folder(), str(context.run_id), str(context.node_id), self._keep_days
        )
        if form is None:
            text = memory.load().get("form")
            if text is None:
                raise NeedsWhole("this client holds no model yet, or lost its memory")
            try:
                form = Form.read(text)
            except WireError as error:
                raise SpecError(f"{memory} is damaged: {error}; {memory.way_out}") from error
        return Client(form, memory, up=self._up, down=self._down)


def _error(reason: str, message: Message) -> Message:
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=message)
