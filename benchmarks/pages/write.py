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

from benchmarks.admm import page as admm_page
from benchmarks.auto import page as auto_page
from benchmarks.block_admm import page as block_admm_page
from benchmarks.federated import page as federated_page
from benchmarks.gpu import page as gpu_page
from benchmarks.large_batch import page as large_batches_page
from benchmarks.lowbit import page as low_bit_page
from benchmarks.meta import page as meta_page
from benchmarks.outer import page as outer_page
from benchmarks.own_rates import page as own_rates_page
from benchmarks.pages import accuracy as accuracy_page
from benchmarks.pages import activations as activations_page
from benchmarks.pages import change_coding as change_coding_page
from benchmarks.pages import entropy as entropy_page
from benchmarks.pages import front, situations
from benchmarks.pages import methods as methods_page
from benchmarks.pages import partitions as partitions_page
from benchmarks.pages import pipelines as pipelines_page
from benchmarks.pages import replicator as replicator_page
from benchmarks.pages import scaling as scaling_page
from benchmarks.pages import steps as steps_page
from benchmarks.pages import straggler as straggler_page
from benchmarks.pages import triton_kernels as triton_kernels_page
from benchmarks.pages.results import RESULTS, plus_minus, read
from benchmarks.precision import page as precision_page
from benchmarks.rigl import page as rigl_page
from benchmarks.sharded import page as sharded_page
from benchmarks.sparse_steps import page as sparse_steps_page
from benchmarks.time_to_accuracy import page as time_to_accuracy_page
from benchmarks.trials import RUNS
from benchmarks.zerofl import page as zerofl_page

ROOT = Path(__file__).parents[2]
BLOCKED = (
    "index",
    "choosing",
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
    "triton_kernels": triton_kernels_page.block,
    "steps": steps_page.short,
    "flower": flower,
    "choices": situations.choices,
    "partitions": partitions_page.block,
    "large_batches": large_batches_page.large,
    "batch_augmentation": large_batches_page.copies,
    "change_coding": change_coding_page.block,
    "replicator_script": replicator_page.script,
    "replicator": replicator_page.block,
    "sharded": sharded_page.block,
    **gpu_page.BLOCKS,
}

WHOLE: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "methods.md": methods_page.page,
    ROOT / "docs" / "accuracy.md": accuracy_page.page,
    ROOT / "docs" / "admm.md": admm_page.page,
    ROOT / "docs" / "block_admm.md": block_admm_page.page,
    ROOT / "docs" / "entropy.md": entropy_page.page,
    ROOT / "docs" / "low_bit.md": low_bit_page.page,
    ROOT / "docs" / "scaling.md": scaling_page.page,
    ROOT / "docs" / "scaling.svg": scaling_page.picture,
    **partitions_page.pictures(ROOT / "docs"),
    **block_admm_page.pictures(ROOT / "docs"),
}
if admm_page.grouped():
    WHOLE[ROOT / "docs" / "admm.svg"] = admm_page.picture
if activations_page.RESULTS.exists():
    WHOLE[ROOT / "docs" / "activations.md"] = activations_page.page
if auto_page.RESULTS.exists():
    WHOLE[ROOT / "docs" / "auto.md"] = auto_page.page
if meta_page.kept()["sinusoids"]:
    WHOLE[ROOT / "docs" / "meta_learning.md"] = meta_page.page
    WHOLE[ROOT / "docs" / "meta_learning.svg"] = meta_page.picture
if outer_page.done(outer_page.DENSE):
    WHOLE[ROOT / "docs" / "outer.md"] = outer_page.page
if own_rates_page.done():
    WHOLE[ROOT / "docs" / "own_rates.md"] = own_rates_page.page
if precision_page.results():
    WHOLE[ROOT / "docs" / "precision.md"] = precision_page.page
if rigl_page.runs():
    WHOLE[ROOT / "docs" / "rigl.md"] = rigl_page.page
if sparse_steps_page.done():
    WHOLE[ROOT / "docs" / "sparse_steps.md"] = sparse_steps_page.page
    WHOLE[ROOT / "docs" / sparse_steps_page.PICTURE] = sparse_steps_page.picture
if straggler_page.RESULTS.exists():
    WHOLE[ROOT / "docs" / "straggler.md"] = straggler_page.page
if federated_page.RUNS.rows():
    WHOLE[ROOT / "docs" / "federated_accuracy.md"] = federated_page.page
    WHOLE.update(federated_page.pictures(ROOT / "docs"))
if pipelines_page.rows("speed"):
    WHOLE[ROOT / "docs" / "pipelines_measured.md"] = pipelines_page.page
if pipelines_page.rows("loss"):
    WHOLE[ROOT / "docs" / "pipelines.svg"] = pipelines_page.picture
if time_to_accuracy_page.done():
    WHOLE[ROOT / "docs" / "time_to_accuracy.md"] = time_to_accuracy_page.page
    WHOLE.update(time_to_accuracy_page.pictures(ROOT / "docs"))
if zerofl_page.RUNS.rows():
    WHOLE[ROOT / "docs" / "zerofl.md"] = zerofl_page.page
if steps_page.RESULTS.exists():
    WHOLE[ROOT / "docs" / "steps.md"] = steps_page.page


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
    (RESULTS / "demo.json").write_text(json.dumps(kept, indent=1) + "\n")
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
