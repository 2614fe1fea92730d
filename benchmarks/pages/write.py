"""Writes every number of README.md and docs/ from the result files of commands.

    python -m benchmarks.pages.write           fill the blocks between the markers, and write whole pages
    python -m benchmarks.pages.write --demo    first copy the figures and the picture of the last `make demo`
    python -m benchmarks.pages.write --check   change nothing; fail if a page does not match its result files

A block stands between `<!-- name -->` and `<!-- /name -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.accuracy import page as accuracy_page
from benchmarks.accuracy.trials import RUNS
from benchmarks.activations import page as activations_page
from benchmarks.admm import page as admm_page
from benchmarks.auto import page as auto_page
from benchmarks.block_admm import page as block_admm_page
from benchmarks.change_coding import page as change_coding_page
from benchmarks.common.results import read
from benchmarks.common.tables import plus_minus
from benchmarks.entropy import page as entropy_page
from benchmarks.faults import page as faults_page
from benchmarks.federated import page as federated_page
from benchmarks.gpu import buckets as gpu_buckets
from benchmarks.gpu import page as gpu_page
from benchmarks.large_batch import page as large_batches_page
from benchmarks.lowbit import page as low_bit_page
from benchmarks.meta import page as meta_page
from benchmarks.methods import page as methods_page
from benchmarks.outer import page as outer_page
from benchmarks.own_rates import curves, densities
from benchmarks.own_rates import page as own_rates_page
from benchmarks.pages import claims as claims_page
from benchmarks.pages import front, situations
from benchmarks.pages import partitions as partitions_page
from benchmarks.pipeline import page as pipelines_page
from benchmarks.precision import page as precision_page
from benchmarks.replicator import page as replicator_page
from benchmarks.resnet9 import page as resnet9_page
from benchmarks.rigl import page as rigl_page
from benchmarks.scaling import page as scaling_page
from benchmarks.sharded import page as sharded_page
from benchmarks.sparse_steps import page as sparse_steps_page
from benchmarks.steps import page as steps_page
from benchmarks.straggler import page as straggler_page
from benchmarks.time_to_accuracy import page as time_to_accuracy_page
from benchmarks.wan import page as wan_page
from benchmarks.zerofl import page as zerofl_page

ROOT = Path(__file__).parents[2]
BLOCKED = (
    "index",
    "choosing",
    "faults",
    "federated_flower",
    "gpu",
    "kernels",
    "large_batches",
    "partitions",
    "pipelines",
    "quick_start",
    "replicator",
    "sharded",
)  # pages with blocks in them
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in BLOCKED))


def accuracy() -> str:
    """One row per experiment and method."""
    lines = [
        "| task | method | test accuracy, % | test loss | smaller than dense |",
        "|---|---|---|---|---|",
    ]
    for found in RUNS.rows("densities"):
        task = f"{found['config']['task']}, {found['config']['model']}, {found['config']['steps']} steps"
        for row in found["rows"]:
            lines.append(
                f"| {task} | `{row['spec']}` | {plus_minus(row['accuracy'], 100)}"
                f" | {plus_minus(row['test_loss'], digits=4)} | {row['smaller']:.0f} times |"
            )
    return "\n".join(lines)


def bars(name: str) -> str:
    """The figures of a result file that have a bar."""
    lines = ["| what | measured | at most |", "|---|---|---|"]
    for row in read(name)["figures"]:
        if row["bar"] is not None and row["unit"] != "M indices/s":
            at_most = f"{row['bar']:g}" if row["bar"] > 0 else f"at least {-row['bar']:g}"
            lines.append(f"| {row['what']} | {row['figure']:.2f} {row['unit']} | {at_most} |")
    return "\n".join(lines)


def triton_kernels() -> str:
    """Registers of each Triton kernel on three targets, and static instructions per element on sm_90."""
    found = json.loads((ROOT / "tests" / "triton" / "kernels.json").read_text())
    lines = [
        f"| compiled by Triton {found['triton']} | registers sm_80; sm_90; gfx942 | instructions |",
        "|---|---|---|",
    ]
    for row in found["rows"]:
        registers = "; ".join(str(row[target]["registers"]) for target in ("sm_80", "sm_90", "gfx942"))
        lines.append(f"| {row['kernel']} | {registers} | {row['sm_90']['per_element']:.0f} |")
    return "\n".join(lines)


def wire() -> str:
    """How far the model of headers is from the interface's counters."""
    rows = read("wire")["rows"]
    large = [row for row in rows if row["payload_sent"] + row["payload_received"] >= 1e6]
    worst = max(abs(row["error"]) for row in large)
    return (
        f"In {len(large)} measurements of 1 MB and more (2 to 4 ranks in network namespaces), the model is"
        f" within {100 * worst:.1f} % of the interface's own counters."
    )


def flower() -> str:
    """What two lines save the example's app."""
    found = read("flower")
    rows = [
        ("plain FedAvg", found["plain_nbytes"], found["plain_accuracy"]),
        ("with the two lines", found["nbytes"], found["accuracy"]),
    ]
    lines = [
        f"| {found['nodes']} clients, {found['rounds']} rounds, {found['spec']} | MB | accuracy | smaller |",
        "|---|---|---|---|",
    ]
    for what, nbytes, accuracy in rows:
        smaller = found["plain_nbytes"] / nbytes
        lines.append(f"| {what} | {nbytes / 1e6:.2f} | {100 * accuracy:.1f} % | {smaller:.0f} times |")
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "presets": front.presets,
    "names": front.registered,
    "demo": front.demo,
    "accuracy": accuracy,
    "kernels": lambda: bars("kernels"),
    "quantisers": lambda: bars("quantisers"),
    "wire": wire,
    "triton_kernels": triton_kernels,
    "steps": steps_page.short,
    "flower": flower,
    "choices": situations.choices,
    "partitions": partitions_page.block,
    "large_batches": large_batches_page.large,
    "batch_augmentation": large_batches_page.copies,
    "change_coding": change_coding_page.block,
    "replicator_script": replicator_page.script,
    "replicator": replicator_page.block,
    "faults": faults_page.block,
    "sharded": sharded_page.block,
    **gpu_page.BLOCKS,
    **gpu_buckets.BLOCKS,
}

DOCS = ROOT / "docs"
WHOLE: dict[Path, Callable[[], str]] = {
    DOCS / "accuracy.md": accuracy_page.page,
    DOCS / "activations.md": activations_page.page,
    DOCS / "admm.md": admm_page.page,
    DOCS / "admm.svg": admm_page.picture,
    DOCS / "auto.md": auto_page.page,
    DOCS / "block_admm.md": block_admm_page.page,
    DOCS / "claims.md": claims_page.page,
    DOCS / "entropy.md": entropy_page.page,
    DOCS / "federated_accuracy.md": federated_page.page,
    DOCS / "low_bit.md": low_bit_page.page,
    DOCS / "meta_learning.md": meta_page.page,
    DOCS / "meta_learning.svg": meta_page.picture,
    DOCS / "methods.md": methods_page.page,
    DOCS / "outer.md": outer_page.page,
    DOCS / "own_rates.md": own_rates_page.page,
    DOCS / "pipelines.svg": pipelines_page.picture,
    DOCS / "pipelines_measured.md": pipelines_page.page,
    DOCS / "precision.md": precision_page.page,
    DOCS / "rigl.md": rigl_page.page,
    DOCS / "scaling.md": scaling_page.page,
    DOCS / "scaling.svg": scaling_page.picture,
    DOCS / "sparse_steps.md": sparse_steps_page.page,
    DOCS / sparse_steps_page.PICTURE: sparse_steps_page.picture,
    DOCS / "steps.md": steps_page.page,
    DOCS / "straggler.md": straggler_page.page,
    DOCS / "time_to_accuracy.md": time_to_accuracy_page.page,
    DOCS / "zerofl.md": zerofl_page.page,
    **block_admm_page.pictures(DOCS),
    **densities.pictures(DOCS),
    **curves.pictures(DOCS),
    **federated_page.pictures(DOCS),
    **partitions_page.pictures(DOCS),
    **resnet9_page.pages(DOCS),
    **time_to_accuracy_page.pictures(DOCS),
    **wan_page.pages(DOCS),
}


def stale() -> dict[Path, str]:
    """The pages that do not match their result files, with their correct text."""
    due = {page: filled(page.read_text()) for page in PAGES} | {page: make() for page, make in WHOLE.items()}
    return {page: text for page, text in due.items() if not page.exists() or page.read_text() != text}


def filled(text: str) -> str:
    """The text of a page with every block rewritten."""

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- {name} -->\n{BLOCKS[name]()}\n<!-- /{name} -->"

    return re.sub(r"<!-- (?P<name>\w+) -->\n.*?<!-- /(?P=name) -->", block, text, flags=re.DOTALL)


def take_demo() -> None:
    """Copy the figures and the picture of the last `make demo`."""
    run = ROOT / "runs" / "demo"
    kept = json.loads((run / "summary.json").read_text())
    if not kept["complete"]:
        raise SystemExit("the last demo did not finish: run `make demo` again")
    kept["config"].pop("started", None)
    (ROOT / "benchmarks" / "demo" / "results.json").write_text(json.dumps(kept, indent=1) + "\n")
    shutil.copy(run / "loss.svg", ROOT / "docs" / "demo.svg")


def main() -> None:
    """Write the pages, or check them."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--demo", action="store_true")
    arguments.add_argument("--check", action="store_true")
    options = arguments.parse_args()
    if options.demo:
        take_demo()
    found = stale()
    if options.check and found:
        sys.exit(f"out of date: {', '.join(page.name for page in found)}; run `make docs`")
    for page, text in found.items():
        page.write_text(text)


if __name__ == "__main__":
    main()
