"""A GAN on MNIST with two optimisers, on one device or many. LACONIC_DATA names the folder of MNIST's files.

    python examples/gan.py single
    torchrun --nproc-per-node 4 examples/gan.py sync --compressor "topk(density=0.1)"
    torchrun --nproc-per-node 5 examples/gan.py "async(servers=1)"

The generator's BatchNorm has the moments of all replicas in sync, so that a small batch on each does no harm.
Replica 0 writes a picture of 64 digits: a PGM file, which image viewers open.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import laconic
from laconic.tools.tasks.mnist import load

NOISE, SIDE = 64, 28


class CrossReplicaNorm(nn.Module):
    """BatchNorm without running statistics, over the batches of all replicas in sync."""

    def __init__(self, replicator: laconic.Replicator, width: int):
        super().__init__()
        self.replicator = replicator
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, square = self.replicator.all_mean((x.mean(0), x.square().mean(0)))
        return self.scale * (x - mean) * (square - mean.square() + 1e-5).rsqrt() + self.shift


def generator(replicator: laconic.Replicator) -> nn.Module:
    layers = []
    for inside, width in ((NOISE, 256), (256, 512)):
        layers += [nn.Linear(inside, width), CrossReplicaNorm(replicator, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, SIDE * SIDE), nn.Tanh())


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(SIDE * SIDE, 256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 1),
    )


def train(
    replicator: laconic.Replicator,
    images: Tensor,
    *,
    steps: int,
    batch: int = 64,
    compressor: str | None = None,
    picture: Path | None = None,
) -> list[tuple[float, float]]:
    """Train on images uint8 (n, 1, 28, 28); the two losses of each step, as means over replicas in sync."""
    device = replicator.logical_device()
    torch.manual_seed(0)
    making, judging = generator(replicator).to(device), discriminator().to(device)
    wrap = replicator.wrap_optimizer
    adams = [torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (making, judging)]
    makes, judges = (
        wrap(adam, compressor=compressor, name=name)
        for adam, name in zip(adams, ("generator", "discriminator"), strict=True)
    )
    torch.manual_seed(1 + replicator.replica + replicator.replicas * replicator.group)  # each its own noise

    def input_fn(context: laconic.replicator.InputContext):
        rng, size = torch.Generator().manual_seed(context.pipeline), context.per_pipeline(batch)
        while True:
            yield images[torch.randint(len(images), (size,), generator=rng)].view(size, -1)

    def verdict(x: Tensor, real: float) -> Tensor:
        found = judging(x)
        return binary_cross_entropy_with_logits(found, torch.full_like(found, real))

    def step_fn(pixels: Tensor) -> tuple[float, float]:
        real = pixels.to(device).float() / 127.5 - 1
        made = making(torch.randn(len(real), NOISE, device=device))
        judges.zero_grad()
        judged = verdict(real, 0.9) + verdict(made.detach(), 0.0)
        judged.backward()
        judges.step()
        makes.zero_grad()
        fooled = verdict(made, 1.0)
        fooled.backward()
        makes.step()
        return replicator.all_mean((judged.item(), fooled.item()))

    losses = replicator.run(step_fn, replicator.make_input(input_fn), steps=steps)
    if picture is not None:
        with torch.no_grad():  # all replicas in sync take part: the norm is theirs
            digits = making(torch.randn(64, NOISE, device=device)).cpu()
        if replicator.replica == replicator.group == 0:
            draw(digits, picture)
    return losses


def draw(digits: Tensor, picture: Path) -> None:
    """64 digits in [-1, 1], 8 in a row, as a PGM file."""
    pixels = digits.view(8, 8, SIDE, SIDE).transpose(1, 2).reshape(8 * SIDE, 8 * SIDE)
    grey = ((pixels + 1) * 127.5).round().byte()
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_bytes(b"P5 %d %d 255\n" % (8 * SIDE, 8 * SIDE) + grey.numpy().tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN on MNIST.")
    parser.add_argument("deployment", nargs="?", default="single")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="examples in an update, over replicas in sync")
    parser.add_argument("--compressor", help="how gradients travel")
    parser.add_argument("--picture", type=Path, default=Path("runs/gan.pgm"))
    options = parser.parse_args()
    images = load()["train_x"]
    for losses in laconic.Replicator(options.deployment).launch(
        lambda replicator: train(
            replicator,
            images,
            steps=options.steps,
            batch=options.batch,
            compressor=options.compressor,
            picture=options.picture,
        )
    ):
        judged, fooled = losses[-1]
        print(f"after {len(losses)} steps: discriminator {judged:.3f}, generator {fooled:.3f}")


if __name__ == "__main__":
    main()
