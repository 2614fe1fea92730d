"""Rendezvous store for spot.sh, on a machine that stays up: instances may come and go, the store may not.

python examples/clusters/store.py --port 29400
"""

from __future__ import annotations

import argparse
import signal

from torch.distributed import TCPStore


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the rendezvous of a training on spot instances.")
    parser.add_argument("--port", type=int, default=29400)
    store = TCPStore("localhost", parser.parse_args().port, is_master=True, wait_for_workers=False)
    print(f"serving at port {store.port}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
