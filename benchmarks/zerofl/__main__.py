"""ZeroFL's three uplink masks on CIFAR-10: accuracy and uplink bytes, beside plain SWAT and dense FedAvg.

    python -m benchmarks.zerofl                 every run that is not stored yet, one seed first
    python -m benchmarks.zerofl --splits iid    only these; another process can do the others meanwhile
    python -m benchmarks.zerofl --quick         one round of each, in a temporary folder

100 clients, 10 a round, in one process on one thread. A run is a function of its seed: clients, their
examples and their batches do not depend on the mask.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic.core.layout import Layout
from laconic.core.turn import mix
from laconic.data.partition.dirichlet import Dirichlet
from laconic.federated.zerofl import DiffOnTopWeights, TopDiff, TopWeights, Uplink, UplinkMask, csr_nbytes
from laconic.sparsity import swat
from laconic.tools.tasks import find
from laconic.tools.tasks.task import Tensors, cross_entropy, right_answers

RUNS = Results(Path(__file__).with_name("results.jsonl"))
CLIENTS, PER_ROUND, ROUNDS = 100, 10, 20
BATCH, LOCAL_BATCHES = 25, 10
LR_FIRST, LR_LAST = 0.2, 0.02  # eta_t = first (last / first)^(t / T)
LOWER = (0.1, 0.05)  # first rates of dense training and of plain SWAT, beside LR_FIRST
SPARSITY, KEEP = 0.9, ("11",)  # the last layer stays dense, as the first one
SEEDS = 3
ALPHAS = {"iid": 1000.0, "dirichlet": 0.1}
MASKS = {"A": TopWeights, "B": DiffOnTopWeights, "C": TopDiff}
RATIOS = (0.0, 0.1, 0.2)
TEST_BATCH = 500


@dataclass(frozen=True)
class Trial:
    """One training. `name`: "fedavg", "swat", or a mask's letter and its ratio, such as "A-0.1".

    After an "@" the name has the learning rate of the first round, instead of LR_FIRST: "fedavg@0.1".
    """

    split: str
    name: str
    seed: int

    @property
    def mask(self) -> UplinkMask | None:
        """None where the whole model is sent."""
        letter, _, ratio = self.name.partition("-")
        return MASKS[letter](SPARSITY, float(ratio)) if ratio else None

    @property
    def dense(self) -> bool:
        """Whether clients train without SWAT."""
        return self.name.startswith("fedavg")

    @property
    def lr(self) -> float:
        """Learning rate of the first round."""
        return float(self.name.partition("@")[2] or LR_FIRST)

    @property
    def key(self) -> str:
        return f"{self.split}-{self.name}-{self.seed}"


def trials() -> Iterator[Trial]:
    """All of them, all of one seed before the next seed."""
    masks = (f"{letter}-{ratio:g}" for ratio in (0.1, 0.0, 0.2) for letter in MASKS)
    names = ["fedavg", "swat", *masks, *(f"{name}@{rate:g}" for name in ("fedavg", "swat") for rate in LOWER)]
    for seed in range(SEEDS):
        for name in names:
            for split in ALPHAS:
                yield Trial(split, name, seed)


def train(trial: Trial, tensors: Tensors, rounds: int, tested: int | None = None) -> dict[str, Any]:
    """One training, and what is kept of it. `tested`: how many test images; default: all."""
    began = time.process_time()
    torch.manual_seed(trial.seed)
    model = network()
    handle = None if trial.dense else swat(model, SPARSITY, keep=KEEP)
    fresh = {} if handle is None else handle.state_dict()
    layout = Layout.of((name, tuple(part.shape)) for name, part in model.named_parameters())
    uplink = None if trial.mask is None or handle is None else Uplink(trial.mask, layout, handle.weights)
    weights = torch.cat([part.detach().flatten() for part in model.parameters()])
    deals = Dirichlet(ALPHAS[trial.split], least=BATCH)
    shards = deals.deal(tensors["train_y"], CLIENTS, trial.seed)
    uplink_bytes, curve, kept = [], [], []
    for turn in range(rounds):
        rng = np.random.default_rng(mix(trial.seed, turn))
        chosen = rng.choice(CLIENTS, PER_ROUND, replace=False).tolist()
        lr, wires, ends = trial.lr * (LR_LAST / LR_FIRST) ** (turn / rounds), [], []
        for client in chosen:
            put(model, weights)
            if handle is not None:
                handle.load_state_dict(fresh)  # each client computes its own thresholds
            local(model, tensors, batches(shards[client], trial.seed, turn, client), lr)
            ends.append(torch.cat([part.detach().flatten() for part in model.parameters()]))
            if uplink is not None:
                wires.append(uplink.encode(weights, ends[-1]))
            if handle is not None:
                kept.append(handle.kept_bytes() / handle.dense_bytes())
        examples = [len(shards[client]) for client in chosen]
        uplink_bytes += [wire.numel() for wire in wires] or [4 * layout.numel] * PER_ROUND
        if uplink is None:
            shares = torch.tensor(examples) / sum(examples)
            weights = (torch.stack(ends) * shares[:, None]).sum(0)
        else:
            weights = uplink.next_weights(weights, wires, examples)
        if (turn + 1) % max(1, rounds // 5) == 0:
            put(model, weights)
            part = tested if turn + 1 == rounds else 2000
            curve.append((turn + 1, *accuracy(model, tensors, part)))
    shapes = {entry.name: entry.shape for entry in layout}
    csr = None
    if trial.mask is not None and handle is not None:
        csr = csr_nbytes(shapes, handle.weights, trial.mask.density)
    return {
        "split": trial.split,
        "name": trial.name,
        "seed": trial.seed,
        "rounds": rounds,
        "accuracy": curve[-1][1],
        "test_loss": curve[-1][2],
        "uplink_bytes": sum(uplink_bytes) / len(uplink_bytes),  # per client and round
        "csr_bytes": csr,
        "dense_bytes": 4 * layout.numel,
        "kept_share": sum(kept) / len(kept) if kept else None,
        "curve": curve,
        "cpu_s": round(time.process_time() - began, 1),
        "machine": machine(),
    }


def network() -> nn.Module:
    """The small CNN with the first weights of He et al. 2015: a tenth of torch's is too small to learn."""
    model = find("cifar10").recipe("cnn").build()
    for name, part in model.named_parameters():
        if part.dim() > 1 and not name.startswith(KEEP):
            nn.init.kaiming_normal_(part)
    return model


def put(model: nn.Module, weights: Tensor) -> None:
    """Copy flat weights into the model's parameters."""
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())


def batches(own: Tensor, seed: int, turn: int, client: int) -> Iterator[Tensor]:
    """The examples of a client's local batches in a round, drawn anew whenever all have been used."""
    rng = torch.Generator().manual_seed(mix(seed, turn, client) >> 1)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(LOCAL_BATCHES):
        if len(order) < BATCH:
            order = torch.randperm(len(own), generator=rng)
        yield own[order[:BATCH]]
        order = order[BATCH:]


def local(model: nn.Module, tensors: Tensors, chosen: Iterator[Tensor], lr: float) -> None:
    """A client's local training: plain SGD."""
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=lr), find("cifar10").inputs
    for examples in chosen:
        optimizer.zero_grad()
        x, y = inputs(tensors["train_x"][examples], None), tensors["train_y"][examples]
        torch.autograd.backward(cross_entropy(model(x), y))
        optimizer.step()


def accuracy(model: nn.Module, tensors: Tensors, tested: int | None) -> tuple[float, float]:
    """Share of right answers and mean loss on the first `tested` test images, sparse as in training."""
    model.eval()
    x, y = tensors["test_x"][:tested], tensors["test_y"][:tested]
    right, loss = 0, 0.0
    with torch.no_grad():
        for start in range(0, len(y), TEST_BATCH):
            logits = model(find("cifar10").inputs(x[start : start + TEST_BATCH], None))
            labels = y[start : start + TEST_BATCH]
            right += right_answers(logits, labels)
            loss += len(labels) * cross_entropy(logits, labels).item()
    model.train()
    return right / len(y), loss / len(y)


def main() -> None:
    """Do every run that is left."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--splits", nargs="+", choices=[*ALPHAS], default=[*ALPHAS])
    arguments.add_argument("--seeds", nargs="+", type=int, default=[*range(SEEDS)])
    arguments.add_argument("--names", nargs="+", help="such as swat or A-0.1; default: all")
    arguments.add_argument("--quick", action="store_true", help="one round of each, kept nowhere")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    tensors = find("cifar10").load(None)
    for trial in trials():
        left_out = options.names is not None and trial.name not in options.names
        if left_out or trial.split not in options.splits or trial.seed not in options.seeds:
            continue
        if not options.quick and trial.key in RUNS:
            continue
        found = train(trial, tensors, *((1, 500) if options.quick else (ROUNDS,)))
        if not options.quick:
            RUNS.put(trial.key, found)
        print(f"{trial.key}: {100 * found['accuracy']:.2f} %, {found['uplink_bytes']:,.0f} bytes", flush=True)


if __name__ == "__main__":
    main()
