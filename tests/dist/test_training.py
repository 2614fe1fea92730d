"""One rank's training loop: one way for methods and strategies, and a resumed training does the same bits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import StateError
from laconic.tools.tasks import checkpoint, find
from laconic.tools.tasks.group_model import MODEL
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import cross_entropy
from laconic.tools.tasks.training import train_rank
from tests.dist.nets import flat
from tests.dist.plans import BATCH, STEPS, events_of, told
from tests.dist.runs import same


def trained(plan):
    return events_of(train_rank, plan)


def goes_on(pool, plan, step=STEPS - 1, **damage):
    """Check that a training from a checkpoint has the bits of one without a stop; its events."""
    whole = pool.run(2, trained, plan)
    model = torch.load(plan.folder / MODEL)
    ends = [checkpoint.load(plan.folder / f"step-{STEPS:06d}", rank=rank, size=2) for rank in (0, 1)]
    again = replace(plan, resume_from=plan.folder / f"step-{step:06d}")
    for events, later in zip(whole, pool.run(2, trained, again), strict=True):
        assert told(events)[step:] == told(later)
    for rank, end in enumerate(ends):
        found = checkpoint.load(plan.folder / f"step-{STEPS:06d}", rank=rank, size=2)
        assert all(same(end.get(key), found.get(key)) for key in ("model", "optimizer", "sparsity"))
    assert same(model, torch.load(plan.folder / MODEL))
    for name, value in damage.items():
        with pytest.raises(
            StateError, match=re.escape(f"trained with {name}={getattr(plan, name)!r}, not {value!r}")
        ):
            pool.run(2, trained, replace(again, **damage))
    return whole, ends


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
    return told(events), by_hand(plan), told(events, "eval", "consensus"), "notes" in events[-2]


def test_a_method_trains_as_compress_under_ddp_does(pool, plan):
    plans = [replace(plan, spec=spec) for spec in ("dense()", "dgc(density=0.05)", "qsgd(levels=7)")]
    for case, found in pool.each(2, both_ways, plans):
        for told_of, expected, distances, noted in found:
            assert told_of == expected, case.spec
            assert distances == [0.0] * 3
            assert not noted


def test_a_strategy_is_tested_at_its_average_and_tells_how_far_ranks_are_from_it(pool, plan):
    one, other = pool.run(2, trained, replace(plan, spec="local_sgd(every=3)"))
    distances = told(one, "eval", "consensus")
    assert distances == told(other, "eval", "consensus")
    assert [distance > 1e-3 for distance in distances] == [True, True, False]  # after steps 2, 4 and 6
    assert told(one, "eval", "zeros") == told(other, "eval", "zeros")
    assert [notes["rounds"] for notes in told(one, name="notes")] == [0, 0, 1, 1, 1, 2]
    assert told(one) != told(other)
    assert told(one, "start", "optimiser") == ["SGD"]


def test_a_strategy_goes_on_from_a_checkpoint_with_the_same_bits(pool, plan):
    """Stopped between two meetings, where replicas differ and the carrier has its memory."""
    plan = replace(plan, spec="local_sgd(every=3, compressor=sign())", checkpoint_every=1, skew=0.5)
    goes_on(pool, plan, skew=None)


@pytest.mark.parametrize("spec", ["masked(topk(density=0.3))", "dgc(density=0.1)"])
def test_a_sparse_training_goes_on_with_the_same_bits(pool, plan, spec):
    """Stopped after two updates of the masks."""
    plan = replace(plan, spec=spec, sparsity="rigl(density=0.2, every=3, until=1.0)", checkpoint_every=1)
    whole, states = goes_on(pool, plan)
    assert same(*(state["sparsity"]["masks"] for state in states))
    masks = [event for event in whole[0] if event["kind"] == "masks"]
    assert [event["step"] for event in masks] == [1, 4] and whole[1] != whole[0]
    assert masks[0]["density"] == pytest.approx(0.2, abs=1e-3) and masks[0]["changed"] > 0
    weights = [each for each in torch.load(plan.folder / MODEL).values() if each.dim() > 1]
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
    whole, parted = (trained(replace(plan, micro_batch_size=most)) for most in (None, 3))
    return told(whole), told(parted)


def test_micro_batches_train_like_whole_ones(pool, plan):
    for whole, parted in pool.run(2, micro_batches, plan):
        assert parted == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("recipe", ["lamb", "lars", "sgd"])
def test_a_recipe_with_copies_trains_and_resumes_with_the_same_bits(pool, plan, recipe):
    whole = replace(plan, recipe=recipe, copies=2, micro_batch_size=3, checkpoint_every=3)
    found = pool.run(2, trained, whole)
    assert all("noise" not in event for events in found for event in events)  # ranks share examples
    place = checkpoint.complete(plan.folder)[0]
    again = pool.run(2, trained, replace(whole, resume_from=place))
    for first, second in zip(found, again, strict=True):
        assert told(first)[3:] == told(second)


@pytest.mark.parametrize("spec", ["dense()", "local_sgd(every=3)"])
def test_coded_activations_go_on_from_a_checkpoint_with_the_same_bits(pool, plan, spec):
    plan = replace(plan, model="cnn", spec=spec, activations="comet()", checkpoint_every=1)
    whole, _ = goes_on(pool, plan, activations=None)
    for test in (event for events in whole for event in events if event["kind"] == "eval"):
        assert 0 < 2 * test["kept"] < test["kept_dense"]


def test_activations_as_they_are_say_nothing(pool, plan):
    assert all("kept" not in event for events in pool.run(2, trained, plan) for event in events)
