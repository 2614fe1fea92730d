"""DGC's warm-up by epochs: every step of an epoch has its density, and the last one stays."""

from __future__ import annotations

from tests.unit.shared import for_each, refuses

from laconic.core.errors import SpecError
from laconic.exchange.method import lift
from laconic.methods.dgc import by_epoch, dgc


def densities(spec: object, steps: int) -> list[float]:
    codec = lift(spec).routes[0].reducer.feedback_codec()
    assert codec is not None
    return [codec.at(step).select.density for step in range(steps)]  # type: ignore[attr-defined]


@for_each("steps_per_epoch", [1, 7, 391])
def test_an_epoch_has_one_density(steps_per_epoch: int) -> None:
    """75, 93.75, 98.4375 and 99.6 % sparsity in the first four epochs, then 99.9 %."""
    spec = dgc(**by_epoch(steps_per_epoch=steps_per_epoch))
    found = densities(repr(spec), 6 * steps_per_epoch)
    paper = [0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001]
    assert found == [paper[step // steps_per_epoch] for step in range(6 * steps_per_epoch)]


def test_no_epoch_falls_below_the_density() -> None:
    spec = dgc(0.05, **by_epoch(0.05, epochs=4, steps_per_epoch=2))
    assert densities(spec, 10) == [0.25, 0.25, 0.0625, 0.0625] + [0.05] * 6


@for_each(
    "given, says",
    [
        ({"epochs": 0, "steps_per_epoch": 5}, "by_epoch: epochs must be"),
        ({"steps_per_epoch": 0}, "by_epoch: steps_per_epoch must be"),
        ({"density": 2, "steps_per_epoch": 5}, "density must be"),
    ],
)
def test_a_wrong_argument_is_refused(given: dict[str, int], says: str) -> None:
    refuses(SpecError, says, by_epoch, **given)


def test_answers_are_never_sparser_in_the_warm_up_than_after_it() -> None:
    reducer = lift(dgc(0.001, warmup_steps=8, down=0.1)).routes[0].reducer
    found = [(reducer.up.at(step), reducer.down.at(step)) for step in range(12)]  # type: ignore[attr-defined]
    for step, (up, down) in enumerate(found):
        assert down.select.density == max(up.select.density, 0.1), f"step {step}"
