"""Replicator in real processes: the example in all deployments, lost workers, dead servers."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from laconic import Replicator
from laconic.core.errors import AttachError, PeerError, SpecError

EXAMPLES = Path(__file__).parents[2] / "examples"
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (64,), generator=torch.Generator().manual_seed(2))


def script(name):
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(spec, **options):
    return Replicator(spec, **options).launch(script("replicator").main)


@pytest.mark.parametrize(
    "spec, ranks, replicas",
    [
        ("single", 1, 1),
        ("local(replicas=2)", 1, 2),
        ("sync", 2, 2),
        ("async(servers=2)", 4, 2),
        ("groups(size=2)", 5, 4),
    ],
)
def test_one_script_runs_in_every_deployment(pool, spec, ranks, replicas):
    """It learns: the loss starts at ln 5 = 1.6."""
    losses = [loss for results in pool.run(ranks, example, spec) for loss in results]
    assert len(losses) == replicas
    assert all(loss < 0.2 for loss in losses)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def trained(replicator, steps=4, pause=lambda step: None, **wrap):
    """Train on global batches of 16; the parameters at the end, and the figures."""
    model = network()
    plain = torch.optim.SGD(model.named_parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(plain, step_size=2, gamma=0.5)
    optimizer = replicator.wrap_optimizer(plain, **wrap)

    def input_fn(context):
        size = context.per_pipeline(16)
        while True:
            for first in range(0, len(X), 16):
                begin = first + (size * context.pipeline) % 16
                yield X[begin : begin + size], Y[begin : begin + size]

    batches = replicator.make_input(input_fn)
    for step in range(steps):
        pause(step)

        def step_fn(batch):
            optimizer.zero_grad()
            cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            schedule.step()

        replicator.run(step_fn, batches, steps=1)
    return flat(model), optimizer.stats()


def alone(spec, steps=4, compressor=None):
    return Replicator(spec).launch(lambda replicator: trained(replicator, steps, compressor=compressor))


@pytest.mark.parametrize(
    "spec, ranks", [("sync", 2), ("sync", 4), ("async(servers=2)", 3), ("groups(size=2)", 3)]
)
def test_processes_in_step_equal_a_single_replica(pool, spec, ranks):
    """With one worker, or one group, servers compute what one device computes: schedule and momentum too."""
    ((expected, _),) = Replicator("single").launch(trained)
    found = [each for results in pool.run(ranks, alone, spec) for each in results]
    assert found
    for parameters, stats in found:
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)
        assert (stats.updates, stats.refused, dict(stats.staleness)) == (4, 0, {0: 4})


def test_compressed_pushes_are_small_and_keep_what_they_do_not_send(pool):
    plain, few = (
        next(each for results in pool.run(2, alone, "async", 40, c) for each in results)
        for c in ("dense()", "topk(density=0.1)")
    )
    assert few[1].payload_sent < plain[1].payload_sent


def together(workers):
    """Wait for the other workers, which `async` never does."""
    store = dist.distributed_c10d._get_default_store()
    store.add("together", 1)
    while store.add("together", 0) < workers:
        time.sleep(0.005)


def slow_beside_fast(spec):
    """The last worker waits in each step for a few of the others; they do not wait for it."""

    def main(replicator):
        store = dist.distributed_c10d._get_default_store()
        fast = replicator.groups - 1
        slow = replicator.group == fast

        def pause(step):
            if step == 0:
                together(replicator.groups)
            if not slow:
                store.add("fast steps", 1)
                time.sleep(0.01)
                return
            begun = store.add("fast steps", 0)
            while store.add("fast steps", 0) < min(begun + 2 + fast, 40 * fast):  # each may be within one
                time.sleep(0.005)

        return slow, trained(replicator, 5 if slow else 40, pause)[1]

    return Replicator(spec).launch(main)


def test_nobody_waits_for_a_slow_worker_and_staleness_is_counted(pool):
    found = [each for results in pool.run(4, slow_beside_fast, "async(staleness=1000)") for each in results]
    assert [slow for slow, _ in found] == [False, False, True]
    total = sum((Counter(stats.staleness) for _, stats in found), Counter())
    assert sum(total.values()) == 85
    assert max(found[2][1].staleness) > 1  # others came between
    assert max(stats.updates for _, stats in found) == 85


def test_a_gradient_beyond_the_bound_is_refused(pool):
    found = [each for results in pool.run(3, slow_beside_fast, "async(staleness=0)") for each in results]
    for slow, stats in found:
        assert set(stats.staleness) <= {0}
        assert sum(stats.staleness.values()) + stats.refused == (5 if slow else 40)
    assert found[1][1].refused > 0
    assert max(stats.updates for _, stats in found) == sum(sum(s.staleness.values()) for _, s in found)


def losing(spec, who, folder=None):
    """This rank dies in its third step."""

    def main(replicator):
        def pause(step):
            if step == 3 and dist.get_rank() == who:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)

        return trained(replicator, 20, pause)[1].updates

    return Replicator(spec, checkpoints=folder, checkpoint_every=5).launch(main)


def test_the_others_survive_a_lost_worker(pool):
    outcomes = pool.fresh(4, losing, "async(staleness=100)", 2)
    assert outcomes[2].exit_code == -signal.SIGKILL
    survivors = [each for each in outcomes if each.rank != 2]
    assert [each.error for each in survivors] == [None] * 3
    assert 2 * 20 <= max(each.value[0] for each in survivors if each.value) <= 2 * 20 + 3


def test_the_other_groups_survive_a_lost_one(pool):
    """A group that loses a replica ends: its other one says so."""
    outcomes = pool.fresh(5, losing, "groups(size=2, staleness=100)", 4)
    assert isinstance(outcomes[3].error, PeerError)
    assert [outcomes[rank].error for rank in (0, 1, 2)] == [None] * 3
    assert outcomes[1].value == outcomes[2].value
    assert outcomes[1].value[0] >= 20


def dying_server(folder):
    """The server dies after a checkpoint; its worker tells what is kept."""
    if dist.get_rank() == 0:

        def end():
            while not (Path(folder) / "optimizer-server0.pt").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=end, daemon=True).start()
    return Replicator("async", checkpoints=folder, checkpoint_every=5).launch(
        lambda replicator: trained(replicator, 10_000)
    )


def going_on(folder):
    return Replicator("async", checkpoints=folder).launch(
        lambda replicator: trained(replicator, 1)[1].updates
    )


def test_a_dead_server_is_named_and_its_checkpoint_is_kept(pool, tmp_path):
    server, worker = pool.fresh(2, dying_server, str(tmp_path))
    assert server.exit_code == -signal.SIGKILL
    assert isinstance(worker.error, PeerError)
    said = str(worker.error)
    file = tmp_path / "optimizer-server0.pt"
    assert "server 0 of 1 is gone after update" in said
    assert "4 tensors of 'optimizer', the first '0.weight'" in said
    assert f"kept in {file}: start again with the same folder" in said
    kept = torch.load(file, weights_only=True)["version"]
    assert kept >= 5
    (updates,) = pool.run(2, going_on, str(tmp_path))[1]
    assert updates == kept + 1


def normalised():
    """Cross-replica BatchNorm and torch's own: outputs and gradients of this replica's rows, in float64."""
    replicator = Replicator("sync")
    rows = 16 // replicator.replicas
    mine = slice(rows * replicator.replica, rows * (replicator.replica + 1))
    whole = X[:16].double().requires_grad_()
    nn.functional.batch_norm(whole, None, None, training=True).sin().pow(2).sum().backward()
    part = X[:16].double()[mine].requires_grad_()
    mean, square = replicator.all_mean((part.mean(0), part.square().mean(0)))
    made = (part - mean) * (square - mean.square() + 1e-5).rsqrt()
    made.sin().pow(2).sum().backward()
    expected = nn.functional.batch_norm(X[:16].double(), None, None, training=True)[mine]
    replicator.close()
    return (made - expected).abs().max().item(), (part.grad - whole.grad[mine]).abs().max().item()


@pytest.mark.parametrize("ranks", [2, 4])
def test_cross_replica_batchnorm_is_that_of_the_whole_batch(pool, ranks):
    for apart, gradients_apart in pool.run(ranks, normalised):
        assert apart < 1e-10
        assert gradients_apart < 1e-10


def failing(spec, what):
    def main(replicator):
        layer = nn.Linear(2 + (what == "model" and replicator.group), 2)
        compressor = {"compressor": "dgc()", "state": None}.get(what)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        if what == "state":
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        topology = "ring()" if what == "topology" else None
        optimizer = replicator.wrap_optimizer(optimizer, compressor=compressor, topology=topology)
        layer(torch.full((1, layer.in_features), torch.nan if what == "nan" else 1.0)).sum().backward()
        optimizer.step()

    return Replicator(spec).launch(main)


@pytest.mark.parametrize(
    "spec, ranks, what, error, said",
    [
        ("async", 3, "model", AttachError, "workers differ in the optimiser 'optimizer'"),
        ("async", 2, "compressor", SpecError, "takes a codec or selector"),
        ("async", 2, "topology", SpecError, "in 'async' and 'groups' they do not"),
        ("async", 2, "state", AttachError, "has a state already"),
        ("async", 2, "nan", ArithmeticError, "nothing was pushed"),
        ("groups(size=3)", 3, "", SpecError, "start 4 ranks"),
    ],
)
def test_what_servers_refuse(pool, spec, ranks, what, error, said):
    with pytest.raises(error, match=said):
        pool.run(ranks, failing, spec, what)


def disagreeing():
    def main(replicator):
        x = torch.ones(3)
        replicator.all_sum(x)
        return replicator.all_mean(x) if replicator.replica == 1 else replicator.all_gather(x)

    return Replicator("sync", debug=True).launch(main)


def test_debug_names_the_collective_that_differs(pool):
    with pytest.raises(
        PeerError, match=r"replicas differ at collective 2: all_gather.*0, 2.*all_mean.*replica 1"
    ):
        pool.run(3, disagreeing)


def stopping(who):
    """This rank is stopped, not dead, in its third step: it sends nothing, and no connection closes."""

    def main(replicator):
        def pause(step):
            if step == 3 and dist.get_rank() == who:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.02)

        return trained(replicator, 20, pause)[1].updates

    return Replicator("async(staleness=100)").launch(main)


@pytest.mark.soak
def test_a_worker_that_hangs_keeps_nobody(pool):
    """Its heartbeat tells the server, after 3 seconds, that it need not wait for a goodbye."""
    outcomes = pool.fresh(3, stopping, 2, timeout_s=12)
    assert [outcomes[rank].error for rank in (0, 1)] == [None, None]
    assert outcomes[1].value[0] >= 20
    assert "not done" in str(outcomes[2].error)
