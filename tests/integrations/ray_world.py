"""Ray Train's example in a process of its own, which prints what came out.

python -m tests.integrations.ray_world FOLDER
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import ray
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "ray_train.py"


def main(folder: Path) -> None:
    train = runpy.run_path(str(EXAMPLE))["main"]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    found: dict[str, object] = {}
    try:
        whole = train(str(folder / "whole"), epochs=2)
        found |= {key: whole.metrics[key] for key in ("loss", "ratio", "steps")}
        found["ranks"] = len(state_of(whole)["handle"]["ranks"])
        half = train(str(folder / "half"), epochs=1)
        rest = train(str(folder / "half"), epochs=2)  # Ray goes on from the folder's last checkpoint
        ends = [parameters(result) for result in (whole, half, rest)]
        found["epochs"] = [state_of(result)["epoch"] for result in (whole, half, rest)]
        found["same"] = [torch.equal(end, ends[0]) for end in ends]
    finally:
        ray.shutdown()
    print(json.dumps(found))


def state_of(result: Any) -> dict[str, Any]:
    """What rank 0 saved last."""
    state: dict[str, Any] = torch.load(Path(result.checkpoint.path) / "model.pt", weights_only=True)
    return state


def parameters(result: Any) -> torch.Tensor:
    """Those of the model, float32 (n,)."""
    return torch.cat([value.flatten() for value in state_of(result)["model"].values()])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
