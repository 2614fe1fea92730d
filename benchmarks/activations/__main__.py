"""Activations kept for backward: the codec, memory, time and accuracy with COMET, blocks and checkpointing.

    python -m benchmarks.activations codec       ratio and GB/s on real activations
    python -m benchmarks.activations memory      kept bytes, peak resident memory and time, a process each
    python -m benchmarks.activations kept        kept bytes after 12 steps
    python -m benchmarks.activations accuracy    test accuracy over seeds; see accuracy.py

Results are in benchmarks/activations/results.jsonl, with one row for each of the first three parts.
Batches are CIFAR-10's. `pip install '.[references]'` brings what the codec is compared with.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.activations import accuracy as activations_accuracy
from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic import activations, kernels
from laconic.tools.tasks.cifar10 import inputs, load, resnet20, small_cnn

PICTURE = Path(__file__).parents[2] / "docs" / "activations.svg"
VARIANTS = ("dense", "comet()", "checkpoint", "blocks(bits=4)", "comet(norms='exact')", "comet(share=0.03)")
BATCH, STEPS = 256, 4
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "262144"
}  # what is freed leaves the process; glibc keeps hundreds of MB
BOUNDS = (0.1, 0.03, 0.01, 0.001)  # of the rms


def vgg() -> nn.Module:
    """VGG-like: six convolutions with batch norm at 32, 64 and 128 channels, and two linear layers."""
    layers, inside = list[nn.Module](), 3
    for outside in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
            inside = outside
        layers.append(nn.MaxPool2d(2))
    linear = [nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10)]
    return nn.Sequential(*layers, *linear)


NETS = {"resnet20": resnet20, "vgg": vgg, "cnn": small_cnn}


class Checkpointed(nn.Module):
    """A sequential net in four parts, each of which but the last recomputes itself in backward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint_sequential(self.net, 4, x, use_reentrant=False)
        return out


class Batches:
    """Random training batches of CIFAR-10, by seed."""

    def __init__(self, size: int, seed: int) -> None:
        self.data, self.size = load(), size
        self.rng = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Images float32 (b, 3, 32, 32), labels int64 (b,)."""
        chosen = torch.randint(0, len(self.data["train_x"]), (self.size,), generator=self.rng)
        return inputs(self.data["train_x"][chosen], self.rng), self.data["train_y"][chosen].long()


def trainer(net: str, variant: str, seed: int, lr: float) -> tuple[nn.Module, Any, Any]:
    """Model, optimiser and what compresses its activations."""
    torch.manual_seed(seed)
    model = NETS[net]()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    if variant in ("dense", "checkpoint"):
        return Checkpointed(model) if variant == "checkpoint" else model, optimizer, None
    return model, optimizer, activations.compress(model, variant, optimizer)


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """One step; its loss."""
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])


def one(net: str, variant: str, batches: str) -> dict[str, Any]:
    """Kept bytes, peak memory above what lived before the step, and seconds a step, in this process."""
    torch.set_num_threads(1)
    fed = torch.load(batches)
    model, optimizer, session = trainer(net, variant, 0, 0.05)
    peaks, times, before = [], [], status("VmRSS")
    with session or contextlib.nullcontext():
        for number in range(STEPS):
            Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
            began = time.thread_time()
            step(model, optimizer, *fed[number % 2])
            times.append(time.thread_time() - began)
            peaks.append(status("VmHWM"))
    row = {"net": net, "variant": variant, "step_s": round(min(times), 3), "peak": peaks[-1]}
    row["above"] = peaks[-1] - before
    if variant != "checkpoint":
        kept = activations.measure(model, fed[0][0], session or "comet()")
        row |= {"dense": kept.dense, "kept": kept.kept if session else kept.dense}
        if variant == "comet()" and net == "resnet20":
            PICTURE.write_text(kept.picture())
    return row


def memory() -> list[dict[str, Any]]:
    """A row for each net and variant, each in a fresh process."""
    rows = []
    batches = Batches(BATCH, 0)
    with tempfile.TemporaryDirectory() as folder:
        fed = f"{folder}/batches"
        torch.save([batches.next() for _ in range(2)], fed)
        for variant in VARIANTS:
            for net in ("resnet20", "vgg"):
                command = [sys.executable, "-m", "benchmarks.activations", "one", net, variant, fed]
                settings = {**os.environ, **ALLOCATOR}
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, timeout=900, env=settings
                )
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
                keep("memory", rows)
    return rows


def grown(net: str, steps: int = 12) -> dict[str, Any]:
    """Kept bytes of a batch of 256 after these steps, when momentum has grown."""
    torch.set_num_threads(1)
    batches = Batches(BATCH, 0)
    model, optimizer, session = trainer(net, "comet()", 0, 0.05)
    with session:
        for _ in range(steps):
            step(model, optimizer, *batches.next())
    kept = activations.measure(model, batches.next()[0], session)
    return {"net": net, "variant": "comet()", "steps": steps, "dense": kept.dense, "kept": kept.kept}


def codec() -> list[dict[str, Any]]:
    """Ratio and speed on inputs of layers."""
    return [row for name, x in layer_inputs().items() for row in coded(name, x)]


def layer_inputs() -> dict[str, Tensor]:
    """Inputs of six layers of a ResNet-20 after 30 steps, flat float32, by the layers' names."""
    torch.set_num_threads(1)
    batches = Batches(64, 0)
    model, optimizer, _ = trainer("resnet20", "dense", 0, 0.1)
    for _ in range(30):
        step(model, optimizer, *batches.next())
    seen: dict[str, Tensor] = {}
    chosen = ("3.conv2", "5.conv1", "7.conv1", "10.conv2", "5.norm1", "7.norm1")
    for name in chosen:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, given, name=name: seen.__setitem__(name, given[0].detach().flatten().clone())
        )
    model(batches.next()[0])
    return {name: seen[name] for name in chosen}


def coded(name: str, x: Tensor) -> Iterator[dict[str, Any]]:
    """A row for each bound and codec."""
    rms = float(x.square().mean().sqrt())
    for share in BOUNDS:
        about = {"input": name, "bound": share, "zeros": round(float((x == 0).float().mean()), 3)}
        wire = kernels.error_bound_encode(x, share * rms)
        encode_s = least(lambda s=share: kernels.error_bound_encode(x, s * rms))
        decode_s = least(lambda w=wire: kernels.error_bound_decode(w, x.numel()))
        gigabytes = 4 * x.numel() / 1e9
        yield {
            **about,
            "codec": "error_bound",
            "ratio": round(4 * x.numel() / wire.numel(), 2),
            "encode_gb_s": round(gigabytes / encode_s, 2),
            "decode_gb_s": round(gigabytes / decode_s, 2),
        }
        if importlib.util.find_spec("blosc2"):
            yield {**about, "codec": "int8/16, bit shuffle, zstd 1 (blosc2)", **shuffled(x, share * rms)}


def shuffled(x: Tensor, eb: float) -> dict[str, float]:
    """Bins of 2 eb as the smallest integers, bits shuffled, zstd."""
    import blosc2

    def encode() -> Any:
        bins = (x / (2 * eb)).round()
        most = float(bins.abs().max())
        kind = torch.int8 if most < 128 else torch.uint8 if most < 256 and bins.min() >= 0 else torch.int16
        array = bins.to(kind).numpy()
        options = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.BITSHUFFLE]}
        return blosc2.compress2(array, typesize=array.itemsize, nthreads=1, **options)

    size = len(encode())
    return {
        "ratio": round(4 * x.numel() / size, 2),
        "encode_gb_s": round(4e-9 * x.numel() / least(encode), 2),
    }


def least(work: Any, repeats: int = 5) -> float:
    """The least processor time of one call."""
    found = []
    for _ in range(repeats):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return max(min(found), 1e-9)


def keep(part: str, rows: list[dict[str, Any]]) -> None:
    """Store the rows of a part."""
    activations_accuracy.RUNS.put(part, {"machine": machine(), "rows": rows})


def main() -> None:
    """Measure one part."""
    options = argparse.ArgumentParser(prog="benchmarks.activations")
    options.add_argument("part", choices=("codec", "memory", "kept", "accuracy", "one"))
    options.add_argument("of", nargs="*", help=argparse.SUPPRESS)
    options.add_argument("--net", choices=tuple(NETS), default="resnet20", help="of accuracy")
    options.add_argument(
        "--seeds", type=int, default=activations_accuracy.SEEDS, help="of accuracy [default: %(default)s]"
    )
    options.add_argument("--steps", type=int, help="of accuracy [default: about one epoch]")
    options.add_argument(
        "--out", type=Path, default=activations_accuracy.RUNS.file, help="the file of accuracy"
    )
    given = options.parse_args()
    if given.part == "one":
        print(json.dumps(one(*given.of)))
    elif given.part == "memory":
        keep("memory", memory())
    elif given.part == "codec":
        keep("codec", codec())
    elif given.part == "kept":
        keep("kept", [grown(net) for net in ("resnet20", "vgg")])
    else:
        activations_accuracy.measure(given.net, given.seeds, given.steps, Results(given.out))


if __name__ == "__main__":
    main()
