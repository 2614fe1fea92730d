"""What `laconic.distribute` and its optimiser refuse, on every rank."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import AttachError, LaconicError, SpecError, StateError
from tests.dist.nets import net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, distributed, trained


@on_ranks(2)
def test_what_cannot_be_is_refused_on_every_rank():
    """A second `distribute`, another's state, a moved model and wrong options."""
    model, optimizer = distributed("local_sgd()")

    def moved():
        model[0].weight.data = model[0].weight.data.clone()
        advance(model, optimizer, 1)

    def over(model, held=None, spec="local_sgd()"):
        return laconic.distribute(model, torch.optim.SGD((held or model).parameters(), lr=0.1), spec)

    scaler = "scaler= takes the GradScaler that the script steps by, got"
    seed = "seed must be a whole number of 0 or more, below 2^63, got"
    plain = torch.optim.SGD(net().parameters(), lr=0.1).state_dict()
    other = trained("local_sgd(every=2)", 1)[1].state_dict()
    differs = f"local_sgd(every={2 + dist.get_rank()})"
    for kind, words, call in (
        (AttachError, "distributed already", lambda: over(model, spec="dense()")),
        (SpecError, "every must be a whole number of 1 or more", lambda: distributed("local_sgd(every=0)")),
        (SpecError, "changes the optimiser", lambda: distributed("local_sgd(compressor=comp_ams())")),
        (AttachError, "statistics must be one of", lambda: distributed("local_sgd()", statistics="maximum")),
        (AttachError, "omit bucket_cap_mb=", lambda: distributed("local_sgd()", bucket_cap_mb=1)),
        (AttachError, f"{scaler} 'fp16'", lambda: distributed("local_sgd()", scaler="fp16")),
        (AttachError, f"{scaler} 8", lambda: distributed("dense()", scaler=8)),
        (SpecError, f"{seed} 0.5", lambda: distributed("local_sgd()", seed=0.5)),
        (SpecError, f"{seed} None", lambda: distributed("dense()", seed=None)),
        (
            AttachError,
            "optimizer= takes the torch.optim.Optimizer that",
            lambda: laconic.distribute(net(), None, "local_sgd()"),
        ),
        (
            AttachError,
            "got Parameter: build one over them",
            lambda: laconic.distribute(net(), net().parameters(), "dense()"),
        ),
        (AttachError, "the spec differs", lambda: distributed(differs)),
        (AttachError, "is torch.float64", lambda: over(net().double(), net())),
        (AttachError, "holds no trained parameter of this model", lambda: over(net(), net())),
        (StateError, "the state of a plain optimiser", lambda: optimizer.load_state_dict(plain)),
        (
            StateError,
            "the saved state is of spec 'local_sgd(every=2)'",
            lambda: optimizer.load_state_dict(other),
        ),
        (AttachError, "do not exchange it", lambda: optimizer.add_param_group({"params": [torch.zeros(1)]})),
        (AttachError, "the memory of 0.weight was replaced", moved),
    ):
        with pytest.raises(LaconicError, match=re.escape(words)) as caught:
            call()
        assert caught.type is kind, words
