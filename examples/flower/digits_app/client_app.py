"""The client: a plain Flower app, and one line."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import laconic

from .task import EXAMPLES, net
from .task import train as train_net

app = ClientApp(mods=[laconic.federated.mod()])


@app.train()
def train(message: Message, context: Context) -> Message:
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    partition = int(context.node_config["partition-id"])
    number = int(message.content["config"]["server-round"])
    loss = train_net(model, partition, int(context.run_config["local-epochs"]), 100 * number + partition)
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": EXAMPLES, "train-loss": loss})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
