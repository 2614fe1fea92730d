"""Ray Train's quick start for PyTorch, compressed: two workers of this machine.

    python examples/integrations/ray_train.py

Its checkpoint holds what each worker has not sent yet.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import laconic


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    handle = laconic.compress(model, optimizer, config["spec"])  # the line

    x = torch.randn(2048, 64)
    train_loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=16, shuffle=True)
    train_loader = ray.train.torch.prepare_data_loader(train_loader)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "model.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["handle"])
        first = saved["epoch"]

    for epoch in range(first, config["epochs"]):
        train_loader.sampler.set_epoch(epoch)
        for inputs, targets in train_loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        kept = handle.state_dict(gather=True)  # on rank 0, that of all
        metrics = {"loss": loss.item(), "ratio": handle.stats().ratio, "steps": handle.stats().steps}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "handle": dict(kept)}, Path(folder) / "model.pt")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)


def main(storage: str, *, spec: str = "topk(density=0.02)", epochs: int = 2) -> ray.train.Result:
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"spec": spec, "epochs": epochs},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="laconic", storage_path=storage),
    )
    return trainer.fit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage:
        result = main(storage)
        print(f"loss {result.metrics['loss']:.3f}, {result.metrics['ratio']:.0f} times less than dense")
    ray.shutdown()
