"""Shakespeare: a GPT or an LSTM predicts the next letter (the char-rnn corpus)."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core.errors import DataError, SpecError
from laconic.tools.tasks.source import read_first, tensor
from laconic.tools.tasks.task import Recipe, Task, Tensors

WINDOW = 64  # letters per example
LETTERS = 128  # ASCII
SPEECH = re.compile(rb"(?:\A|\n\n)([^\n:]+):\n")
HOW = (
    "get https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt "
    "(any plain ASCII text will do)"
)


def load(folder: Path | None = None) -> Tensors:
    """Load windows uint8 (n, 64), and the same shifted by one; the last tenth is for tests."""
    return read_first("shakespeare", folder, READERS, HOW)


def _from_text(path: Path) -> Tensors:
    letters = tensor(np.frombuffer(path.read_bytes(), dtype=np.uint8))
    if len(letters) < 20 * WINDOW or int(letters.max()) >= LETTERS:
        raise DataError(
            f"{path} must contain at least {20 * WINDOW} letters of plain ASCII, got {len(letters)} bytes"
        )
    cut = len(letters) * 9 // 10
    train_x, train_y = windows(letters[:cut])
    test_x, test_y = windows(letters[cut:])
    return {"train_x": train_x, "train_y": train_y, "test_x": test_x, "test_y": test_y}


def windows(letters: Tensor) -> tuple[Tensor, Tensor]:
    n = (len(letters) - 1) // WINDOW
    return letters[: n * WINDOW].view(n, WINDOW), letters[1 : n * WINDOW + 1].view(n, WINDOW)


def passages(y: Tensor) -> Tensor:
    """Return the tenth of the text of each window, (n,): tenths differ in scenes and speakers."""
    return torch.arange(len(y), dtype=torch.int64, device="cpu") * 10 // len(y)


def speakers(x: Tensor) -> Tensor:
    """Return the main speaker of each window (n, 64), int64 (n,), numbered by first appearance.

    A speech begins with a blank line and a line `NAME:`. Equal names in two plays are one speaker. Raises
    `DataError` without speeches.
    """
    speeches = [*SPEECH.finditer(x.flatten().numpy().tobytes())]
    if not speeches:
        raise DataError(
            "this text has no speakers: each speech must begin with a line NAME: after a blank line"
        )
    names = {name: number for number, name in enumerate(dict.fromkeys(found[1] for found in speeches))}
    starts = torch.tensor([found.start(1) for found in speeches], dtype=torch.int64, device="cpu")
    numbers = torch.tensor([names[found[1]] for found in speeches], dtype=torch.int64, device="cpu")
    speech = (
        torch.searchsorted(starts, torch.arange(x.numel(), dtype=torch.int64, device="cpu"), right=True) - 1
    )
    return numbers[speech.clamp(min=0)].view(x.shape).mode(1).values


def inputs(x: Tensor, rng: torch.Generator | None) -> Tensor:
    return x.long()


class LSTM(nn.Module):
    """Recurrent layer: letters (b, t) to logits (b, t, 128)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 64)
        self.lstm = nn.LSTM(64, width, batch_first=True)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(x))
        logits: Tensor = self.head(hidden)
        return logits


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.mix(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class GPT(nn.Module):
    """Decoder-only transformer: letters (b, t) to logits (b, t, 128)."""

    def __init__(self, width: int = 128, depth: int = 3, heads: int = 4, window: int = WINDOW) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, width)
        self.place = nn.Parameter(0.1 * torch.randn(window, width, dtype=torch.float32, device="cpu"))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(self.embed(x) + self.place[: x.shape[1]])
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class GPTStage(nn.Module):
    """Consecutive layers of a GPT.

    The first takes letters (b, t), the last returns logits (b, t, 128); others pass (b, t, width).
    """

    def __init__(self, whole: GPT, start: int, end: int) -> None:
        super().__init__()
        self.first, self.last = start == 0, end == len(whole.layers)
        if self.first:
            self.embed, self.place = whole.embed, whole.place
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in range(start, end)})
        if self.last:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.place[: x.shape[1]] if self.first else x
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.head(self.norm(hidden)) if self.last else hidden


def cut_gpt(model: nn.Module, stage: int, stages: int) -> nn.Module:
    """Return stage `stage` of `stages`; numbers of layers differ by at most one."""
    assert isinstance(model, GPT)
    depth = len(model.layers)
    if stages > depth:
        raise SpecError(
            f"--stages must be at most {depth}, the layers of this model, got {stages}: use fewer stages, or"
            " a deeper --model"
        )
    return GPTStage(model, stage * depth // stages, (stage + 1) * depth // stages)


def wide_windows(tensors: Tensors) -> Tensors:
    return {name: part[: len(part) // 4 * 4].reshape(-1, 4 * WINDOW) for name, part in tensors.items()}


def gpt_10m() -> nn.Module:
    """Build 10.8 million parameters, for windows of 256 letters."""
    return GPT(384, 6, 6, 4 * WINDOW)


def gpt_6_layers() -> nn.Module:
    """Build 1.2 million parameters, for up to six stages."""
    return GPT(128, 6, 4)


READERS = {"tinyshakespeare.txt": _from_text, "input.txt": _from_text}

SHAKESPEARE = Task(
    name="shakespeare",
    title="Shakespeare, letter by letter",
    batch=16,
    steps=2000,
    load=load,
    inputs=inputs,
    models={
        "gpt": Recipe(GPT, lr=0.1, weight_decay=0.0, cut=cut_gpt),
        "lstm": Recipe(LSTM, lr=3.0, weight_decay=0.0),
        "gpt6": Recipe(gpt_6_layers, lr=0.1, weight_decay=0.0, cut=cut_gpt),
        "gpt10m": Recipe(gpt_10m, lr=0.1, weight_decay=0.0, cut=cut_gpt, arranged=wide_windows),
    },
    files=tuple(READERS),
    how=HOW,
    kinds=passages,
    speakers=speakers,
)
