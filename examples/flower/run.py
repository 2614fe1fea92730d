"""Run the app with a SuperLink and SuperNodes on this machine, with TLS and node authentication.

    pip install '.[federated]'    # in a checkout
    python examples/flower/run.py --nodes 4 --rounds 3

It makes keys and certificates, starts all processes, shows the run, and ends all that it has started.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from deployment import Deployment

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--up", default="stc(density=0.0025)")
    parser.add_argument("--down", default="stc(density=0.0025)")
    parser.add_argument("--save", default="", help="a folder for the model and the bytes of each round")
    chosen = parser.parse_args()
    if chosen.nodes < 2:
        parser.error("a round needs two nodes or more: --nodes 2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("starts Flower's processes, each a Python of its own: a minute or so", flush=True)
    with tempfile.TemporaryDirectory() as folder, Deployment(Path(folder)) as deployment:
        print(f"a SuperLink is up; keys and certificates for {chosen.nodes} SuperNodes", flush=True)
        for number in range(chosen.nodes):
            deployment.register(number)
            deployment.start_node(number, f"partition-id={number}")
        config = (
            f"num-server-rounds={chosen.rounds} nodes={chosen.nodes}"
            f' up="{chosen.up}" down="{chosen.down}" save="{chosen.save and Path(chosen.save).resolve()}"'
        )
        run = deployment.start_run(HERE, config)
        finished = False
        assert run.stdout is not None
        for line in run.stdout:
            text = line.decode(errors="replace")
            print(text, end="", flush=True)
            finished = finished or "laconic: round" in text
        run.wait()
    if not finished:
        print("the run has not finished", file=sys.stderr)
    return run.returncode if finished else max(1, run.returncode)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
