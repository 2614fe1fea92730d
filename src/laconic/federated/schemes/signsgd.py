"""signSGD on updates: one bit per entry from each client, and a majority vote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from laconic.core.spec import Status
from laconic.federated.rounds import Aggregate, majority
from laconic.federated.schemes import Scheme


@dataclass(frozen=True, repr=False)
class SignSGD(Scheme):
    """w += median over clients of mean |update| * sign(sum over clients of sign(update)), tensor by tensor.

    Bernstein et al. 2018, arXiv:1802.04434 and 1810.05291, on updates instead of gradients, as in Sattler et
    al. 2019 (arXiv:1903.02891). The paper uses a constant step, ours the median of the clients' magnitudes,
    which no single client can move far. Clients send one bit per entry and keep no residual; the model is
    sent uncompressed.
    """

    name: ClassVar[str] = "signsgd"
    paper: ClassVar[str] = "Bernstein et al. 2018, arXiv:1810.05291"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = ("signsgd()",)

    @property
    def up(self) -> Any:
        return "gather(signmean())"

    @property
    def aggregate(self) -> Aggregate:
        return majority
