"""What `laconic.distribute` and its optimiser refuse, on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

import laconic
from laconic.core.errors import AttachError, LaconicError, SpecError, StateError
from tests.dist.distribute_world import pair, trained
from tests.dist.nets import loss_of, net


def refused(spec, **options):
    """The errors of a second `distribute`, another's state, a moved model."""
    said = []
    model, optimizer = pair("local_sgd()")
    for attempt in (
        lambda: laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "dense()"),
        lambda: pair("local_sgd(every=0)"),
        lambda: pair("local_sgd(compressor=comp_ams())"),
        lambda: pair("local_sgd()", statistics="maximum"),
        lambda: pair("local_sgd()", bucket_cap_mb=1),
        lambda: pair("local_sgd()", scaler="fp16"),
        lambda: pair("dense()", scaler=8),
        lambda: pair("local_sgd()", seed=0.5),
        lambda: pair("dense()", seed=None),
        lambda: laconic.distribute(net(), None, "local_sgd()"),
        lambda: laconic.distribute(net(), net().parameters(), "dense()"),
        lambda: pair(f"local_sgd(every={2 + dist.get_rank()})"),
        lambda: laconic.distribute(net().double(), torch.optim.SGD(net().parameters()), "local_sgd()"),
        lambda: laconic.distribute(net(), torch.optim.SGD(net().parameters()), "local_sgd()"),
        lambda: optimizer.load_state_dict(torch.optim.SGD(net().parameters(), lr=0.1).state_dict()),
        lambda: optimizer.load_state_dict(trained("local_sgd(every=2)", 1)[1].state_dict()),
        lambda: optimizer.add_param_group({"params": [torch.zeros(1)]}),
        lambda: moved(model, optimizer),
    ):
        try:
            attempt()
        except LaconicError as error:
            said.append((type(error), str(error)))
    return said


def moved(model, optimizer):
    model[0].weight.data = model[0].weight.data.clone()
    loss_of(model, 0).backward()
    optimizer.step()


def test_what_cannot_be_is_refused_on_every_rank(pool):
    expected = [
        (AttachError, "distributed already"),
        (SpecError, "every must be a whole number of 1 or more"),
        (SpecError, "changes the optimiser"),
        (AttachError, "statistics must be one of"),
        (AttachError, "leave bucket_cap_mb= out"),
        (AttachError, "scaler= takes the GradScaler that the script steps by, got 'fp16'"),
        (AttachError, "scaler= takes the GradScaler that the script steps by, got 8"),
        (SpecError, "seed must be a whole number of 0 or more, below 2^63, got 0.5"),
        (SpecError, "seed must be a whole number of 0 or more, below 2^63, got None"),
        (AttachError, "optimizer= takes the torch.optim.Optimizer that"),
        (AttachError, "got Parameter: build one over them"),
        (AttachError, "the spec differs"),
        (AttachError, "is torch.float64"),
        (AttachError, "holds no trained parameter of this model"),
        (StateError, "the state of a plain optimiser"),
        (StateError, "the saved state is of spec 'local_sgd(every=2)'"),
        (AttachError, "do not exchange it"),
        (AttachError, "the memory of 0.weight was replaced"),
    ]
    for said in pool.run(2, refused, ""):
        for (kind, text), (wanted, words) in zip(said, expected, strict=True):
            assert kind is wanted, text
            assert words in text
