"""Block-ADMM without processes: what blocks compute, remember, and say of bad input."""

from __future__ import annotations

import base64
import copy
import io
import re
import zlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.block_admm.__main__ import SEEDS, VARIANTS
from benchmarks.block_admm.page import NAMES, WEAK, mosaic, png, written
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
from tests.unit.shared import for_each, refuses, same
from torch import nn

import laconic
from laconic.admm import BlockAdmm, BlockTrainer, Proximal, cut_into
from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, NonFiniteError, SpecError, StateError

ONLINE, BATCH = "block_admm(blocks=3)", "block_admm(blocks=3, mode='batch', steps=2, rate=0.5, dual=0.5)"
CODED = "block_admm(blocks=3, mode='batch', activations=qsgd(levels=127), targets=minmax(bits=8))"


@for_each("beta", [0.1, 1.0, 7.0])
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


@for_each("text", [ONLINE, BATCH])
def test_blocks_compute_what_one_loop_does(text):
    """To the rounding of float32 sums, which Adam's first steps amplify."""
    losses, parameters = by_hand(laconic.parse(text), 12)
    by_blocks = trained(text, 12)
    assert by_blocks[2][0] == pytest.approx(losses, rel=1e-4)
    for _, _, found, _ in by_blocks:
        torch.testing.assert_close(found, parameters, rtol=1e-3, atol=1e-5)


@for_each("text, share", [(ONLINE, 0.95), (BATCH, 0.95), (CODED, 0.9)])
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


@for_each("text", [ONLINE, BATCH, CODED])
@for_each("stop", [1, 9])
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


@for_each(
    "rows, ids, words",
    [
        (ROWS, (), r"needs the ids of a batch's samples: call trainer.step\(x, y, samples="),
        (2, ([3, SAMPLES],), rf"must be in 0\.\.{SAMPLES - 1}, got {SAMPLES}"),
        (2, ([3],), "one id for each sample of the batch: 2 samples, 1 ids"),
    ],
)
def test_ids_are_needed_in_mode_batch(rows, ids, words):
    x, y = data()
    act = lambda comm: trainer(comm, BATCH).step(x[:rows], y[:rows], *ids)  # noqa: E731
    refuses(StateError, words, Loopback.run, 3, act)


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
    "few": (nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4)), (), "at most 2, the number of children"),
    "inside": (net(Proximal(torch.sign), nn.ReLU()), ("2", "4"), "child 1 is a Proximal, so it must begin"),
    "many": (net(*[Proximal(torch.sign)] * 2)[:4], (), "at most 2, the number of children"),
}


@for_each("case", MODELS)
def test_a_model_that_cannot_be_cut_is_refused(case):
    model, cut, message = MODELS[case]
    spec = BlockAdmm(blocks=3, cut=cut)

    train = partial(BlockTrainer, model, spec, example=torch.randn(2, 16))
    refuses(AttachError, message, Loopback.run, 3, lambda comm: train(comm=comm))


@for_each(
    "text, options, size, kind, message",
    [
        (ONLINE, {}, 2, AttachError, "one rank per block, 3 ranks, got 2"),
        (ONLINE, {"samples": 5}, 3, StateError, "is for mode='batch'"),
        ("dense()", {}, 3, AttachError, r"must be block_admm\(\.\.\.\), got dense"),
        (BATCH, {"samples": None}, 3, StateError, r"samples=len\(dataset\)"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(text, options, size, kind, message):
    refuses(kind, message, Loopback.run, size, lambda comm: trainer(comm, text, **options))


def test_ranks_that_disagree_are_refused():
    with pytest.raises(AttachError, match="the seed differs"):
        Loopback.run(3, lambda comm: trainer(comm, ONLINE, seed=comm.rank))


@for_each(
    "text, message",
    [
        ("block_admm(blocks=1)", "blocks must be a whole number of 2 or more"),
        ("block_admm(blocks=3, beta=0)", "beta must be a finite number above 0"),
        ("block_admm(blocks=3, rate=2)", r"rate must be a number in \(0, 2\)"),
        ("block_admm(blocks=3, mode='off')", "mode must be 'online' or 'batch'"),
        ("block_admm(blocks=3, cut=('2',))", "2 names, got"),
        ("block_admm(blocks=3, keep=sparse(topk(0.1), indices=golomb()))", "of fixed size"),
        ("block_admm(blocks=3, targets=sum())", "targets must be a codec"),
    ],
)
def test_a_wrong_spec_is_refused(text, message):
    refuses(SpecError, message, laconic.parse, text)


def test_what_diverges_says_so():
    with pytest.raises(NonFiniteError, match=r"block [123] has (activations|targets) with NaN or Inf"):
        trained(ONLINE, 40, make=lambda parameters: torch.optim.SGD(parameters, lr=1e30))


def test_a_state_of_another_training_is_refused():
    def rank(comm):
        state = trainer(comm, ONLINE).state_dict()
        trainer(comm, "block_admm(blocks=3, beta=2.0)").load_state_dict(state)

    refuses(StateError, re.escape("the saved state is of spec 'block_admm(blocks=3)'"), Loopback.run, 3, rank)


def test_a_state_that_one_rank_refuses_changes_nothing_on_any():
    def rank(comm):
        made = trainer(comm, BATCH)
        for step in range(9):
            stepped(made, step)
        good = made.state_dict()
        other = trainer(comm, BATCH)
        before = flat(other.block.layers)
        worker = dict(good["worker"])
        shapes = {key: value[..., :1] for key, value in worker["layers"].items()}
        changes = ({"kept": None}, {"ticks": "9"}, {"layers": shapes})
        damaged = [None, {**good, "worker": {}}, *(good | {"worker": worker | each} for each in changes)]
        for name, state in enumerate(damaged):
            with pytest.raises(StateError, match="saved state" if comm.rank == 1 else "rank 1 says"):
                other.load_state_dict(state if comm.rank == 1 else good)
            assert torch.equal(flat(other.block.layers), before), name
            kept = other._worker.rows
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
    refuses(AttachError, r"0\.weight and 2\.weight are one tensor, in blocks 1 and 2", cut_into, model, 2)


def test_modules_stay_in_their_modes():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model[1].eval()

    def modes(comm):
        own = copy.deepcopy(model)
        BlockTrainer(own, "block_admm(blocks=2)", example=torch.randn(2, 4), comm=comm)
        return [each.training for each in own]

    assert Loopback.run(2, modes) == [[True, False, True, True]] * 2


@for_each("mode", ["online", "batch"])
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
    assert same(fresh, again)


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


def run(name: str, error: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "spec": VARIANTS[name].spec, "seed": seed, "error": error}
    found |= {"cpu_s": 10.0, "moved": 0.0, "machine": {"cores": 2}}
    if VARIANTS[name].spec:
        curve = {"primal": [0.5, 0.25], "dual": [0.5, 0.125]}
        spans = [[("forward", 0.0, 0.1), ("update", 0.1, 0.3)]] * 3
        found |= {"residuals": {"1 to 2": curve, "2 to 3": curve}, "overlap": [1.0, 0.75, 0.5]}
        found |= {"spans": spans, "sent_kb": 100.0, "moved": 3.0}
    return found | more


def test_every_variant_has_a_name() -> None:
    assert NAMES.keys() | WEAK.keys() | {"time line"} == VARIANTS.keys()


def test_a_row_is_a_mean_over_seeds_and_the_bar_is_told() -> None:
    found = [run("blocks", 2.0), run("blocks", 3.0, seed=1), run("sgd", 1.5)]
    page = written([*found, run("time line", 9.0, batch=512)])
    assert f"4 of {len(SEEDS) * len(VARIANTS)} are" in page
    assert "| blocks | `block_admm(blocks=3)` | 2.50 ± 0.71 | 100 | 10 | 2 |" in page
    assert "stay below 4 %: 3.00 % at most." in page and "missed" not in page
    assert "two or more do in 75 %, all 3 in 50 %" in page
    assert "| blocks | 1 to 2 | 0.500 | 0.250 | 0.500 | 0.125 |" in page
    assert "DeepFacto's parts" not in page
    assert "which is missed" in written([run("blocks", 4.5)])


def test_signs_and_parts_are_told_where_they_were_measured() -> None:
    page = written([run("signs, adam", 20.0), run("signs, blocks", 6.0)])
    assert "weights by 0, as a step has the gradient 0, and trains the last layer alone: 20.00 %" in page
    assert "Blocks move them by 3.0, to 6.00 %." in page
    facto = {"reconstruction": 0.1, "least_part": 0.0, "least_code": 1e-9, "code_zeros": 0.25}
    page = written([run("deep_facto", 3.0, **facto)])
    assert "lose 10.00 % of the first block's" in page and "least entry is 0." in page and "25 % are" in page


def test_digits_of_weak_labels_have_a_table_of_their_own() -> None:
    digits = {"code": 20.0, "hidden": 10.0}
    runs = [
        run("weak, adam", 3.0, untrained=digits, trained=digits),
        run("weak, deep_facto", 4.0, trained=digits),
    ]
    main, weak = written(runs).split("### Weak labels")
    assert "| back-propagation, Adam |" not in main
    assert "| back-propagation, Adam before training | - | 20.00 | 10.00 | 1 |" in weak
    assert "| blocks, DeepFacto of rank 32 | 4.00 | 20.00 | 10.00 | 1 |" in weak


def test_an_image_has_its_pixels() -> None:
    pixels = bytes(range(256)) * 3 + bytes(16)
    picture = mosaic([pixels.hex()] * 9)
    assert picture.count("<image") == 9
    (first, *_) = re.findall(r"base64,([^\"]+)", picture)
    assert base64.b64decode(first) == png(pixels)
    at = png(pixels).index(b"IDAT")
    lines = zlib.decompress(png(pixels)[at + 4 : -16])
    assert b"".join(lines[i + 1 : i + 29] for i in range(0, 29 * 28, 29)) == pixels
