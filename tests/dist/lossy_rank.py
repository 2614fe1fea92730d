"""One rank of `test_lab_netns`: trains by each method, waits until the link is bad, and does it again."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic


def main(folder: Path, steps: int, specs: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    clean = {spec: trained(spec, steps) for spec in specs}
    (folder / f"clean{os.environ['RANK']}").touch()
    while not (folder / "bad").exists():
        time.sleep(0.02)
    print(json.dumps({"clean": clean, "bad": {spec: trained(spec, steps) for spec in specs}}))


def trained(spec: str, steps: int) -> str:
    """A fingerprint of the parameters after so many steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = laconic.compress(model, optimizer, spec)
    rng = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=rng)).square().mean().backward()
        optimizer.step()
    handle.remove()
    whole = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
