"""Policies: which tensor goes which way, what they print, and that they change nothing else."""

from __future__ import annotations

import torch
from tests.laws.worlds import everywhere, exchange_on, gradient, one_step
from tests.unit.shared import for_each, refuses

from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.feedback.momentum_correction import MomentumCorrection

SHAPES = {"embed.weight": (50, 8), "blocks.0.norm.weight": (8,), "blocks.0.mlp.weight": (8, 16)}
MODEL = Layout.of((SHAPES | {"blocks.0.mlp.bias": (8,), "head.weight": (5, 8)}).items())


HALF, BRAIN = "gather(cast(dtype='fp16'))", "gather(cast(dtype='bf16'))"


def ways(spec):
    """The reducer of every tensor, in the model's order, as text."""
    method = lift(spec)
    parts = zip(method.routes, method.assign(MODEL), strict=True)
    found = {name: repr(route.reducer) for route, part in parts for name in part.names}
    return [found[name] for name in MODEL.names]


@for_each(
    "spec, expected",
    [
        (  # the first matching pattern wins; the norm has one dimension, and a codec leaves these dense
            "by_name({'*embed*': cast('fp16'), '*weight': cast('bf16'), '*mlp*': fp16()}, rest=dense())",
            [HALF, "sum()", BRAIN, "sum(dtype='fp16')", BRAIN],
        ),
        (  # a method carries what it is given whole
            "by_name({'*norm*': fp16(), '*bias': bf16()}, rest=dense())",
            ["sum()", "sum(dtype='fp16')", "sum()", "sum(dtype='bf16')", "sum()"],
        ),
        (  # size decides, and the limit itself is large
            "by_size(128, large=cast('fp16'), small=bf16())",
            [HALF, "sum(dtype='bf16')", HALF, "sum(dtype='bf16')", "sum(dtype='bf16')"],
        ),
        (  # policies nest
            "by_name({'head*': cast('fp16')}, rest=by_size(100, large=cast('bf16')))",
            [BRAIN, "sum()", BRAIN, "sum()", HALF],
        ),
    ],
)
def test_a_policy_sends_each_tensor_its_way(spec, expected):
    assert ways(spec) == expected


@for_each(
    "text",
    [
        "by_name(names={'*embed*': cast(dtype='fp16'), '*norm*': dense()}, rest=dgc(density=0.01))",
        "by_name(names={'a': by_size(limit=10, large=fp16())})",
        "by_size(limit=3, large=by_name(names={'a': fp16()}, rest=bf16()), small=topk(density=0.5))",
    ],
)
def test_a_policy_is_its_text(text):
    assert repr(parse(text)) == text
    assert parse(repr(parse(text))) == parse(text)


def test_a_pattern_that_takes_nothing_is_refused_when_it_is_attached():
    nothing = r"no tensor of this model matches '\*embd\*'; it has 5: embed.weight"
    for names, words in (
        ("{'*embd*': fp16()}", nothing),
        ("{'*': bf16(), '*embd*': fp16()}", nothing),
        ("{'*norm*': bf16(), '*embd*': fp16()}", nothing),
        ("{'*': bf16(), '*norm*': fp16()}", r"go to '\*', which come first"),
        (
            "{'*norm*': bf16(), '*norm.weight': fp16(), 'embed*': fp16()}",
            r"go to '\*norm\*', which come first",
        ),
        (
            "{'*bias': bf16(), '*.0.mlp.w*': bf16(), '*mlp*': fp16()}",
            r"go to '\*.0.mlp.w\*' and '\*bias', which",
        ),
    ):
        method = lift(f"by_name({names}, rest=dense())")
        refuses(SpecError, words, everywhere, 1, lambda comm, m=method: exchange_on(comm, m, layout=MODEL))


def test_routes_that_are_alike_share_their_collectives():
    spec = "by_name({'*norm*': dense(), 'head*': cast('bf16')}, rest=by_size(200, large=topk(0.1)))"
    reducers = [route.reducer for route in lift(spec).routes]
    assert [repr(each) for each in reducers].count("sum()") == 1 and len(reducers) == 3


def test_feedback_and_rules_are_those_of_the_arms():
    method = lift("by_name({'embed*': topk(0.1), '*norm*': fp16()}, rest=dgc(0.1))")
    kinds = [type(route.feedback) for route in method.routes]
    assert kinds.count(MomentumCorrection) == 1
    voting = lift("by_name({'embed*': topk(0.1), '*.bias': fp16(), '*norm*': fp16()}, rest=signum())")
    assert [rule for rule, _ in voting.governed(MODEL)] == list(lift("signum()").rules)
    governed = {name for _, part in voting.governed(MODEL) for name in part.names}
    assert governed == {"blocks.0.mlp.weight", "head.weight"}


def test_each_arm_computes_what_it_would_alone():
    """Error-fed top-k on one part and bfloat16 on another: the same bits as each on the whole model."""
    spec = "by_name({'embed*': topk(0.1), '*mlp*': bf16()}, rest=dense())"

    def play(comm):
        runs = {}
        for each in (spec, "topk(0.1)", "bf16()", "dense()"):
            exchange = exchange_on(comm, each, layout=MODEL)
            runs[each] = [one_step(exchange, gradient(comm.rank, t, MODEL), [MODEL])[0] for t in range(4)]
        return runs

    homes = {"embed.weight": "topk(0.1)", "blocks.0.mlp.weight": "bf16()", "blocks.0.mlp.bias": "bf16()"}
    for runs in everywhere(2, play):
        for entry in MODEL:
            where = slice(entry.offset, entry.offset + entry.numel)
            alone = runs[homes.get(entry.name, "dense()")]
            for mixed, expected in zip(runs[spec], alone, strict=True):
                assert torch.equal(mixed[where], expected[where]), entry.name
