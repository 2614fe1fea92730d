"""Models learn, are alike on all ranks, and leave little for the dense route."""

from __future__ import annotations

import pytest
import torch
from tests.unit.shared import for_each, same

from laconic.tools.tasks import TASKS, find
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import cross_entropy, right_answers

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32), "shakespeare": (64,)}
MODELS = [(task.name, model) for task in TASKS.values() for model in task.models]


@for_each("name, model", MODELS)
def test_a_model_learns_one_batch_and_equal_seeds_build_equal_models(name: str, model: str) -> None:
    task = find(name)
    recipe, rows = task.recipe(model), 2 if model == "gpt10m" else 8
    torch.manual_seed(0)
    net = recipe.build()
    torch.manual_seed(0)
    assert same(net.state_dict().values(), recipe.build().state_dict().values())
    rng = torch.Generator().manual_seed(0)
    most, shape = 16 if name == "digits" else 100, (rows, 64) if name == "shakespeare" else (rows,)
    x = torch.randint(0, most, (rows, *SHAPES[name]), dtype=torch.uint8, generator=rng)
    y = torch.randint(0, 10, shape, dtype=torch.uint8, generator=rng)
    optimizer = recipe.optimizer(net, lr=0.2 * recipe.lr)
    losses = []
    for _ in range(12):
        loss = cross_entropy(net(task.inputs(x, None)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_digits_leaves_room_for_a_ratio_of_50() -> None:
    net = find("digits").recipe().build()
    vectors = sum(p.numel() for p in net.parameters() if p.dim() < 2)
    matrices = sum(p.numel() for p in net.parameters()) - vectors
    assert matrices >= 200_000
    bits = matrices * 0.01 * (32 + 8.2) + 32 * vectors  # 8.2: Golomb-coded gaps at density 0.01
    assert 32 * (matrices + vectors) / bits > 60


@pytest.mark.nightly
def test_digits_reaches_97_percent() -> None:
    task = find("digits")
    recipe, tensors = task.recipe(), task.load(None)
    torch.manual_seed(0)
    net = recipe.build()
    optimizer = recipe.optimizer(net)
    shard = Shard(len(tensors["train_y"]), 64, rank=0, size=1, seed=0)
    for step in range(200):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(recipe.lr, step, 200)
        chosen = shard.indices(step)
        loss = cross_entropy(net(task.inputs(tensors["train_x"][chosen], None)), tensors["train_y"][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = right_answers(net(task.inputs(tensors["test_x"], None)), tensors["test_y"])
    assert right / len(tensors["test_y"]) > 0.97


def test_shards_never_overlap_and_epochs_differ() -> None:
    for n, batch, size in ((100, 7, 3), (64, 8, 8), (10, 10, 1)):
        shards = [Shard(n, batch, rank, size, seed=5) for rank in range(size)]
        length, epochs = shards[0].steps_per_epoch, []
        for epoch in range(2):
            steps = range(epoch * length, (epoch + 1) * length)
            seen = [i for shard in shards for step in steps for i in shard.indices(step).tolist()]
            assert len(seen) == len(set(seen)) == length * batch * size
            assert set(seen) <= set(range(n))
            epochs.append(seen)
        assert epochs[0] != epochs[1]
        assert shards[0].indices(3).tolist() == Shard(n, batch, 0, size, seed=5).indices(3).tolist()
    rngs = [Shard(100, 5, rank, 4, seed=0).rng(step) for rank in range(4) for step in range(5)]
    assert len({torch.rand(1, generator=rng).item() for rng in rngs}) == 20, (
        "ranks and steps augment differently"
    )
