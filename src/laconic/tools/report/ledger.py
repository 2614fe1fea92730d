"""Writer of a run's events: `events.jsonl` and TensorBoard scalars.

A line of `events.jsonl` is one step or evaluation of one rank:

    {"kind": "step", "method": "dgc(density=0.01)", "seed": 0, "rank": 1, "step": 17, "loss": 0.31,
     "network_sent": 42693, ..., "backward_s": 0.012, "encode_s": 0.001, ...}

Other events:

    {"kind": "start", ..., "optimiser": "SGD", "lr": 0.1}      rank 0, before its first step and on a resume
    {"kind": "decision", ..., "step": 20, "message": "..."}    rank 0: a method's decision
    {"kind": "masks", ..., "step": 20, "density": 0.1, ...}    rank 0: share of weights in use, in sparse
                                                               layers; "model_density": in all; "changed" last
    {"kind": "lost", ..., "rank": 2, "step": 17}               a lost worker's last step
    {"kind": "back", ..., "rank": 2, "step": 31}               its replacement's first step
    {"kind": "interface", ..., "sent": 123, "received": 120}   in a lab, at the end: bytes of the interface

In a pipeline, only last stages have "loss" (else null), and "network_sent" sums "activations_sent",
"gradients_sent" (of activations) and "replicas_sent". With coded activations, a test has "kept" and
"kept_dense": bytes saved for backward, coded and uncoded. With `--precision fp16` a step has "loss_scale" and
"skipped". With parallel blocks, it has "blocks": residuals, bytes each way, and spans [work, begin, end].

A step may have "noise", [tr(S), |G|^2, share of the entries] (see `laconic.exchange.noise_scale`), and a
strategy's "notes" (see `notes.py`). An evaluation may have "consensus", the ranks' distance from their
average. Readers skip an incomplete last line.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from laconic.core.atomic_file import naming, write_text
from laconic.core.errors import StateError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS = "events.jsonl"
CONFIG = "config.json"
SCALARS = ("loss", "payload_sent", "network_sent", "step_s", "encode_s", "communicate_s", "decode_s")


def slug(spec: str) -> str:
    """Return a folder name for a spec.

    >>> slug("dgc(density=0.01)")
    'dgc_density_0.01'
    """
    return re.sub(r"[^A-Za-z0-9.-]+", "_", spec).strip("_") or "_"


class Ledger:
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, json.dumps(config, indent=1))
        self.folder = folder
        self._size = int(config["workers"])
        self._events = (folder / EVENTS).open("a", encoding="utf-8")
        self._boards: dict[tuple[str, int], SummaryWriter] = {}
        self._waiting: dict[tuple[str, int, str, int], list[dict[str, Any]]] = {}
        self._lost: defaultdict[tuple[str, int], set[int]] = defaultdict(set)  # by training

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, event: dict[str, Any]) -> None:
        with naming(self.folder / EVENTS):
            self._events.write(json.dumps(event) + "\n")
        if event["kind"] == "lost":
            self._lost[event["method"], event["seed"]].add(event["rank"])
        if event["kind"] == "back":
            self._lost[event["method"], event["seed"]].discard(event["rank"])
        if event["kind"] not in ("step", "eval"):
            return
        key = (event["method"], event["seed"], event["kind"], event["step"])
        ranks = self._waiting.setdefault(key, [])
        ranks.append(event)
        if len(ranks) == self._size - len(self._lost[event["method"], event["seed"]]):
            self._scalars(ranks)
            del self._waiting[key]
            with naming(self.folder / EVENTS):
                self._events.flush()

    def rewrite(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        self._close_events()
        kept = [json.dumps(event) for event in read_events(self.folder) if wanted(event)]
        write_text(self.folder / EVENTS, "".join(f"{line}\n" for line in kept))
        self._events = (self.folder / EVENTS).open("a", encoding="utf-8")

    def close(self) -> None:
        self._close_events()
        for board in self._boards.values():
            board.close()

    def _close_events(self) -> None:
        with naming(self.folder / EVENTS):
            self._events.close()

    def _scalars(self, ranks: list[dict[str, Any]]) -> None:
        first = ranks[0]
        board = self._board(first["method"], first["seed"])
        if first["kind"] == "eval":
            answers = sum(event["answers"] for event in ranks)
            board.add_scalar("test/accuracy", sum(event["right"] for event in ranks) / answers, first["step"])
            board.add_scalar("test/loss", sum(event["loss_sum"] for event in ranks) / answers, first["step"])
            if first.get("consensus"):
                board.add_scalar("test/consensus", first["consensus"], first["step"])
            return
        for name in SCALARS:
            known = [event[name] for event in ranks if event[name] is not None]
            board.add_scalar(f"train/{name}", sum(known) / len(known), first["step"])

        if first.get("loss_scale") is not None:
            board.add_scalar("train/loss_scale", first["loss_scale"], first["step"])

    def _board(self, method: str, seed: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter  # a slow import

        if (method, seed) not in self._boards:
            place = self.folder / "tensorboard" / f"{slug(method)}-seed{seed}"
            self._boards[method, seed] = SummaryWriter(str(place), flush_secs=10)
        return self._boards[method, seed]


def read_events(folder: Path) -> list[dict[str, Any]]:
    path = folder / EVENTS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_event(line, path, number) for number, line in enumerate(lines[:-1], 1) if line]


def _event(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise StateError(f"{path}, line {number} is damaged ({error}): remove the line") from None
    return event
