"""train.py on the workers of a Ray cluster, with checkpoints in a folder that all machines share.

    GLOO_SOCKET_IFNAME=eno1 ray start --head                       # on the first machine
    GLOO_SOCKET_IFNAME=eno1 ray start --address=10.0.0.1:6379      # on each other machine
    python examples/clusters/ray_job.py --workers 4 --folder /shared/clusters

Workers inherit the interface from `ray start`. The checkout has the same path on all machines.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from train import train


def train_func(config: dict[str, Any]) -> None:
    """Train in the process group that Ray has set up, from the newest complete checkpoint."""
    train(Path(config["folder"]), steps=config["steps"], every=config["every"], spec=config["spec"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small net on a Ray cluster.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/clusters"), help="shared by all machines")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--spec", default="dgc(density=0.02)", help="compression method")
    options = parser.parse_args()

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = options.folder.resolve()
    config = {"folder": str(folder), "steps": options.steps, "every": options.every, "spec": options.spec}
    TorchTrainer(
        train_func,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name="clusters",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=20),  # each starts all workers again
        ),
    ).fit()


if __name__ == "__main__":
    main()
