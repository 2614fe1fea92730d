"""The page of claims has a row for every system, and its figures are cells of the pages it links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.pages.claims import PAGES, SOURCES, VERDICTS, cells, claims, figure, page, parsed, text_of
from benchmarks.pages.write import ROOT
from tests.unit.shared import for_each

SYSTEMS = (
    *("DGC", "TernGrad", "QSGD", "Natural compression", "FastSGD", "STC", "Hierarchical quantisation (DHQC)"),
    *(
        "Comp-AMS",
        "QCMD and QRDA AdaGrad",
        "DEFT",
        "CGX",
        "LGC",
        "SGP",
        "LSGD",
        "8-bit decentralised training",
    ),
    *("TF-Replicator", "AC-SGD", "COMET", "ZeroFL", "P-SGA", "RigL", "QNN", "ADMM quantisation"),
    *("Mixed precision", "Batch augmentation", "Large batches: LAMB", "Stochastic Block-ADMM"),
)
NUMBERS = {  # of headline claims, by system
    "DGC": ("270", "600"),
    "TernGrad": ("2 points", "performance model"),
    "QSGD": ("1.8",),
    "Natural compression": ("9/8",),
    "DEFT": ("selection", "build-up"),
    "CGX": ("2 to 3",),
    "LGC": ("0.18",),
    "8-bit decentralised training": ("1 point",),
    "AC-SGD": ("4.3", "4.9"),
    "COMET": ("13.5",),
    "ZeroFL": ("2.3",),
    "P-SGA": ("energy",),
    "QNN": ("7 times",),
    "ADMM quantisation": ("31", "5 times"),
}


def test_every_system_has_its_headline_claims() -> None:
    found: dict[str, str] = {}
    for claim in claims():
        found[claim.system] = found.get(claim.system, "") + claim.claim
    assert set(SYSTEMS) <= found.keys()
    for system, words in NUMBERS.items():
        assert all(word in found[system] for word in words), system


def test_rows_are_complete_and_only_unmeasured_ones_lack_a_figure() -> None:
    for claim in claims():
        assert claim.claim and claim.paper and claim.here and claim.cited, claim
        assert claim.status in VERDICTS and claim.source in SOURCES, claim
        assert claim.figures or claim.status in ("not measured", "not measurable here"), claim
    assert len({(claim.system, claim.claim) for claim in claims()}) == len(claims())


def test_what_is_met_has_a_bound_and_a_page_that_a_command_writes() -> None:
    met = [claim for claim in claims() if claim.status == "met"]
    assert met
    for claim in met:
        assert " least " in claim.verdict or " most " in claim.verdict, claim
        assert claim.pages


@for_each("name", PAGES)
def test_linked_pages_and_commands_are_there(name: str) -> None:
    known = PAGES[name]
    assert (ROOT / "docs" / f"{known.doc or name}.md").exists()
    path = ROOT / known.command.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_a_figure_is_the_cell_of_its_page() -> None:
    row = next(line for line in text_of("methods").splitlines() if line.startswith("| `dgc()` |"))
    assert figure("methods|Methods|`dgc()`|message") == row.split(" | ")[1]
    with pytest.raises(ValueError, match="no row '`dgx"):
        figure("methods|Methods|`dgx()`|message")


def test_a_claim_that_is_no_longer_met_is_refused() -> None:
    claim = next(claim for claim in claims() if claim.system == "Natural compression")
    assert claim.verdict == "met, at most 0.125" and cells(claim)[3] == "met"
    with pytest.raises(ValueError, match="change the row"):
        cells(replace(claim, verdict="met, at most 0.01"))


def test_rows_are_read_from_the_text() -> None:
    text = "# Group\n\n## Name ; Cited ; abstract\n\nclaim: a b\n  c: d\npaper: p\nhere: -\nverdict: partly\n"
    (claim,) = parsed(text)
    assert (claim.group, claim.system, claim.cited, claim.source) == ("Group", "Name", "Cited", "abstract")
    assert (claim.claim, claim.paper, claim.here, claim.verdict) == ("a b c: d", "p", "-", "partly")


def test_the_page_has_every_row_and_no_open_figure() -> None:
    text = page()
    assert all(f"\n| {claim.claim} |" in text for claim in claims())
    assert "{" not in text
