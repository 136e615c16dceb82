"""Train the received LoRA factors, and send all of them back."""

from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .training import Site

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run one round."""
    site = Site(Path(str(context.run_config["task"])), int(context.node_config["partition-id"]))
    weights = message.content.array_records["arrays"].to_torch_state_dict()
    round_ = int(str(message.content.config_records["config"]["server-round"]))
    after, loss = site.trained(round_, weights)
    metrics = MetricRecord({"train_loss": loss, "num-examples": site.rows})
    return Message(RecordDict({"arrays": ArrayRecord(after), "metrics": metrics}), reply_to=message)
