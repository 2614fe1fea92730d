"""The probe: links and computing measured among threads, and the file that the planner reads."""

from __future__ import annotations

import re
import time

import pytest
import torch
from tests.unit.shared import refuses
from torch import nn
from typer.testing import CliRunner

from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, StateError
from laconic.tools.cli.main import app
from laconic.tools.plan import beside, probe
from laconic.tools.plan.growth import Growth
from laconic.tools.plan.network import Network
from laconic.tools.plan.probe import Pair, Probe, _ready
from laconic.tools.plan.rehearsal import Rehearsed, Traffic
from laconic.tools.plan.step import Work


class Slow(Loopback):
    """Threads whose exchange takes 3 ms, and 100 ns a byte."""

    def exchange(self, sends, recvs):
        time.sleep(0.003 + 1e-7 * max((x.nbytes for x in sends.values()), default=0))
        super().exchange(sends, recvs)


def known() -> Probe:
    growth = Growth((0.0, 1.5, 0.0, 2.0))
    method = Rehearsed("fp16()", {"all_reduce": Traffic(growth, growth * 1e6)}, growth, growth * 0.001)
    work = Work(0.1, 0.2, 0.03, (1200,), 1.5, (0.9,))
    return Probe(2, (Pair(0, 1, 1e-4, 1e8),), Network(1e8, 1e-4), work, (("a", (10, 30)),), (method,))


def test_another_file_is_refused(tmp_path):
    path, nothing = tmp_path / "probe.json", "what a probe measures is not in it"
    path.write_text(known().json())
    assert Probe.load(path) == known(), "what is saved is read again"
    for text, why in (
        ("", "it is empty"),
        ("\x00", "it is no JSON"),
        ("[]", nothing),
        ("{}", nothing),
        ('{"format": 1, "size": 2}', nothing),
        ('{"format": 99}', "it has version 99, and this Laconic reads 1"),
    ):
        path.write_text(text)
        words = f"{path} is not a file of laconic probe: {why}; laconic probe -o FILE writes one"
        refuses(StateError, re.escape(words), Probe.load, path)
        said = CliRunner().invoke(app, ["plan", "--probe", str(path)])
        assert (said.exit_code, said.stderr) == (2, f"laconic: {words}\n")
    said = CliRunner().invoke(app, ["plan", "--probe", str(tmp_path)])
    assert said.exit_code == 2 and said.stderr.count("\n") == 1
    assert said.stderr.startswith(f"laconic: cannot read {tmp_path}: Is a directory; laconic probe -o FILE")
    said = CliRunner().invoke(app, ["plan", "--params", "1M"])
    assert said.exit_code == 2 and "--workers" in said.output and "--probe" in said.output


def test_the_link_of_a_pair_is_measured():
    slow = [Slow(comm.room, comm.rank) for comm in Loopback.world(2)]
    one, other = Loopback.run(2, lambda comm: probe.probe_pairs(slow[comm.rank]))
    assert one == other
    (pair,) = one
    assert (pair.first, pair.second) == (0, 1)
    assert 0.003 <= pair.latency_s < 0.05  # a sleep on a busy machine may last longer
    assert 1e6 < pair.bytes_a_second <= 1.1e7


def test_all_links_of_a_few_ranks_and_a_ring_of_many_are_tried(monkeypatch):
    monkeypatch.setattr(probe, "MAX_BYTES", 1 << 12)
    monkeypatch.setattr(probe, "FEW", 3)
    assert len(Loopback.run(3, probe.probe_pairs)[0]) == 3
    ring = Loopback.run(4, probe.probe_pairs)[2]
    assert [(pair.first, pair.second) for pair in ring] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    monkeypatch.setattr(probe, "MAX_BYTES", 1 << 16)
    found = Loopback.run(3, probe.probe_network)
    assert found[0] == found[1] == found[2], "ranks agree"
    assert found[0].bytes_a_second > 0 < found[0].latency_s


def test_a_link_that_keeps_the_processor_busy_has_a_toll(monkeypatch):
    """Each byte takes 200 ns of the interpreter, which the multiplying thread wants too.

    A machine that is busy with other things says little of a toll: one of three tries has to find it.
    """
    monkeypatch.setattr(beside, "MAX_BYTES", 1 << 18)

    class Laborious(Loopback):
        def all_gather(self, x):
            until = time.perf_counter() + 2e-7 * x.numel()
            while time.perf_counter() < until:
                pass
            return super().all_gather(x)

    def toll():
        ranks = [Laborious(comm.room, comm.rank) for comm in Loopback.world(2)]
        one, other = Loopback.run(2, lambda comm: beside.probe_beside(ranks[comm.rank], Network(1e9, 1e-5)))
        assert one == other
        assert one.busy.latency_s >= one.latency_s == 1e-5
        return one.toll_s_a_byte

    assert any(2e-8 < toll() < 1e-6 for _ in range(3))


def test_a_step_is_measured_and_its_buckets_come_in_order():
    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.05)
            return grad

    first, last = nn.Linear(600, 600, bias=False), nn.Linear(600, 600, bias=False)
    model = nn.Sequential(first, last)
    x = torch.randn(2, 600)

    def loss():
        return last(Pause.apply(first(x))).square().mean()

    comm = Loopback.world(1)[0]
    work = probe.probe_work(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), comm, cores=1.0)
    assert work.backward_s > 0.05
    assert work.buckets == (2**20, 8 * 600 * 600 - 2**20)
    pause = 0.05 / work.backward_s  # the first layer's gradient comes after it
    assert work.ready[0] + pause <= work.ready[1] <= 1.0


def test_laconic_plan_takes_from_a_probe_what_is_not_told(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(known().json())
    said = CliRunner().invoke(app, f"plan --probe {path} --with fp16() --workers 4".split())
    assert said.exit_code == 0, said.output
    assert "A step with no communication takes 330 ms" in said.output
    told = CliRunner().invoke(app, f"plan --probe {path} --with fp16() --backward 20ms --update 1ms".split())
    assert "A step with no communication takes 31 ms" in told.output


def test_a_model_without_gradients_is_told() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(AttachError, match="no trained parameter of this model has had a gradient"):
        _ready([weight], {}, 0.0, 1.0, (12,))
