"""Blocks in processes, over gloo: the bits of threads, no hang when one fails, training and its report."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch import nn

from laconic.core.errors import NonFiniteError, PeerError, StateError
from laconic.tools.report.time_line import at_once
from laconic.tools.tasks.blockwise import train_blocks
from laconic.tools.tasks.group_model import MODEL
from tests.dist.commands import inside
from tests.dist.plans import BATCH, STEPS, events_of, noise_plan, told
from tests.unit.block_world import SAMPLES, data, flat, stepped, trained, trainer

ONLINE = "block_admm(blocks=3)"
CODED = "block_admm(blocks=3, mode='batch', activations=sparse(topk(0.5)), targets=minmax(bits=8))"


def in_process(spec, steps):
    made = trainer(None, spec)
    losses = [stepped(made, step) for step in range(steps)]
    losses = [loss for loss in losses if loss is not None] + made.finish()
    found = losses, flat(made.gather()), made.stats().activations
    made.close()
    return found


def test_processes_compute_the_bits_of_threads(pool):
    for spec, processes in pool.each(3, in_process, (ONLINE, CODED), 10):
        for (losses, parameters, sent), (others, stats, found, _) in zip(
            processes, trained(spec, 10), strict=True
        ):
            assert losses == others and sent == stats.activations, spec
            assert torch.equal(parameters, found), spec


class Slow(nn.Linear):
    """A layer whose forward pass takes 30 ms and no processor."""

    def forward(self, x):
        time.sleep(0.03)
        return super().forward(x)


def slow_blocks():
    """For each of 12 ticks its spans and how long it took, where each block takes 60 ms a tick."""
    model = nn.Sequential(Slow(16, 8), Slow(8, 8), Slow(8, 4))
    made = trainer(None, ONLINE, model=model)
    x, y = data()
    for _ in range(4):
        made.step(x[:4], y[:4])
    ticks = []
    for _ in range(12):
        began = time.perf_counter()
        made.step(x[:4], y[:4])
        spent = time.perf_counter() - began
        ticks.append(([(span.work, span.begin, span.end) for span in made.spans()], spent))
    made.close()
    return ticks


def test_blocks_work_at_the_same_time(pool):
    """One after the other they would take 150 ms a tick: two forward passes each, one on the last block."""
    ticks = [*zip(*pool.run(3, slow_blocks), strict=True)]  # each of them on all ranks
    assert median(max(spent for _, spent in tick) for tick in ticks) < 0.150
    assert median(at_once([spans for spans, _ in tick])[1] for tick in ticks) > 0.6


def diverging(rank):
    """One rank's learning rate is far too high; what each rank says, and after how many steps."""
    made = trainer(None, ONLINE, lambda p: torch.optim.SGD(p, lr=1e30 if made_rank() == rank else 1e-3))
    try:
        for step in range(20):
            stepped(made, step)
    except (NonFiniteError, PeerError) as error:
        return type(error).__name__, str(error)
    finally:
        made.close()
    return "", ""


def made_rank():
    return torch.distributed.get_rank()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_block_that_diverges_ends_all_with_a_reason(pool, rank):
    """NaN appears on the rank itself, or in the targets of a neighbour that had its activations."""
    said = pool.run(3, diverging, rank, timeout_s=40.0)
    kinds = [kind for kind, _ in said]
    assert "NonFiniteError" in kinds and "" not in kinds
    for kind, text in said:
        assert ("NaN or Inf" if kind == "NonFiniteError" else "has failed: see its error") in text


def unlabelled():
    """The last rank gets no labels; what each rank says."""
    made, (x, _) = trainer(None, ONLINE), data()
    try:
        for _ in range(5):
            made.step(x[:4], None)
    except (StateError, PeerError) as error:
        return str(error)
    finally:
        made.close()
    return ""


def test_a_call_that_is_wrong_on_one_rank_ends_all(pool):
    first, second, third = pool.run(3, unlabelled, timeout_s=40.0)
    assert "rank 2 has the last block: pass y" in third
    assert "rank 2 has failed" in second and "rank 1 has failed" in first


@pytest.fixture
def plan(tmp_path):
    """Three dense layers on three ranks."""
    return noise_plan(tmp_path, SAMPLES, 9, spec=ONLINE, workers=3, eval_every=0)


def trained_blocks(plan):
    return events_of(train_blocks, plan)


def test_every_rank_tells_every_step_and_tests_the_whole_model(pool, plan):
    events = pool.run(3, trained_blocks, replace(plan, eval_every=3, checkpoint_every=STEPS))
    for rank, its in enumerate(events):
        assert told(its, name="step") == [1, 2, 3, 4, 5, 6]
        assert all((loss is not None) == (rank == 2) for loss in told(its))
        assert told(its, "eval", "step") == [3, 6]
        for blocks in told(its, name="blocks")[2:]:  # before that, the first blocks wait for targets
            assert (blocks["primal"] > 0) == (rank > 0)
            assert all(end >= begin for _, begin, end in blocks["spans"])
    assert sum(told(its, "eval", "answers")[-1] for its in events) == 9
    assert (plan.folder / MODEL).exists()
    floats = 3 * BATCH * 512 * 4 + 8  # a mini-batch has the examples of three workers
    assert set(told(events[1], name="payload_sent")[1:-1]) == {2 * floats}


@pytest.mark.parametrize("spec", [ONLINE, "block_admm(blocks=3, mode='batch', targets=qsgd(levels=7))"])
def test_a_resumed_training_does_the_same_bits(pool, plan, spec):
    plan = replace(plan, spec=spec, checkpoint_every=1)
    whole = pool.run(3, trained_blocks, plan)
    model = torch.load(plan.folder / MODEL)
    again = replace(plan, resume_from=plan.folder / f"step-{STEPS - 1:06d}")
    rest = pool.run(3, trained_blocks, again)
    for events, later in zip(whole, rest, strict=True):
        assert told(events)[STEPS - 1 :] == told(later)
    found = torch.load(plan.folder / MODEL)
    assert all(torch.equal(model[key], found[key]) for key in model)
    with pytest.raises(StateError, match="trained with spec="):
        pool.run(3, trained_blocks, replace(again, spec="block_admm(blocks=3, beta=2.0)"))


def test_the_command_trains_blocks_from_end_to_end(tmp_path):
    given = ("--model", "mlp", "--workers", 3, "--with", ONLINE, "--steps", 40, "--name", "run")
    done = inside("train", "digits", *given, "--out", tmp_path)
    assert done.code == 0, done.errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (blocks,) = summary["rows"]
    assert summary["complete"] and blocks["spec"] == ONLINE and blocks["steps"] == 40
    assert blocks["accuracy"]["mean"] > 0.8
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Blocks side by side" in page and "two or more do in" in page and "1 to 2" in page
