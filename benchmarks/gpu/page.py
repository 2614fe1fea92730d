"""The blocks of docs/gpu.md, from the results of a run, or of measurements before the kernels existed.

    python -m benchmarks.gpu.page DIR [DIR]     copy the results of one or two calls to results/run.json

`make docs` then writes the blocks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.tables import table

RESULTS = Path(__file__).parent / "results"
BEFORE, RUN = RESULTS / "before.json", RESULTS / "run.json"
Row = dict[str, Any]

WHAT = {
    "codecs": "each registered codec against the reference: wires, decoded values, messages of 8 ranks",
    "bits": "each kernel against its reference: forced ties, damaged wires, memory outside its segments",
    "api": "NCCL with one rank: groups, DDP, FSDP2, AMP, `torch.compile`, CUDA graphs",
    "ranks": "two processes on one card over gloo: equal replicas, late streams, the CPU's bits; strategies",
    "bandwidth": "kernels at least at their share of a copy",
    "step": "exchanges within their goals, and budgets of launches and host waits",
    "laws": "the project's laws and unit tests with CUDA inputs",
    "training": "trainings that reached their last epoch",
}


SPEED = ("bandwidth", "step")  # parts whose checks are about speed


@dataclass(frozen=True)
class Link:
    """A link of a rank to the others, with the bytes a second that one rank sends."""

    name: str
    gb_per_s: float


LINKS = (
    Link("PCIe 4.0, 12 GB/s", 12.0),
    Link("25 GbE", 25 / 8),
    Link("10 GbE", 10 / 8),
    Link("1 GbE", 1 / 8),
)
BACKWARD = 2 / 3  # of ResNet-50, batch 64


def step_ms(compute_ms: float, coding_ms: float, sent_mb: float, gb_per_s: float) -> float:
    """Return the milliseconds of a step whose exchange runs during backward.

    forward + max(backward, exchange), where exchange = coding + sent / link. Coding is the time to
    encode and decode; a dense exchange has none.

    >>> step_ms(24.0, 2.0, 25.0, 1.25), step_ms(24.0, 2.0, 1.25, 1.25)
    (30.0, 24.0)
    """
    exchange = coding_ms + sent_mb / gb_per_s
    return (1 - BACKWARD) * compute_ms + max(BACKWARD * compute_ms, exchange)


def machine() -> str:
    """The card and the versions of the results on the page."""
    run, old = _run(), json.loads(BEFORE.read_text())
    if run is None:
        return (
            f"**Measured before the kernels existed**: {old['card']}, torch {old['torch']}, Triton"
            f" {old['triton']}, NCCL {old['nccl']}, Python package without native code. A copy of 1 GB reads"
            f" and writes {old['copy_tb_per_s']} TB/s. Source: {old['source']}."
        )
    about = run["about"]
    copy = next((row for row in run["parts"].get("machine", []) if row["name"] == "copy"), None)
    rate = f" A copy of 1 GB reads and writes {copy['gb_per_s'] / 1e3:.2f} TB/s." if copy else ""
    return (
        f"{about['card']}, torch {about['torch']}, Triton {about.get('triton', 'missing')}, NCCL"
        f" {about.get('nccl', 'missing')}, Python package without native code.{rate}"
    )


def checks() -> str:
    """Numbers of checks that passed, failed and were left out, by part."""
    run, old = _run(), json.loads(BEFORE.read_text())
    if run is None:
        rows = [
            [each["what"], f"{each['right']} of {each['count']}", each["detail"]] for each in old["correct"]
        ]
        return "\n".join(table(("what", "right", "the rest"), rows))
    rows = []
    for part, what in WHAT.items():
        found = run["parts"].get(part)
        if found is None:
            rows.append([f"`{part}`: {what}", "not run", "", ""])
            continue
        passed, failed = (sum(row.get("ok") is each for row in found) for each in (True, False))
        left_out = sum("skipped" in row for row in found)
        rows.append([f"`{part}`: {what}", str(passed), str(failed), str(left_out)])
    lines = table(("part", "passed", "failed", "left out"), rows)
    return "\n".join([*lines, *_failed(run["parts"]), *_left_out(run["parts"])])


def _failed(parts: dict[str, list[Row]]) -> list[str]:
    """Name the failures of correctness; those of speed stand in their own tables."""
    names, slow = [], 0
    for part, rows in parts.items():
        for row in rows:
            if row.get("ok") is False and part in SPEED:
                slow += 1
            elif row.get("ok") is False:
                names.append(f"`{part}`: {row['name']}")
    lines = ["", "Failed: " + "; ".join(names) + "."] if names else []
    return [*lines, "", f"{slow} goals of speed, launches and waits were missed: see the tables below."]


def _left_out(parts: dict[str, list[Row]]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for rows in parts.values():
        for row in rows:
            if "skipped" in row:
                reasons.setdefault(row["skipped"].split(":")[0], []).append(row["name"])
    if not reasons:
        return []
    told = [
        f"{reason}: {', '.join(names[:6])}{' and more' * (len(names) > 6)}"
        for reason, names in reasons.items()
    ]
    return ["", "Left out: " + "; ".join(told) + "."]


def steps() -> str:
    """Exchanges of ResNet-50's gradient, before and after."""
    old, run = json.loads(BEFORE.read_text())["exchange"], _run()
    before = {row["spec"]: row for row in old["rows"]}
    heads = ["method", "before: ms among 2; 8", "GPU busy, ms", "launches", "host waits"]
    if run is None:
        rows = [
            [f"`{spec}`", _pair(row["ms"].values()), *(_pair(row[key]) for key in FIGURES[2:])]
            for spec, row in before.items()
        ]
        ddp = json.loads(BEFORE.read_text())["ddp"]
        rows_ddp = [[f"`{name}`", f"{ms}"] for name, ms in ddp["ms"].items()]
        lines = [*table(heads, rows), "", f"*Before*: {old['about']}.", "", f"{ddp['about']}:", ""]
        return "\n".join([*lines, *table(("method", "ms a step"), rows_ddp)])
    found = {row["name"]: row["figures"] for row in run["parts"].get("step", []) if "figures" in row}
    specs = [name.split("exchange ")[1].split(", 8 ranks")[0] for name in found if name.endswith(", 8 ranks")]
    sizes = [size for size in ("2", "8") if any(name.endswith(f", {size} ranks") for name in found)]
    rows = []
    for spec in specs:
        two, eight = (found.get(f"exchange {spec}, {size} ranks", {}) for size in (2, 8))
        cells = [_pair([figures[key] for figures in (two, eight) if key in figures]) for key in FIGURES]
        rows.append([f"`{spec}`", _pair(before[spec]["ms"].values()) if spec in before else "", *cells])
    heads = [
        "method",
        "before: ms among 2; 8",
        f"ms among {'; '.join(sizes)}",
        "goal",
        "GPU busy, ms",
        "launches",
        "host waits",
    ]
    ddp = [[f"`{name[4:]}`", f"{each['ms']:.1f}"] for name, each in found.items() if name.startswith("ddp ")]
    lines = [*table(heads, rows), "", f"*Before*: {old['about']}.", ""]
    return "\n".join([*lines, *table(("a step of DDP, one rank", "ms"), ddp)])


FIGURES = ("ms", "goal_ms", "busy_ms", "launches", "waits")


def _pair(values: Any) -> str:
    """Return one or two figures in a cell.

    >>> _pair([1.5, 20.25]), _pair([3, 4]), _pair([])
    ('1.5; 20', '3; 4', '')
    """
    return "; ".join(_figure(value) for value in values)


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if value < 20 else f"{value:,.0f}"


def speeds() -> str:
    """Kernels: microseconds, and shares of a copy of as many bytes."""
    old, run = json.loads(BEFORE.read_text())["drafts"], _run()
    if run is None:
        rows = [
            [
                each["kernel"],
                str(each["us"]),
                "; ".join(f"{share:.2f}" for share in each["share"] or []),
                f"{each['times']:,}" if each["times"] else "",
            ]
            for each in old
        ]
        heads = (
            "draft of a kernel",
            "us, 25.6 M values",
            "share of a copy: 161 tensors; one",
            "times plain torch",
        )
        return "\n".join(table(heads, rows))
    found = {row["name"]: row for row in run["parts"].get("bandwidth", []) if "figures" in row}
    rows = []
    for name, row in found.items():
        if not name.endswith(", 161 tensors"):
            continue
        kernel = name.removesuffix(", 161 tensors")
        one = found.get(f"{kernel}, one tensor")
        both = [each for each in (row, one) if each is not None]
        shares = "; ".join(f"{each['figures']['share']:.2f}" for each in both)
        least = "; ".join(f"{each['figures']['least']:.2f}" for each in both if "least" in each["figures"])
        times = row["figures"].get("times")
        host = f"{row['figures']['host_us']:.0f}"
        cells = [kernel, f"{row['figures']['us']:.0f}", host, shares, least, f"{times:,.0f}" if times else ""]
        rows.append(cells)
    heads = ("kernel", "us on the GPU", "us for the host", "share of a copy: 161 tensors; one", "least")
    return "\n".join(table((*heads, "times the reference"), rows))


def training() -> str:
    """Test accuracy of ResNet-9: of our own run if dense training ended in it, else of an independent one."""
    old, run = json.loads(BEFORE.read_text())["training"], _run()
    found = [row for row in run["parts"].get("training", []) if "figures" in row] if run else []
    dense = [row for row in found if row["name"] == "dense()"]
    if not dense or not _ended(dense[0]):
        rows = [
            [name, f"{value:.2f}", f"{old['smaller'][name]:.1f}"] for name, value in old["accuracy"].items()
        ]
        lines = table(("method", "test accuracy, %", "times fewer bytes"), rows)
        lines += ["", f"{old['about'][0].upper()}{old['about'][1:]}."]
        if found:
            epochs = ", ".join(f"`{row['name']}` {row['figures']['epochs']}" for row in found)
            lines += [
                "",
                f"Our own run was cut short, and its accuracies mean nothing yet. Epochs: {epochs}.",
            ]
        return "\n".join(lines)
    heads = ("method", "accuracy, %", "times fewer bytes", "after each epoch")
    rows = []
    for row in filter(_ended, found):
        marks = " ".join(f"{value:.1f}" for value in row["accuracy"])
        rows.append([f"`{row['name']}`", f"{row['figures']['accuracy']:.2f}", _smaller(row), marks])
    return "\n".join(table(heads, rows))


def _ended(row: Row) -> bool:
    done, planned = row["figures"]["epochs"].split("/")
    return bool(done == planned)


def _smaller(row: Row) -> str:
    return f"{row['smaller']:.1f}" if "smaller" in row else ""


def gains() -> str:
    """Speed-up of a step over a dense one, by link."""
    old, run = json.loads(BEFORE.read_text()), _run()
    sent = dict(old["sent_mb"])
    coding = {row["spec"]: float(row["ms"]["8"]) for row in old["exchange"]["rows"] if row["spec"] in sent}
    compute = float(old["ddp"]["ms"]["plain"])
    if run is not None:
        for row in run["parts"].get("step", []):
            if row["name"].endswith(", 8 ranks") and row["name"].startswith("exchange") and "figures" in row:
                spec = row["name"].split("exchange ")[1].removesuffix(", 8 ranks")
                coding[spec], sent[spec] = row["figures"]["ms"], row["figures"]["sent_mb"]
            elif row["name"] == "ddp plain" and "figures" in row:
                compute = row["figures"]["ms"]
    dense = [step_ms(compute, 0.0, sent["dense()"], link.gb_per_s) for link in LINKS]
    rows = [["`dense()`, ms a step", "", f"{sent['dense()']:.1f}", *(f"{ms:.0f}" for ms in dense)]]
    for spec, ms in sorted(coding.items(), key=lambda item: item[1]):
        gain = [
            plain / step_ms(compute, ms, sent[spec], link.gb_per_s)
            for link, plain in zip(LINKS, dense, strict=True)
        ]
        rows.append([f"`{spec}`", f"{ms:.3g}", f"{sent[spec]:.1f}", *(f"{each:.2f}" for each in gain)])
    when = "" if run else " before the kernels existed"
    heads = ("method", f"coding, ms{when}", "MB sent", *(link.name for link in LINKS))
    lines = table(heads, rows)
    return "\n".join(lines if run else [*lines, "", f"*Coding*: {old['exchange']['about']}."])


def _run() -> Row | None:
    """Return the results of the stored run, if there is one."""
    found: Row | None = json.loads(RUN.read_text()) if RUN.exists() else None
    return found


def collected(folders: Sequence[Path]) -> Row:
    """Return the rows of all files of a run by part. Raises `ValueError` for one that ran without a GPU."""
    parts: dict[str, list[Row]] = {}
    about: Row = {}
    for folder in folders:
        for file in sorted(folder.glob("*.*of*.json")):
            found = json.loads(file.read_text())
            if found["device"] != "cuda":
                raise ValueError(f"{file} was made on a {found['device']}: the page is about GPUs")
            about = {key: found[key] for key in ("card", "torch", "triton", "nccl") if key in found}
            rows = parts.setdefault(found["part"], [])
            rows += [_short(row) for row in found["rows"]]
            if not found["finished"]:
                rows.append({"name": f"the end of {file.stem}", "ok": False})
    return {"about": about, "parts": parts}


def _short(row: Row) -> Row:
    """Return a row without the long lists that are of use only where something failed."""
    if row.get("ok") is False:
        return row
    return {
        key: value for key, value in row.items() if key not in ("where", "tail", "warnings", "found", "near")
    }


def main() -> None:
    found = collected([Path(word) for word in sys.argv[1:]])
    if not found["parts"]:
        raise SystemExit(__doc__)
    lines = [
        f"  {json.dumps(part)}: [\n   " + ",\n   ".join(map(json.dumps, rows)) + "\n  ]"
        for part, rows in found["parts"].items()
    ]
    text = f' "about": {json.dumps(found["about"])},\n "parts": {{\n' + ",\n".join(lines) + "\n }\n"
    RUN.write_text("{\n" + text + "}\n")


BLOCKS = {
    "gpu_machine": machine,
    "gpu_checks": checks,
    "gpu_steps": steps,
    "gpu_kernels": speeds,
    "gpu_training": training,
    "gpu_gains": gains,
}

if __name__ == "__main__":
    main()
