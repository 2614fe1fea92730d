"""Policies: which tensor goes which way, what they print, and that they change nothing else."""

from __future__ import annotations

import re

import pytest
import torch
from tests.laws.worlds import everywhere, exchange_on, gradient, one_step

from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.feedback.momentum_correction import MomentumCorrection

MODEL = Layout.of(
    [
        ("embed.weight", (50, 8)),
        ("blocks.0.norm.weight", (8,)),
        ("blocks.0.mlp.weight", (8, 16)),
        ("blocks.0.mlp.bias", (8,)),
        ("head.weight", (5, 8)),
    ]
)


def ways(spec):
    """The reducer of every tensor, as text."""
    method = lift(spec)
    parts = zip(method.routes, method.assign(MODEL), strict=True)
    return {name: repr(route.reducer) for route, part in parts for name in part.names}


def test_the_first_matching_pattern_wins():
    spec = "by_name({'*embed*': cast('fp16'), '*weight': cast('bf16'), '*mlp*': fp16()}, rest=dense())"
    assert ways(spec) == {
        "embed.weight": "gather(cast(dtype='fp16'))",
        "blocks.0.norm.weight": "sum()",  # has one dimension, and a codec leaves these dense
        "blocks.0.mlp.weight": "gather(cast(dtype='bf16'))",
        "blocks.0.mlp.bias": "sum(dtype='fp16')",
        "head.weight": "gather(cast(dtype='bf16'))",
    }


def test_a_method_carries_what_it_is_given_whole():
    assert ways("by_name({'*norm*': fp16(), '*bias': bf16()}, rest=dense())") == {
        "embed.weight": "sum()",
        "blocks.0.norm.weight": "sum(dtype='fp16')",
        "blocks.0.mlp.weight": "sum()",
        "blocks.0.mlp.bias": "sum(dtype='bf16')",
        "head.weight": "sum()",
    }


def test_size_decides_and_the_limit_itself_is_large():
    assert ways("by_size(128, large=cast('fp16'), small=bf16())") == {
        "embed.weight": "gather(cast(dtype='fp16'))",
        "blocks.0.norm.weight": "sum(dtype='bf16')",
        "blocks.0.mlp.weight": "gather(cast(dtype='fp16'))",
        "blocks.0.mlp.bias": "sum(dtype='bf16')",
        "head.weight": "sum(dtype='bf16')",
    }


def test_policies_nest():
    inner = "by_size(100, large=cast('bf16'))"
    assert ways(f"by_name({{'head*': cast('fp16')}}, rest={inner})") == {
        "embed.weight": "gather(cast(dtype='bf16'))",
        "blocks.0.norm.weight": "sum()",
        "blocks.0.mlp.weight": "gather(cast(dtype='bf16'))",
        "blocks.0.mlp.bias": "sum()",
        "head.weight": "gather(cast(dtype='fp16'))",
    }


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    "names", ["{'*embd*': fp16()}", "{'*': bf16(), '*embd*': fp16()}", "{'*norm*': bf16(), '*embd*': fp16()}"]
)
def test_a_pattern_that_matches_nothing_is_refused_when_it_is_attached(names):
    method = lift(f"by_name({names}, rest=dense())")
    with pytest.raises(
        SpecError, match=r"no tensor of this model matches '\*embd\*'; it has 5: embed.weight"
    ):
        everywhere(1, lambda comm: exchange_on(comm, method, layout=MODEL))


@pytest.mark.parametrize(
    ("names", "earlier"),
    [
        ("{'*': bf16(), '*norm*': fp16()}", "'*'"),
        ("{'*norm*': bf16(), '*norm.weight': fp16(), 'embed*': fp16()}", "'*norm*'"),
        ("{'*bias': bf16(), '*.0.mlp.w*': bf16(), '*mlp*': fp16()}", "'*.0.mlp.w*' and '*bias'"),
    ],
)
def test_a_pattern_whose_tensors_earlier_ones_take_is_refused(names, earlier):
    method = lift(f"by_name({names}, rest=dense())")
    with pytest.raises(SpecError, match=re.escape(f"go to {earlier}, which come first")):
        everywhere(1, lambda comm: exchange_on(comm, method, layout=MODEL))


def test_routes_that_are_alike_share_their_collectives():
    spec = "by_name({'*norm*': dense(), 'head*': cast('bf16')}, rest=by_size(200, large=topk(0.1)))"
    reducers = [route.reducer for route in lift(spec).routes]
    assert [repr(each) for each in reducers].count("sum()") == 1 and len(reducers) == 3


def test_feedback_and_rules_are_those_of_the_arms():
    method = lift("by_name({'embed*': topk(0.1), '*norm*': fp16()}, rest=dgc(0.1))")
    assert [rule for rule, _ in method.governed(MODEL)] == list(lift("dgc(0.1)").rules)
    governed = {name for _, part in method.governed(MODEL) for name in part.names}
    assert governed == {"blocks.0.mlp.weight", "head.weight"}
    kinds = [type(route.feedback) for route in method.routes]
    assert kinds.count(MomentumCorrection) == 1


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
