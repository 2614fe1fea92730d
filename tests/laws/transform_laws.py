"""Short trainings by everything that changes a model or its data, as tensors to compare bit for bit.

Each takes a function that opens a setting of torch, and one that opens the mode of evaluation and of state
calls.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from laconic import activations, admm, lowbit, sparsity
from laconic.activations import Coding
from laconic.admm.block_admm import BlockAdmm
from laconic.comm.loopback import Loopback
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.data.partition import Partition
from laconic.exchange.method import lift
from laconic.federated.client import Client
from laconic.federated.meta import PSGA, Averaging, Learner, Local, MetaGradient, Mlp, Sinusoids, few_step
from laconic.federated.rounds import deliver, weighted_mean
from laconic.federated.server import Server
from laconic.federated.zerofl import DiffOnTopWeights, Uplink
from laconic.optim import LAMB, LARS, AMSGrad, QCMDAdaGrad, QRDAAdaGrad, ShiftAdaMax, master_weights
from laconic.recipes import Accumulation, Copies, large_batch
from laconic.sparsity import Sparsifier
from laconic.tools.plan.rehearsal import play
from laconic.tools.plan.stage import Gradients

from .table import specs

Mode = Callable[[], AbstractContextManager[None]]
Law = Callable[[Mode, Mode], list[Tensor]]


def dense_net() -> nn.Sequential:
    """A classifier of 20 numbers, made before any setting is opened."""
    torch.manual_seed(0)
    middle = (nn.BatchNorm1d(32), nn.Hardtanh(), nn.Linear(32, 32), nn.ReLU())
    return nn.Sequential(nn.Linear(20, 32), *middle, nn.Linear(32, 5))


def image_net() -> nn.Sequential:
    """A classifier of images (1, 8, 8)."""
    torch.manual_seed(0)
    first = (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))
    return nn.Sequential(*first, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 5))


def batch_for(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Inputs and labels of 16 examples."""
    rng = torch.Generator().manual_seed(3)
    shape = (16, 1, 8, 8) if isinstance(model[0], nn.Conv2d) else (16, 20)  # type: ignore[index]
    return torch.randn(shape, generator=rng), torch.randint(0, 5, (16,), generator=rng)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def state_of(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters and buffers."""
    return [each.detach().clone() for each in model.state_dict().values() if isinstance(each, Tensor)]


def leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors of a state."""
    if isinstance(tree, Tensor):
        yield tree.detach().clone()
    elif isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from leaves(tree[key])
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from leaves(each)


def attached(
    attach: Callable[[nn.Module, Optimizer], Any],
    net: Callable[[], nn.Module] = dense_net,
    finish: Callable[[Any], Any] = lambda handle: handle.remove(),
    block: Callable[[Any], AbstractContextManager[Any]] | None = None,
) -> Law:
    """Train, evaluate, save, load, train on and finish with what `attach` returns."""

    def law(setting: Mode, evaluation: Mode) -> list[Tensor]:
        model = net()
        (x, y), optimizer, found = batch_for(model), sgd(model), list[Tensor]()
        with setting():
            handle = attach(model, optimizer)
            trained = handle if isinstance(handle, nn.Module) else model
            if trained is handle:
                optimizer = sgd(trained)
            for _ in range(2):
                for _ in range(4):
                    if block is None:
                        step(trained, optimizer, x, y)
                    else:
                        optimizer.zero_grad()
                        with block(handle):
                            loss = F.cross_entropy(trained(x), y)
                        loss.backward()
                        optimizer.step()
                trained.eval()
                with evaluation():
                    found.append(trained(x).clone())
                    state = handle.state_dict()
                    handle.load_state_dict(state)
                    found += leaves(state)
                trained.train()
            with evaluation():
                made = finish(handle)
                if isinstance(made, nn.Module):
                    found.append(made.eval()(x).clone())
            return found + state_of(trained)

    return law


def packed_by(kind: Callable[..., Any], **options: Any) -> Law:
    """Low bits in products, packed at the end."""
    return attached(lambda model, _: kind(model, **options), finish=lambda handle: handle.pack())


def table_admm(name: str, extragradient: bool) -> Law:
    def attach(model: nn.Module, optimizer: Optimizer) -> Any:
        return lowbit.admm(model, optimizer, name, every=2, extragradient=extragradient)  # type: ignore[arg-type]

    def finish(handle: Any) -> Any:
        handle.finish()
        return handle.pack()

    return attached(attach, finish=finish)


def straight(model: nn.Module, optimizer: Optimizer) -> Any:
    return lowbit.straight_through(model, optimizer, "ternary")


def exported(form: str) -> Law:
    """A sparse model in a sparse form."""

    def law(setting: Mode, evaluation: Mode) -> list[Tensor]:
        model = image_net()
        x, _ = batch_for(model)
        for each in model.parameters():
            if each.dim() > 1:
                each.data.view(-1, 4 if each[0].numel() % 4 == 0 else 1)[:, 0:1].zero_()
                each.data.flatten()[::2] = 0
        with setting(), evaluation():
            made = sparsity.export(model.eval(), form)  # type: ignore[arg-type]
            return [made(x).clone(), *state_of(made)]

    return law


def optimised(make: Callable[[list[nn.Parameter]], Optimizer], half: bool = False) -> Law:
    """Training by an optimiser with a resume in the middle."""

    def law(setting: Mode, evaluation: Mode) -> list[Tensor]:
        model = dense_net().to(torch.bfloat16 if half else torch.float32)
        x, y = batch_for(model)
        x = x.to(torch.bfloat16 if half else torch.float32)
        with setting():
            optimizer = make([*model.parameters()])
            for _ in range(4):
                step(model, optimizer, x, y)
            again = make([*model.parameters()])
            again.load_state_dict(optimizer.state_dict())
            for _ in range(4):
                step(model, again, x, y)
            return [*state_of(model), *leaves(again.state_dict()["state"])]

    return law


def with_masters(parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = SGD(parameters, lr=0.05, momentum=0.9)
    master_weights(optimizer)
    return optimizer


def by_rounding(parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = SGD(parameters, lr=0.05, momentum=0.9)
    master_weights(optimizer, rounding="stochastic")
    return optimizer


def recipe(kind: str) -> Law:
    """A large batch in parts, by a recipe, and copies of each example."""

    def law(setting: Mode, evaluation: Mode) -> list[Tensor]:
        model = dense_net()
        x, y = batch_for(model)
        with setting():
            sizes = {"batch": 64, "base_batch": 16, "steps": 8}
            optimizer, schedule = large_batch(model, **sizes, optimizer=kind)  # type: ignore[arg-type]
            parts, copies = Accumulation(16, most=4), Copies(2, correct_every=2)
            for _ in range(3):
                optimizer.zero_grad()
                for share, some_x, some_y in parts.parts(model, x, y):
                    (share * F.cross_entropy(model(some_x), some_y)).backward()
                copies.backward(model, F.cross_entropy, x, y)
                optimizer.step()
                schedule.step()
            return state_of(model)

    return law


def federated(up: str, down: str | None) -> Law:
    """Rounds of two clients, with a server that is saved and loaded."""

    def law(setting: Mode, evaluation: Mode) -> list[Tensor]:
        first = {name: each.clone() for name, each in dense_net().state_dict().items()}
        noise = {
            name: torch.randn(each.shape, generator=torch.Generator().manual_seed(len(name)))
            for name, each in first.items()
        }
        with setting():
            server, clients = Server(first, up, down), [Client(first) for _ in range(2)]
            present, found = first, list[Tensor]()
            for _ in range(4):
                proposals = []
                for place, client in enumerate(clients):
                    own = deliver(server, client, str(place))
                    trained = {
                        name: value + 1 if not value.is_floating_point() else value + 0.1 * noise[name]
                        for name, value in own.items()
                    }
                    wire = client.reply(trained)
                    found.append(wire.clone())
                    proposals.append((server.receive(str(place), wire), 1 + place))
                present = weighted_mean(present, proposals)
                with evaluation():
                    server.publish(present)
                    server.load_state_dict(server.state_dict())
            return [*found, *(present[name].clone() for name in sorted(present))]

    return law


def meta(plan: Any) -> Law:
    """A meta-model of sinusoids, and how well it learns."""

    def law(setting: Mode, evaluation: Mode) -> list[Tensor]:
        with setting():
            learner, tasks = Learner(Mlp((1, 8, 8, 1))), Sinusoids(3, seed=1)
            made = plan.train(learner, tasks, learner.network.first(0))
            loss = few_step(learner, tasks, made.weights, queries=10, steps=(0, 1, 2)).loss
            return [made.weights, made.agents, torch.tensor(loss, dtype=torch.float64, device="cpu")]

    return law


def masked_uplink(setting: Mode, evaluation: Mode) -> list[Tensor]:
    layout = Layout.of([("a", (10, 10)), ("bias", (10,)), ("b", (7, 9))])
    rng = torch.Generator().manual_seed(0)
    start, end = torch.randn(layout.numel, generator=rng), torch.randn(layout.numel, generator=rng)
    with setting():
        uplink = Uplink(DiffOnTopWeights(0.9, 0.1), layout, ("a", "b"))
        wire = uplink.encode(start, end)
        return [wire, uplink.decode(wire), uplink.next_weights(start, [wire, wire], [1, 3])]


def dealt(spec: str) -> Law:
    """A partition of labels."""

    def law(setting: Mode, evaluation: Mode) -> list[Tensor]:
        labels = torch.arange(400) * 7 % 10
        with setting():
            shares: list[Tensor] = parse(spec).deal(labels, None if "speaker" in spec else 4, seed=1)
            return [each.clone() for each in shares]

    return law


def by_blocks(spec: str) -> Law:
    """Blocks of a model that train side by side."""

    def law(setting: Mode, evaluation: Mode) -> list[Tensor]:
        rng, size = torch.Generator().manual_seed(0), parse(spec).blocks
        x = torch.randn(32, 20, generator=rng)
        y, example, nets = x[:, :4].argmax(1), x[:2], [dense_net() for _ in range(size)]
        options = {"samples": 32} if "mode='batch'" in spec else {}

        def rank(comm: Loopback) -> list[Tensor]:
            with device:
                make: Any = lambda parameters: SGD(parameters, lr=0.05)  # noqa: E731
                trainer: Any = admm.BlockTrainer(
                    nets[comm.rank], spec, example=example, optimizer=make, comm=comm, **options
                )
                for number in range(4):
                    ids = torch.arange(8, dtype=torch.int64, device="cpu") + 8 * (number % 4)
                    trainer.step(x[ids], y[ids], ids if options else None)
                with evaluation():
                    trainer.load_state_dict(trainer.state_dict())
                trainer.finish()
                model = trainer.gather()
                trainer.close()
                return state_of(model)

        with setting():
            device = torch.get_default_device()  # each thread has its own
            return [each for end in Loopback.run(size, rank) for each in end]

    return law


def factorised(setting: Mode, evaluation: Mode) -> list[Tensor]:
    x = torch.rand(6, 12, generator=torch.Generator().manual_seed(0))
    with setting():
        facto = admm.DeepFacto(12, 3, device=torch.device("cpu"))
        with evaluation():
            before = facto(x).clone()
        return [before, facto.learn(x), *state_of(facto)]


def planned(spec: str) -> Law:
    """Bytes of a method in the planner's rehearsal."""

    def law(setting: Mode, evaluation: Mode) -> list[Tensor]:
        layout = Layout.of([("a", (40, 30)), ("bias", (40,))])
        with setting():
            figures = [each.nbytes.values() for each in play(lift(spec), layout, 2, Gradients(layout))]
        return [torch.tensor([sum(each) for each in figures], dtype=torch.float64)]

    return law


def saved_pack(setting: Mode, evaluation: Mode) -> list[Tensor]:
    """A packed model, through a file."""
    model, plain = dense_net(), dense_net()
    x, _ = batch_for(model)
    with setting():
        handle = lowbit.quantise(model, weights=2, activations=2)
        handle.finish()
        with tempfile.TemporaryDirectory() as folder, evaluation():
            lowbit.save_packed(handle.pack(), f"{folder}/packed.pt")
            again = lowbit.load_packed(f"{folder}/packed.pt", plain)
            return [again.eval()(x).clone()]


WAYS = (
    ("dense()", None),
    ("stc(density=0.05)", "stc(density=0.05)"),
    ("qsgd(levels=7)", "qsgd(levels=7)"),
    ("sign()", "bf16()"),
    ("fp16()", "natural()"),
)
METAS = (
    PSGA(rounds=3, eta=0.1, local=Local(steps=3)),
    PSGA(rounds=3, eta=0.1, local=Local(steps=3), up="qsgd(levels=7)", down="topk(density=0.1)"),
    Averaging(rounds=3, local=Local(steps=3)),
    MetaGradient(rounds=3),
)
LAWS: dict[str, Law] = {
    **{
        f"activations {spec}": attached(
            lambda model, optimizer, spec=spec: activations.compress(model, spec, optimizer),
            finish=lambda session: None,
            net=image_net,
            block=lambda session: session,
        )
        for spec in specs(Coding)
    },
    "binarise": packed_by(lowbit.binarise, stochastic=True, norm="shift", seed=3),
    "quantise linear": packed_by(lowbit.quantise, weights=2, activations=3, stochastic=True),
    "quantise weights": packed_by(lowbit.quantise, weights=2, activations=None, gradients=None),
    "quantise log": attached(lambda model, _: lowbit.quantise(model, weights=3, scale="log")),
    "convert": attached(
        lambda model, _: lowbit.convert(model, 4, rounding="stochastic"),
        net=image_net,
        finish=lambda made: made,
    ),
    "admm ternary": table_admm("ternary", True),
    "admm quinary": table_admm("quinary", False),
    "straight_through": attached(straight, finish=lambda handle: handle.finish()),
    "saved pack": saved_pack,
    **{
        f"sparsify {spec}": attached(
            lambda model, optimizer, spec=spec: sparsity.sparsify(model, optimizer, spec, steps=8),
            net=image_net,
        )
        for spec in specs(Sparsifier)
    },
    "swat": attached(lambda model, _: sparsity.swat(model, 0.5, refresh=2), net=image_net),
    "export csr": exported("csr"),
    "export auto": exported("auto"),
    "LARS": optimised(lambda p: LARS(p, lr=1.0)),
    "LAMB": optimised(lambda p: LAMB(p, lr=0.01)),
    "AMSGrad": optimised(lambda p: AMSGrad(p, lr=0.01)),
    "QCMDAdaGrad": optimised(lambda p: QCMDAdaGrad(p, lr=0.01)),
    "QRDAAdaGrad": optimised(lambda p: QRDAAdaGrad(p, lr=0.01)),
    "ShiftAdaMax": optimised(lambda p: ShiftAdaMax(p)),
    "master weights": optimised(with_masters, half=True),
    "stochastic rounding": optimised(by_rounding, half=True),
    **{f"large_batch {kind}": recipe(kind) for kind in ("lars", "lamb", "sgd")},
    **{f"federated {up} {down}": federated(up, down) for up, down in WAYS},
    **{f"meta {plan}": meta(plan) for plan in METAS},
    "zerofl": masked_uplink,
    **{f"partition {spec}": dealt(spec) for spec in specs(Partition)},
    **{f"blocks {spec}": by_blocks(spec) for spec in specs(BlockAdmm)},
    "deep_facto": factorised,
    **{f"plan {spec}": planned(spec) for spec in ("dgc(density=0.05)", "oktopk(density=0.05)")},
}
