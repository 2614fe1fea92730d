"""What two lines save a Flower app: the example's, over a grid in memory, plain and compressed.

    .venv-federated/bin/python -m benchmarks.flower    about a minute; after `make venv-federated`

`make docs` writes the figures of docs/federated_flower.md from its result.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from flwr.supercore.task_identity import TaskIdentity
from tests.flower.conftest import IDENTITY
from tests.flower.example_world import NODES, ROUNDS, STC, compared

from benchmarks.common.machine import machine

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("results.json")


def main() -> None:
    """Measure and write."""
    sys.path.insert(0, str(ROOT / "examples" / "flower"))
    for name, value in IDENTITY.items():  # messages name their run and node
        setattr(TaskIdentity, name, value)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        found = asdict(compared())
    about = {"nodes": NODES, "rounds": ROUNDS, "spec": STC, "flwr": version("flwr"), "machine": machine()}
    RESULT.write_text(json.dumps(found | about, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
