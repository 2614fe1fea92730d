"""Torch's global settings change nothing in real processes: DDP, FSDP2, strategies, pipelines, replicas."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import LaconicError
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.strategies.strategy import Strategy
from tests.dist import composition, nets, pipelines
from tests.dist.composition import FEATURES, METHODS
from tests.dist.nets import batch, flat, net
from tests.laws.strategy_ranks import fits
from tests.laws.table import compressors, first_of_each, specs
from tests.laws.torch_settings import SETTINGS, evaluating, opened

GRID = ("float64", "bfloat16", "meta", "deterministic")
Place = tuple[str, str, str]  # method, feature and setting


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with the CPU as default device, for data and models of the user."""

    def there(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return there


@contextmanager
def replaced(module: Any, functions: dict[str, Any]) -> Iterator[None]:
    """A block in which these names of a module are others."""
    before = {name: vars(module)[name] for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def given_on_cpu() -> Iterator[None]:
    """Models, batches and DDP of the grid are made on the CPU."""
    names = ("net", "batch", "agree", "flat", "DistributedDataParallel", "Words", "Sometimes")
    made = {name: on_cpu(vars(composition)[name]) for name in names}
    with replaced(composition, made), replaced(nets, {"batch": on_cpu(nets.batch)}):
        yield


def cells(places: list[Place]) -> list[str]:
    """The cells of docs/composition.md under a setting that differ from those without."""
    wrong = []
    for spec, feature, setting in places:
        with opened(setting), given_on_cpu():
            found = composition.cell(spec, feature)
        if found != "works" and found != (plain := composition.cell(spec, feature)):
            wrong.append(f"{spec}, {feature} under {setting}: {found}; without: {plain}")
    return wrong


def places() -> list[Place]:
    """Each feature under two of four settings, and each method once; the slow compiler under one setting."""
    pairs = [
        (feature, setting)
        for i, setting in enumerate(GRID)
        for j, feature in enumerate(FEATURES)
        if (i == 0 if feature == "compile" else (i + j) % 2 == 0)
    ]
    return [(METHODS[i % len(METHODS)], *pair) for i, pair in enumerate(pairs)]


def test_the_composition_grid_is_the_same_under_every_setting(pool: Any) -> None:
    for wrong in pool.run(2, cells, places(), timeout_s=200):
        assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("setting", GRID)
@pytest.mark.parametrize("spec", METHODS)
def test_the_whole_grid_is_the_same_under_every_setting(pool: Any, spec: str, setting: str) -> None:
    every = [(spec, feature, setting) for feature in FEATURES]
    for wrong in pool.run(2, cells, every, timeout_s=200):
        assert not wrong, "\n".join(wrong)


def optimizer_of(spec: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD, or what the method needs."""
    made = (rule.make([*model.parameters()], lr=0.01, weight_decay=0.0) for rule in lift(spec).rules)
    own = next((each for each in made if each is not None), None)
    return own or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def compressed(spec: str, setting: str, dtype: torch.dtype | None = None) -> Tensor:
    """Parameters after a DDP training with an evaluation and a resume in the middle."""
    model = net(width=16, depth=2).to(dtype)
    batches = [(x.to(dtype), y) for x, y in (batch(dist.get_rank(), step) for step in range(4))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = DistributedDataParallel(model)
        with opened(setting):
            optimizer = optimizer_of(spec, model)
            handle = laconic.compress(wrapped, optimizer, spec)
            for step, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
                if step == 1:
                    wrapped.eval()
                    with evaluating(setting):
                        wrapped(x)
                        handle.load_state_dict(handle.state_dict())
                        handle.stats()
                    wrapped.train()
            with evaluating(setting):
                handle.remove()
    return flat(model)


def distributed(spec: str, setting: str) -> Tensor:
    """Parameters after a training by a strategy, and after `finish`."""
    model = net(width=16, depth=2)
    batches = [batch(dist.get_rank(), step) for step in range(6)]
    with opened(setting):
        momentum = nets.momentum_for(spec)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        model, optimizer = laconic.distribute(model, sgd, spec)
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step == 2:
                with evaluating(setting):
                    optimizer.load_state_dict(optimizer.state_dict())
                    with optimizer.averaged():
                        model(x)
        with evaluating(setting):
            optimizer.stats()
            optimizer.finish()
        end = flat(model)
        optimizer.remove()
    return end


def differing(kind: str, cases: list[tuple[str, str]]) -> list[str]:
    """The cases in which a setting changes a bit, or which fail."""
    wrong = []
    for spec, setting in cases:
        try:
            plain, found = TRAININGS[kind](spec, ""), TRAININGS[kind](spec, setting)
        except Exception as error:
            raise AssertionError(f"{spec} under {setting}: {type(error).__name__}: {error}") from error
        if found.dtype != plain.dtype or not (torch.equal(plain, found) or by_clocks(spec)):
            wrong.append(f"{spec} under {setting}: not the same weights")
    return wrong


def by_clocks(spec: str) -> bool:
    """Whether clocks decide, so that no two runs are alike."""
    found = parse(spec)
    return found.clocked if isinstance(found, Strategy) else lift(spec).adaptive


def float64_models(names: list[str]) -> list[str]:
    """Methods that do not train a float64 model, under a float64 default."""
    wrong = []
    for spec in names:
        try:
            if not bool(compressed(spec, "float64", torch.float64).isfinite().all()):
                wrong.append(f"{spec}: not finite")
        except LaconicError as error:
            if not str(error).startswith("lgc does not compress"):
                raise
    return wrong


def sharded(spec: str, setting: str) -> Tensor:
    """Parameters after a training under FSDP2."""
    model = net(width=16, depth=2)
    batches = [batch(dist.get_rank(), step) for step in range(4)]
    fully_shard(model)
    with opened(setting):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        handle = laconic.compress(model, optimizer, spec)
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step == 1:
                with evaluating(setting):
                    handle.load_state_dict(handle.state_dict())
                    handle.stats()
        handle.remove()
    return torch.cat([each.full_tensor().detach().flatten() for each in model.parameters()])


def piped(spec: str, setting: str) -> Tensor:
    """Parameters after a pipelined training with a resume in the middle."""
    made, known = pipelines.Pipeline("GPipe"), pipelines.data()
    plain = {"data": lambda: known, "order": on_cpu(pipelines.order)}
    with opened(setting), replaced(pipelines, plain):
        given = {"samples": pipelines.SAMPLES} if spec.startswith("change") else {}
        handle = pipelines.compressed(made, {"forward": spec, **given})
        for step in range(4):
            ids = pipelines.order(step)
            handle.samples = ids
            made.train(ids)
            if step == 1:
                with evaluating(setting):
                    handle.load_state_dict(handle.state_dict())
                    handle.stats()
        handle.remove()
    return made.weights


def replicated(spec: str, setting: str) -> Tensor:
    """Parameters after a training by a Replicator."""
    rng, first = torch.Generator().manual_seed(1), net(width=16, depth=2)
    x, y = torch.randn(32, 20, generator=rng), torch.randint(0, 5, (32,), generator=rng)

    def main(replicator: Any) -> Tensor:
        model = copy.deepcopy(first)
        optimizer = replicator.wrap_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), compressor="qsgd(levels=7)"
        )

        def step_fn(rows: Any) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows["x"]), rows["y"]).backward()
            optimizer.step()

        def slices(context: Any) -> Iterator[dict[str, Tensor]]:
            size = context.per_pipeline(16)
            for start in range(0, len(x), 16):
                begin = start + size * context.pipeline
                yield {"y": y[begin : begin + size], "x": x[begin : begin + size]}

        replicator.run(step_fn, replicator.make_input(slices, "per_worker"))
        with evaluating(setting):
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.stats()
        replicator.run(step_fn, replicator.make_input(slices, "per_worker"))
        return flat(model)

    with opened(setting):
        return torch.cat(laconic.Replicator(spec).launch(main))


COMPRESS = compressors()
DISTRIBUTE = [spec for spec in specs(Strategy) if fits(spec, 2)]
FSDP = ["cgx(bits=8)", "error_fed(scatter_reduce(minmax(bits=2, block=16)))"]
PIPELINES = ["minmax(bits=8)", "change(minmax(bits=2))", "change(qsgd(levels=15), first='bf16')"]
PIPELINES += ["change(sparse(topk(density=0.5)))"]
REPLICAS = ["sync", "local(replicas=2)"]
TRAININGS = {
    "compress": compressed,
    "distribute": distributed,
    "fsdp": sharded,
    "pipeline": piped,
    "replicator": replicated,
}
CASES = {
    "compress": COMPRESS,
    "distribute": DISTRIBUTE,
    "fsdp": FSDP,
    "pipeline": PIPELINES,
    "replicator": REPLICAS,
}


@pytest.mark.parametrize("kind", CASES)
def test_training_has_the_same_bits_under_a_setting(pool: Any, kind: str) -> None:
    """Every name under one setting in turn, by its first example."""
    cases = [(spec, SETTINGS[i % len(SETTINGS)]) for i, spec in enumerate(first_of_each(CASES[kind]))]
    for wrong in pool.run(2, differing, kind, cases, timeout_s=200):
        assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
def test_every_example_of_a_method_trains_a_float64_model(pool: Any) -> None:
    for wrong in pool.run(2, float64_models, COMPRESS, timeout_s=600):
        assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", CASES)
def test_training_has_the_same_bits_under_every_setting(pool: Any, kind: str, setting: str) -> None:
    for wrong in pool.run(2, differing, kind, [(spec, setting) for spec in CASES[kind]], timeout_s=600):
        assert not wrong, "\n".join(wrong)


def test_every_method_trains_a_float64_model(pool: Any) -> None:
    """With a float64 default, as scientific scripts have it."""
    for wrong in pool.run(2, float64_models, first_of_each(COMPRESS), timeout_s=200):
        assert not wrong, "\n".join(wrong)


PULLED = ("easgd()", "lsgd(ranks_per_node=1)")  # towards a centre or a leader that has moved less
SUBTRACTED = ("sgp()", "dpsgd()", "osgp()", "noloco()", "choco()", "local_sgd()", "diloco()")


def change(spec: str, dtype: str) -> tuple[torch.dtype, float]:
    """What three steps of SGD at a rate of 1 with gradients of 1 add to each weight."""
    model = nn.Linear(4, 4, bias=False)
    with opened(dtype):
        _, optimizer = laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), spec)
        before = model.weight.detach().clone()
        for _ in range(3):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        optimizer.finish()
        optimizer.remove()
    return model.weight.dtype, float((model.weight.detach() - before).mean())


def changes(names: tuple[str, ...], dtype: str) -> dict[str, tuple[torch.dtype, float]]:
    return {spec: change(spec, dtype) for spec in names}


def test_an_update_is_applied_once_whatever_the_default_dtype_is(pool: Any) -> None:
    names = SUBTRACTED + PULLED
    plain, *others = (pool.run(2, changes, names, dtype) for dtype in ("", "float64", "bfloat16"))
    for found in (*plain, *(each for ranks in others for each in ranks)):
        for spec, (dtype, by) in found.items():
            assert dtype is torch.float32, spec
            assert by == pytest.approx(plain[0][spec][1] if spec in PULLED else -3.0, abs=1e-5), spec
