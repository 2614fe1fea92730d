"""One rank's training loop: one way for methods and strategies, and a resumed training does the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import StateError
from laconic.tasks import checkpoint, find
from laconic.tasks.enlarged import Enlarged
from laconic.tasks.group_model import MODEL
from laconic.tasks.settings import TrainingSettings
from laconic.tasks.shard import Shard
from laconic.tasks.task import cross_entropy
from laconic.tasks.training import train_rank
from tests.dist.nets import flat

STEPS, BATCH = 6, 4


@pytest.fixture
def plan(tmp_path):
    """Digits that are noise, by a small network."""
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for part, n in (("train", 60), ("test", 11)):
        tensors[f"{part}_x"] = torch.randint(0, 17, (n, 1, 8, 8), dtype=torch.uint8, generator=rng)
        tensors[f"{part}_y"] = torch.randint(0, 10, (n,), dtype=torch.uint8, generator=rng)
    torch.save(tensors, tmp_path / "data.pt")
    return TrainingSettings(
        task="digits", model="mlp", spec="dense()", seed=3, workers=2, steps=STEPS, batch=BATCH, lr=None,
        eval_every=2, checkpoint_every=0, data=tmp_path / "data.pt", folder=tmp_path, threads=1,
    )  # fmt: skip


def trained(plan):
    events = []
    train_rank(plan, events.append)
    return events


def losses(events, kind="step", name="loss"):
    return [event[name] for event in events if event["kind"] == kind]


def by_hand(plan):
    """The same losses from DistributedDataParallel and `laconic.compress` alone."""
    task, rank, size = find("digits"), dist.get_rank(), dist.get_world_size()
    tensors, recipe = torch.load(plan.data), task.recipe("mlp")
    torch.manual_seed(plan.seed)
    model = DistributedDataParallel(recipe.build())
    optimizer = recipe.optimizer(model)
    laconic.compress(model, optimizer, plan.spec, seed=plan.seed)
    shard = Shard(60, BATCH, rank, size, plan.seed)
    found = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = recipe.rate(recipe.lr, step, STEPS)
        chosen = shard.indices(step)
        loss = cross_entropy(model(task.inputs(tensors["train_x"][chosen], None)), tensors["train_y"][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def both_ways(plan):
    events = trained(plan)
    return losses(events), by_hand(plan), losses(events, "eval", "consensus"), "notes" in events[-2]


@pytest.mark.parametrize("spec", ["dense()", "dgc(density=0.05)", "qsgd(levels=7)"])
def test_a_method_trains_as_compress_under_ddp_does(pool, plan, spec):
    for told, expected, distances, noted in pool.run(2, both_ways, replace(plan, spec=spec)):
        assert told == expected
        assert distances == [0.0] * 3
        assert not noted


def test_a_strategy_is_tested_at_its_average_and_tells_how_far_ranks_are_from_it(pool, plan):
    one, other = pool.run(2, trained, replace(plan, spec="local_sgd(every=3)"))
    distances = losses(one, "eval", "consensus")
    assert distances == losses(other, "eval", "consensus")
    assert [distance > 1e-3 for distance in distances] == [True, True, False]  # after steps 2, 4 and 6
    assert losses(one, "eval", "zeros") == losses(other, "eval", "zeros")
    assert [notes["rounds"] for notes in losses(one, name="notes")] == [0, 0, 1, 1, 1, 2]
    assert losses(one) != losses(other)
    assert losses(one, "start", "optimiser") == ["SGD"]


def parts(plan, step):
    place = plan.folder / f"step-{step:06d}"
    return [checkpoint.load(place, rank=rank, size=2)["optimizer"]["laconic"]["tensors"] for rank in (0, 1)]


def test_a_strategy_goes_on_from_a_checkpoint_with_the_same_bits(pool, plan):
    """Stopped between two meetings, where replicas differ and the carrier has its memory."""
    plan = replace(plan, spec="local_sgd(every=3, compressor=sign())", checkpoint_every=1, skew=0.5)
    whole = pool.run(2, trained, plan)
    ends, model = parts(plan, STEPS), torch.load(plan.folder / MODEL)
    again = replace(plan, resume_from=plan.folder / "step-000005")
    rest = pool.run(2, trained, again)
    for events, later in zip(whole, rest, strict=True):
        assert losses(events)[5:] == losses(later)
    for kept, found in zip(ends, parts(plan, STEPS), strict=True):
        assert kept.keys() == found.keys()
        assert all(torch.equal(kept[key], found[key]) for key in kept)
    found = torch.load(plan.folder / MODEL)
    assert all(torch.equal(model[key], found[key]) for key in model)
    with pytest.raises(StateError, match=r"trained with skew=0\.5, not None"):
        pool.run(2, trained, replace(again, skew=None))


@pytest.mark.parametrize("spec", ["masked(topk(density=0.3))", "dgc(density=0.1)"])
def test_a_sparse_training_goes_on_with_the_same_bits(pool, plan, spec):
    """Stopped after two updates of the masks."""
    plan = replace(plan, spec=spec, sparsity="rigl(density=0.2, every=3, until=1.0)", checkpoint_every=1)
    whole = pool.run(2, trained, plan)
    states = [checkpoint.load(plan.folder / f"step-{STEPS:06d}", rank=rank, size=2) for rank in (0, 1)]
    masks, model = states[0]["sparsity"]["masks"], torch.load(plan.folder / MODEL)
    assert all(torch.equal(masks[name], states[1]["sparsity"]["masks"][name]) for name in masks)
    again = replace(plan, resume_from=plan.folder / "step-000005")
    rest = pool.run(2, trained, again)
    for events, later in zip(whole, rest, strict=True):
        assert losses(events)[5:] == losses(later)
    told = [event for event in whole[0] if event["kind"] == "masks"]
    assert [event["step"] for event in told] == [1, 4] and whole[1] != whole[0]
    assert told[0]["density"] == pytest.approx(0.2, abs=1e-3) and told[0]["changed"] > 0
    again = checkpoint.load(plan.folder / f"step-{STEPS:06d}", rank=0, size=2)["sparsity"]["masks"]
    assert all(torch.equal(masks[name], again[name]) for name in masks)
    found = torch.load(plan.folder / MODEL)
    assert all(torch.equal(model[key], found[key]) for key in model)
    weights = [each for each in found.values() if each.dim() > 1]
    used = sum(int((weight != 0).sum()) for weight in weights)
    assert used <= 0.2 * sum(weight.numel() for weight in weights) + len(weights)


def at_the_end(plan):
    """This rank's parameters after the last step, as in its own memory, and the model that was saved."""
    trained(plan)
    state = checkpoint.load(plan.folder / f"step-{STEPS:06d}", rank=dist.get_rank(), size=2)
    dist.barrier()
    return state["optimizer"]["laconic"]["tensors"][f"rank{dist.get_rank()}/flat"]


def test_the_saved_model_is_the_exact_average(pool, plan):
    plan = replace(plan, spec="local_sgd(every=100)", checkpoint_every=STEPS)
    one, other = pool.run(2, at_the_end, plan)
    net = find("digits").recipe("mlp").build()
    net.load_state_dict(torch.load(plan.folder / MODEL))
    torch.testing.assert_close(flat(net), (one + other) / 2, rtol=1e-6, atol=1e-7)
    assert float((one - other).abs().max()) > 1e-3


def micro_batches(plan):
    whole, parted = (trained(replace(plan, enlarged=Enlarged(micro_batch_size=most))) for most in (None, 3))
    return losses(whole), losses(parted)


def test_micro_batches_train_like_whole_ones(pool, plan):
    for whole, parted in pool.run(2, micro_batches, plan):
        assert parted == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("recipe", ["lamb", "lars", "sgd"])
def test_a_recipe_with_copies_trains_and_resumes_with_the_same_bits(pool, plan, recipe):
    whole = replace(plan, enlarged=Enlarged(recipe, copies=2, micro_batch_size=3), checkpoint_every=3)
    found = pool.run(2, trained, whole)
    assert all("noise" not in event for events in found for event in events)  # ranks share examples
    place = checkpoint.complete(plan.folder)[0]
    again = pool.run(2, trained, replace(whole, resume_from=place))
    for first, second in zip(found, again, strict=True):
        assert losses(first)[3:] == losses(second)


@pytest.mark.parametrize("spec", ["dense()", "local_sgd(every=3)"])
def test_coded_activations_go_on_from_a_checkpoint_with_the_same_bits(pool, plan, spec):
    plan = replace(plan, model="cnn", spec=spec, activations="comet()", checkpoint_every=1)
    again = replace(plan, resume_from=plan.folder / f"step-{STEPS - 1:06d}")
    whole = pool.run(2, trained, plan)
    rest = pool.run(2, trained, again)
    for events, later in zip(whole, rest, strict=True):
        assert losses(events)[STEPS - 1 :] == losses(later)
        tests = [event for event in events if event["kind"] == "eval"]
        assert all(0 < 2 * test["kept"] < test["kept_dense"] for test in tests)
    with pytest.raises(StateError, match=r"trained with activations='comet\(\)', not None"):
        pool.run(2, trained, replace(again, activations=None))


def test_activations_as_they_are_say_nothing(pool, plan):
    assert all("kept" not in event for events in pool.run(2, trained, plan) for event in events)
