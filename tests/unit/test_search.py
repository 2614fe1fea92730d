"""The search of autotune on steps whose seconds vary."""

from __future__ import annotations

import random
from statistics import mean, median

from tests.unit.shared import for_each

from laconic.reducers.autotune.search import MORE, Search, Timed

LINKS = {  # seconds of a step with each candidate, on the GPT of benchmarks.steps; the last one is sparse
    "100mbit": [5.0, 2.8, 1.9, 1.3, 0.75],
    "1gbit": [0.62, 0.50, 0.44, 0.40, 0.35],
    "1gbit, slower processor": [0.96, 0.83, 0.86, 0.85, 0.73],
    "unshaped": [0.77, 0.80, 0.78, 0.79, 0.75],
}
SOON = 150  # steps, after which most steps have a good candidate


def found(seconds: list[float], spread: float, seed: int) -> tuple[int, float]:
    """Return the choice of a search on log-normal seconds, and the median expected step from SOON on."""
    rng = random.Random(seed)
    trial = Search(0.05, len(seconds) - 1, twice=[len(seconds) - 1]).run(0, {MORE})
    used, expected, chosen = next(trial), [], None
    while chosen is None or len(expected) < SOON + 20:
        expected.append(seconds[used])
        took = seconds[used] * rng.lognormvariate(0, spread)
        try:
            used = used if chosen is not None else trial.send(Timed(0.4 * took, took))
        except StopIteration as end:
            used = chosen = end.value
    return chosen, median(expected[SOON : SOON + 20])


@for_each("link", LINKS)
def test_soon_most_steps_come_close_to_the_best(link: str) -> None:
    seconds = LINKS[link]
    for spread in (0.05, 0.1, 0.15):
        runs = [found(seconds, spread, seed) for seed in range(40)]
        assert median(step for _, step in runs) <= 1.05 * min(seconds), (spread, runs)
        assert mean(step for _, step in runs) <= 1.1 * min(seconds), (spread, runs)
        assert mean(seconds[chosen] for chosen, _ in runs) <= 1.05 * min(seconds), (spread, runs)


def test_a_sparse_candidate_is_tried_after_two_misses_and_no_second_one() -> None:
    tried = set()
    trial = Search(0.05, 4, twice=[3, 4]).run(0, {MORE})
    used = next(trial)
    try:
        while True:
            tried.add(used)
            used = trial.send(Timed(0.5, 1.0 + used))
    except StopIteration as end:
        assert end.value == 0
    assert tried == {0, 1, 2, 3}
