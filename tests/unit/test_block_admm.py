"""Block-ADMM without processes: what blocks compute, remember, and say of bad input."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
import torch.nn.functional as F
from tests.unit.block_world import (
    ROWS,
    SAMPLES,
    WIDE,
    adam,
    data,
    flat,
    ids_of,
    net,
    sgd,
    stepped,
    trained,
    trainer,
)
from torch import nn

import laconic
from laconic.admm import BlockAdmm, BlockTrainer, Proximal, cut_into
from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, NonFiniteError, SpecError, StateError

ONLINE, BATCH = "block_admm(blocks=3)", "block_admm(blocks=3, mode='batch', steps=2, rate=0.5, dual=0.5)"
CODED = "block_admm(blocks=3, mode='batch', activations=qsgd(levels=127), targets=minmax(bits=8))"


@pytest.mark.parametrize("beta", [0.1, 1.0, 7.0])
def test_one_mini_batch_is_one_step_of_back_propagation(beta):
    """With one step at rate 1, X - f = -G / beta, so a block's gradient is the chain rule's; in float32."""
    by_blocks = trained(f"block_admm(blocks=3, beta={beta})", 1, make=sgd)
    model, (x, y) = net(), data()
    optimizer = sgd(model.parameters())
    F.cross_entropy(model(x[ids_of(0)]), y[ids_of(0)]).backward()
    optimizer.step()
    for _, _, parameters, _ in by_blocks:
        torch.testing.assert_close(parameters, flat(model), rtol=1e-5, atol=1e-6)


def by_hand(spec, steps):
    """The same training in one process and one loop: every block's tick after the other, no messages."""
    model, (x, y) = net(), data()
    blocks = [model[:2], model[2:4], model[4:]]
    optimizers = [adam(block.parameters()) for block in blocks]
    stored = [None, torch.zeros(2, SAMPLES, WIDE), torch.zeros(2, SAMPLES, WIDE)]
    seen = [None, set(), set()]
    given, out, target, losses = [{}, {}, {}], [{}, {}, {}], [{}, {}, {}], []
    for tick in range(steps + 4):
        for b in range(3):  # a neighbour's message of this tick is needed in the next one
            ids = None
            m = tick - b
            if 0 <= m < steps:
                ids = ids_of(m)
                now = x[ids] if b == 0 else out[b - 1][m].clone()
                u = torch.zeros_like(now)
                if b and spec.mode == "batch":
                    for row, sample in enumerate(ids.tolist()):
                        if sample in seen[b]:
                            old = stored[b][:, sample]
                            u[row] = old[1] + spec.dual * (old[0] - out[b - 1][m][row])
                            now[row] = old[0] - spec.rate * (old[0] - out[b - 1][m][row] + u[row])
                given[b][m] = now, u
                with torch.no_grad():
                    out[b][m] = blocks[b](now)
            m = tick - (4 - b)
            if 0 <= m < steps:
                ids, (now, u) = ids_of(m), given[b].pop(m)
                for step in range(spec.steps):
                    leaf = now.clone().requires_grad_()
                    found = blocks[b](leaf)
                    if b == 2:
                        term = F.cross_entropy(found, y[ids])
                        losses += [term.item()] if step == 0 else []
                    else:
                        term = spec.beta / 2 * (found - target[b][m]).square().sum(1).mean()
                    optimizers[b].zero_grad()
                    term.backward()
                    optimizers[b].step()
                    if b:
                        pull = now - out[b - 1][m] + u + ROWS * leaf.grad / spec.beta
                        now = now - spec.rate * pull
                if b:
                    target[b - 1][m] = now + u
                    stored[b][:, ids] = torch.stack([now, u])
                    seen[b] |= set(ids.tolist())
    return losses, flat(model)


@pytest.mark.parametrize("text", [ONLINE, BATCH])
def test_blocks_compute_what_one_loop_does(text):
    """To the rounding of float32 sums, which Adam's first steps amplify."""
    losses, parameters = by_hand(laconic.parse(text), 12)
    by_blocks = trained(text, 12)
    assert by_blocks[2][0] == pytest.approx(losses, rel=1e-4)
    for _, _, found, _ in by_blocks:
        torch.testing.assert_close(found, parameters, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("text", "share"), [(ONLINE, 0.95), (BATCH, 0.95), (CODED, 0.9)])
def test_blocks_learn(text, share):
    """Four classes, of which a model that has learnt nothing gets a quarter."""
    losses, stats, _, model = trained(text, 100)[2]
    x, y = data()
    assert losses[-1] < 0.6 * losses[0]
    assert (model(x).argmax(1) == y).float().mean() > share
    assert stats.updates == 100 and stats.ticks == 104


def test_blocks_come_together_in_mode_batch():
    """|X - f| / |f|: large while blocks move, small when the rate has fallen."""

    def rank(comm):
        made, primal = trainer(comm, "block_admm(blocks=3, mode='batch')", adam), []
        for step in range(120):
            made.optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 120)
            stepped(made, step)
            primal.append(made.stats().primal)
        return primal

    _, second, third = Loopback.run(3, rank)
    for primal in (second, third):
        assert 0 < sum(primal[-8:]) < 0.2 * max(primal[8:]) * 8


def test_a_step_function_trains_where_back_propagation_cannot():
    """torch.sign has the gradient 0, so with it only the last layer's weights would move."""
    signs = lambda: (Proximal(torch.sign), Proximal(torch.sign))  # noqa: E731
    _, _, found, model = trained("block_admm(blocks=3, beta=0.03)", 80, signs)[0]
    x, y = data()
    right = (model(x).argmax(1) == y).float().mean()
    plain = net(*signs())
    optimizer = adam(plain.parameters())
    for step in range(80):
        optimizer.zero_grad()
        F.cross_entropy(plain(x[ids_of(step)]), y[ids_of(step)]).backward()
        optimizer.step()
    start = net(*signs())
    assert torch.equal(plain[0].weight, start[0].weight) and torch.equal(plain[2].weight, start[2].weight)
    assert not torch.equal(model[0].weight, start[0].weight)
    fixed = (plain(x).argmax(1) == y).float().mean()
    assert right > fixed + 0.05 and found.isfinite().all()


def test_an_operator_bounds_what_a_block_is_given():
    met = []

    class Box(Proximal):
        def forward(self, x):
            met.append(x.clamp(-0.2, 0.2))
            return met[-1]

    _, stats, _, _ = trained(ONLINE, 8, lambda: (Box(nn.Identity()), nn.ReLU()))[1]
    assert met and max(float(x.abs().max()) for x in met) <= 0.2 + 1e-6
    assert stats.primal > 0.1  # a block that wants more is held back


@pytest.mark.parametrize("text", [ONLINE, BATCH, CODED])
@pytest.mark.parametrize("stop", [1, 9])
def test_a_resumed_training_has_the_same_bits(text, stop, tmp_path):
    def rank(comm):
        made = trainer(comm, text)
        for step in range(stop):
            stepped(made, step)
        torch.save(made.state_dict(), tmp_path / f"{comm.rank}.pt")
        losses = [stepped(made, step) for step in range(stop, 14)] + made.finish()
        again = trainer(comm, text)
        again.load_state_dict(torch.load(tmp_path / f"{comm.rank}.pt", weights_only=True))
        later = [stepped(again, step) for step in range(stop, 14)] + again.finish()
        return losses, later, flat(made.gather()), flat(again.gather())

    for losses, later, parameters, found in Loopback.run(3, rank):
        assert losses == later
        assert torch.equal(parameters, found)


def test_files_keep_the_same_bits_as_memory(tmp_path):
    def rank(comm):
        made = trainer(comm, BATCH, folder=tmp_path)
        losses = [stepped(made, step) for step in range(10)]
        sizes = [path.stat().st_size for path in tmp_path.glob(f"block{comm.rank + 1}.rows")]
        assert made.stats().kept_bytes == sum(sizes) == (SAMPLES * WIDE * 8 if comm.rank else 0)
        parameters = flat(made.gather())
        made.close()
        return losses, parameters

    files = Loopback.run(3, rank)
    assert not [*tmp_path.iterdir()]

    def plain(comm):
        made = trainer(comm, BATCH)
        return [stepped(made, step) for step in range(10)], flat(made.gather())

    for (losses, parameters), (others, found) in zip(files, Loopback.run(3, plain), strict=True):
        assert losses == others and torch.equal(parameters, found)


def test_gathering_leaves_what_is_under_way():
    def rank(comm):
        made, other = trainer(comm, ONLINE), trainer(comm, ONLINE)
        for step in range(6):
            stepped(made, step)
            made.gather()
            stepped(other, step)
        return flat(made.gather()), flat(other.gather())

    for often, once in Loopback.run(3, rank):
        assert torch.equal(often, once)


def test_every_byte_is_counted():
    """float32 each way, or the codec's bytes, and a head of 8 for each message."""
    for text, coded in ((ONLINE, 4), ("block_admm(blocks=3, targets=cast('fp16'))", 2)):
        first, second, third = (stats for _, stats, _, _ in trained(text, 5))
        n = ROWS * WIDE
        assert first.activations.sent_bytes == second.activations.received_bytes == 5 * (4 * n + 8)
        assert second.targets.sent_bytes == first.targets.received_bytes == 5 * (coded * n + 8)
        assert third.activations.sent == first.targets.sent == 0
        assert second.ratio == pytest.approx(8 / (4 + coded), rel=0.01)


def test_ids_are_needed_in_mode_batch():
    def without(comm):
        x, y = data()
        trainer(comm, BATCH).step(x[:ROWS], y[:ROWS])

    with pytest.raises(StateError, match=r"needs the ids of a batch's samples: trainer.step\(x, y, samples="):
        Loopback.run(3, without)

    def wrong(comm):
        x, y = data()
        trainer(comm, BATCH).step(x[:2], y[:2], [3, SAMPLES])

    with pytest.raises(StateError, match=rf"must be in 0\.\.{SAMPLES - 1}, got {SAMPLES}"):
        Loopback.run(3, wrong)

    def few(comm):
        x, y = data()
        trainer(comm, BATCH).step(x[:2], y[:2], [3])

    with pytest.raises(StateError, match="one id for each sample of the batch: 2 samples, 1 ids"):
        Loopback.run(3, few)


MODELS = {
    "plain": (nn.Linear(16, 4), (), "nn.Sequential, got Linear"),
    "named": (net(), ("2", "fc"), r"cannot be cut at 'fc': its children are 0, 1, 2, 3, 4"),
    "order": (net(), ("4", "2"), "in the model's order"),
    "empty": (net(), ("1", "2"), "block 2 of 3, children 1, has no parameters"),
    "frozen": (
        nn.Sequential(nn.Linear(16, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 4)),
        (),
        "block 1 of 3, children 0, has only frozen parameters",
    ),
    "few": (nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4)), (), "at most 2, the children"),
    "inside": (net(Proximal(torch.sign), nn.ReLU()), ("2", "4"), "child 1 is a Proximal, so it must begin"),
    "many": (net(*[Proximal(torch.sign)] * 2)[:4], (), "at most 2, the children"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_cut_is_refused(case):
    model, cut, message = MODELS[case]
    spec = BlockAdmm(blocks=3, cut=cut)

    def rank(comm):
        BlockTrainer(model, spec, example=torch.randn(2, 16), comm=comm)

    with pytest.raises(AttachError, match=message):
        Loopback.run(3, rank)


@pytest.mark.parametrize(
    ("text", "options", "size", "kind", "message"),
    [
        (ONLINE, {}, 2, AttachError, "needs 3 ranks, got 2"),
        (ONLINE, {"samples": 5}, 3, StateError, "is for mode='batch'"),
        ("dense()", {}, 3, AttachError, r"takes block_admm\(\.\.\.\), got dense"),
        (BATCH, {"samples": None}, 3, StateError, r"samples=len\(dataset\)"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(text, options, size, kind, message):
    with pytest.raises(kind, match=message):
        Loopback.run(size, lambda comm: trainer(comm, text, **options))


def test_ranks_that_disagree_are_refused():
    with pytest.raises(AttachError, match="the seed differs"):
        Loopback.run(3, lambda comm: trainer(comm, ONLINE, seed=comm.rank))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block_admm(blocks=1)", "blocks must be a whole number of 2 or more"),
        ("block_admm(blocks=3, beta=0)", "beta must be a finite number above 0"),
        ("block_admm(blocks=3, rate=2)", r"rate must be a number in \(0, 2\)"),
        ("block_admm(blocks=3, mode='off')", "mode must be 'online' or 'batch'"),
        ("block_admm(blocks=3, cut=('2',))", "2 names, got"),
        ("block_admm(blocks=3, keep=sparse(topk(0.1), indices=golomb()))", "one size"),
        ("block_admm(blocks=3, targets=sum())", "targets must be a codec"),
    ],
)
def test_a_wrong_spec_is_refused(text, message):
    with pytest.raises(SpecError, match=message):
        laconic.parse(text)


def test_what_diverges_says_so():
    with pytest.raises(NonFiniteError, match=r"block [123] has (activations|targets) with NaN or Inf"):
        trained(ONLINE, 40, make=lambda parameters: torch.optim.SGD(parameters, lr=1e30))


def test_a_state_of_another_training_is_refused():
    def rank(comm):
        state = trainer(comm, ONLINE).state_dict()
        trainer(comm, "block_admm(blocks=3, beta=2.0)").load_state_dict(state)

    with pytest.raises(StateError, match=re.escape("the saved state is of spec 'block_admm(blocks=3)'")):
        Loopback.run(3, rank)


def test_a_state_that_one_rank_refuses_changes_nothing_on_any():
    def rank(comm):
        made = trainer(comm, BATCH)
        for step in range(9):
            stepped(made, step)
        good = made.state_dict()
        other = trainer(comm, BATCH)
        before = flat(other.block.layers)
        worker = dict(good["worker"])
        damaged = {
            "nothing": None,
            "empty": {**good, "worker": {}},
            "not kept": {**good, "worker": {**worker, "kept": None}},
            "no count": {**good, "worker": {**worker, "ticks": "9"}},
            "other shape": {
                **good,
                "worker": {**worker, "layers": {k: v[..., :1] for k, v in worker["layers"].items()}},
            },
        }
        for name, state in damaged.items():
            with pytest.raises(StateError, match="saved state" if comm.rank == 1 else "rank 1 says"):
                other.load_state_dict(state if comm.rank == 1 else good)
            assert torch.equal(flat(other.block.layers), before), name
            kept = other._worker.kept
            assert other.stats().ticks == 0 and (kept is None or not bool(kept.seen.any()))
        other.load_state_dict(good)
        return flat(other.block.layers), flat(made.block.layers)

    for found, wanted in Loopback.run(3, rank):
        assert torch.equal(found, wanted)


def test_a_module_that_stands_twice_is_in_its_place_twice():
    twice = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 8), twice, nn.Linear(8, 8), twice, nn.Linear(8, 2))
    assert [block.names for block in cut_into(model, 3)] == [("0", "1"), ("2", "3"), ("4",)]
    first, second = cut_into(model, 2)
    x = torch.randn(3, 4)
    assert torch.equal(second.layers(first.layers(x)), model(x))


def test_a_tensor_of_two_blocks_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    with pytest.raises(AttachError, match=r"0\.weight and 2\.weight are one tensor, in blocks 1 and 2"):
        cut_into(model, 2)


def test_modules_stay_in_their_modes():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model[1].eval()

    def modes(comm):
        own = copy.deepcopy(model)
        BlockTrainer(own, "block_admm(blocks=2)", example=torch.randn(2, 4), comm=comm)
        return [each.training for each in own]

    assert Loopback.run(2, modes) == [[True, False, True, True]] * 2


@pytest.mark.parametrize("mode", ["online", "batch"])
def test_a_batch_may_be_filled_anew(mode):
    x, y = data()

    def body(comm, reused):
        made = trainer(comm, f"block_admm(blocks=3, mode='{mode}')")
        inputs, targets = x[ids_of(0)].clone(), y[ids_of(0)].clone()
        for step in range(5):
            ids = ids_of(step)
            if not reused:
                inputs, targets = inputs.clone(), targets.clone()
            inputs.copy_(x[ids])
            targets.copy_(y[ids])
            made.step(inputs, targets, ids if made.samples else None)
        made.finish()
        return flat(made.gather())

    fresh, again = (Loopback.run(3, lambda comm, r=reused: body(comm, r)) for reused in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(fresh, again, strict=True))


def test_a_state_does_not_move_with_the_training():
    def body(comm):
        made = trainer(comm, ONLINE)
        for step in range(6):
            stepped(made, step)
        saved = made.state_dict()
        kept = copy.deepcopy(saved)
        stepped(made, 6)
        made.finish()
        file, other = io.BytesIO(), io.BytesIO()
        torch.save(saved, file), torch.save(kept, other)
        return file.getvalue() == other.getvalue()

    assert Loopback.run(3, body) == [True] * 3
