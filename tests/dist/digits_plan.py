"""The plan of a training of digits by workers that may be lost."""

from __future__ import annotations

from laconic.tasks import find
from laconic.tasks.loading import prepare
from laconic.tasks.settings import TrainingSettings


def digits_plan(folder, *, workers, steps, eval_every, patience_s):
    """SGP on 16 digits a worker and step; the data are written into `folder`."""
    prepare(find("digits"), None, folder / "data.pt")
    return TrainingSettings(
        task="digits",
        model=None,
        spec="sgp()",
        seed=0,
        workers=workers,
        steps=steps,
        batch=16,
        lr=None,
        eval_every=eval_every,
        checkpoint_every=0,
        data=folder / "data.pt",
        folder=folder,
        threads=1,
        patience_s=patience_s,
    )
