"""Partitions: every example is with one client at most, and the deal depends on nothing but its arguments."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import laconic
from laconic.core import spec
from laconic.core.errors import SpecError
from laconic.data import draws
from laconic.data.partition import Partition
from laconic.data.partition.classes_per_client import sizes

NAMES = sorted(name for name, home in spec.modules().items() if home.startswith("laconic.data.partition."))
SPECS = sorted(
    {text for name in NAMES for text in (f"{name}()", *spec.find(name).examples)}  # type: ignore[attr-defined]
)
LABELS = torch.arange(4000) * 7 % 10  # 400 of each
every_rule = pytest.mark.parametrize("text", SPECS)


def digest(shares: list[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for share in shares:
        found.update(share.numpy().tobytes() + b"|")
    return found.hexdigest()


def held(shares: list[Tensor], kinds: Tensor = LABELS) -> list[int]:
    """Number of kinds of each client."""
    return [len(kinds[share].unique()) for share in shares]


def test_there_is_something_to_test() -> None:
    assert NAMES == ["by_speaker", "classes_per_client", "dirichlet", "iid", "label_shards", "lda"]
    assert len(SPECS) >= 12


@every_rule
def test_a_spec_is_read_back(text: str) -> None:
    rule = laconic.parse(text)
    assert isinstance(rule, Partition) and laconic.parse(repr(rule)) == rule


@settings(max_examples=150, deadline=None)
@given(
    text=st.sampled_from(SPECS),
    kinds=st.lists(st.integers(-3, 9), min_size=1, max_size=80),
    clients=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_deal_is_a_partition(text: str, kinds: list[int], clients: int, seed: int) -> None:
    """Disjoint, ascending, complete where promised, nobody without; or it is refused with a reason."""
    rule = laconic.parse(text)
    try:
        shares = rule.deal(kinds, clients, seed)
    except SpecError:
        assume(False)
    every = torch.cat(shares)
    assert len(shares) == clients and all(share.dtype == torch.int64 and len(share) for share in shares)
    assert all(bool((share.diff() > 0).all()) for share in shares)
    assert len(every.unique()) == len(every) and int(every.min()) >= 0 and int(every.max()) < len(kinds)
    assert not rule.complete or len(every) == len(kinds)
    assert all(map(torch.equal, shares, rule.deal(torch.tensor(kinds), clients, seed)))


@pytest.mark.parametrize("text", ["iid()", "label_shards()", "dirichlet()", "lda()", "classes_per_client()"])
def test_what_any_data_allows_is_not_refused(text: str) -> None:
    for clients in (1, 2, 7, 100, 2000):
        assert len(laconic.parse(text).deal(LABELS, clients)) == clients


@every_rule
def test_a_deal_is_lazy_and_the_same_for_each_client_alone(text: str) -> None:
    rule = laconic.parse(text)
    shares = rule.deal(LABELS, 5, seed=3)
    for client in (4, 0):
        deal = rule.over(LABELS, 5, seed=3)
        assert "shares" not in vars(deal)
        assert torch.equal(deal.indices(client), shares[client])
    assert deal.sizes == [len(share) for share in shares]
    assert deal.counts().tolist() == [
        torch.bincount(LABELS[share], minlength=10).tolist() for share in shares
    ]
    assert deal.counts(torch.zeros(4000, dtype=torch.int32)).flatten().tolist() == deal.sizes


@pytest.mark.parametrize("text", [text for text in SPECS if "speaker" not in text])
def test_another_seed_deals_otherwise(text: str) -> None:
    rule = laconic.parse(text)
    assert digest(rule.deal(LABELS, 20, seed=0)) != digest(rule.deal(LABELS, 20, seed=1))


KNOWN = {
    "iid()": "87688075bfad518f",
    "label_shards()": "83607dde3d3d0fab",
    "classes_per_client(2, gamma=0.9)": "b35d6d1561807f85",
    "lda(alpha=0.5)": "39ffd67fda178da7",
    "by_speaker()": "71bb0fe0b41ca5de",
}


@pytest.mark.parametrize("text", KNOWN)
def test_a_deal_is_the_same_in_every_process_and_release(text: str) -> None:
    assert digest(laconic.parse(text).deal(LABELS, 7, seed=5)) == KNOWN[text]


def test_another_process_deals_the_same() -> None:
    code = (
        "import torch, laconic\n"
        "shares = laconic.parse('lda(alpha=0.1)').deal(torch.arange(4000) * 7 % 10, 7, seed=5)\n"
        "print([share.sum().item() for share in shares])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
    )
    here = [share.sum().item() for share in laconic.parse("lda(alpha=0.1)").deal(LABELS, 7, seed=5)]
    assert done.stdout.strip() == str(here)


def test_bits_are_those_of_splitmix64_and_an_order_is_fair() -> None:
    """The generator's published outputs for seed 1234567; each item in each place in a 24th of the orders."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert draws.bits(1234567, 4).tolist() == published
    assert draws.bits((1 << 64) - 1, 2).dtype == np.uint64
    orders = [tuple(draws.order(key * 977, 4).tolist()) for key in range(24_000)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    assert len(counts) == 24 and abs(counts - 1000).max() < 160, "5 sigma are 155"


def test_iid_sizes_are_even_and_its_mix_is_that_of_all() -> None:
    deal = laconic.parse("iid()").over(LABELS, 7)
    assert deal.sizes == [572, 572, 572, 571, 571, 571, 571]
    assert int((deal.counts() - 57).abs().max()) < 38, "5 sigma of 57 of 400"


def test_two_shards_hold_at_most_two_labels_where_shards_fit_labels() -> None:
    deal = laconic.parse("label_shards()").over(LABELS, 100)
    assert set(deal.sizes) == {40} and set(held(deal.shares)) == {1, 2}
    by_place = LABELS.argsort(stable=True).view(200, 20).sort().values.tolist()
    whole = {tuple(shard) for shard in by_place}
    for share in deal.shares[:10]:
        assert sum(set(shard) <= set(share.tolist()) for shard in whole) == 2
    uneven = laconic.parse("label_shards(3)").over(LABELS[:1001], 7).sizes
    assert sum(uneven) == 1001 and max(uneven) - min(uneven) <= 3


def formula(n: int, clients: int, gamma: Fraction) -> list[int]:
    """The paper's, written out: frac_i = 0.1 / N + 0.9 gamma^i / sum gamma^j, reversed."""
    total = sum(gamma**j for j in range(clients))
    fracs = [Fraction(1, 10 * clients) + Fraction(9, 10) * gamma**i / total for i in range(clients)]
    return [int(frac * n) for frac in fracs][::-1]


@pytest.mark.parametrize(
    ("n", "clients", "gamma", "known"),
    [
        (1000, 4, 0.5, [85, 145, 265, 505]),  # 25 + 900 / 15 * (1, 2, 4, 8)
        (1500, 2, 0.5, [525, 975]),  # 75 + 1350 / 3 * (1, 2)
        (100, 3, 1.0, [33, 33, 33]),
        (60000, 100, 1.0, [600] * 100),
        (7, 1, 0.9, [7]),
    ],
)
def test_sizes_are_those_of_the_paper(n: int, clients: int, gamma: float, known: list[int]) -> None:
    assert sizes(n, clients, gamma) == known


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 10**6), clients=st.integers(1, 40), gamma=st.floats(0.01, 0.999))
def test_sizes_are_the_formula_and_ascend(n: int, clients: int, gamma: float) -> None:
    found = sizes(n, clients, gamma)
    assert found == formula(n, clients, Fraction(gamma)) == sorted(found)
    assert n - clients < sum(found) <= n


def test_a_client_starts_at_a_class_of_its_own_and_takes_the_next() -> None:
    for seed in range(5):
        counts = laconic.parse("classes_per_client(3)").over(LABELS, 4, seed).counts()[0].tolist()
        first = next(k for k in range(10) if counts[k] and not counts[k - 1])
        around = counts[first:] + counts[:first]
        assert around == [333, 333, 333, 1, 0, 0, 0, 0, 0, 0], "1000 is not three times 333"
    even = laconic.parse("classes_per_client(2)").over(LABELS, 100)
    assert set(even.sizes) == {40} and min(held(even.shares)) == 2
    assert held(even.shares)[:20] == [2] * 20, "only the last find classes used up"
    one = laconic.parse("classes_per_client(1)").over(LABELS, 10, seed=0)
    assert sorted(held(one.shares)) == [1] * 10, "ten clients of 400 take ten classes of 400"


def test_dirichlet_deals_the_bits_that_skewed_shards_always_had() -> None:
    """Digests of `tasks.skew.dealt` before it moved here."""
    known = {
        (4000, 8, 0.1, 0, 16): "5e0b5699c28eddc9",
        (4000, 5, 1000.0, 7, 0): "83d2f47eca98ce8f",
        (50, 6, 1e-3, 3, 8): "52a8eddc6bcdea49",
    }
    for (n, clients, alpha, seed, least), digested in known.items():
        rule = laconic.parse(f"dirichlet(alpha={alpha}, least={least})")
        assert digest(rule.deal(LABELS[:n], clients, seed)) == digested
    tiny = laconic.parse("dirichlet(alpha=1e-300, least=0)")
    assert digest(tiny.deal(LABELS - 3, 3, 5)) == "9ebc01c298229784"


def test_lda_is_equal_in_size_and_skewed_by_alpha() -> None:
    for alpha in (1e-300, 0.1, 1000.0, 1e300):
        assert laconic.parse(f"lda(alpha={alpha})").over(LABELS, 7).sizes == [572, 572, 572, *[571] * 4]
    even = laconic.parse("lda(alpha=1e6)").over(LABELS, 8).counts()
    assert int((even - 50).abs().max()) < 35, "5 sigma of 50 of 500"
    skewed = laconic.parse("lda(alpha=0.01)").deal(LABELS, 100)
    assert np.median(held(skewed)) <= 2


def test_lda_mixes_have_the_variance_of_their_distribution() -> None:
    """First clients of 300 deals: (k - 1) / (k^2 (k alpha + 1)) plus multinomial noise, within a seventh."""
    rule, size, alpha = laconic.parse("lda(alpha=0.5)"), 400, 0.5
    shares = torch.stack([rule.over(LABELS, 10, seed).counts()[0] / size for seed in range(300)])
    spread = 9 / (100 * (10 * alpha + 1))
    expected = spread + (0.09 - spread) / size
    assert float((shares - 0.1).square().mean()) == pytest.approx(expected, rel=1 / 7)


def test_speakers_with_little_are_left_out_or_joined() -> None:
    speakers = torch.tensor([5, 5, 5, 2, 9, 9, 1, 7, 5])
    deal: Any = laconic.parse("by_speaker(least=2)").deal
    assert [share.tolist() for share in deal(speakers)] == [[0, 1, 2, 8], [4, 5]]
    joined: Any = laconic.parse("by_speaker(least=2, few='join')").deal
    assert [share.tolist() for share in joined(speakers)] == [[0, 1, 2, 8], [4, 5], [3, 6, 7]]
    assert [share.tolist() for share in laconic.parse("by_speaker(least=4, few='join')").deal(speakers)] == [
        [0, 1, 2, 8],
        [3, 4, 5, 6, 7],
    ]
    assert all(map(torch.equal, deal(speakers, 2, 9), deal(speakers)))
    drawn = {tuple(map(tuple, (s.tolist() for s in deal(speakers, 1, seed)))) for seed in range(20)}
    assert drawn == {((0, 1, 2, 8),), ((4, 5),)}


@pytest.mark.parametrize(
    "text",
    ["lda(alpha=0)", "lda(alpha=-1.0)", "dirichlet(alpha=0)", "dirichlet(alpha=-0.5)", "dirichlet(least=-1)"]
    + ["classes_per_client(0)", "classes_per_client(2.5)", "label_shards(0)", "by_speaker(least=0)"]
    + [f"classes_per_client(gamma={gamma})" for gamma in (0, 1.5, -1.0, "'high'")],
)
def test_an_argument_outside_its_limits_is_named(text: str) -> None:
    name = text.partition("(")[0]
    with pytest.raises(SpecError, match=rf"{name}: \w+ must be .*, got "):
        laconic.parse(text)


def test_by_speaker_knows_two_ways() -> None:
    with pytest.raises(SpecError, match="few must be 'leave' or 'join', got 'drop'"):
        laconic.parse("by_speaker(few='drop')")


@pytest.mark.parametrize(
    ("text", "kinds", "clients", "words"),
    [
        ("iid()", [0, 1], 0, r"clients must be a whole number in 1\.\.2, got 0"),
        ("iid()", [0, 1], 3, r"clients must be a whole number in 1\.\.2, got 3; each needs an example"),
        ("iid()", [0, 1], None, r"iid\(\) works for any number of clients: pass one"),
        ("iid()", [0, 1], 1.0, "clients must be a whole number"),
        ("iid()", [], 1, r"kinds \(labels or speakers\) must hold one integer per example, got none"),
        ("iid()", [0.5, 1.0], 1, r"kinds \(labels or speakers\) must be integers, got torch.float"),
        ("iid()", [True, False], 1, r"kinds \(labels or speakers\) must be integers, got torch.bool"),
        ("iid()", torch.eye(3).long(), 1, r"got shape \(3, 3\); for one-hot rows use argmax"),
        (
            "iid()",
            ["cat", "dog"],
            1,
            r"kinds \(labels or speakers\) must be integers \(n,\), got \['cat', 'dog'\]",
        ),
        ("iid()", [[1], [1, 2]], 1, r"kinds \(labels or speakers\) must be integers \(n,\), got"),
        ("iid()", 3, 1, "one per example, got 3"),
        ("label_shards()", [0, 1, 2], 2, "2 clients need 4 shards, but there are 3 examples; use at most 1"),
        ("dirichlet(least=2)", [0, 1, 2], 2, r"least must be at most 1 for 3 examples on 2 clients, got 2"),
        ("classes_per_client(3)", [4, 4, 9], 1, r"classes must be in 1\.\.2, the number of labels, got 3"),
        ("classes_per_client(1, gamma=0.1)", [0] * 9, 9, "without any of 9 examples among 9 clients"),
        ("by_speaker()", [0, 1, 2], None, "no speaker has 2 examples; the longest part has 1"),
        ("by_speaker()", [0, 0, 2], 2, "clients must be at most 1, the number of speakers, got 2"),
        ("by_speaker()", [0, 0, 2], 0, "clients must be a whole number of 1 or more"),
    ],
)
def test_what_cannot_be_dealt_says_why(text: str, kinds: Any, clients: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        laconic.parse(text).over(kinds, clients)


def test_a_client_or_a_seed_outside_the_range_is_refused() -> None:
    deal = laconic.parse("iid()").over(LABELS, 5)
    for client in (5, -1, 1.0):
        with pytest.raises(SpecError, match=r"client must be a whole number in 0\.\.4, got .*there are 5"):
            deal.indices(client)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="seed must be a whole number"):
        laconic.parse("iid()").over(LABELS, 5, seed=-1)


def test_labels_may_be_bytes_arrays_or_lists() -> None:
    rule = laconic.parse("label_shards()")
    forms = [LABELS, LABELS.to(torch.uint8), LABELS.numpy().astype(np.int16), LABELS.tolist()]
    assert len({digest(rule.deal(form, 9, 1)) for form in forms}) == 1
