"""Wrong arguments: whatever is given for any argument of any registered name, a `SpecError` says what is
wrong, or the object that comes of it prints as a call that makes it again. No other exception, and no `inf`.
"""

from __future__ import annotations

import ast
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.shared import for_each, refuses

from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.selector import Selector
from laconic.core.spec import find, names, parse

NEVER = ("x", True, math.nan, math.inf, -math.inf, -1, 10**400, None)  # for an argument that is a number
STRANGE = (*NEVER, 2.5, 10**30, 5e-324, 0, (), {}, ("x",), object)


def usual(name: str) -> dict[str, Any]:
    """Arguments that this name takes, from its first example."""
    make = find(name)
    call = ast.parse((getattr(make, "examples", ()) or (f"{name}()",))[0], mode="eval").body
    assert isinstance(call, ast.Call)
    places = list(inspect.signature(make).parameters)
    given = {places[i]: parse(ast.unparse(item)) for i, item in enumerate(call.args)}
    return given | {item.arg: parse(ast.unparse(item.value)) for item in call.keywords if item.arg}


def parameters() -> list[tuple[str, str, str]]:
    """Registered name, argument, and its annotation."""
    own = [name for name in names() if find(name).__module__.startswith("laconic.")]
    return [
        (name, argument, str(each.annotation))
        for name in own
        for argument, each in inspect.signature(find(name)).parameters.items()
    ]


NUMBERS = [each for each in parameters() if {"int", "float"} & set(each[2].replace("|", " ").split())]


def show(value: Any) -> str:
    return "10**400" if value is NEVER[6] else repr(value)


def test_there_is_something_to_test() -> None:
    assert len(NUMBERS) > 30 and len(parameters()) > len(NUMBERS) + 20
    assert {"levels", "block", "clip", "warmup_steps", "floor", "share"} <= {each[1] for each in NUMBERS}


@for_each("value", STRANGE)
@for_each("name, argument, annotation", parameters())
def test_a_strange_argument_is_refused_or_prints_as_itself(name, argument, annotation, value):
    try:
        made = find(name)(**usual(name) | {argument: value})
    except SpecError:
        return
    assert parse(repr(made)) == made
    if isinstance(made, Codec):
        x = torch.tensor([1.0, -0.5, 0.0, 3.0])
        assert bool(made.decode(made.encode(x, key=3), 4).isfinite().all())
        assert made.omega(4) >= 0 and made.nbytes(4) > 0
    if isinstance(made, Selector):
        assert made.select(torch.arange(200.0)).numel() <= made.max_count(200)


@for_each("value", [*NEVER, 2.5, np.float64(0.3)])
@for_each("name, argument, annotation", NUMBERS)
def test_what_is_no_number_of_this_kind_is_refused_by_its_name(name, argument, annotation, value):
    if (value is None and "None" in annotation) or (value == 2.5 and "float" in annotation):
        return
    with pytest.raises(SpecError, match=f"{argument}|warmup") as caught:
        find(name)(**usual(name) | {argument: value})
    assert "must be" in str(caught.value) and arguments.shown(value) in str(caught.value)


@for_each(
    "text, words",
    [
        ("qsgd(levels=2.5)", r"qsgd: levels must be a whole number in 1\.\.32767, got 2\.5"),
        ("qsgd(block=1e400)", r"block must be a whole number in 0\.\.2147483648, got inf; 0 makes a whole"),
        ("qsgd(block=99999999999999999999)", "block must be .* got 99999999999999999999"),
        ("nuqsgd(levels=128)", r"nuqsgd: levels must be a whole number in 1\.\.127, got 128"),
        ("ternary(clip=1e400)", r"ternary: clip must be .* in \[0, 100000\], got inf; .* 0 cuts nothing"),
        ("dense_first('x', steps=3)", r"then must be a reducer, such as gather\(sign\(\)\), got 'x'"),
        ("error_feedback(damped='x')", "damped must be True or False, got 'x'"),
        ("dgc(warmup_steps=1e400)", r"must be a whole number of 0 or more, below 2\^63, got inf"),
        ("dgc(warmup_steps=4, warmup=3)", r"must be densities, such as \(0.25, 0.0625\), or None, got 3"),
        ("dgc(density=1, values='x')", "values must be a Codec"),
        ("momentum_correction(clip=1e400)", "clip must be a finite number above 0, got inf; None leaves"),
        ("fastsgd(floor=100)", r"fastsgd: floor must be .* in 0\.\.99, got 100; with base=2.0 more"),
        ("fastsgd(base=3.5, floor=60)", r"in 0\.\.54, got 60"),
        ("fastsgd(base=1.5, floor=254)", r"in 0\.\.169, got 254"),
        ("sum(dtype=3)", "dtype must be 'fp32', 'fp16' or 'bf16', got 3"),
        ("natural(bits=8.0)", "bits must be 9 or 8, got 8.0"),
        ("error_fed('dgc()')", r"takes a codec, selector or reducer, got the method dgc\(\)"),
        ("comp_ams('dgc()')", r"takes a codec, selector or reducer, got the method dgc\(\)"),
        ("qcmd_adagrad('topq(0.1)')", "did you mean topk"),
        ("terngrad(clip=-1)", r"^terngrad: clip must be .* in \[0, 100000\], got -1; .* 0 cuts nothing"),
        ("by_name({})", r"must have a pattern, such as \{'\*norm\*': dense\(\)\}; or use dense"),
        ("one_bit()", r"unknown name 'one_bit': here it is called signmean\(\) or sign\(\)"),
        ("randk(density=0.1)", r"unknown name 'randk': here it is called randomk\(density=\.\.\.\)"),
        ("DGC()", r"unknown name 'DGC': did you mean dgc"),
        ("by_size(0, large=dense())", r"limit must be a whole number of 1 or more, below 2\^63, got 0"),
    ],
)
def test_an_error_names_value_limit_and_way_out(text: str, words: str) -> None:
    refuses(SpecError, words, parse, text)


@for_each("base", [1.001, 1.2, 1.5, 2.0, 3.0, 3.9])
def test_the_highest_floor_is_taken_and_the_next_is_not(base: float) -> None:
    with pytest.raises(SpecError) as caught:
        parse(f"fastsgd(base={base}, floor=9999)")
    highest = int(str(caught.value).split("in 0..")[1].split(",")[0])
    assert parse(f"fastsgd(base={base}, floor={highest})").routes
    refuses(SpecError, "floor", lambda: parse(f"fastsgd(base={base}, floor={highest + 1})"))


def test_very_long_values_are_shown_short() -> None:
    assert arguments.shown(10**5000) == "an integer of 16610 bits"
    assert len(arguments.shown("x" * 1000)) == 100


def test_numpy_numbers_are_told_the_way_out() -> None:
    with pytest.raises(SpecError, match=r"write it as Python's own number: int\(\.\.\.\) or float\(\.\.\.\)"):
        find("topk")(density=np.float64(0.5))
