"""Replicator in one process: what replicas compute together is what one computes alone."""

from __future__ import annotations

import copy
import re
import threading
import time

import numpy as np
import pytest
import torch
from tests.unit.shared import flat, for_each, refuses, same
from torch import nn
from torch.nn.functional import batch_norm, cross_entropy

from laconic import Replicator
from laconic.core.errors import AttachError, DataError, NonFiniteError, PeerError, SpecError
from laconic.replicator import InputContext

LOCAL = "local(replicas=2)"

BATCH = 16
X = torch.randn(4 * BATCH, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (4 * BATCH,), generator=torch.Generator().manual_seed(2))


class OwnDict(dict):
    """A container that is no pytree."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def slices(context: InputContext):
    """The global batches in order, each pipeline's share of them."""
    size = context.per_pipeline(BATCH)
    for first in range(0, len(X), BATCH):
        begin = first + size * context.pipeline
        yield {"y": Y[begin : begin + size], "x": X[begin : begin + size]}


def learn(model: nn.Module, optimizer, batch) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch["x"]), batch["y"]).backward()
    optimizer.step()


def sgd(replicator: Replicator, model: nn.Module, **wrap):
    return replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), **wrap)


def trained(replicator: Replicator, replication: str = "per_worker", **wrap) -> torch.Tensor:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    optimizer = replicator.wrap_optimizer(plain, **wrap)
    for _ in range(3):
        batches = replicator.make_input(slices, replication)
        replicator.run(lambda batch: learn(model, optimizer, batch), batches)
    assert optimizer.updates == 12
    return flat(model)


@for_each(
    "replicas, replication",
    [(1, "single"), (2, "per_worker"), (2, "single"), (4, "per_replica"), (4, "per_worker")],
)
def test_replicas_at_one_batch_equal_a_single_one(replicas: int, replication: str) -> None:
    """Sums in another order differ by rounding: 12 steps with momentum stay within 1e-6, with debug too."""
    (alone,) = Replicator("single").launch(trained)
    spec, debug = f"local(replicas={replicas})", replicas == 2
    found = Replicator(spec, debug=debug).launch(lambda r: trained(r, replication))
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], alone, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):  # the comparison can fail: without a step it does
        torch.testing.assert_close(alone, flat(network()), rtol=1e-5, atol=1e-6)


def test_a_gather_that_sends_more_than_dense_is_warned_of_in_the_users_line() -> None:
    """Half of the bytes to each of 7 others is more than a dense sum's 7/4 of them."""
    with pytest.warns(UserWarning, match=r"all other ranks: among 8 that is") as said:
        Replicator("local(replicas=8)").launch(lambda r: trained(r, compressor="gather(cast('fp16'))") * 0)
    assert [each.filename for each in said] == [__file__]


def test_replicas_draw_what_processes_of_their_own_would_draw() -> None:
    def main(replicator: Replicator) -> list[float]:
        torch.manual_seed(7 + replicator.replica)
        np.random.seed(7 + replicator.replica)
        first = [torch.rand(1).item(), np.random.rand()]
        replicator.all_sum(1.0)  # others run, and draw
        return [*first, torch.rand(1).item(), np.random.rand()]

    torch.manual_seed(7)
    np.random.seed(7)
    expected = [draw() for _ in range(2) for draw in (lambda: torch.rand(1).item(), np.random.rand)]
    before = torch.get_rng_state()
    assert Replicator("local(replicas=3)").launch(main)[0] == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert Replicator("local(replicas=3)").launch(main) == Replicator("local(replicas=3)").launch(main)


def normalised(replicator: Replicator, x: torch.Tensor) -> torch.Tensor:
    """Cross-replica BatchNorm, in three lines."""
    moments = replicator.all_mean({"x": x.mean(0), "square": x.square().mean(0)})
    variance = moments["square"] - moments["x"].square()
    return (x - moments["x"]) / (variance + 1e-5).sqrt()


def test_cross_replica_batchnorm_is_that_of_the_whole_batch() -> None:
    """In float64: forward and gradients to 1e-10; without the exchange they differ by far more."""
    whole = X[:BATCH].double().requires_grad_()
    weight = torch.randn(BATCH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = batch_norm(whole, None, None, training=True, eps=1e-5)
    (expected.sin() * weight).sum().backward()

    def main(replicator: Replicator) -> tuple[torch.Tensor, torch.Tensor]:
        part = X[:BATCH].double().chunk(4)[replicator.replica].clone().requires_grad_()
        y = normalised(replicator, part)
        (y.sin() * weight.chunk(4)[replicator.replica]).sum().backward()
        return y.detach(), part.grad

    found = Replicator("local(replicas=4)").launch(main)
    torch.testing.assert_close(torch.cat([y for y, _ in found]), expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat([g for _, g in found]), whole.grad, rtol=0, atol=1e-10)
    alone = batch_norm(X[:4].double(), None, None, training=True, eps=1e-5)
    assert (alone - expected[:4].detach()).abs().max() > 0.1


def test_collectives_on_pytrees_and_their_gradients() -> None:
    """Each loss weighs what it got by the replica's number + 1; gradients are those of the sum of losses."""

    def main(replicator: Replicator) -> None:
        me, n = replicator.replica, replicator.replicas
        x = torch.full((me + 1, 2), float(me), requires_grad=True)  # ragged rows
        z = torch.tensor([me + 1.0], requires_grad=True)
        every = replicator.all_gather([x, torch.tensor(me)])
        root = replicator.broadcast(z, root=1)
        total = replicator.all_sum({"b": z, "a": (2.0, None)})
        ((me + 1) * (every[0].sum() + root.sum() + 10 * total["b"].sum())).backward()
        assert list(total) == ["b", "a"] and total["a"] == (2.0 * n, None)
        assert every[0].tolist() == [[float(rank)] * 2 for rank in range(n) for _ in range(rank + 1)]
        assert every[1].tolist() == [0, 1, 2]
        count = replicator.map_reduce(lambda v: v + me, 1, op="sum")
        assert (root.item(), total["b"].item(), count) == (2.0, 6.0, 6.0)
        assert torch.equal(x.grad, torch.full((me + 1, 2), 6.0))
        assert z.grad.item() == (60.0 + (6.0 if me == 1 else 0.0))
        rows = torch.zeros(me + 1, 0, 3, requires_grad=True)  # without elements
        every = replicator.all_gather(rows)
        every.sum().backward()
        assert every.shape == (6, 0, 3) and rows.grad.shape == rows.shape

    Replicator("local(replicas=3)").launch(main)


def test_gradients_of_gradients_go_through_a_sum() -> None:
    """Of the sum of N equal losses (sum x)^3 the second derivative is 6 N^2 sum x."""

    def main(replicator: Replicator) -> None:
        x = torch.tensor(1.0 + replicator.replica, requires_grad=True)
        (first,) = torch.autograd.grad(replicator.all_sum(x) ** 3, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
        assert second.item() == 2 * 2 * 6 * 3.0

    Replicator(LOCAL).launch(main)


@for_each("compressor", ["dgc(density=0.5)", "cgx(bits=8)", "powersgd"])
def test_any_method_keeps_replicas_equal(compressor: str) -> None:
    first, second = Replicator(LOCAL).launch(lambda r: trained(r, compressor=compressor))
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(network()))


def test_a_method_that_exchanges_inside_the_step_does_not_stop_the_others() -> None:
    def main(replicator: Replicator) -> torch.Tensor:
        model = network()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = replicator.wrap_optimizer(adam, compressor="zero_one_adam()")
        for batch in replicator.make_input(slices):
            learn(model, optimizer, batch)
        return flat(model)

    first, second = Replicator(LOCAL, timeout_s=20).launch(main)
    assert torch.isfinite(first).all()
    assert not torch.equal(first, flat(network()))
    assert first.shape == second.shape


@for_each("wrap", [{"compressor": "topk(density=0.1)"}, {"topology": "ring()"}])
def test_save_and_resume_gives_the_same_bits(wrap) -> None:
    def main(replicator: Replicator) -> bool:
        batches = list(replicator.make_input(slices, "per_replica"))

        def begun(name: str):
            model = network()
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return model, replicator.wrap_optimizer(plain, name=name, **wrap)

        def go(parts, some) -> None:
            for batch in some:
                learn(*parts, batch)

        whole, again = begun("it"), begun("again")
        go(whole, batches[:2])
        states = copy.deepcopy([part.state_dict() for part in whole])
        go(whole, batches[2:])
        go(again, batches[:1])
        for part, state in zip(again, states, strict=True):
            part.load_state_dict(state)
        go(again, batches[2:])
        return same(whole[0].parameters(), again[0].parameters())

    assert Replicator(LOCAL).launch(main) == [True, True]


def test_frozen_parameters_are_the_first_replicas_too() -> None:
    def main(replicator: Replicator) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        sgd(replicator, model)
        return flat(model)

    assert torch.equal(*Replicator(LOCAL).launch(main))


def test_a_replica_that_fails_is_a_peer_error_to_the_others() -> None:
    said: list[str] = []

    def main(replicator: Replicator) -> None:
        model = network()
        optimizer = sgd(replicator, model)
        for step in range(3):
            if replicator.replica == 1 and step == 2:
                raise ValueError("boom")
            batch = next(replicator.make_input(slices, "per_replica"))
            try:
                learn(model, optimizer, batch)
            except PeerError as error:
                said.append(str(error))
                raise

    refuses(ValueError, "boom", Replicator(LOCAL).launch, main)
    assert len(said) == 1


def test_numbers_in_a_batch_come_as_they_are() -> None:
    def main(replicator: Replicator):
        given = {"x": torch.arange(4.0), "n": 3, "flag": True, "id": 2**53 + 1, "weight": 0.5}
        batch = next(replicator.make_input(lambda context: [given]))
        assert [*replicator.make_input(lambda context: [None, None], "single")] == [None, None]
        return [(type(batch[key]), batch[key]) for key in ("n", "flag", "id", "weight")]

    wanted = [(int, 3), (bool, True), (int, 2**53 + 1), (float, 0.5)]
    for deployment, size in (("single", 1), (LOCAL, 2)):
        assert Replicator(deployment).launch(main) == [wanted] * size


def test_a_topology_gossips_until_finish() -> None:
    def main(replicator: Replicator):
        model = network()
        optimizer = sgd(replicator, model, topology="ring()")
        learn(model, optimizer, next(replicator.make_input(slices, "per_replica")))
        apart = flat(model)
        optimizer.finish()
        return apart, flat(model)

    found = Replicator("local(replicas=4)").launch(main)
    assert not torch.equal(found[0][0], found[1][0])
    mean = torch.stack([apart for apart, _ in found]).mean(0)
    for _, finished in found:
        torch.testing.assert_close(finished, mean, rtol=1e-6, atol=1e-7)


def test_it_starts_from_the_first_replica_and_counts_bytes() -> None:
    def main(replicator: Replicator):
        layer = nn.Linear(1000, 50)
        nn.init.constant_(layer.weight, replicator.replica + 1)
        plain = torch.optim.SGD(layer.named_parameters(), lr=0.1)
        optimizer = replicator.wrap_optimizer(plain, compressor="topk(density=0.01)", name="it")
        layer(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        stats = replicator.stats()["it"]
        assert layer.weight.max().item() == 1.0
        assert stats.ratio > 10
        assert stats.staleness == {0: 1}
        assert optimizer.controller.handle.layout.names == ("weight", "bias")

    Replicator(LOCAL).launch(main)


def test_tensors_of_several_dtypes_and_sparse_gradients_stay_equal() -> None:
    def main(replicator: Replicator) -> list[torch.Tensor]:
        torch.manual_seed(replicator.replica)
        table = nn.Embedding(10, 4, sparse=True)
        half, whole = nn.Parameter(torch.randn(4, 4).bfloat16()), nn.Parameter(torch.randn(4))
        held = [*table.parameters(), half, whole, nn.Parameter(torch.ones(2))]
        optimizer = replicator.wrap_optimizer(torch.optim.SGD(held, lr=0.1))
        row = table(torch.tensor([replicator.replica]))
        (row @ half.float() * whole).sum().backward()
        optimizer.step()
        return [part.detach() for part in held]

    first, second = Replicator(LOCAL).launch(main)
    assert same(first, second)
    assert torch.equal(first[-1], torch.ones(2)), "nothing used it"


def test_no_thread_outlives_a_launch() -> None:
    before = set(threading.enumerate())
    Replicator(LOCAL).launch(trained)
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_all_stop_at_the_end_of_the_shortest_input() -> None:
    def main(replicator: Replicator) -> None:
        batches = replicator.make_input(lambda context: range(3 + context.pipeline), "per_replica")
        assert len(replicator.run(lambda batch: replicator.all_sum(1.0), batches)) == 3

    Replicator("local(replicas=3)").launch(main)


def test_a_nan_on_one_replica_stops_all_before_the_step() -> None:
    def main(replicator: Replicator) -> None:
        model = network()
        optimizer = sgd(replicator, model)
        model(X[:4]).sum().backward()
        optimizer.step()
        alone = replicator.replicas == 1
        optimizer.load_state_dict(optimizer.state_dict(gather=alone))
        before = flat(model)
        optimizer.zero_grad()
        last = replicator.replica == replicator.replicas - 1
        (model(X[:4]).sum() * (torch.nan if last else 1.0)).backward()
        refuses(NonFiniteError, "nothing was changed" if alone else "not finite", optimizer.step)
        assert torch.equal(flat(model), before)

    Replicator(LOCAL).launch(main)
    Replicator("single").launch(main)


def fails(error: type[Exception], said: str, main, spec: str = LOCAL, **options) -> None:
    refuses(error, said, lambda: Replicator(spec, **options).launch(main))


def wrapping(*names: str, **wrap):
    def main(replicator: Replicator) -> None:
        for name in names:
            replicator.wrap_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()), name=name, **wrap)

    return main


def test_what_cannot_be_wrapped_or_fed_is_refused() -> None:
    Replicator("single").launch(wrapping("generator", "discriminator"))

    def late(replicator: Replicator) -> None:
        sgd(replicator, nn.Linear(2, 2)).add_param_group({"params": [torch.zeros(3, requires_grad=True)]})

    def scaled(replicator: Replicator) -> None:
        layer = nn.Linear(2, 2)
        optimizer, scaler = sgd(replicator, layer), torch.amp.GradScaler("cpu")
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)

    def paired(replicator: Replicator) -> None:
        next(replicator.make_input(lambda context: [{(1, 2): torch.ones(8)}], "single"))

    def seven(replication: str):
        return lambda r: next(r.make_input(lambda context: [torch.ones(7, 2)], replication))

    lbfgs = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    both = "two optimisers are named 'generator'"
    for error, said, main, spec in (
        (AttachError, both, wrapping("generator", "generator"), "single"),
        (AttachError, both, wrapping("generator", "generator"), LOCAL),
        (AttachError, r"shape \(3,\) was frozen or unknown when wrap_optimizer\(\) was called", late, LOCAL),
        (AttachError, "the optimiser's name differs", lambda r: wrapping(f"its{r.replica}")(r), LOCAL),
        (AttachError, "does not support GradScaler", scaled, LOCAL),
        (AttachError, "LBFGS evaluates the model many times", lambda r: r.wrap_optimizer(lbfgs), LOCAL),
        (SpecError, "got the strategy", wrapping("it", compressor="sgp()"), "single"),
        (SpecError, "topology must be a topology", wrapping("it", topology="dgc()"), "single"),
        (SpecError, "name must be a word", wrapping("a/b"), "single"),
        (TypeError, "a leaf of a pytree must be a tensor", lambda r: r.all_sum("text"), "single"),
        (
            TypeError,
            r"OwnDict is a class of its own, .* give dict\(...\)",
            lambda r: r.all_sum(OwnDict()),
            "single",
        ),
        (TypeError, r"strings and numbers as keys, got \[\(1, 2\)\]", paired, LOCAL),
        (SpecError, "in 0..0", lambda r: r.logical_device(1), "single"),
        (DataError, r"split it among 2 replicas, got \(7, 2\)", seven("single"), LOCAL),
        (DataError, r"split it among 2 replicas, got \(7, 2\)", seven("per_worker"), LOCAL),
        (
            DataError,
            "10 does not divide among 4 replicas: use 8 or 12",
            lambda r: next(r.make_input(lambda context: [context.per_pipeline(10)], "per_replica")),
            "local(replicas=4)",
        ),
        (DataError, "ended after 3 of 5 batches", lambda r: r.run(print, iter(range(3)), steps=5), LOCAL),
    ):
        fails(error, said, main, spec)
    launch = re.escape("call Replicator(...).launch(main)")
    refuses(AttachError, launch, Replicator(LOCAL).all_sum, 1.0)
    refuses(AttachError, "start the script with torchrun", Replicator("sync").launch, print)
    assert Replicator("single", devices=2).logical_device(1) is not None
    assert Replicator("single").all_sum(2.0) == 2.0  # without launch


def test_an_input_that_fails_is_named_on_every_replica() -> None:
    def main(replicator: Replicator) -> None:
        def input_fn(context):
            raise ZeroDivisionError("no such file")

        if replicator.replica:
            said = "replica 0 failed: ZeroDivisionError: no such file"
            refuses(PeerError, said, lambda: next(replicator.make_input(input_fn, "single")))
        else:
            next(replicator.make_input(input_fn, "single"))

    fails(ZeroDivisionError, "no such file", main)


def test_debug_names_the_first_collective_that_differs() -> None:
    """Its kind, its order, an early end, a step beside a backward pass, and who does not come."""

    def kind(replicator: Replicator) -> None:
        replicator.all_sum(1.0)
        (replicator.all_gather if replicator.replica == 1 else replicator.all_sum)(torch.ones(2))

    def order(replicator: Replicator) -> float:
        """Tensors of one shape would be mixed in silence, as they are without debug."""
        if replicator.replica:
            return float(replicator.all_sum(torch.tensor(1.0)))
        return float(replicator.all_sum(torch.tensor(100.0)))

    def end(replicator: Replicator) -> None:
        for _ in range(3 - replicator.replica):
            replicator.all_mean({"loss": 1.0})

    def backward(replicator: Replicator) -> None:
        x = torch.ones(2, requires_grad=True)
        optimizer = replicator.wrap_optimizer(torch.optim.SGD([x], lr=0.1), name="generator")
        loss = replicator.all_sum(x).sum()
        if replicator.replica == 0:
            loss.backward()
        optimizer.step()

    def absent(replicator: Replicator) -> None:
        replicator.all_sum(1.0)
        if replicator.replica == 0:
            replicator.all_sum(2.0)
        else:
            replicator._context.comm.split(0)  # waits elsewhere

    at = r"at test_replicator.py:\d+"
    assert Replicator(LOCAL).launch(order) == [101.0, 101.0]
    for main, spec, options, said in (
        (
            kind,
            "local(replicas=3)",
            {},
            rf"replicas differ at collective 2: all_sum\(float32 \(2,\)\) {at} \(replicas 0, 2\);"
            rf" all_gather\(float32 \(..., \(\)\)\) {at} \(replica 1\)",
        ),
        (order, LOCAL, {}, "replicas differ at collective 1"),
        (end, LOCAL, {}, "collective 3: all_mean.*replica 0.*; the end of the script .replica 1"),
        (
            backward,
            LOCAL,
            {},
            "the backward pass of all_sum.*replica 0.*; step of 'generator' at .*replica 1",
        ),
        (
            absent,
            LOCAL,
            {"timeout_s": 1.0},
            "replica 0 waits at collective 2, all_sum.*behind it: replica 1 at 1|not all 2 ranks arrived",
        ),
    ):
        fails(PeerError, said, main, spec, debug=True, **options)


def test_bools_are_counted_and_complex_sums_have_gradients() -> None:
    def main(replicator) -> None:
        n, z = replicator.replicas, torch.tensor([1 + 2j], requires_grad=True)
        total = replicator.all_sum(z)
        total.abs().square().sum().backward()
        flag = torch.tensor([replicator.replica == 0, True])
        assert replicator.all_sum(flag).tolist() == [1, n]
        assert replicator.all_mean(flag).tolist() == [1 / n, 1.0]
        assert n == 1 or (total.requires_grad and z.grad is not None)

    Replicator("local(replicas=4)").launch(main)
    Replicator("single").launch(main)


def gathering(replicator):
    model = network()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    compressor = "zero_one_adam(freeze_steps=1, double_every=1, longest=4)"
    optimizer = replicator.wrap_optimizer(adam, compressor=compressor)
    for _ in range(6):
        optimizer.zero_grad()
        model(X[8 * replicator.replica :][:8]).square().mean().backward()
        optimizer.step()
    saved = optimizer.state_dict(gather=True)
    with optimizer.averaged() as apart:
        shown = flat(model)
    optimizer.remove()
    return saved["ranks"] if "ranks" in saved else len(str(saved)), apart, shown


def test_what_exchanges_outside_of_steps_passes_the_baton_on() -> None:
    (_, one, first), (_, other, second) = Replicator(LOCAL, timeout_s=20).launch(gathering)
    assert one == other > 0
    assert torch.equal(first, second)


def test_the_string_is_the_repr() -> None:
    for spec in ("single()", "sync()", "local(replicas=4)", "async(servers=2)", "groups(size=4)"):
        parsed = Replicator(spec).deployment
        assert repr(parsed) == spec.replace("async", "asynchronous")
        assert Replicator(repr(parsed)).deployment == parsed
    for spec, said in (
        ("dgc()", "must be a deployment"),
        ("local(replicas=0)", "replicas must be a whole number"),
        ("async(servers=0)", "servers must be a whole number"),
        ("groups(size=2, staleness=-1)", "staleness must be a whole number"),
    ):
        refuses(SpecError, said, Replicator, spec)
