"""Integrations without the libraries: the tested ranges, and what is said where they do not hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.shared import for_each, refuses

import laconic.integrations
from laconic.core.errors import AttachError, ExtraError
from laconic.ddp.compress import compress
from laconic.integrations import versions

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@for_each("library", versions.TESTED)
def test_an_extra_brings_what_is_tested(library: str) -> None:
    lowest, end = versions.TESTED[library]
    assert f'{library} = ["{library}>={lowest},<{end}"' in PYPROJECT.read_text()


@for_each("name", laconic.integrations.__all__)
def test_a_missing_library_is_told_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, library = laconic.integrations.HOMES[name]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ExtraError, match=rf"needs {library}: pip install 'laconic\[{library}\]'"):
        getattr(laconic.integrations, name)


@for_each("found, fits", [("2.5.9", False), ("2.6.0", True), ("2.6.12", True), ("2.7.0rc1", False)])
def test_another_version_is_told(found: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "require", lambda *_: None)
    monkeypatch.setattr(versions, "version", lambda library: found)
    if fits:
        versions.check("lightning", "this")
        return
    with pytest.warns(
        UserWarning, match=rf"from 2.6 and below 2.7, and {found} is installed: .*laconic\[lightning"
    ):
        versions.check("lightning", "this")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KerasCompression'"):
        laconic.integrations.KerasCompression  # noqa: B018


@for_each(
    "kind, words",
    [("FullyShardedDataParallel", "fully_shard"), ("DeepSpeedEngine", "without its configuration")],
)
def test_models_of_others_are_told_the_way_out(kind: str, words: str) -> None:
    """By their names alone: neither library need be there."""
    import torch

    model = type(kind, (torch.nn.Linear,), {})(2, 2)
    with pytest.raises(AttachError, match=words):
        compress(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk(density=0.1)")


def test_the_model_of_torchft_is_told_the_way_out() -> None:
    """By its module's name alone, before anything is asked of its process group."""
    from torch.nn.parallel import DistributedDataParallel

    model = type("DistributedDataParallel", (DistributedDataParallel,), {"__module__": "torchft.ddp"})
    refuses(AttachError, "TorchftDDP", lambda: compress(model.__new__(model), [], "cgx()"))
