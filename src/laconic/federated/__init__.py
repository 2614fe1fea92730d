"""Federated training: clients exchange models with a server once per round, over slow links.

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
    """Wrap a Flower strategy so that its messages are compressed in both directions.

    Clients need `mod()` as the first of their mods. Make this the outermost wrapper: the wrapped strategy
    sees only plain arrays, so FedAvg, FedProx, FedAdam, Flower's privacy wrappers and custom strategies all
    work.

    Args:
        strategy: A `flwr.serverapp.strategy.Strategy`.
        up: Spec of the clients' updates, such as "stc(density=0.0025)", "qsgd(levels=7)" or "dense()".
        down: Spec of the server's messages; default: the uncompressed model.
        buffers: 'send', 'local', or the names of the tensors that stay with each client: see `Form`.
        max_norm: Euclidean norm to which longer client updates are scaled; default: no limit.
        sampling: Sets the strategy's `fraction_train` in each round, for example "falling(0.2, rate=0.05)".
        seed: Seed of random codecs.
        cache_nbytes: Memory for past updates; default: the bytes of one model.

    Raises:
        ExtraError: Flower is not installed.
        SpecError: A spec or an argument is invalid, or the strategy does not support compression.
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

    Put it first: `ClientApp(mods=[laconic.federated.mod(), ...])`. Messages that a `compressed` strategy did
    not create pass through unchanged.

    Args:
        folder: Folder for the updates that a client has not sent yet, one file per run and node; default:
            $XDG_STATE_HOME/laconic/federated, or ~/.local/state/laconic/federated if the variable is not set.
        up, down: Specs that this client accepts; default: those the server asks for.
        keep_days: Files of other runs that are older than this are removed; 0 removes none.

    Raises:
        ExtraError: Flower is not installed.
        SpecError: `up` or `down` is not a valid spec between a client and a server.
    """
    require("flwr", "laconic.federated.mod", INSTALL_FEDERATED)
    from laconic.federated.flower.mod import Mod

    return Mod(folder, up=up, down=down, keep_days=keep_days)
