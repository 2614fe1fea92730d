"""What works together: every method with every feature of DDP training, each cell tried for real.

`composition_page.py` writes the table; a test compares it with what it finds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import LaconicError
from tests.dist.nets import SGD, agree, batch, flat, loss_of, net
from tests.dist.runs import MANY, advance, compressed, scaled_step

METHODS = (
    "auto()",
    "dense()",
    "fp16()",
    "bf16()",
    "cast('fp16')",
    "topk(density=0.05)",
    "sampled_topk(density=0.05)",
    "threshold(value=0.01)",
    "randomk(density=0.05)",
    "dgc(density=0.05)",
    "dgc(density=0.05, warmup_steps=4)",
    "terngrad()",
    "qsgd(levels=7)",
    "natural()",
    "sign()",
    "stc(density=0.05, down=0.05)",
    "majority_vote()",
    "by_name({'*0.*': qsgd(levels=127), '*': topk(density=0.05)})",
    "ef21_sgdm(topk(density=0.05))",
    "demo(density=0.05)",
    "comp_ams(topk(density=0.05))",
    "onebit_adam(warmup_steps=2)",
    "zero_one_adam(freeze_steps=2, kappa=1)",
)
ADAMS = ("comp_ams", "onebit_adam", "zero_one_adam")  # methods for another optimiser than SGD
STEPS = 4
Feature = Callable[[str], bool]  # spec -> whether replicas agree and parameters moved and are finite


def attach(spec: str, model: nn.Module, scaler: Any = None, groups: Any = None, **ddp: Any) -> Any:
    """DDP, an optimiser that the method takes and a handle on a model."""
    wrapped = DistributedDataParallel(model, **ddp)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups or wrapped.parameters(), **SGD)
    if spec.startswith(ADAMS):
        optimizer = torch.optim.AdamW(groups or wrapped.parameters(), lr=1e-3, eps=1e-4, amsgrad=True)
    return wrapped, optimizer, laconic.compress(wrapped, optimizer, spec, scaler=scaler)


def sound(model: nn.Module, before: Tensor) -> bool:
    """Replicas agree bit for bit, and training moved them."""
    return agree(model) and not torch.equal(before, flat(model))


def loop(spec: str, model: nn.Module, loss: Callable[[Any, int], Tensor] = loss_of, **options: Any) -> bool:
    """The plain training loop."""
    wrapped, optimizer, _ = attach(spec, model, **options)
    before = flat(wrapped)
    advance(wrapped, optimizer, STEPS, loss)
    return sound(wrapped, before)


def in_dtype(dtype: torch.dtype) -> Feature:
    """A feature: parameters and inputs of this dtype."""

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = batch(dist.get_rank(), step)
        out = model(x.to(dtype))
        return nn.functional.cross_entropy(out if dtype is torch.float64 else out.float(), y)

    return lambda spec: loop(spec, net().to(dtype), loss)


def autocast_and_scaler(spec: str) -> bool:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    wrapped, optimizer, _ = attach(spec, net(), scaler=scaler)
    before = flat(wrapped)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(wrapped, step)
        scaled_step(scaler, optimizer, loss)
    return sound(wrapped, before)


def accumulation(spec: str) -> bool:
    wrapped, optimizer, handle = attach(spec, net())
    before = flat(wrapped)
    for step in range(STEPS):
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss_of(wrapped, 2 * step).backward()
        loss_of(wrapped, 2 * step + 1).backward()
        optimizer.step()
    return sound(wrapped, before) and handle.stats().steps == STEPS


def clipping(spec: str) -> bool:
    wrapped, optimizer, _ = attach(spec, net())
    before = flat(wrapped)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(wrapped, step).backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 1e-3)
            optimizer.step()
    warned = any("changed between backward() and step()" in str(each.message) for each in said)
    return sound(wrapped, before) and warned == ("dgc" in spec)


class Sometimes(nn.Module):
    """Uses its second branch on odd steps only, and its third never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = net(0), net(1), net(2)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.first(x) + (self.second(x) if self.step % 2 == 0 else 0)


class Words(nn.Module):
    """An embedding with sparse gradients before a small network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 20, sparse=True)
        self.rest = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.words((x[:, 0] * 10).long() % 50) + x)


def sparse_embeddings(spec: str) -> bool:
    plain = {**SGD, "weight_decay": 0.0}  # torch.optim.SGD takes no weight decay with sparse gradients
    wrapped, optimizer, _ = compressed(spec, Words(), sgd=plain)
    before = flat(wrapped)
    advance(wrapped, optimizer, STEPS)
    return sound(wrapped, before)


def join(spec: str) -> bool:
    wrapped, optimizer, handle = attach(spec, net())
    before = flat(wrapped)
    with Join([wrapped, handle]):
        advance(wrapped, optimizer, 2 + dist.get_rank())
    return sound(wrapped, before)


def several_groups(spec: str) -> bool:
    model = net()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "momentum": 0.8}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]
    return loop(spec, model, groups=groups)


def frozen_and_tied(spec: str) -> bool:
    model = net()
    model[2].weight = model[5].weight
    model[0].weight.requires_grad_(False)
    return loop(spec, model)


FEATURES: dict[str, Feature] = {
    "autocast + GradScaler": autocast_and_scaler,
    "accumulation": accumulation,
    "clipping": clipping,
    "compile": lambda spec: loop(spec, torch.compile(net(), backend="aot_eager")),  # type: ignore[arg-type]
    "static_graph": lambda spec: loop(spec, net(), static_graph=True),
    "unused parameters": lambda spec: loop(spec, Sometimes(), find_unused_parameters=True),
    "sparse embeddings": sparse_embeddings,
    "bf16 parameters": in_dtype(torch.bfloat16),
    "fp16 parameters": in_dtype(torch.float16),
    "fp64 parameters": in_dtype(torch.float64),
    "Join": join,
    "several groups": several_groups,
    "many buckets": lambda spec: loop(spec, net(), gradient_as_bucket_view=True, **MANY),
    "frozen, tied": frozen_and_tied,
}


def cell(spec: str, feature: str) -> str:
    """The text of one cell of the table: "works", "refused: ..." or "BROKEN: ..."."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of torch about its own features are not ours to judge here
        try:
            return "works" if FEATURES[feature](spec) else "BROKEN: replicas differ or nothing was learnt"
        except LaconicError as error:
            return f"refused: {error}"


def tried(pool: Any, cells: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The text of these cells, as two ranks find it."""
    found = pool.each(2, cell, cells, timeout_s=600)
    return {key: one if one == other else f"BROKEN: {one} / {other}" for key, (one, other) in found}
