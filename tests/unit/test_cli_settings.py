"""What is asked for is checked as a whole before anything starts, and every error shows the way out."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tests.unit.commands import invoke
from tests.unit.shared import for_each, refuses

import laconic
import laconic.tools.cli.doctor  # whose name is also a command
from laconic.core.errors import StateError
from laconic.exchange.method import lift
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.cli.cautions import cautions
from laconic.tools.cli.entries import entries
from laconic.tools.cli.methods import LISTED
from laconic.tools.cli.presets import PRESETS
from laconic.tools.cli.run import torchrun_arguments
from laconic.tools.cli.settings import Options, Settings

doctor = sys.modules["laconic.tools.cli.doctor"]


REQUESTS = """\
digits --with dcg(density=0.01) => unknown name 'dcg' | did you mean dgc
digits --with dgc(density=2) => density must be a number in (0, 1], got 2
digits --with dgc(denisty=0.1) => denisty | it takes dgc(density
digits --with dgc(density=0.01 => cannot read the spec
digits --with golomb() => a method, codec, selector or reducer
digits --with dgc() --against fb16() => unknown name 'fb16' | fp16
digits => --with | laconic methods
digts --with dgc() => unknown task 'digts' | digits
digits --model cn --with dgc() => no model 'cn' | cnn
digits --with dgc() --workers 0 => --workers must be 1 or more, got 0
digits --with dgc() --seeds 0 => --seeds must be 1 or more, got 0
digits --with dgc() --target 101 => --target must be a percentage in (0, 100], got 101
digits --with dgc() --steps 0 => --steps must be 1 or more, got 0
digits --with dgc() --lr -1 => --lr must be a number above 0, got -1
digits --with dgc() --skew 0 => --skew must be a finite number above 0, got 0.0
digits --with dgc() --skew nan => got nan; 0.1 skews strongly, 100 hardly at all
digits --with dgc() --bits 9 => --bits must be a whole number in 2..8, got 9
shakespeare --with dgc() --bits 8 => --bits 8 does not work with | is a GPT | use cifar10, mnist or digits
shakespeare --with dense() --lowbit admm(table='ternry') => table must be 'binary' | got 'ternry'
digits --with dense() --lowbit dgc() => --lowbit takes a low-bit training
digits --with local_sgd() --lowbit admm() => needs replicas that are equal | a method that exchanges gradients
digits --with dense() --lowbit admm(keep=['x']) => admm(keep=['x']) does not work with | no module 'x'
digits --with dense() --bits 8 --activations comet() => --activations and --bits cannot be | one of the two
digits --with dense() --lowbit admm() --sparsity rigl() => --sparsity and --lowbit cannot be | one of the two
digits --with dense() --sparsity swat(sparsity=1) => sparsity must be | got 1
digits --with masked(dense()) --sparsity swat() => masked(dense()) sends | swat() has none: take the method
digits --with dense() --sparsity swat() --activations comet() --model cnn => swat() and --activations
digits --with dense() --sparsity swat() --bits 8 => --sparsity swat() does not work with | no layer to
digits --with dense() --activations comte() => unknown name 'comte' | comet
digits --with dense() --activations dense() => take comet(...) or blocks(...)
digits --with dense() --lowbit binarise(first=1) => first must be 'real'
digits --with dense() --lowbit binarize() => did you mean | binarise
digits --with dense() --lowbit quantise(keep=('x',)) => does not work with this model | no module 'x'
digits --with local_sgd(every=0) => every must be a whole number of 1 or more
digits --with dpsgd(bipartite_exponential()) --workers 3 => even number of ranks, got 3
digits --with dgc() --batch 800 => batch must be in [1, 718] | got 800
digits --with dgc() --name= => --name must be the name of a folder | got ''
digits --with dgc() --name .. => --name must be the name of a folder | got '..'
digits --with dgc() --name a/b => --name must be the name of a folder | 'a/b'
digits --with dgc() --name x --resume --overwrite => --overwrite deletes it: give one of the two
digits --with dgc() --against dense() --patience 9 => for strategies | dense(), dgc() needs all | remove it
digits --with dgc() --resume => --resume needs the --name
digits --with dgc() --resume --name x => no run in | start it without --resume
mnist --with dgc() --data nowhere => no data folder nowhere
"""


@for_each("asked", REQUESTS.splitlines())
def test_a_wrong_request_is_one_line_and_starts_nothing(asked, tmp_path, monkeypatch):
    arguments, words = asked.split(" => ")
    monkeypatch.chdir(tmp_path)
    result = invoke("train", *arguments.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("laconic: ") and result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words.split(" | ")), result.stderr
    assert not any(tmp_path.iterdir()), "nothing is written"


def settings(tmp_path: Path, **changes: object) -> Settings:
    given: dict[str, object] = {"task": "digits", "workers": 2, "seeds": 2, "seed": 3, "name": "run"}
    given |= {"methods": ("dgc( density = 0.01 )", "topk(0.02)"), "against": ("dense", "dgc(density=0.01)")}
    given |= dict.fromkeys(("model", "steps", "batch", "lr", "eval_every", "data"))
    given |= {"checkpoint_every": 0, "out": tmp_path, "resume": False}
    return Settings.of(Options(**(given | changes)))  # type: ignore[arg-type]


@for_each(
    "spec, steps",
    [
        ("onebit_adam()", 1000),
        ("zero_one_adam(300)", 300),
        ("dgc(density=0.001, warmup_steps=400)", 400),
        ("dgc(density=0.001, warmup_steps=400, warmup=(1, 1, 0.5, 0.1))", 400),
        ("dense_first(gather(sign()), steps=7)", 7),
        ("gather(sparse(density_schedule(topk(0.01), densities=(0.25, 0.0625), every=100)))", 200),
        ("by_name({'0.weight': onebit_adam(20)}, rest=dense())", 20),
        ("topk(0.01)", 0),
    ],
)
def test_a_warm_up_that_outlasts_the_run_is_told(spec: str, steps: int, tmp_path: Path) -> None:
    assert lift(spec).warm_at == steps
    if steps:
        (line,) = cautions(settings(tmp_path, methods=(spec, "dense()"), steps=steps))
        assert f"warms up for {steps:,} steps and this run has {steps:,}" in line
    assert not cautions(settings(tmp_path, methods=(spec, "dense()"), steps=steps + 1))


def test_a_run_to_resume_is_told_what_goes_by_the_clock(tmp_path: Path) -> None:
    given = {"methods": ("auto()", "cgx()"), "steps": 9}
    assert not cautions(settings(tmp_path, **given))
    (line,) = cautions(settings(tmp_path, checkpoint_every=3, **given))
    assert line.startswith("auto() decides by timing") and "does not end with the same bits" in line
    pinned = re.search(r'"(auto\(.*\))"', line)
    assert pinned and not strategy_or_method(pinned[1]).adaptive, "the way out is one"


def test_a_method_beside_patient_strategies_is_told_to_need_all_workers(tmp_path: Path) -> None:
    (line,) = cautions(settings(tmp_path, methods=("local_sgd()",), against=("dense()",), patience=9.0))
    assert line.startswith("dense() needs all workers, so --patience has no effect on it")


def test_methods_are_spelt_one_way_and_baselines_come_first(tmp_path: Path) -> None:
    made = settings(tmp_path)
    assert made.specs == ("dense()", "dgc(density=0.01)", "topk(density=0.02)")
    assert list(made.all_seeds) == [3, 4]
    assert (made.steps, made.batch, made.lr, made.eval_every) == (300, 16, None, 30)


def test_strategies_and_methods_are_asked_for_alike(tmp_path: Path) -> None:
    made = settings(tmp_path, methods=("local_sgd( 8 )", "sgp( ring() )"), skew=0.1)
    assert made.specs[2:] == ("local_sgd()", "sgp(ring())")
    assert cautions(made) == []
    assert made.config()["skew"] == 0.1 and settings(tmp_path).config()["skew"] is None


def test_a_run_with_other_shards_is_not_gone_on_with(tmp_path: Path) -> None:
    settings(tmp_path).open_folder()
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings(tmp_path).config()))
    settings(tmp_path, resume=True).open_folder()
    with pytest.raises(StateError, match=r"started with skew=None, not 0\.1"):
        settings(tmp_path, resume=True, skew=0.1).open_folder()


def test_an_older_run_is_kept_unless_its_user_says_so(tmp_path: Path) -> None:
    made = settings(tmp_path)
    made.open_folder()
    (made.folder / "config.json").write_text("{}")
    made.open_folder()  # it has measured nothing
    (made.folder / "config.json").write_text("{}")
    (made.folder / "events.jsonl").write_text("{}\n")
    refuses(StateError, "already: give another --name, --resume .* or --overwrite", made.open_folder)
    assert (made.folder / "events.jsonl").read_text() == "{}\n"
    settings(tmp_path, overwrite=True).open_folder()
    assert not any(made.folder.iterdir())
    (made.folder / "thesis.tex").touch()
    refuses(StateError, "is not a run of Laconic", lambda: settings(tmp_path, overwrite=True).open_folder())


def test_methods_lists_every_name_with_its_bits() -> None:
    listed = {entry.spec: entry for entry in entries()}
    assert {"dgc()", "fp16()", "dense()", "topk(density=0.01)", "sum()"} <= set(listed)
    assert 16 <= listed["fp16()"].max_bits < 16.001  # and an exponent that ranks agree on
    assert listed["dense()"].max_bits == 32
    assert 0.03 < listed["dgc()"].max_bits < 0.05  # a thousandth of 32 + 11.5 bits
    assert "arXiv:1712.01887" in listed["dgc()"].paper
    assert all(entry.sends for entry in listed.values())
    assert all(repr(strategy_or_method(spec)) == spec for spec in listed)
    result = invoke("methods", "--all")
    assert result.exit_code == 0 and "arXiv:1712.01887" in result.output


def test_methods_is_short_with_the_presets_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = invoke("methods").output.splitlines()
    assert len(lines) < 70
    assert [line.split()[0] for line in lines[1:5]] == ["auto()", "cgx()", "stc(density=0.01)", "diloco()"]
    assert all(repr(strategy_or_method(preset.spec)) for preset in PRESETS)
    (dgc,) = (line for line in lines if line.split()[:1] == ["dgc"])
    assert dgc.split()[1] == "0.14" and "the largest entries of the accumulated velocity" in dgc
    listed = " ".join(" ".join(lines).replace(",", " ").split())
    assert all(f" {name} " in f" {listed} " for name in laconic.catalogue()), "every name is there"


def test_methods_can_be_searched() -> None:
    found = invoke("methods", "--find", "sign").output
    assert "signum" in found and "stc" in found and "powersgd" not in found
    assert "arXiv:1810.05291" in invoke("methods", "--all", "--find", "1810.05291").output
    nothing = invoke("methods", "--find", "xyzzy")
    assert nothing.exit_code == 2 and "no method has 'xyzzy'" in nothing.stderr


def test_help_names_the_presets_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for arguments in (["--help"], ["train", "--help"]):
        said = " ".join(invoke(*arguments).output.replace("│", " ").split())
        places = [said.index(f'"{preset.spec}"') for preset in PRESETS]
        assert places == sorted(places), arguments


def test_methods_come_under_headings_by_kind() -> None:
    lines = [line.strip() for line in invoke("methods", "--all").output.splitlines()]
    heads = ("Methods", "Strategies:", "Selectors:", "Codecs:", "Reducers:")
    heads += ("Index codings:", "Feedback:", "Topologies:")
    places = [next(i for i, line in enumerate(lines) if line.startswith(head)) for head in heads]
    assert places == sorted(places)
    under = ("dgc", "local_sgd", "topk", "qsgd", "gather", "golomb", "error_feedback", "ring")
    for name, start, end in zip(under, places, [*places[1:], len(lines)], strict=True):
        assert any(line.startswith(f"{name}(") for line in lines[start:end]), name


def test_a_strategy_is_listed_and_shown_without_figures() -> None:
    assert {"dgc", "local_sgd", "sgp", "topk"} <= set(laconic.catalogue())
    found = {entry.name: entry for entry in entries()}
    assert found["local_sgd"].kind == "strategy" and found["local_sgd"].max_bits is None
    lines = [line.strip() for line in invoke("methods", "--all").output.splitlines()]
    (line,) = (line for line in lines if line.startswith("local_sgd()"))
    assert line.split()[1:] == ["-"] * LISTED
    shown = invoke("methods", "local_sgd").output
    assert shown.startswith("local_sgd(every=8, start=0, compressor=dense())")
    assert "arXiv:1805.09767" in shown and "local_sgd(every=4, compressor=minmax(bits=8))" in shown
    assert "measured" not in shown


def test_doctor_says_what_is_live_and_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path))
    (tmp_path / "mnist.npz").touch()
    result = invoke("doctor")
    assert result.exit_code == 0
    words = ("kernels", "gloo", "LACONIC_DATA", str(tmp_path / "mnist.npz"))
    assert all(word in result.output for word in words)
    assert "missing: data of cifar10" in result.output and "missing: data of mnist" not in result.output


def test_doctor_counts_one_core_and_says_slower_of_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 1)
    seconds = {torch.float32: 1.0, torch.bfloat16: 21.0, torch.float16: 0.5}
    monkeypatch.setattr(doctor, "_product_s", seconds.__getitem__)
    said = " ".join(invoke("doctor").output.split())
    assert ", 1 core " in said and ", 1 thread " in said
    assert "bf16 21 times slower than fp32, fp16 2 times as fast as fp32" in said


def test_doctor_ends_with_what_to_try_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "no_lab", lambda: None)
    assert doctor.to_try().startswith("to try: laconic demo")
    monkeypatch.setattr(doctor, "no_lab", lambda: "there is no ip")
    line = invoke("doctor").output.replace("\n", " ")
    assert 'to try: laconic train digits --workers 2 --with "cgx()"' in line
    assert line.strip().endswith("no ip)")
    monkeypatch.setattr(doctor, "version_of", lambda package: "not installed")
    assert doctor.to_try().startswith("to try: pip install 'laconic[train]'")


STANDALONE = "--standalone --nproc-per-node 2 --max-restarts 3 train.py --lr 1"
RENDEZVOUS = "--nnodes=2 --rdzv-endpoint a:1 train.py"


@for_each(
    "given, found",
    [
        ("train.py --nproc-per-node 2 --max-restarts 3 -- --lr 1", STANDALONE),
        ("--nproc-per-node 2 --max-restarts 3 train.py --lr 1", STANDALONE),
        (RENDEZVOUS, RENDEZVOUS),
    ],
)
def test_run_takes_flags_around_the_script_and_leaves_a_rendezvous_alone(given: str, found: str) -> None:
    assert torchrun_arguments(given.split()) == found.split()
