"""Job: one process of a part, with its device, its deadline and the file of its results."""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


@dataclass
class Job:
    """One process of a part. Rows go to `out/PART.SHARD.json`, which is rewritten whole after each row.

    A row has a `name`; `ok`, where it is a check; `skipped`, a reason, where something did not run.
    """

    part: str
    device: torch.device
    out: Path
    seconds: float
    shard: int = 0
    shards: int = 1
    began: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    about: Row = field(default_factory=dict)
    finished: bool = False

    def __post_init__(self) -> None:
        self.about = {**versions(self.device), **self.about}
        self.write()

    @property
    def cuda(self) -> bool:
        """Whether the part runs on a GPU."""
        return self.device.type == "cuda"

    @property
    def file(self) -> Path:
        """The file of this process's rows."""
        return self.out / f"{self.part}.{self.shard + 1}of{self.shards}.json"

    def left(self) -> float:
        """Seconds before the deadline."""
        return self.seconds - (time.monotonic() - self.began)

    def mine(self, items: list[Any]) -> list[Any]:
        """The items of this shard."""
        return items[self.shard :: self.shards]

    def note(self, name: str, **figures: Any) -> None:
        """Store figures that are not a check."""
        self.rows.append({"name": name, **figures})
        self.write()

    def check(self, name: str, ok: bool, **figures: Any) -> None:
        """Store the result of a check."""
        self.note(name, ok=bool(ok), **figures)

    def skip(self, name: str, reason: str) -> None:
        """Store that something did not run, and why."""
        self.note(name, skipped=reason)

    def fail(self, name: str, error: BaseException, **figures: Any) -> None:
        """Store an error that should not occur."""
        self.note(name, ok=False, error=brief(error), **figures)

    def finish(self) -> None:
        """Mark the part as complete: it was not ended by its deadline."""
        self.finished = True
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        head = {"part": self.part, "shard": f"{self.shard + 1}/{self.shards}", **self.about}
        head |= {"seconds": round(time.monotonic() - self.began, 1), "finished": self.finished}
        lines = [f" {json.dumps(key)}: {json.dumps(value, default=str)},\n" for key, value in head.items()]
        rows = ",\n".join(f"  {json.dumps(row, default=str)}" for row in self.rows)
        temporary = self.file.with_suffix(".new")
        temporary.write_text("{\n" + "".join(lines) + ' "rows": [\n' + rows + "\n ]\n}\n")
        temporary.replace(self.file)


def versions(device: torch.device) -> Row:
    """Return the card and the versions that results depend on."""
    about: Row = {"device": device.type, "torch": torch.__version__, "threads": torch.get_num_threads()}
    with suppress(ImportError):
        from importlib import metadata

        about["triton"] = metadata.version("triton")
    if device.type == "cuda":
        about["card"] = torch.cuda.get_device_name(device)
        about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    else:
        about["card"] = None
        about["warning"] = "tried on a CPU with small sizes: the figures say nothing about a GPU"
    return about


def brief(error: BaseException) -> str:
    """Return an error's type, its message and the last line of the package that it passed through.

    >>> brief(ValueError("too long"))
    'ValueError: too long'
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}laconic{os.sep}" in frame.filename]
    text = f"{type(error).__name__}: {str(error)[:400]}"
    if ours:
        text += f" @ {ours[-1].filename.split(f'{os.sep}laconic{os.sep}')[-1]}:{ours[-1].lineno}"
    if error.__cause__ is not None:
        text += f" <- {error.__cause__!r}"[:240]
    return text
