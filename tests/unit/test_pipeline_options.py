"""What is asked of a pipeline is checked before anything starts, and every error shows the way out."""

from __future__ import annotations

import pytest
import torch
from tests.unit.shared import for_each, refuses
from typer.testing import CliRunner

from laconic.core.errors import SpecError
from laconic.pipeline.compress import FORWARD, _plan
from laconic.tools.cli.main import app
from laconic.tools.cli.pipelining import PipelineOptions
from laconic.tools.tasks import find
from laconic.tools.tasks.settings import Pipeline
from laconic.tools.tasks.shakespeare import GPT, wide_windows

COMBINED = "--{} and --stages cannot be combined"
WRONG = [
    ("--stages 3 --workers 2", ["needs 3 workers", "got --workers 2", "remove --workers"]),
    ("--stages 2 --workers 5", ["needs 4 workers", "got --workers 5"]),
    ("--stages 2 --replicas 2 --workers 2", ["2 and --replicas 2 needs 4 workers", "give --workers 4"]),
    ("--stages 1", ["--stages must be a whole number of 2 or more", "every worker has the whole"]),
    ("--stages 4", ["--stages must be at most 3", "the layers of this model", "a deeper --model"]),
    ("--stages 2 --model lstm", ["cannot be cut", "use --model gpt or gpt6 or gpt10m"]),
    ("--replicas 2", ["--replicas is for a pipeline", "--stages 2"]),
    ("--schedule gpipe", ["--schedule is for a pipeline"]),
    ("--micro-batches 2", ["--micro-batches is for a pipeline"]),
    ("--stages 2 --schedule zb", ["--schedule must be 1f1b or gpipe, got 'zb'"]),
    ("--stages 2 --micro-batches 3", ["got 3", "give 2, 4, 8, 16"]),
    ("--stages 2 --micro-batches 32", ["--micro-batches must divide --batch 16", "got 32"]),
    ("--stages 2 --batch 1", ["--batch 1 is less than --stages 2", "or --schedule gpipe"]),
    ("--stages 2 --replicas-with cgx()", ["--replicas-with needs --replicas of 2 or more"]),
    ("--stages 2 --replicas 2 --replicas-with cxg()", ["unknown name 'cxg'", "did you mean cgx"]),
    *(
        (f"--stages 2 --{name} {8 - 7 * (name == 'skew')}", [COMBINED.format(name)])
        for name in ("bits", "skew", "patience")
    ),
    ("--stages 2 --with ac_sgd(forward=9)", ["in 1..8, got 9"]),
    ("--with ac_sgd(forward=4,backward=8)", ["between the stages of a pipeline", "--stages 2"]),
    ("--examples 0", ["--examples must be", "got 0"]),
]


@for_each("arguments, words", WRONG)
def test_wrong_options_are_refused_with_the_way_out(
    arguments: str, words: list[str], tmp_path: object
) -> None:
    given = ["train", "shakespeare", "--with", "dense()", "--out", str(tmp_path), *arguments.split()]
    refused = CliRunner().invoke(app, given)
    assert refused.exit_code == 2
    assert len(refused.output.strip().splitlines()) == 1
    assert all(word in refused.output for word in words)


def test_other_tasks_and_methods_are_told_where_a_pipeline_belongs() -> None:
    for words, said in (
        ("digits --with dense()", ["digits's model", "shakespeare"]),
        ("shakespeare --with dgc()", ["--replicas-with"]),
        ("shakespeare", ['no method given: choose one, such as --with "ac_sgd()"']),
    ):
        refused = CliRunner().invoke(app, f"train {words} --stages 2".split())
        assert refused.exit_code == 2
        assert all(word in " ".join(refused.output.split()) for word in said)


def test_micro_batches_divide_the_batch_and_workers_left_over_are_replicas() -> None:
    for batch, micro_batches in ((16, 4), (6, 3), (7, 7), (2, 2)):
        made = PipelineOptions(stages=2).pipeline_of(None, batch)
        assert made == Pipeline(2, 1, micro_batches, "1f1b", "dense()")
    made = PipelineOptions(stages=2).pipeline_of(6, 8)
    assert made is not None and made.replicas == 3
    refuses(SpecError, ".", PipelineOptions(stages=4).pipeline_of, 6, 8)


@for_each("stages", [1, 2, 3])
def test_stages_one_after_the_other_are_the_model(stages: int) -> None:
    torch.manual_seed(0)
    recipe = find("shakespeare").recipe("gpt")
    model = recipe.build()
    assert isinstance(model, GPT) and recipe.cut is not None
    parts = [recipe.cut(model, stage, stages) for stage in range(stages)]
    x = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(1))
    hidden = x
    for part in parts:
        hidden = part(hidden)
    assert torch.equal(hidden, model(x))
    names = [name for part in parts for name in part.state_dict()]
    assert sorted(names) == sorted(model.state_dict())  # each once, under the whole model's name


def test_wide_windows_are_the_same_letters() -> None:
    x = torch.arange(10 * 64).view(10, 64)
    wide = wide_windows({"train_x": x, "train_y": x + 1})
    assert wide["train_x"].shape == (2, 256)
    assert torch.equal(wide["train_x"].flatten(), x.flatten()[: 8 * 64])
    assert torch.equal(wide["train_y"][:, :-1], wide["train_x"][:, 1:])
    with torch.device("meta"):
        model = find("shakespeare").recipe("gpt10m").build()
    assert sum(part.numel() for part in model.parameters()) == pytest.approx(10.8e6, rel=0.01)


def test_a_spec_and_its_parts_are_not_given_together() -> None:
    rest = (16, "dense()", None, None, 0)  # samples, keep, folder, most_bytes, seed
    with pytest.raises(SpecError, match=r"ac_sgd\(.*not both: got .*backward='dense\(\)'"):
        _plan("ac_sgd()", FORWARD, "dense()", *rest)
    assert repr(_plan("change(minmax(bits=4))", FORWARD, "dense()", *rest).backward) == "dense()"
