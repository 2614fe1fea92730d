"""Training in stages: dense stages are the whole model, and a resumed training does the same bits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from laconic.core.errors import StateError
from laconic.core.turn import mix
from laconic.pipeline.crossing import crossing
from laconic.pipeline.message import HEADER
from laconic.tools.cli.main import app
from laconic.tools.plan.boundary import rehearse_crossing
from laconic.tools.report.ledger import slug
from laconic.tools.tasks import checkpoint, find
from laconic.tools.tasks.group_model import MODEL
from laconic.tools.tasks.pipelined import train_stage
from laconic.tools.tasks.settings import Pipeline, TrainingSettings
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import cross_entropy
from tests.dist.nets import flat

STEPS, BATCH, N, LONG = 3, 4, 8, 16
AC = "ac_sgd(forward=2, backward=6, block=32, rounding='stochastic')"
AGAIN = [
    ("dense()", 1, "dense()"),
    ("dense()", 2, "cgx(bits=4)"),
    ("dense()", 2, "local_sgd(every=3)"),
    (AC, 1, "dense()"),
    (AC, 2, "onebit_adam(warmup_steps=2)"),
    ("direct(qsgd(levels=7))", 1, "dense()"),
]


@pytest.fixture
def plan(tmp_path):
    """Letters that are noise, by a small GPT in two stages."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"train_x": N, "train_y": N, "test_x": 5, "test_y": 5}
    tensors = {
        name: torch.randint(0, 128, (n, LONG), dtype=torch.uint8, generator=rng) for name, n in shapes.items()
    }
    torch.save(tensors, tmp_path / "data.pt")
    return TrainingSettings(
        task="shakespeare", model="gpt", spec="dense()", seed=3, workers=2, steps=STEPS, batch=BATCH, lr=None,
        eval_every=0, checkpoint_every=0, data=tmp_path / "data.pt", folder=tmp_path, threads=1,
        pipeline=Pipeline(2, 1, 2, "1f1b", "dense()"),
    )  # fmt: skip


def trained(plan):
    events = []
    train_stage(plan, events.append)
    return events


def trained_each(plans):
    return [trained(plan) for plan in plans]


def told(events, kind="step", name="loss"):
    return [event[name] for event in events if event["kind"] == kind]


def by_hand(plan):
    """The losses of each replica, and the model's parameters, where one process does all."""
    task, recipe, tensors = find("shakespeare"), find("shakespeare").recipe("gpt"), torch.load(plan.data)
    torch.manual_seed(plan.seed)
    model = recipe.build()
    optimizer = recipe.optimizer(model)
    replicas = range(plan.pipeline.replicas)
    owned = [torch.arange(N)[r :: len(replicas)] for r in replicas]
    orders = [Shard(len(own), BATCH, 0, 1, mix(plan.seed, r)) for r, own in enumerate(owned)]
    found = [[] for _ in replicas]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = recipe.rate(recipe.lr, step, STEPS)
        optimizer.zero_grad()
        for r in replicas:
            chosen = owned[r][orders[r].indices(step)]
            logits = model(task.inputs(tensors["train_x"][chosen], None))
            loss = cross_entropy(logits, tensors["train_y"][chosen])
            (loss / len(replicas)).backward()
            found[r].append(loss.item())
        optimizer.step()
    return found, flat(model)


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_dense_stages_and_replicas_are_one_model(pool, plan, stages, replicas):
    """But for the order of sums: gradients add up micro-batch by micro-batch."""
    plans = []
    for schedule in ("1f1b", "gpipe"):
        pipeline = Pipeline(stages, replicas, 4 if stages == 3 else 2, schedule, "dense()")
        folder = plan.folder / schedule
        folder.mkdir()
        plans.append(replace(plan, pipeline=pipeline, checkpoint_every=STEPS, folder=folder))
    found = pool.run(stages * replicas, trained_each, plans)
    losses, parameters = by_hand(plans[0])
    for one, *each in zip(plans, *found, strict=True):
        for rank, its in enumerate(each):
            if one.pipeline.stage(rank) == stages - 1:
                assert told(its) == pytest.approx(losses[one.pipeline.replica(rank)], rel=1e-5)
            else:
                assert told(its) == [None] * STEPS
        model = find("shakespeare").recipe("gpt").build()
        model.load_state_dict(torch.load(one.folder / MODEL))
        torch.testing.assert_close(flat(model), parameters, rtol=1e-4, atol=1e-6)


def test_the_wire_is_that_of_the_activations_and_their_gradients(pool, plan):
    """float32 (4, 16, 128) each way in two messages: 33 kB and the headers of the model of packets."""
    first, last = pool.run(2, trained, plan)
    assert (
        set(told(first, name="payload_sent")) == set(told(last, name="payload_sent")) == {4 * LONG * 128 * 4}
    )
    assert told(first, name="activations_sent") == told(last, name="gradients_sent")
    assert told(first, name="gradients_sent") == told(last, name="activations_sent")  # acknowledgements
    assert max(told(first, name="gradients_sent")) < 0.05 * min(told(first, name="activations_sent"))
    assert all(1 < wire / (4 * LONG * 128 * 4) < 1.09 for wire in told(first, name="network_sent"))


def test_all_test_the_same_whole_model(pool, plan):
    """The parts of a test add up to one on the whole set, by the model that was saved."""
    events = pool.run(2, trained, replace(plan, eval_every=STEPS, checkpoint_every=STEPS))
    tensors, model = torch.load(plan.data), find("shakespeare").recipe("gpt").build()
    model.load_state_dict(torch.load(plan.folder / MODEL))
    with torch.no_grad():
        expected = cross_entropy(model(tensors["test_x"].long()), tensors["test_y"]).item()
    total = sum(told(its, "eval", "loss_sum")[0] for its in events)
    assert total / sum(told(its, "eval", "answers")[0] for its in events) == pytest.approx(expected, rel=1e-5)


def resumed(again, other):
    """Events of a run that goes on, and what is said of one with other settings."""
    events = trained(again)
    with pytest.raises(StateError) as refused:
        train_stage(other, [].append)
    return events, str(refused.value)


@pytest.mark.parametrize(("spec", "replicas", "between"), AGAIN)
def test_a_resumed_pipeline_does_the_same_bits(pool, plan, spec, replicas, between):
    pipeline = Pipeline(2, replicas, 2, "1f1b", between)
    plan = replace(plan, spec=spec, pipeline=pipeline, checkpoint_every=1)
    whole = pool.run(2 * replicas, trained, plan)
    model = torch.load(plan.folder / MODEL)
    again = replace(plan, resume_from=plan.folder / f"step-{STEPS - 1:06d}")
    other = replace(again, pipeline=replace(pipeline, micro_batches=4))
    for events, (later, refused) in zip(whole, pool.run(2 * replicas, resumed, again, other), strict=True):
        assert told(events)[STEPS - 1 :] == told(later)
        assert "trained with pipeline=" in refused
    found = torch.load(plan.folder / MODEL)
    assert all(torch.equal(model[key], found[key]) for key in model)


def test_after_the_first_visits_changes_cross_in_few_bits(pool, plan):
    """Eight samples in batches of four: two steps of bf16, then 4 bits and scales, and 8 bits back."""
    first, last = pool.run(2, trained, replace(plan, spec="ac_sgd()", steps=3))
    n, headers = 4 * LONG * 128, 2 * HEADER.size
    for step, (up, down) in enumerate(
        zip(told(first, name="payload_sent"), told(last, name="payload_sent"), strict=True)
    ):
        bits = 16 if step < 2 else 4 + 64 / 128
        assert 8 * (up - headers) / n == bits
        assert 8 * (down - headers) / n == 8 + 64 / 128
    new, old = rehearse_crossing(crossing("ac_sgd()"), (BATCH // 2, LONG, 128))
    forecast = [new.sent(2), new.sent(2), old.sent(2)]  # what `laconic plan` says of the wire
    sent = zip(told(first, name="network_sent"), told(last, name="network_sent"), strict=True)
    assert list(sent) == forecast
    assert told(first, name="dense")[0] > 1.9 * told(first, name="network_sent")[0]


def test_many_bits_train_as_dense_stages_do(pool, plan):
    """Relative to the loss: 8 bits leave 1/255 of a block's range, and two steps let it grow."""
    specs = ("dense()", "ac_sgd(forward=8)", "cast('fp16')", "direct(minmax(bits=8))")
    _, events = pool.run(2, trained_each, [replace(plan, steps=4, spec=spec) for spec in specs])
    dense, *others = map(told, events)
    for coded in others:
        assert coded == pytest.approx(dense, rel=0.01)
        assert coded != dense


@pytest.fixture
def text(tmp_path):
    """A folder with a text of 12 kB."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "input.txt").write_text("To be, or not to be: that is the question.\n" * 300)
    return folder


def test_the_command_trains_stages_from_end_to_end(tmp_path, text):
    done = CliRunner().invoke(app, [
        "train", "shakespeare", "--stages", "2", "--with", "ac_sgd(forward=4, backward=8)", "--against",
        "dense()", "--data", str(text), "--steps", "4", "--examples", "16", "--batch", "8",
        "--checkpoint-every", "2", "--out", str(tmp_path), "--name", "run",
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    dense, coded = summary["rows"]
    assert summary["complete"] and (dense["spec"], coded["spec"]) == ("dense()", "ac_sgd()")
    for row in (dense, coded):
        assert row["steps"] == 4 and row["replicas_mb"] == 0
        assert 0 < row["activations_mb"] <= 1.001 * row["gradients_mb"]
        assert checkpoint.latest(tmp_path / "run" / slug(row["spec"]) / "seed0") is not None
    assert coded["activations_mb"] < dense["activations_mb"] / 5
    assert "Between stages" in (tmp_path / "run" / "report.html").read_text()
