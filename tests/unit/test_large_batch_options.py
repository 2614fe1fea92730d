"""Large batches and copies of the built-in tasks: what is dealt, which rates, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import nn

from laconic.core.errors import SpecError
from laconic.tools.cli.settings import Options, Settings
from laconic.tools.tasks import find
from laconic.tools.tasks.large_batch import LargeBatch
from laconic.tools.tasks.precision import Precision
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import cross_entropy

N, BATCH = 48, 3


def of(rank: int, size: int) -> Shard:
    return Shard(N, BATCH, rank, size, seed=5)


def test_a_group_of_workers_draws_the_same_examples_with_other_random_numbers() -> None:
    shards = [LargeBatch(copies=2).shard(of, rank, 4) for rank in range(4)]
    seen = []
    for step in range(N // (BATCH * 2)):
        drawn = [shard.indices(step) for shard in shards]
        assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
        assert len({shard.rng(step).initial_seed() for shard in shards}) == 4
        seen += [*drawn[0].tolist(), *drawn[2].tolist()]
    assert sorted(seen) == list(range(N))


def test_in_a_batch_copies_lie_one_after_the_other() -> None:
    shard = LargeBatch(copies=3, across="batch").shard(of, 1, 2)
    assert torch.equal(shard.indices(4), of(1, 2).indices(4).repeat(3))


def test_one_copy_is_the_shard_as_it_was() -> None:
    assert LargeBatch().shard(of, 1, 2) == of(1, 2)


def test_without_a_recipe_optimiser_and_rates_are_the_tasks_own() -> None:
    recipe = find("digits").recipe()
    made, peak, rate = _made(LargeBatch())
    assert type(made) is torch.optim.SGD
    assert peak == recipe.lr
    assert [rate(step) for step in range(20)] == [recipe.rate(recipe.lr, step, 20) for step in range(20)]


@for_each("kind, factor", [("sgd", 8.0), ("lars", 8.0), ("lamb", 8**0.5)])
def test_a_recipe_scales_the_rate_unless_one_is_given(kind: Any, factor: float) -> None:
    usual = {"lamb": 4e-3}.get(kind, find("digits").recipe().lr)
    _, peak, rate = _made(LargeBatch(recipe=kind))
    assert peak == pytest.approx(usual * factor)
    assert max(rate(step) for step in range(20)) == pytest.approx(peak)
    assert rate(0) < peak and rate(20) == 0
    assert _made(LargeBatch(recipe=kind), lr=0.3)[1] == 0.3


def _made(large_batch: LargeBatch, lr: float | None = None) -> Any:
    recipe = find("digits").recipe()
    sizes = {"batch": 256, "base_batch": 32, "steps": 20}
    return large_batch.optimizer(nn.Linear(3, 2), recipe, _method(), lr=lr, **sizes)


def _method() -> Any:
    from laconic.exchange.method import lift

    return lift("dense()")


def test_micro_batches_add_up_to_the_batch() -> None:
    torch.manual_seed(0)
    whole, parted = (nn.Linear(4, 3) for _ in range(2))
    parted.load_state_dict(whole.state_dict())
    x, y = torch.randn(10, 4), torch.randint(3, (10,))
    cross_entropy(whole(x), y).backward()
    rows, labels, share, earlier = LargeBatch(micro_batch_size=4).ahead(parted, x, y, Precision(None))
    loss = share * cross_entropy(parted(rows), labels)
    loss.backward()
    assert loss.item() + earlier == pytest.approx(cross_entropy(whole(x), y).item(), rel=1e-6)
    torch.testing.assert_close(parted.weight.grad, whole.weight.grad)


def settings(folder: Path, **changes: Any) -> Settings:
    given: dict[str, Any] = {"task": "digits", "model": None, "methods": ("dense()",), "against": ()}
    given |= {"workers": 2, "seeds": 1, "seed": 0, "steps": 30, "batch": None, "lr": None}
    given |= {"eval_every": None, "checkpoint_every": 0, "data": None, "out": folder, "name": "run"}
    return Settings.of(Options(**(given | changes)))


@for_each(
    "wrong, says",
    [
        ({"across": "batch"}, r"--across batch places --copies, which is 1: use --copies 2"),
        ({"copies": 3, "workers": 4}, r"divide --workers 4, got 3: use --workers 6, or --across batch"),
        ({"copies": 0}, "--copies must be"),
        ({"across": "epochs"}, "--across must be 'ranks' or 'batch'"),
        ({"recipe": "adam"}, "--recipe must be 'lamb', 'lars' or 'sgd'"),
        ({"micro_batch_size": 0}, "--micro-batch-size must be"),
        ({"copies": 2, "skew": 0.5}, "omit one of the two"),
        ({"recipe": "lamb", "methods": ("signum()",)}, "--recipe lamb does not go with signum"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(wrong, says, tmp_path):
    refuses(SpecError, says, settings, tmp_path, **wrong)


def test_a_run_knows_its_recipe_again(tmp_path: Path) -> None:
    made = settings(tmp_path, recipe="lars", copies=2, methods=("dgc(density=0.01)", "local_sgd(every=4)"))
    told = {"recipe": "lars", "copies": 2, "across": "ranks", "micro_batch_size": None}
    assert told.items() <= made.config().items()
