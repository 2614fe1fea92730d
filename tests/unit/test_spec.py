"""Spec strings: what they are read as, what they refuse, what they print."""

from __future__ import annotations

import copy
import pickle
from importlib.metadata import EntryPoint

import pytest
from tests.unit.shared import for_each, refuses

import laconic
from laconic.core import spec
from laconic.core.aliases import ALIASES
from laconic.core.errors import LaconicError, SpecError

GOOD = [
    "dense()",
    "cast(dtype='fp16')",
    "sparse(topk(density=0.01))",
    "sparse(sampled_topk(density=0.001), values=cast(dtype='fp16'), indices=golomb())",
    "gather(sparse(randomk(density=0.1)), grain='bucket')",
    "dgc(density=0.01, warmup_steps=400)",
    "dgc(density=0.01, warmup_steps=8, warmup=(1.0, 0.5), values=cast(dtype='bf16'), vectors='fp16')",
    "error_feedback(decay=0.9)",
    "momentum_correction(clip=5.0)",
    "by_name(names={'*embed*': cast(dtype='fp16'), '*[ab]?': 'topk(0.1)'}, rest=dgc(density=0.01))",
]


@for_each("text", GOOD)
def test_a_spec_prints_as_the_call_that_makes_it(text: str) -> None:
    made = laconic.parse(text)
    assert repr(made) == text
    assert laconic.parse(repr(made)) == made


def test_ways_to_write_the_same() -> None:
    warm_up = "dgc(density=0.01, warmup_steps=4, warmup=(1.0, 0.5))"
    for one, other in (
        ("topk(0.01)", " topk( density = 1e-2 ) "),
        ("fp16", "fp16()"),
        ("dgc(0.01, warmup_steps=4, warmup=[1.0, 0.5])", warm_up),
    ):
        assert laconic.parse(one) == laconic.parse(other)


@for_each(
    "text, words",
    [
        ("", "cannot read"),
        ("topk(", "cannot read"),
        ("topk(density=0.01) + 1", "only calls, numbers, strings, lists and dicts"),
        ("__import__('os')", "unknown name"),
        ("topk.__class__", "only calls, numbers, strings, lists and dicts"),
        ("(lambda: 1)()", "only calls, numbers, strings, lists and dicts"),
        ("[x for x in (1,)]", "only calls, numbers, strings, lists and dicts"),
        ("topk(*[0.1])", r"cannot have \* or \*\*"),
        ("topk(**{})", r"cannot have \* or \*\*"),
        ("topk(density=0)", r"density must be a number in \(0, 1\], got 0"),
        ("topk(density=1.5)", r"density must be a number in \(0, 1\], got 1.5"),
        ("topk(density=-0.1)", r"density must be a number in \(0, 1\], got -0.1"),
        ("topk(density='much')", "density must be a number"),
        ("topk(density=True)", "density must be a number"),
        ("topk(0.1, dense=0.1)", r"unexpected keyword argument 'dense'; it takes topk\(density\)"),
        ("by_name({1: dense()})", "keys of a dict must be strings, got '1'"),
        ("by_name({dense: dense()})", "keys of a dict must be strings, got 'dense'"),
        ("by_name({**{}})", r"keys of a dict must be strings, got \*\*"),
        ("topk(density=0.1, density=0.2)", "'density' is given twice in .*: give it once"),
        ("by_name({'a': dense(), 'a': fp16()})", "must be unique, got 'a' twice"),
        ("by_name({'a': 1 + 1})", "only calls, numbers, strings, lists and dicts"),
        ("by_name({'a': 7})", "by_name: 'a': compress takes a method, codec, selector or reducer, got 7"),
        ("by_name({'a': dense()}, rest=7)", "by_name: rest: compress takes a method, .* got 7"),
        ("cgx(bits=33)", r"cgx: minmax: bits must be a whole number in 1\.\.8, got 33"),
        ("by_name({'a': dgc(density=2)})", r"^dgc: density must be a number in \(0, 1\], got 2"),
        ("by_name(dense())", "by_name: names must be a dict"),
        ("by_name({'a': topkk(0.1)})", "did you mean topk"),
        ("by_size(0, large=dense())", "limit must be a whole number of 1 or more, .* got 0"),
        ("topk()", "missing a required argument"),
        ("topkk(density=0.1)", "did you mean topk"),
        ("gather(topk(density=0.1))", "gather takes a codec"),
        ("dgc(density=0.1, warmup_steps=-1)", "warmup_steps must be a whole number of 0 or more"),
        ("dgc(density=0.1, warmup=[0.5])", "set warmup_steps"),
        ("dgc(density=0.1, warmup_steps=4, warmup=[0.05])", "must fall towards"),
        ("momentum_correction(clip=-1)", "clip must be a finite number above 0, got -1"),
        ("topk(density=0.1" + " " * 20_000 + ")", "at most"),
        ("(" * 400 + "1" + ")" * 400, "cannot read|only"),
        ("topk(" * 3000, "cannot read|at most"),
    ],
)
def test_a_wrong_spec_says_what_is_wrong(text: str, words: str) -> None:
    refuses(SpecError, words, laconic.parse, text)


def test_errors_have_one_root() -> None:
    refuses(SpecError, "got int", laconic.parse, 3)
    refuses(LaconicError, ".", laconic.parse, "nonsense()")
    refuses(ValueError, "nonsense", laconic.parse, "nonsense()")


def test_names_have_docstrings_and_what_the_field_says_leads_to_them() -> None:
    for name in spec.names():
        assert spec.find(name).__doc__, name
    registered = set(spec.names())
    assert not registered & set(ALIASES), "a name that is there needs no other"
    assert {call.partition("(")[0] for calls in ALIASES.values() for call in calls} <= registered


def test_a_selector_that_is_used_as_a_codec_says_how_to_make_one() -> None:
    selector = laconic.parse("topk(density=0.01)")
    words = r"topk\(density=0\.01\) is a selector.*sparse\(topk\(density=0\.01\)\)"
    refuses(AttributeError, words, getattr, selector, "encode")
    refuses(AttributeError, "'TopK' object has no attribute 'density_'", getattr, selector, "density_")
    assert copy.deepcopy(selector) == pickle.loads(pickle.dumps(selector)) == selector


def test_a_function_called_like_its_module_is_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.reducers.server import deal

    monkeypatch.setattr(deal, "deal", lambda: None, raising=False)
    assert "deal" not in spec.names() and "integer_sum" not in spec.names()
    refuses(SpecError, "unknown name 'deal'", laconic.parse, "deal()")


@for_each("name", ["borders", "coins", "union", "variance", "widths", "theirs"])
def test_names_of_other_packages_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A module of our helpers stands in no entry point's way."""
    assert (name in spec.modules()) == (name != "theirs")
    refuses(SpecError, "unknown name", spec.find, name)
    entry = EntryPoint(name, "laconic.codecs.dense:Dense", "laconic.methods")
    monkeypatch.setattr(
        spec, "entry_points", lambda group, name=None: [entry] if name in (None, entry.name) else []
    )
    assert laconic.parse(name) == laconic.parse(f"{name}()") == laconic.parse("dense")
    assert name in spec.names()
