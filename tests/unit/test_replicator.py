"""Replicator in one process: what replicas compute together is what one computes alone."""

from __future__ import annotations

import copy
import re
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, cross_entropy

from laconic import Replicator
from laconic.core.errors import AttachError, DataError, NonFiniteError, PeerError, SpecError
from laconic.replicator import InputContext

BATCH = 16
X = torch.randn(4 * BATCH, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (4 * BATCH,), generator=torch.Generator().manual_seed(2))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def slices(context: InputContext):
    """The global batches in order, each pipeline's share of them."""
    size = context.per_pipeline(BATCH)
    for first in range(0, len(X), BATCH):
        begin = first + size * context.pipeline
        yield {"y": Y[begin : begin + size], "x": X[begin : begin + size]}


def trained(replicator: Replicator, replication: str = "per_worker", **wrap) -> torch.Tensor:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    optimizer = replicator.wrap_optimizer(plain, **wrap)

    def step_fn(batch):
        optimizer.zero_grad()
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()

    for _ in range(3):
        replicator.run(step_fn, replicator.make_input(slices, replication))
    assert optimizer.updates == 12
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("replication", ["single", "per_worker", "per_replica"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_replicas_at_one_batch_equal_a_single_one(replicas: int, replication: str) -> None:
    """Sums in another order differ by rounding: 12 steps with momentum stay within 1e-6."""
    (alone,) = Replicator("single").launch(trained)
    every = Replicator(f"local(replicas={replicas})").launch(lambda r: trained(r, replication))
    assert all(torch.equal(each, every[0]) for each in every)
    torch.testing.assert_close(every[0], alone, rtol=1e-5, atol=1e-6)


def test_a_gather_that_sends_more_than_dense_is_warned_of_in_the_users_line() -> None:
    """Half of the bytes to each of 7 others is more than a dense sum's 7/4 of them."""
    with pytest.warns(UserWarning, match=r"all other ranks: among 8 that is") as said:
        Replicator("local(replicas=8)").launch(lambda r: trained(r, compressor="gather(cast('fp16'))") * 0)
    assert [each.filename for each in said] == [__file__]


def test_the_comparison_can_fail() -> None:
    """A step too few is seen."""
    (alone,) = Replicator("single").launch(trained)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            alone, nn.utils.parameters_to_vector(network().parameters()), rtol=1e-5, atol=1e-6
        )


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


def test_collectives_on_nests_and_their_gradients() -> None:
    """Each loss weighs what it got by the replica's number + 1; gradients are those of the sum of losses."""

    def main(replicator: Replicator):
        me, n = replicator.replica, replicator.replicas
        x = torch.full((me + 1, 2), float(me), requires_grad=True)  # ragged rows
        z = torch.tensor([me + 1.0], requires_grad=True)
        every = replicator.all_gather([x, torch.tensor(me)])
        root = replicator.broadcast(z, root=1)
        total = replicator.all_sum({"b": z, "a": (2.0, None)})
        count = replicator.map_reduce(lambda v: v + me, 1, op="sum")
        ((me + 1) * (every[0].sum() + root.sum() + 10 * total["b"].sum())).backward()
        assert list(total) == ["b", "a"]
        assert total["a"] == (2.0 * n, None)
        return every[0].tolist(), every[1].tolist(), root.item(), total["b"].item(), count, x.grad, z.grad

    found = Replicator("local(replicas=3)").launch(main)
    rows = [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    for me, (gathered, numbers, root, total, count, x_grad, z_grad) in enumerate(found):
        assert gathered == rows
        assert numbers == [0, 1, 2]
        assert (root, total, count) == (2.0, 6.0, 6.0)
        assert torch.equal(x_grad, torch.full((me + 1, 2), 6.0))
        assert z_grad.item() == (60.0 + (6.0 if me == 1 else 0.0))


def test_gradients_of_gradients_go_through_a_sum() -> None:
    """Of the sum of N equal losses (sum x)^3 the second derivative is 6 N^2 sum x."""

    def main(replicator: Replicator) -> float:
        x = torch.tensor(1.0 + replicator.replica, requires_grad=True)
        (first,) = torch.autograd.grad(replicator.all_sum(x) ** 3, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
        return second.item()

    assert Replicator("local(replicas=2)").launch(main) == [2 * 2 * 6 * 3.0] * 2


@pytest.mark.parametrize(
    "wrap", [{"compressor": "dgc(density=0.5)"}, {"compressor": "cgx(bits=8)"}, {"compressor": "powersgd"}]
)
def test_any_method_keeps_replicas_equal(wrap) -> None:
    first, second = Replicator("local(replicas=2)").launch(lambda r: trained(r, **wrap))
    assert torch.equal(first, second)
    assert not torch.equal(first, nn.utils.parameters_to_vector(network().parameters()))


def test_a_method_that_exchanges_inside_the_step_does_not_stop_the_others() -> None:
    def main(replicator: Replicator) -> torch.Tensor:
        model = network()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = replicator.wrap_optimizer(adam, compressor="zero_one_adam()")
        batches = replicator.make_input(slices)
        for batch in batches:
            optimizer.zero_grad()
            cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    first, second = Replicator("local(replicas=2)", timeout_s=20).launch(main)
    assert torch.isfinite(first).all()
    assert not torch.equal(first, nn.utils.parameters_to_vector(network().parameters()))
    assert first.shape == second.shape


@pytest.mark.parametrize("wrap", [{"compressor": "topk(density=0.1)"}, {"topology": "ring()"}])
def test_save_and_resume_gives_the_same_bits(wrap) -> None:
    def main(replicator: Replicator) -> bool:
        batches = list(replicator.make_input(slices, "per_replica"))

        def begun(name: str):
            model = network()
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return model, replicator.wrap_optimizer(plain, name=name, **wrap)

        def go(model, optimizer, some) -> None:
            for batch in some:
                optimizer.zero_grad()
                cross_entropy(model(batch["x"]), batch["y"]).backward()
                optimizer.step()

        whole, optimizer = begun("it")
        go(whole, optimizer, batches[:2])
        state = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
        go(whole, optimizer, batches[2:])
        again, optimizer = begun("again")
        go(again, optimizer, batches[:1])
        again.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        go(again, optimizer, batches[2:])
        pairs = zip(whole.parameters(), again.parameters(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    assert Replicator("local(replicas=2)").launch(main) == [True, True]


def test_frozen_parameters_are_the_first_replicas_too() -> None:
    def main(replicator: Replicator) -> torch.Tensor:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    first, second = Replicator("local(replicas=2)").launch(main)
    assert torch.equal(first, second)


def test_a_replica_that_fails_is_a_peer_error_to_the_others() -> None:
    said: list[str] = []

    def main(replicator: Replicator) -> None:
        model = network()
        optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            if replicator.replica == 1 and step == 2:
                raise ValueError("boom")
            batch = next(replicator.make_input(slices, "per_replica"))
            optimizer.zero_grad()
            cross_entropy(model(batch["x"]), batch["y"]).backward()
            try:
                optimizer.step()
            except PeerError as error:
                said.append(str(error))
                raise

    with pytest.raises(ValueError, match="boom"):
        Replicator("local(replicas=2)").launch(main)
    assert len(said) == 1


def test_numbers_in_a_batch_come_as_they_are() -> None:
    def batches(context):
        yield {"x": torch.arange(4.0), "n": 3, "flag": True, "id": 2**53 + 1, "weight": 0.5}

    def main(replicator: Replicator):
        batch = next(replicator.make_input(batches))
        return [(type(batch[key]), batch[key]) for key in ("n", "flag", "id", "weight")]

    wanted = [(int, 3), (bool, True), (int, 2**53 + 1), (float, 0.5)]
    for deployment, size in (("single", 1), ("local(replicas=2)", 2)):
        assert Replicator(deployment).launch(main) == [wanted] * size


def test_a_topology_gossips_until_finish() -> None:
    def main(replicator: Replicator):
        model = network()
        optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), topology="ring()")
        batch = next(replicator.make_input(slices, "per_replica"))
        cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        apart = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer.finish()
        return apart, nn.utils.parameters_to_vector(model.parameters()).detach()

    found = Replicator("local(replicas=4)").launch(main)
    assert not torch.equal(found[0][0], found[1][0])
    mean = torch.stack([apart for apart, _ in found]).mean(0)
    for _, finished in found:
        torch.testing.assert_close(finished, mean, rtol=1e-6, atol=1e-7)


def test_it_starts_from_the_first_replica_and_counts_bytes() -> None:
    def main(replicator: Replicator):
        layer = nn.Linear(1000, 50)
        with torch.no_grad():
            layer.weight.fill_(replicator.replica + 1)
        optimizer = replicator.wrap_optimizer(
            torch.optim.SGD(layer.named_parameters(), lr=0.1), compressor="topk(density=0.01)", name="it"
        )
        layer(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        stats = replicator.stats()["it"]
        return (
            layer.weight.max().item(),
            stats.ratio,
            stats.staleness,
            optimizer.controller.handle.layout.names,
        )

    for largest, ratio, staleness, names in Replicator("local(replicas=2)").launch(main):
        assert largest == 1.0
        assert ratio > 10
        assert staleness == {0: 1}
        assert names == ("weight", "bias")


def test_tensors_of_several_dtypes_and_sparse_gradients_stay_equal() -> None:
    def main(replicator: Replicator) -> list[torch.Tensor]:
        torch.manual_seed(replicator.replica)
        table = nn.Embedding(10, 4, sparse=True)
        half, whole = nn.Parameter(torch.randn(4, 4).bfloat16()), nn.Parameter(torch.randn(4))
        unused = nn.Parameter(torch.ones(2))
        held = [*table.parameters(), half, whole, unused]
        optimizer = replicator.wrap_optimizer(torch.optim.SGD(held, lr=0.1))
        row = table(torch.tensor([replicator.replica]))
        (row @ half.float() * whole).sum().backward()
        optimizer.step()
        return [each.detach() for each in held]

    first, second = Replicator("local(replicas=2)").launch(main)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(first[-1], torch.ones(2))


def test_no_thread_outlives_a_launch() -> None:
    before = set(threading.enumerate())
    Replicator("local(replicas=2)").launch(trained)
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_a_batch_of_none_is_a_batch() -> None:
    def main(replicator: Replicator) -> list[None]:
        return [*replicator.make_input(lambda context: [None, None], "single")]

    assert Replicator("local(replicas=2)").launch(main) == [[None, None]] * 2


def test_rows_without_elements_are_gathered() -> None:
    def main(replicator: Replicator) -> tuple[int, ...]:
        rows = torch.zeros(replicator.replica + 1, 0, 3, requires_grad=True)
        every = replicator.all_gather(rows)
        every.sum().backward()
        assert rows.grad is not None and rows.grad.shape == rows.shape
        return tuple(every.shape)

    assert Replicator("local(replicas=2)").launch(main) == [(3, 0, 3)] * 2


def test_all_stop_at_the_end_of_the_shortest_input() -> None:
    def main(replicator: Replicator) -> int:
        batches = replicator.make_input(lambda context: range(3 + context.pipeline), "per_replica")
        return len(replicator.run(lambda batch: replicator.all_sum(1.0), batches))

    assert Replicator("local(replicas=3)").launch(main) == [3, 3, 3]


def test_a_nan_on_one_replica_stops_all_before_the_step() -> None:
    def main(replicator: Replicator) -> None:
        layer = nn.Linear(2, 2)
        optimizer = replicator.wrap_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
        layer(torch.full((1, 2), torch.nan if replicator.replica else 1.0)).sum().backward()
        before = layer.weight.detach().clone()
        with pytest.raises(ArithmeticError, match="not finite"):
            optimizer.step()
        assert torch.equal(layer.weight, before)

    Replicator("local(replicas=2)").launch(main)


# What is refused.


def refused(error: type[Exception], said: str, main, spec: str = "local(replicas=2)", **options) -> None:
    with pytest.raises(error, match=said):
        Replicator(spec, **options).launch(main)


def wrapping(*names: str, **wrap):
    def main(replicator: Replicator) -> None:
        for name in names:
            replicator.wrap_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()), name=name, **wrap)

    return main


def test_two_optimisers_of_one_name() -> None:
    Replicator("single").launch(wrapping("generator", "discriminator"))
    for spec in ("single", "local(replicas=2)"):
        refused(AttachError, "two optimisers are named 'generator'", wrapping("generator", "generator"), spec)


def test_a_parameter_that_came_too_late() -> None:
    def main(replicator: Replicator) -> None:
        optimizer = replicator.wrap_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()))
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})

    refused(AttachError, r"shape \(3,\) was frozen or unknown when wrap_optimizer\(\) was called", main)


def test_a_name_that_differs_between_replicas() -> None:
    def main(replicator: Replicator) -> None:
        wrapping(f"its{replicator.replica}")(replicator)

    refused(AttachError, "the optimiser's name differs", main)


@pytest.mark.parametrize("replication", ["single", "per_worker"])
def test_a_batch_that_does_not_divide(replication: str) -> None:
    def main(replicator: Replicator) -> None:
        next(replicator.make_input(lambda context: [torch.ones(7, 2)], replication))

    refused(DataError, r"cut among 2 replicas .* got \(7, 2\)", main)


def test_a_global_batch_that_does_not_divide() -> None:
    def main(replicator: Replicator) -> None:
        next(replicator.make_input(lambda context: [context.per_pipeline(10)], "per_replica"))

    refused(DataError, "10 does not divide among 4 replicas: take 8 or 12", main, "local(replicas=4)")


def test_an_input_that_ends_early_or_fails() -> None:
    def ends(replicator: Replicator) -> None:
        replicator.run(lambda batch: None, iter(range(3)), steps=5)

    def fails(replicator: Replicator) -> None:
        def input_fn(context):
            raise ZeroDivisionError("no such file")

        if replicator.replica:
            with pytest.raises(PeerError, match="replica 0 failed: ZeroDivisionError: no such file"):
                next(replicator.make_input(input_fn, "single"))
        else:
            next(replicator.make_input(input_fn, "single"))

    refused(DataError, "ended after 3 of 5 batches", ends)
    refused(ZeroDivisionError, "no such file", fails)


@pytest.mark.parametrize(
    "spec, said",
    [
        ("dgc()", "takes a deployment"),
        ("local(replicas=0)", "replicas must be a whole number"),
        ("async(servers=0)", "servers must be a whole number"),
        ("groups(size=2, staleness=-1)", "staleness must be a whole number"),
    ],
)
def test_what_is_no_deployment(spec: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Replicator(spec)


def test_the_string_is_the_repr() -> None:
    for spec in ("single()", "sync()", "local(replicas=4)", "async(servers=2)", "groups(size=4)"):
        parsed = Replicator(spec).deployment
        assert repr(parsed) == spec.replace("async", "asynchronous")
        assert Replicator(repr(parsed)).deployment == parsed


def test_misuse_says_the_way_out() -> None:
    with pytest.raises(AttachError, match=re.escape("call Replicator(...).launch(main)")):
        Replicator("local(replicas=2)").all_sum(1.0)
    with pytest.raises(AttachError, match="start the script with torchrun"):
        Replicator("sync").launch(lambda replicator: None)
    refused(SpecError, "got the strategy", wrapping("it", compressor="sgp()"), "single")
    refused(SpecError, "topology must be a topology", wrapping("it", topology="dgc()"), "single")
    refused(SpecError, "name must be a word", wrapping("a/b"), "single")
    refused(TypeError, "a nest is a tensor", lambda r: r.all_sum("text"), "single")
    refused(SpecError, "in 0..0", lambda r: r.logical_device(1), "single")
    assert Replicator("single", devices=2).logical_device(1) is not None
    assert Replicator("single").all_sum(2.0) == 2.0  # without launch


def test_a_grad_scaler_and_lbfgs_are_refused() -> None:
    def scaled(replicator: Replicator) -> None:
        layer = nn.Linear(2, 2)
        optimizer = replicator.wrap_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(layer(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)

    def lbfgs(replicator: Replicator) -> None:
        replicator.wrap_optimizer(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))

    refused(AttachError, "takes no GradScaler", scaled)
    refused(AttachError, "LBFGS evaluates the model many times", lbfgs)


# Debug: the first collective that differs is named.


def test_debug_names_a_collective_of_another_kind() -> None:
    def main(replicator: Replicator) -> None:
        replicator.all_sum(1.0)
        if replicator.replica == 1:
            replicator.all_gather(torch.ones(2))
        else:
            replicator.all_sum(torch.ones(2))

    said = (
        r"replicas differ at collective 2: all_sum\(float32 \(2,\)\) at test_replicator.py:\d+"
        r" \(replicas 0, 2\); all_gather\(float32 \(..., \(\)\)\) at test_replicator.py:\d+ \(replica 1\)"
    )
    refused(PeerError, said, main, "local(replicas=3)", debug=True)


def test_debug_names_equal_collectives_in_another_order() -> None:
    """Tensors of one shape would be mixed in silence, as they are without debug."""

    def main(replicator: Replicator) -> float:
        first = (lambda: replicator.all_sum(torch.tensor(1.0))) if replicator.replica else None
        if first is not None:
            return float(first())
        return float(replicator.all_sum(torch.tensor(100.0)))

    assert Replicator("local(replicas=2)").launch(main) == [101.0, 101.0]
    refused(PeerError, "replicas differ at collective 1", main, debug=True)


def test_debug_names_a_replica_that_ends_early() -> None:
    def main(replicator: Replicator) -> None:
        for _ in range(3 - replicator.replica):
            replicator.all_mean({"loss": 1.0})

    said = "collective 3: all_mean.*replica 0.*; the end of the script .replica 1"
    refused(PeerError, said, main, debug=True)


def test_debug_names_a_step_and_a_backward_pass() -> None:
    def main(replicator: Replicator) -> None:
        x = torch.ones(2, requires_grad=True)
        optimizer = replicator.wrap_optimizer(torch.optim.SGD([x], lr=0.1), name="generator")
        loss = replicator.all_sum(x).sum()
        if replicator.replica == 0:
            loss.backward()
        optimizer.step()

    said = "the backward pass of all_sum.*replica 0.*; step of 'generator' at .*replica 1"
    refused(PeerError, said, main, debug=True)


def test_debug_tells_who_does_not_come() -> None:
    def main(replicator: Replicator) -> None:
        replicator.all_sum(1.0)
        if replicator.replica == 0:
            replicator.all_sum(2.0)
        else:
            replicator._at.comm.split(0)  # waits elsewhere

    said = "replica 0 waits at collective 2, all_sum.*behind it: replica 1 at 1|not all 2 ranks arrived"
    refused(PeerError, said, main, debug=True, timeout_s=1.0)


def test_debug_lets_a_right_script_pass() -> None:
    (alone,) = Replicator("single").launch(trained)
    every = Replicator("local(replicas=2)", debug=True).launch(trained)
    torch.testing.assert_close(every[0], alone, rtol=1e-5, atol=1e-6)


def test_bools_are_counted_and_complex_sums_have_gradients() -> None:
    def main(replicator):
        z = torch.tensor([1 + 2j], requires_grad=True)
        total = replicator.all_sum(z)
        total.abs().square().sum().backward()
        flag = torch.tensor([replicator.replica == 0, True])
        return (
            replicator.all_sum(flag).tolist(),
            replicator.all_mean(flag).tolist(),
            total.requires_grad,
            z.grad,
        )

    for sums, means, differentiable, grad in Replicator("local(replicas=4)").launch(main):
        assert sums == [1, 4] and means == [0.25, 1.0] and differentiable and grad is not None
    assert Replicator("single").launch(main)[0][:2] == ([1, 1], [1.0, 1.0])


def gathering(replicator):
    model = network()
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = replicator.wrap_optimizer(
        adam, compressor="zero_one_adam(freeze_steps=1, double_every=1, longest=4)"
    )
    for _ in range(6):
        optimizer.zero_grad()
        model(X[8 * replicator.replica :][:8]).square().mean().backward()
        optimizer.step()
    saved = optimizer.state_dict(gather=True)
    with optimizer.averaged() as apart:
        shown = nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer.remove()
    return saved["ranks"] if "ranks" in saved else len(str(saved)), apart, shown


def test_what_exchanges_outside_of_steps_passes_the_baton_on() -> None:
    (_, one, first), (_, other, second) = Replicator("local(replicas=2)", timeout_s=20).launch(gathering)
    assert one == other > 0
    assert torch.equal(first, second)


def test_alone_is_the_same_script() -> None:
    def main(replicator):
        model = network()
        optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(X[:4]).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict(gather=True))
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer.zero_grad()
        (model(X[:4]).sum() * float("nan")).backward()
        with pytest.raises(NonFiniteError, match="nothing was changed"):
            optimizer.step()
        return torch.equal(before, nn.utils.parameters_to_vector(model.parameters()))

    assert Replicator("single").launch(main) == [True]
