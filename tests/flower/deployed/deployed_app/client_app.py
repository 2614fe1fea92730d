"""Clients, one of which may be hostile."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import laconic
from laconic.federated.flower.records import packed


def hostile(message: Message, context: Context, call_next: Any) -> Message:
    """Noise instead of a wire, where the node's configuration says so."""
    reply: Message = call_next(message, context)
    if context.node_config.get("hostile"):
        reply.content["arrays"] = packed(torch.randint(0, 256, (500,), dtype=torch.uint8))
    return reply


app = ClientApp(mods=[hostile, laconic.federated.mod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    number = int(message.content["config"]["server-round"])
    partition = int(context.node_config["partition-id"])
    rng = torch.Generator().manual_seed(100 * number + partition)
    trained = {
        name: 0.99 * value + 0.1 * torch.randn(value.shape, generator=rng)
        for name, value in message.content["arrays"].to_torch_state_dict().items()
    }
    metrics = MetricRecord({"num-examples": 10 + partition})
    return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)
