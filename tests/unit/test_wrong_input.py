"""Wrong input that no other test gives: the error names the value and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.commands import invoke, one_line
from tests.unit.shared import for_each, refuses

import laconic
from laconic.core.errors import DataError, SpecError, StateError
from laconic.federated.form import Form
from laconic.tools.cli.plan import MAX_PARAMS, layout_of, network_of
from laconic.tools.report.ledger import CONFIG
from laconic.tools.tasks import checkpoint, mnist
from laconic.tools.tasks.source import numpy_archive, read_first

SPECS = [
    ("dgc(density=1.0, clip=2.0)", "remove clip"),
    ("terngrad(packing='base3')", "set scale='own'"),
    ("masked(masked(sum()))", "remove one masked"),
    ("dense_first(masked(sum()), steps=4)", "masked must be outermost"),
    ("two_level(masked(sum()), sum())", "masked must be outermost"),
]


@for_each("spec, says", SPECS)
def test_specs_that_contradict_themselves(spec: str, says: str) -> None:
    refuses(SpecError, says, laconic.parse, spec)


def test_numbers_out_of_range() -> None:
    refuses(StateError, "size must be at least 1, got 0", laconic.resize, [], 0)
    refuses(SpecError, f"--params must be at most {MAX_PARAMS:,}", layout_of, MAX_PARAMS + 1)
    assert network_of(None, "1gbit", "5ms").latency_s == 0.005


def test_a_folder_and_an_existing_file_for_a_picture(tmp_path: Path) -> None:
    (tmp_path / "taken.svg").mkdir()
    one_line(
        invoke("topology", "ring()", "--out", tmp_path / "taken.svg"), "is a folder; choose a file in it"
    )
    (tmp_path / "old.svg").write_text("old")
    assert invoke("topology", "ring()", "--out", tmp_path / "old.svg").exit_code == 0
    assert "<svg" in (tmp_path / "old.svg").read_text()


@for_each(
    "content, says", [(b"\0\0\x09\x01", "must start with 000008"), (b"\0\0\x08\x01\0\0\0\x05ab", "5 bytes")]
)
def test_files_that_are_not_mnist(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / mnist.IDX[0]).write_bytes(content)
    refuses(DataError, says, mnist.read_idx, tmp_path / mnist.IDX[0])
    refuses(DataError, f"no {mnist.IDX[1]}|{says}", mnist.load, tmp_path)


def test_archives_that_lack_something(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", x_train=np.zeros((2, 28, 28), np.uint8))
    refuses(
        DataError, "has no array 'y_train'", numpy_archive, tmp_path / "mnist.npz", ("x_train", "y_train")
    )

    def uneven(path: Path) -> dict[str, torch.Tensor]:
        return {"train_x": torch.zeros(3), "train_y": torch.zeros(2)} | dict.fromkeys(
            ("test_x", "test_y"), torch.zeros(1)
        )

    refuses(
        DataError, "3 train examples with 2 labels", read_first, "it", tmp_path, {"mnist.npz": uneven}, ""
    )


def test_a_part_that_torch_cannot_read(tmp_path: Path) -> None:
    place = checkpoint.save(tmp_path, {"step": 1}, step=1, rank=0, size=1, barrier=lambda: None)
    (place / "rank0.pt").write_bytes(b"not a state")
    marker = json.loads((place / checkpoint.MARKER).read_text())
    marker["sha256"]["rank0.pt"] = checkpoint._digest(place / "rank0.pt")
    (place / checkpoint.MARKER).write_text(json.dumps(marker))
    refuses(StateError, "cannot read .*rank0.pt", checkpoint.load, place, rank=0, size=1)


def test_settings_that_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CONFIG).write_text("{")
    words = ("train", "digits", "--with", "dense()", "--out", tmp_path, "--name", "run", "--resume")
    one_line(invoke(*words), f"{CONFIG} is damaged")


def test_models_that_differ_from_the_first() -> None:
    model = {"weight": torch.zeros(40, 30), "count": torch.zeros((), dtype=torch.int64)}
    form = Form.of(model)
    refuses(SpecError, "no tensor 'weight', which it had before", form.check, {"count": model["count"]})
    refuses(SpecError, "a tensor 'more', which it did not have", form.check, model | {"more": torch.zeros(1)})
    refuses(SpecError, "buffers names 'other'", Form.of, model, ["other"])
    refuses(SpecError, "real and imaginary parts", Form.of, {"weight": torch.zeros(3, dtype=torch.complex64)})


@pytest.mark.parametrize("spec", ["masked(topk(density=0.1))", "masked(cast('bf16'))", "masked(dense())"])
def test_masked_takes_what_a_route_takes(spec: str) -> None:
    assert laconic.parse(spec).exact_mean
