"""Federated training: clients exchange models with a server once per round.

For a Flower app, two lines:

    strategy = laconic.federated.compressed(FedAvg(), up="stc(density=0.0025)", down="stc(density=0.0025)")
    app = ClientApp(mods=[laconic.federated.mod()])
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.core.extras import INSTALL_FEDERATED, require
from laconic.federated.form import Buffers
from laconic.federated.memory import KEEP_DAYS
from laconic.federated.samplings import Sampling

if TYPE_CHECKING:
    from laconic.federated.flower.mod import Mod
    from laconic.federated.flower.strategy import Compressed

__all__ = ["compressed", "mod"]


def compressed(
    strategy: Any,
    up: Any = "stc(density=0.0025)",
    down: Any = None,
    *,
    buffers: Buffers = "send",
    max_norm: float | None = None,
    sampling: Sampling | str | None = None,
    seed: int = 0,
    cache_nbytes: int | None = None,
) -> Compressed:
    """Wrap a Flower strategy to compress its messages in both directions.

    Clients need `mod()` as their first mod. Make this the outermost wrapper. The wrapped strategy sees plain
    arrays: FedAvg, FedProx, FedAdam, most of Flower's privacy wrappers and custom strategies work.

    Args:
        strategy: A `flwr.serverapp.strategy.Strategy`.
        up: Spec of the clients' updates, such as "qsgd(levels=7)".
        down: Spec of the server's messages; default: the uncompressed model.
        buffers: 'send', 'local', or names of tensors that stay with each client: see `Form`.
        max_norm: Largest norm of a client's update; longer ones are scaled.
        sampling: Sets `fraction_train` in each round, as "falling(0.2, rate=0.05)".
        seed: Seed of random codecs.
        cache_nbytes: Memory for past updates; default: the model's bytes.

    Raises:
        ExtraError: Flower is not installed.
        SpecError: An argument is invalid, or the strategy cannot be compressed.
    """
    require("flwr", "laconic.federated.compressed", INSTALL_FEDERATED)
    from laconic.federated.flower.strategy import Compressed

    return Compressed(
        strategy,
        up,
        down,
        buffers=buffers,
        max_norm=max_norm,
        sampling=sampling,
        seed=seed,
        cache_nbytes=cache_nbytes,
    )


def mod(
    folder: Path | str | None = None,
    *,
    up: str | None = None,
    down: str | None = None,
    keep_days: float = KEEP_DAYS,
) -> Mod:
    """Return a Flower client mod that decodes the received model and encodes the client's update.

    Put it first: `ClientApp(mods=[laconic.federated.mod(), ...])`. Messages of other strategies pass through.

    Args:
        folder: Folder for unsent updates, one file per run and node; default:
            $XDG_STATE_HOME/laconic/federated, or ~/.local/state/laconic/federated.
        up, down: Specs that this client accepts; default: the server's.
        keep_days: Older files of other runs are removed; 0 removes none.

    Raises:
        ExtraError: Flower is not installed.
        SpecError: `up` or `down` is invalid.
    """
    require("flwr", "laconic.federated.mod", INSTALL_FEDERATED)
    from laconic.federated.flower.mod import Mod

    return Mod(folder, up=up, down=down, keep_days=keep_days)
