"""One script for all deployments, named on the command line:

python examples/replicator.py single
python examples/replicator.py "local(replicas=4)"
torchrun --nproc-per-node 4 examples/replicator.py sync
torchrun --nproc-per-node 5 examples/replicator.py "async(servers=1)"
torchrun --nproc-per-node 5 examples/replicator.py "groups(size=2)"
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import laconic

STEPS, BATCH, KINDS = 60, 64, 5


def main(replicator: laconic.Replicator) -> float:
    torch.manual_seed(0)
    centres = 2 * torch.randn(KINDS, 20)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, KINDS))
    optimizer = torch.optim.SGD(model.to(replicator.logical_device()).parameters(), lr=0.1)
    optimizer = replicator.wrap_optimizer(optimizer, compressor="topk(density=0.1)")

    def input_fn(context):
        rng, size = torch.Generator().manual_seed(context.pipeline), context.per_pipeline(BATCH)
        while True:
            kinds = torch.randint(KINDS, (size,), generator=rng)
            yield {"x": centres[kinds] + torch.randn(size, 20, generator=rng), "y": kinds}

    def step_fn(batch):
        batch = {key: each.to(replicator.logical_device()) for key, each in batch.items()}
        optimizer.zero_grad()
        loss = cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        return replicator.all_mean(loss.item())

    return replicator.run(step_fn, replicator.make_input(input_fn), steps=STEPS)[-1]


if __name__ == "__main__":
    print(*laconic.Replicator(sys.argv[1]).launch(main))
