"""Part bits: each kernel on the GPU against its reference on the CPU, bit for bit, and hostile wires.

Each comparison runs twice on the GPU, with other bytes in the memory that outputs will lie in. Buffers are
compared whole, so a write outside the segments is found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu import inputs
from benchmarks.gpu.compare import POISON, difference, outcome, poison, relative, same
from benchmarks.gpu.inputs import Input
from benchmarks.gpu.job import Job, brief
from benchmarks.gpu.kernel_table import FUNCTIONS, PAIRS, Function, Pair, Results, other
from laconic import kernels
from laconic.core.deferred import deferred
from laconic.core.errors import LaconicError
from laconic.core.layout import Segments

WITHIN = 1e-5  # |a - b| / |b| of decoded values where scales are sums of float64
ALPHA = 0.37
SANITIZER = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
Kernel = Pair | Function


def run(job: Job) -> None:
    """Compare all kernels of this shard, short inputs first."""
    short, long = inputs.short(), inputs.long(small=not job.cuda)
    every: list[Kernel] = job.mine([*PAIRS, *FUNCTIONS])
    if job.shard == job.shards - 1:
        sanitize(job)
    for phase, work in _phases(every, short, long):
        if job.left() < (30 if "tensor" in phase.split(": ")[-1] else 8):
            job.skip(phase, "no time")
            continue
        try:
            failures, count = work(job.device)
            job.check(phase, not failures, comparisons=count, failures=failures[:5])
        except Exception as error:
            job.fail(phase, error)


Failures = tuple[list[str], int]


def _phases(
    every: list[Kernel], short: list[Input], long: list[Input]
) -> Iterator[tuple[str, Callable[[torch.device], Failures]]]:
    """Yield a name and a function for each kernel and kind of check."""

    def on(kernel: Kernel, given: list[Input]) -> Callable[[torch.device], Failures]:
        check = pair_on if isinstance(kernel, Pair) else function_on
        return lambda device: _all(lambda each: check(kernel, each, device), given)  # type: ignore[arg-type]

    for kernel in every:
        yield f"{kernel.name}: short inputs", on(kernel, short)
    for kernel in every:
        if isinstance(kernel, Pair):
            if kernel.ties is not None:
                yield f"{kernel.name}: forced ties", on(kernel, [inputs.tied(kernel.ties)])
            yield f"{kernel.name}: hostile wires", lambda device, pair=kernel: hostile(pair, device)  # type: ignore[misc]
        yield (
            f"{kernel.name}: input that is not finite",
            lambda device, one=kernel: not_finite(one, device),  # type: ignore[misc]
        )
    for given in long:
        for kernel in every:
            yield f"{kernel.name}: {given.label}", on(kernel, [given])


def _all(check: Callable[[Input], list[str]], given: list[Input]) -> Failures:
    """Return the failures on all of these inputs, and how many inputs there were."""
    return [text for each in given for text in check(each)], len(given)


def pair_on(pair: Pair, given: Input, device: torch.device) -> list[str]:
    """Return how an encoder and its decoder on the device differ from the reference on the CPU."""
    failures, out = [], other(given.x)
    with kernels.using("reference"):
        wire = pair.encode(given.x, given.segments, given.keys)
        decoded = pair.add(wire, given.segments, out.clone(), ALPHA)
    x, there = given.x.to(device), wire.to(device)
    for byte in POISON:
        poison(device, [wire.numel()] * 2, byte)
        found = pair.encode(x, given.segments, given.keys)
        if not same(x, given.x):
            failures.append(f"{given.label}: encoding changes its input")
        if pair.exact and not same(found, wire):
            failures.append(f"{given.label}: wire: {difference(found, wire)}")
        if not pair.exact and (far := _apart(pair, given, found, wire)):
            failures.append(f"{given.label}: {far}")
        added = pair.add(there, given.segments, out.to(device, copy=True), ALPHA)
        if not same(added, decoded):
            failures.append(f"{given.label}: decoded: {difference(added, decoded)}")
    return failures


def _apart(pair: Pair, given: Input, found: Tensor, wire: Tensor) -> str:
    """Return the distance of two wires whose scales may differ in the last place."""
    if found.numel() != wire.numel():
        return f"wire of {found.numel()} bytes, the reference's has {wire.numel()}"
    with kernels.using("reference"):
        ours, theirs = (
            pair.add(each.cpu(), given.segments, torch.zeros_like(given.x), 1.0) for each in (found, wire)
        )
    far = relative(ours, theirs)
    return f"decoded values are {far:.1e} apart, at most {WITHIN:g}" if not far <= WITHIN else ""


def function_on(function: Function, given: Input, device: torch.device) -> list[str]:
    """Return how a function's results on the device differ from the reference's on the CPU."""
    failures = []
    with kernels.using("reference"):
        expected = function.run(given.x.clone(), given)
    for byte in POISON:
        poison(device, [each.nbytes for each in expected], byte)
        results = function.run(given.x.to(device, copy=True), given)
        failures += [f"{given.label}: {text}" for text in _unequal(function, results, expected)]
    return failures


def _unequal(function: Function, results: Results, expected: Results) -> list[str]:
    found = []
    for number, (one, true) in enumerate(zip(results, expected, strict=True)):
        near = not function.exact and true.is_floating_point() and relative(one, true) <= WITHIN
        if not near and not same(one, true):
            found.append(f"result {number}: {difference(one, true)}")
    return found


def not_finite(kernel: Kernel, device: torch.device) -> Failures:
    """Check that NaN and Inf anywhere give the reference's error or results."""
    failures, sizes, count = [], (513, 40, 8192, 4097), 0
    segments = inputs.odd_starts(sizes)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for number, size in enumerate(sizes):
            given = inputs.make(f"{bad} in tensor {number}", "normal", segments)
            given.x[segments.starts[number] + size * 2 // 3] = bad
            count += 1
            text = _same_outcome(kernel, given, device)
            failures += [f"{given.label}: {text}"] if text else []
    return failures, count


def _same_outcome(kernel: Kernel, given: Input, device: torch.device) -> str:
    """Return how an error or result differs from the reference's."""

    def call(x: Tensor) -> Results:
        if isinstance(kernel, Pair):
            return [kernel.encode(x, given.segments, given.keys)]
        return kernel.run(x, given)

    with kernels.using("reference"):
        expected, refused = outcome(lambda: call(given.x.clone()))
    results, error = outcome(lambda: call(given.x.to(device, copy=True)))
    if type(refused) is not type(error):
        return f"{_shown(error)}, the reference: {_shown(refused)}"
    if refused is not None or (isinstance(kernel, Function) and not kernel.exact):
        return ""
    return "; ".join(
        difference(one, true) for one, true in zip(results, expected, strict=True) if not _alike(one, true)
    )


def _alike(one: Tensor, true: Tensor) -> bool:
    """Return whether two tensors are equal, where a NaN equals every NaN."""
    if not true.is_floating_point():
        return same(one, true)
    return torch.equal(one.cpu().nan_to_num(nan=12345.0), true.nan_to_num(nan=12345.0))


def _shown(error: BaseException | None) -> str:
    return "no error" if error is None else brief(error)


def hostile(pair: Pair, device: torch.device) -> Failures:
    """Check damaged wires: the device refuses the same wires as the reference, and then writes nothing."""
    failures, count = [], 0
    sizes = (40, 4097, 513, 1030)
    segments = inputs.odd_starts(sizes)
    given = inputs.make("normal", "normal", segments)
    with kernels.using("reference"):
        wire = pair.encode(given.x, segments, given.keys)
    for label, damaged in damages(wire):
        before = other(given.x)
        with kernels.using("reference"):
            expected, refused = outcome(lambda: pair.add(damaged, segments, before.clone(), ALPHA))  # noqa: B023
        for late in (False, True):
            count += 1
            out = before.to(device, copy=True)
            _, error = outcome(lambda: _added(pair, damaged.to(device), segments, out, late))  # noqa: B023
            true = expected if refused is None else before
            if type(error) is not type(refused):
                failures.append(f"{label}, deferred {late}: {_shown(error)}, reference: {_shown(refused)}")
            elif not _alike(out, true):
                failures.append(f"{label}, deferred {late}: out: {difference(out, true)}")
            elif error is not None and not isinstance(error, LaconicError):
                failures.append(f"{label}: {_shown(error)}")
    return failures, count


def _added(pair: Pair, wire: Tensor, segments: Segments, out: Tensor, late: bool) -> None:
    """Decode a wire, with flags read at once, or at the end of a `deferred` block."""
    if late:
        with deferred():
            pair.add(wire, segments, out, ALPHA)
    else:
        pair.add(wire, segments, out, ALPHA)


def damages(wire: Tensor, random: int = 40) -> Iterator[tuple[str, Tensor]]:
    """Yield damaged copies of a wire: other lengths, words that are no scale, random bytes."""
    yield "truncated", wire[:-1].clone()
    yield "too long", torch.cat([wire, wire[:1]])
    yield "empty", wire[:0].clone()
    words = {"NaN": 0x7FC00000, "Inf": 0x7F800000, "-1": 0xBF800000, "-0": 0x80000000, "ones": 0xFFFFFFFF}
    for place in (0, 4, wire.numel() - 4):
        for label, word in words.items():
            damaged = wire.clone()
            damaged[place : place + 4] = torch.tensor(list(word.to_bytes(4, "little")), dtype=torch.uint8)
            yield f"{label} at byte {place}", damaged
    rng = torch.Generator().manual_seed(11)
    for number in range(random):
        damaged = wire.clone()
        at = int(torch.randint(0, wire.numel(), (1,), generator=rng))
        damaged[at] = 0xFF if number % 2 else int(torch.randint(0, 256, (1,), generator=rng))
        yield f"byte {at}", damaged


def sanitize(job: Job) -> None:
    """Run some kernels under compute-sanitizer, which finds reads and writes outside of buffers."""
    tool = next((path for name in SANITIZER if (path := shutil.which(name))), None)
    if tool is None or not job.cuda:
        job.skip("compute-sanitizer", "not installed" if job.cuda else "no CUDA device")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=min(45, job.left() / 2), env={**os.environ}
        )
        job.check("compute-sanitizer", done.returncode == 0, tail=(done.stdout + done.stderr)[-600:])
    except subprocess.TimeoutExpired:
        job.skip("compute-sanitizer", "no time")


def main() -> None:
    """Run each kernel once on the GPU, for the sanitizer."""
    device = torch.device("cuda", 0)
    given = inputs.make("cubes", "cubes", inputs.odd_starts((40, 4097, 513, 12289)))
    for pair in PAIRS:
        wire = pair.encode(given.x.to(device), given.segments, given.keys)
        pair.add(wire, given.segments, other(given.x).to(device), ALPHA)
    for function in FUNCTIONS:
        function.run(given.x.to(device, copy=True), given)
    torch.cuda.synchronize()
    print(f"{len(PAIRS) + len(FUNCTIONS)} kernels ran in {Path(__file__).name}")


if __name__ == "__main__":
    main()
