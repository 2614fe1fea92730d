"""FastSGD: large entries only, their values as small logarithms, their positions in widths that suit them.

Yang, Chen, Zeng, Gao 2021, arXiv:2112.04291. Reconstruction from the abstract, all that is public: gradients
as keys and values, in linear time; values by a reciprocal mapper, a logarithm quantised to small integers,
and a threshold on these; keys by adaptive fine-grained delta encoding.
"""

from __future__ import annotations

import math

from laconic.codecs.indices.fine_delta import FineDelta
from laconic.codecs.logquant import Logquant
from laconic.codecs.selectors.above_share import LEAST_SHARE, AboveShare
from laconic.codecs.sparse import Sparse
from laconic.core import arguments
from laconic.reducers.gather import Gather
from laconic.reducers.sum import Sum
from laconic.strategies.method import Method, Route, everything, matrices, method, routes

MOST = 254


@method(
    paper="Yang et al. 2021, arXiv:2112.04291",
    status="reconstruction",
    sends="where the entries are that are large beside the largest, and their rounded logarithms",
    examples=("fastsgd()", "fastsgd(base=1.5, floor=4)"),
)
def fastsgd(base: float = 2.0, *, floor: int = 3) -> Method:
    """Per tensor of two dimensions and more, on each rank, with s = max |g|:

        q = round(log_base(s / |g|));   keep those with q <= floor
        send s, and of each kept entry its position, its sign and q;   C(g) = sign(g) * s * base^-q

    How many that are, the gradient decides, and networks are not sparse as the paper's logistic models are.
    Of the weights of a small network (benchmarks/gradient.py), floor = 1, 2, 3, 4 keeps 3, 14, 29 and 44 %,
    with 51, 85, 97 and 99.4 % of the squared norm. For a density of one's own choice there is `topk`.
    Payload: about k (log2(floor + 2) + log2(n / k) + 3.4) bits of k kept among n.

    What is dropped is lost: the abstract knows no error feedback. With it, all arrives in time:
    `error_fed(sparse(above_share(share=0.0884), values=logquant(levels=4), indices=fine_delta()))` is
    floor = 3. Tensors of one dimension are summed as they are.

    >>> fastsgd(floor=2)
    fastsgd(floor=2)
    """
    most = highest_floor(Logquant(base))
    arguments.whole("fastsgd: floor", floor, 0, most, f"with base={base} more is under {LEAST_SHARE} of s")
    values = Logquant(base, levels=floor + 1)
    select = AboveShare(values.least_share)
    codec = Sparse(select, values=values, indices=FineDelta())
    return routes(Route(matrices, Gather(codec)), Route(everything, Sum()))


def highest_floor(values: Logquant) -> int:
    """The largest floor whose entries, base^-(floor + 1/2) of the largest and more, can be told apart.

    >>> highest_floor(Logquant(base=2)), highest_floor(Logquant(base=1.1))
    (99, 254)
    """
    return min(MOST, math.floor(-math.log(LEAST_SHARE, values.base) - 0.5))
