"""DeMo: ranks keep their momentum local, and send only its strongest frequencies.

Peng, Quesnelle, Kingma 2024, arXiv:2411.19870. Reconstruction: the first version's equations, with our own
wire of 1.3 bytes per coefficient (public code: 12).
"""

from __future__ import annotations

from laconic.codecs.centroids import Centroids
from laconic.codecs.dct import DCT, TILES
from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.selectors.chunked_topk import ChunkedTopK
from laconic.codecs.sparse import Sparse
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.reducers.gather import Gather
from laconic.reducers.sum import Sum

CENTROIDS = Centroids()


@method(
    paper="Peng et al. 2024, arXiv:2411.19870",
    status="reconstruction",
    sends="the largest cosine coefficients of each tile of the momentum, in 2 bits, and their positions",
    examples=("demo()", "demo(density=0.05, tile=8)"),
)
def demo(
    density: float = 1 / 128, *, tile: int = 64, decay: float = 0.999, values: Codec = CENTROIDS
) -> Method:
    """Per tensor of two dimensions and more, on each rank, with the cosine transform D of tiles (see `dct`):
        m = decay * m + g;   S = top density * tile^2 of |D m| in each tile;   send C((D m)[S])
        m = m - D'(sent share);   the optimiser gets D'(mean over ranks of the sent shares)

    The paper's first version steps along the sign of the mean: `torch.optim.Adam(parameters, lr=0.001,
    betas=(0.0, 0.0))`. Any optimiser works. One-dimensional tensors are summed uncompressed.

    Payload: about density * n * (2 + log2(1 / density) + 1.5) bits, by default 1/390 of the gradient. Memory:
    one float32 per element.

    Args:
        density: Share of each tile's coefficients sent, in (0, 1].
        tile: Side of a tile, a power of two from 2 to 256.
        decay: Share of the momentum that a step keeps, in (0, 1].
        values: Codec of the coefficients.

    Raises:
        SpecError: An argument is out of range.

    >>> demo(density=0.01, decay=0.99)
    demo(density=0.01, decay=0.99)
    """
    arguments.piece("demo: values", values, Codec, "centroids()")
    arguments.choice("demo: tile", tile, TILES)
    chosen = Sparse(ChunkedTopK(density, chunk=tile * tile), values=values, indices=GOLOMB)
    return routes(
        Route(matrices, Gather(DCT(chosen, tile)), ErrorFeedback(decay, momentum="optimizer")),
        Route(everything, Sum()),
    )
