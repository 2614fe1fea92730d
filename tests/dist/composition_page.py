"""Writes docs/composition.md from the result of every cell.

python -m tests.dist.composition_page > docs/composition.md
"""

from __future__ import annotations

import sys

from tests.dist.composition import FEATURES, METHODS, tried
from tests.dist.pool import Pool

CELLS = [(spec, feature) for spec in METHODS for feature in FEATURES]


def page(found: dict[tuple[str, str], str]) -> str:
    """The page, in Markdown, of the text of all cells."""
    rows = {spec: [found[spec, feature] for feature in FEATURES] for spec in METHODS}
    lines = [
        "# What works together",
        "",
        "The tests try every cell on two gloo processes: either it trains and replicas stay bit-identical",
        "(with 0/1 Adam, at its rounds), or it is refused with a clear error. `make docs` writes this page.",
        "",
        "| method | " + " | ".join(FEATURES) + " |",
        "|---|" + "---|" * len(FEATURES),
    ]
    refusals = dict.fromkeys(said for cells in rows.values() for said in cells if said.startswith("refused"))
    number = {said: f"refused ({i})" for i, said in enumerate(refusals, start=1)}
    for spec, cells in rows.items():
        lines.append(f"| `{spec}` | " + " | ".join(number.get(said, said) for said in cells) + " |")
    notes = [
        "",
        *(f"{i}. {said}" for i, said in enumerate(refusals, start=1)),
        "",
        "- *clipping*: where momentum is applied before the exchange, a gradient holds velocity; once it has"
        " been clipped, momentum is the optimiser's. `dgc` warns of it once, and has `clip=`.",
        "- *Join*: a rank without further inputs continues to send its residuals.",
        "- *unused parameters*: a mean gradient is applied even if no rank used the parameter in that step.",
        "- *sparse embeddings*: their gradients are gathered without compression. torch's Adam does not"
        " accept sparse gradients, so the test uses SGD there.",
        "- *bf16, fp16 and fp64 parameters*: the exchange is in float32, or in the type that the method"
        " sends.",
        "- *Join* under 1-bit and 0/1 Adam is `Join([model, handle])`: they communicate inside"
        " `optimizer.step()`, which a rank without further inputs does not call, so the handle calls it"
        " there. It takes no `find_unused_parameters` and no `static_graph`.",
        "- `compress` refuses DDP's `mixed_precision=`, which occupies DDP's only hook.",
    ]
    return "\n".join([*lines, *notes, ""])


if __name__ == "__main__":
    pool = Pool()
    try:
        sys.stdout.write(page(tried(pool, CELLS)))
    finally:
        pool.close()
