"""Accelerate's quick tour, compressed: a plain loop on two processes, with a checkpoint half-way.

torchrun --nproc-per-node 2 examples/integrations/accelerate_quick_tour.py --cpu
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import laconic
from laconic.integrations import keep_with


def main(folder: Path, *, cpu: bool) -> tuple[list[float], float]:
    """The loss of each step, and how many times less than dense was sent."""
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    x = torch.randn(4096, 64)
    dataset = data.TensorDataset(x, x[:, :10].argmax(1))
    training_dataloader = data.DataLoader(dataset, batch_size=16)

    model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)
    handle = laconic.compress(model, optimizer, "topk(density=0.02)")
    keep_with(accelerator, handle)

    losses = []
    for at, (inputs, targets) in enumerate(training_dataloader):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if at == 63:
            accelerator.save_state(str(folder))
    accelerator.print(f"loss {losses[-1]:.3f}, {handle.stats().ratio:.0f} times less than dense")
    return losses, handle.stats().ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small net with Accelerate, compressed.")
    parser.add_argument("--cpu", action="store_true", help="also where there are GPUs")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "laconic-quick-tour")
    options = parser.parse_args()
    main(options.folder, cpu=options.cpu)
    torch.distributed.destroy_process_group()
