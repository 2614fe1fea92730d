"""Federated training: clients that meet a server now and then, over links that are slow both ways.

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
    """A Flower strategy that does what `strategy` does, with compressed messages both ways.

    Its clients need `mod()`, the first of their mods. It is the outermost wrapper of strategies: the wrapped
    one sees plain arrays only, so FedAvg, FedProx, FedAdam, Flower's privacy wrappers and one's own all work.

    Args:
        strategy: A `flwr.serverapp.strategy.Strategy`.
        up: What clients send: a spec such as "stc(density=0.0025)", "qsgd(levels=7)" or "dense()".
        down: What the server answers; default: its model as it is.
        buffers: 'send' or 'local', or the names of what stays with each client: see `Form`.
        max_norm: A client's longer update is scaled to this Euclidean norm; default: none is.
        sampling: Sets the strategy's `fraction_train` in each round, as "falling(0.2, rate=0.05)".
        seed: Of what random codecs draw.
        cache_nbytes: Memory for past answers; default: the bytes of one model.

    Raises:
        ExtraError: Flower is not installed.
        SpecError: A spec or an argument cannot be used, or the strategy does not go with compression.
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
    """A Flower client mod that decodes the model that comes down and encodes the update that goes up.

    Put it first: `ClientApp(mods=[laconic.federated.mod(), ...])`. Messages that no `compressed` strategy has
    made pass through as they are.

    Args:
        folder: Where a client keeps what it has not sent yet, one file for each run and node; default:
            $XDG_STATE_HOME/laconic/federated, where that is not set ~/.local/state/laconic/federated.
        up, down: The specs that this client accepts; default: whatever the server asks for.
        keep_days: Files of other runs that were not written for so long are removed; 0 removes none.

    Raises:
        ExtraError: Flower is not installed.
        SpecError: `up` or `down` is no spec that goes between a client and a server.
    """
    require("flwr", "laconic.federated.mod", INSTALL_FEDERATED)
    from laconic.federated.flower.mod import Mod

    return Mod(folder, up=up, down=down, keep_days=keep_days)
