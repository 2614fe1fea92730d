"""Circle: the group that a strategy talks in, and one beside it; both are made anew when a rank is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from laconic.comm.metered import Metered
from laconic.comm.naming import in_store
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import PeerError
from laconic.strategies.roster import Roster


class Circle:
    """`own` and `aside`, of the same ranks. With `patience_s` a lost rank is left behind by `renew`.

    `patience_s`: how long a message may take before the group is given up; None: as long as those of `group`,
    and what then fails stays failed. Called by all ranks of `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None, patience_s: float | None) -> None:
        timeout = None if patience_s is None else timedelta(seconds=patience_s)
        self._patience_s = patience_s
        self.aside, talking = (TorchComm.own(group, timeout) for _ in range(2))
        self._groups = [self.aside, talking]
        self.own = Metered(talking)
        self._like = talking
        self._name = in_store(talking.group.group_name)
        self.roster: Roster | None = None
        if patience_s is not None:
            store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
            self.roster = Roster.of(store, self._name, talking.rank, talking.size)

    @property
    def called(self) -> bool:
        """Whether another rank waits for a new circle."""
        return self.roster is not None and self.roster.called

    @property
    def late(self) -> bool:
        """Whether this process has come in the place of one that died, while the others went on."""
        return self.roster is not None and self.roster.late

    @property
    def generation(self) -> int:
        """How often the circle was made anew."""
        return 0 if self.roster is None else self.roster.generation

    def renew(self) -> None:
        """Leave the old groups, so that whoever waits in them comes too, and make new ones of the living.

        Raises `PeerError` where that fails as often as there are ranks.
        """
        assert self.roster is not None and self._patience_s is not None
        error: Exception | None = None
        for _ in self._like.ranks:
            self._leave()
            members = self.roster.regroup(timeout_s=60 + 2 * self._patience_s)
            try:
                self._make(members)
                return
            except (PeerError, RuntimeError) as failed:  # another was lost in the meantime
                error = failed
        raise PeerError(f"no new group could be made: {error}") from error

    def _make(self, members: Sequence[int]) -> None:
        assert self.roster is not None
        names = (f"{self._name}/{self.roster.generation}/{which}" for which in ("aside", "own"))
        self._groups = [TorchComm.among(members, name, like=self._like) for name in names]
        self.aside = self._groups[0]
        self.own = self.own.over(self._groups[1])

    def _leave(self) -> None:
        for group in self._groups:
            with contextlib.suppress(RuntimeError, ValueError):  # it may be broken, and is of no use any more
                group.close()
        self._groups.clear()

    def close(self) -> None:
        """Leave for good."""
        if self.roster is not None:
            self.roster.close()
        self._leave()
