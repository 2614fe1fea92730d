"""The GAN of examples/: two optimisers take some steps, alone, together, and on MNIST where it is at hand."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.unit.shared import for_each

import laconic
from laconic.core.errors import DataError
from laconic.tools.tasks.mnist import load

FILE = Path(__file__).parents[2] / "examples" / "gan.py"


@pytest.fixture(scope="module")
def gan() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_gan", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shapes(count: int) -> torch.Tensor:
    """White squares at random places, uint8 (count, 1, 28, 28)."""
    rng = torch.Generator().manual_seed(0)
    images = torch.zeros(count, 1, 28, 28, dtype=torch.uint8)
    for image, (x, y) in zip(images, torch.randint(18, (count, 2), generator=rng).tolist(), strict=True):
        image[:, y : y + 10, x : x + 10] = 255
    return images


@for_each("spec", ["single", "local(replicas=2)"])
def test_both_networks_learn(gan: ModuleType, spec: str, tmp_path: Path) -> None:
    """The discriminator leaves 2 ln 2, the loss of one that guesses, and the generator is seen to answer."""
    picture = tmp_path / "digits.pgm"
    results = laconic.Replicator(spec).launch(
        lambda replicator: gan.train(replicator, shapes(256), steps=12, picture=picture)
    )
    assert all(losses == results[0] for losses in results)
    judged = [each for each, _ in results[0]]
    assert all(math.isfinite(each) for pair in results[0] for each in pair)
    assert judged[0] == pytest.approx(2 * math.log(2), rel=0.1)
    assert min(judged) < 0.9 * judged[0]
    assert results[0][-1][1] < 0.95 * results[0][0][1]
    assert picture.read_bytes().startswith(b"P5 224 224 255\n")
    assert len(picture.read_bytes()) == 15 + 224 * 224


def test_its_norm_is_torchs_over_the_whole_batch(gan: ModuleType) -> None:
    whole = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))

    def main(replicator: laconic.Replicator) -> torch.Tensor:
        norm = gan.CrossReplicaNorm(replicator, 5)
        out: torch.Tensor = norm(whole.chunk(replicator.replicas)[replicator.replica])
        return out.detach()

    found = torch.cat(laconic.Replicator("local(replicas=4)").launch(main))
    torch.testing.assert_close(found, torch.nn.BatchNorm1d(5)(whole).detach(), rtol=1e-4, atol=1e-5)


def test_it_takes_steps_on_mnist(gan: ModuleType) -> None:
    try:
        images = load()["train_x"]
    except DataError as error:
        pytest.skip(f"MNIST is not at hand: {error}")
    (losses,) = laconic.Replicator("single").launch(lambda each: gan.train(each, images, steps=3))
    assert losses[-1][0] < losses[0][0]
