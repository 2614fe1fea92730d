"""The GPU benchmark's own logic: files, deadlines, comparisons, recorded messages, pages."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import bits, compare, inputs, kernel_table, launch, laws, page, step, summary, timing
from benchmarks.gpu.compare import difference, same
from benchmarks.gpu.job import Job
from benchmarks.gpu.parts import CALLS, PARTS, chosen, groups
from tests.unit.shared import for_each, refuses

from laconic import kernels
from laconic.comm.metered import Metered
from laconic.core.layout import Layout, Segments

CPU = torch.device("cpu")
SMALL = Layout.of([("a", (30, 20)), ("b", (20,)), ("c", (7, 11))])


def job(folder: Path, part: str = "bits") -> Job:
    return Job(part, CPU, folder, seconds=60.0)


def test_every_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    one = job(tmp_path)
    for number in range(3):
        one.check(f"check {number}", number != 1, detail=number)
        assert len(json.loads(one.file.read_text())["rows"]) == number + 1
    found = json.loads(one.file.read_text())
    assert found["device"] == "cpu" and "warning" in found and not found["finished"]
    assert launch.failures(found) == ["check 1", "it did not reach its end"]
    one.finish()
    assert launch.failures(json.loads(one.file.read_text())) == ["check 1"]


def test_parts_that_time_something_run_alone() -> None:
    for call in CALLS:
        for group in groups(chosen(None, call)):
            timed = {part.name for part in group} & {"machine", "bandwidth", "step", "training"}
            assert not timed or len(group) == 1
    assert sum(max(p.seconds for p in group) for group in groups(chosen(None, "1"))) <= 420
    refuses(ValueError, r"--only must name parts among machine, .*, got nothing", chosen, "bits,nothing", "1")


def test_a_process_is_ended_at_its_deadline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    popen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    began = time.monotonic()
    launch.wait([launch.Process("sleeper", tmp_path / "none.json", popen, began + 0.3)])
    assert popen.poll() is not None and time.monotonic() - began < 20
    assert "sleeper: ended at its deadline" in capsys.readouterr().out


def test_the_summary_names_failures_and_parts_without_results(tmp_path: Path) -> None:
    rows = [{"name": "good", "ok": True}, {"name": "bad", "ok": False, "error": "ValueError: no"}]
    result = {"rows": rows, "finished": True, "seconds": 3.0}
    text = summary.summary([("bits.1of1", result), ("step.1of1", None)])
    assert "FAILED bits.1of1: bad: error=ValueError: no" in text and "it wrote nothing" in text


def test_tensors_of_one_element_and_any_stride_are_compared() -> None:
    one = torch.tensor([3], dtype=torch.int32).expand(1)
    assert same(one, torch.tensor([3], dtype=torch.int32).as_strided((1,), (0,)))
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert difference(torch.zeros(2), torch.zeros(3)) == "torch.float32 (2,) and torch.float32 (3,)"


@for_each("kind", ["levels", "sevens", "unit", "powers"])
def test_forced_ties_are_ties(kind: str) -> None:
    """16 of the 24 bits that rounding compares are equal for most elements."""
    given = inputs.tied(kind, n=4000)
    for view, key in zip(given.segments.views(given.x), given.keys, strict=True):
        drawn = kernels.dither24(key, view.numel())
        fraction = (view.abs() * 2.0**24).to(torch.int32)
        if kind == "powers":
            fraction = (view.view(torch.int32) & 0x7FFFFF) << 1
        assert (fraction >> 8 == drawn >> 8).double().mean() > 0.7


def test_ties_are_compared() -> None:
    pair = next(pair for pair in kernel_table.PAIRS if pair.ties == "sevens")
    assert bits.pair_on(pair, inputs.tied("sevens", n=4000), CPU) == []


def test_a_kernel_that_writes_outside_its_segments_is_found() -> None:
    pair = kernel_table.PAIRS[0]

    def add(wire: torch.Tensor, segments: Segments, out: torch.Tensor, alpha: float) -> torch.Tensor:
        pair.add(wire, segments, out, alpha)
        if kernels.info()["live"] != "reference":
            out[0] += 1
        return out

    broken = kernel_table.Pair("broken", pair.encode, add)
    given = inputs.make("cubes", "cubes", inputs.odd_starts((40, 513)))
    if kernels.info()["live"] == "reference":
        pytest.skip("without native code both are the reference")
    assert "first at 0" in bits.pair_on(broken, given, CPU)[0]


def test_waits_of_the_host_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with compare.Waits(torch.device("cuda")) as waits:
        for _ in range(3):
            warnings.warn(compare.WAIT, stacklevel=1)
        warnings.warn("this prototype does not detect all synchronizing operations", stacklevel=1)
    assert waits.count == 3 and waits.where[0][1] == 3 and modes == ["warn", "default"]
    with compare.Waits(CPU) as none:
        pass
    assert none.count is None


def test_calls_on_a_gpu_are_timed_by_events_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(calls)

        def elapsed_time(self, other: Event) -> float:
            return float(other.at - self.at)

    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    timed = [lambda i=i: calls.append(i) for i in range(3)]
    assert timing.gpu_us(timed, torch.device("cuda"), rounds=6) == 1000.0
    assert calls == [0, 1, 2] * 3


def test_damages_keep_their_hands_off_the_wire() -> None:
    wire = torch.arange(100, dtype=torch.uint8)
    labels = [label for label, damaged in bits.damages(wire) if damaged.numel()]
    assert "truncated" in labels and same(wire, torch.arange(100, dtype=torch.uint8))


@for_each("spec", ["cgx(bits=4)", "dgc(density=0.1)", "powersgd(rank=2)", "deft(density=0.1)"])
def test_a_rank_does_with_recorded_messages_what_it_did(tmp_path: Path, spec: str) -> None:
    log = step.record(job(tmp_path), spec, 3, SMALL, [SMALL], 3)
    entries = len(log)
    replayed = step.Step(spec, SMALL, [SMALL], Metered(step.Replayed(0, 3, log)), 0, CPU)
    means = []
    for _ in range(3):
        replayed()
        means.append(replayed.flat[0].clone())
    assert entries == len(log) and all(mean.isfinite().all() for mean in means)
    alone = step.Step(spec, SMALL, [SMALL], Metered(step.Replayed(0, 3, log)), 0, CPU)
    for mean in means:
        alone()
        assert same(alone.flat[0], mean)


def test_failures_of_tests_are_told_from_those_of_the_package() -> None:
    mixed = "Expected all tensors to be on the same device, but found cuda:0 and cpu"
    line = {"type": "RuntimeError", "message": mixed, "ours": None, "last": "tests/laws/test_codecs.py:3"}
    assert laws.reason(line)[0]
    assert not laws.reason({**line, "ours": "codecs/sparse.py:99"})[0]


def test_a_run_without_a_gpu_does_not_reach_the_page(tmp_path: Path) -> None:
    job(tmp_path).finish()
    refuses(ValueError, "was made on a cpu", page.collected, [tmp_path])


def test_the_page_shows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"ms": 1.9, "host_ms": 1.0, "sent_mb": 25.0, "goal_ms": 2.0, "waits": 8, "launches": 90}
    kernel = {"us": 50.0, "share": 0.7, "host_us": 90.0, "least": 0.69, "times": 2000.0}
    curve = {"epochs": "2/2", "accuracy": 90.0}
    parts = {
        "bits": [{"name": "a", "ok": True}, {"name": "b", "ok": False}, {"name": "c", "skipped": "no time"}],
        "step": [
            {"name": "exchange cgx(bits=4), 8 ranks", "ok": True, "figures": figures},
            {"name": "ddp plain", "figures": {"ms": 20.0, "host_ms": 20.0}},
        ],
        "bandwidth": [{"name": "accumulate, 161 tensors", "ok": True, "figures": kernel}],
        "training": [
            {"name": "dense()", "ok": True, "figures": curve, "accuracy": [89.0, 91.0], "smaller": 1.0}
        ],
    }
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"about": {"card": "NVIDIA H200", "torch": "2.11"}, "parts": parts}))
    monkeypatch.setattr(page, "RUN", run)
    assert "NVIDIA H200" in page.machine()
    assert "| 1 | 1 | 1 |" in page.checks() and "Failed: `bits`: b." in page.checks()
    assert "| `cgx(bits=4)` | 10.9; 41 | 1.9 | 2.0 |" in page.steps()
    assert "| accumulate | 50 | 90 | 0.70 | 0.69 | 2,000 |" in page.speeds()
    assert "| `dense()` | 90.00 | 1.0 | 89.0 91.0 |" in page.training()
    assert "| `cgx(bits=4)` | 1.9 | 25.0 |" in page.gains()


def test_every_part_is_a_module() -> None:
    folder = Path(page.__file__).parent
    assert all((folder / f"{name}.py").exists() for name in PARTS)
