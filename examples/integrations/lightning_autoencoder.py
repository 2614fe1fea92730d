"""Lightning's quick start, on two processes and compressed. The Trainer starts the second one.

    python examples/integrations/lightning_autoencoder.py

Its images are drawn here, so that nothing is downloaded.
"""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import data

from laconic.integrations import LightningCompression


class LitAutoEncoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 28 * 28))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def spots(count: int) -> torch.Tensor:
    """Pictures float32 (count, 1, 28, 28), each of one spot somewhere."""
    rng = torch.Generator().manual_seed(0)
    centre = torch.rand(count, 2, 1, 1, generator=rng) * 28
    place = torch.arange(28.0)
    across, down = place - centre[:, 0], place[:, None] - centre[:, 1]
    return torch.exp(-(across**2 + down**2) / 30)[:, None]


def main(*, epochs: int = 4) -> tuple[LitAutoEncoder, LightningCompression]:
    L.seed_everything(0)
    train = data.DataLoader(data.TensorDataset(spots(2048)), batch_size=16, shuffle=True)
    autoencoder = LitAutoEncoder()
    compression = LightningCompression("topk(density=0.01)")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=epochs,
        callbacks=[compression],
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(autoencoder, train)
    return autoencoder, compression


if __name__ == "__main__":
    trained, compression = main()
    assert compression.handle is not None
    print(f"loss {trained.losses[-1]:.4f}, {compression.handle.stats().ratio:.0f} times less than dense")
