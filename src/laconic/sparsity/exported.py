"""`export`: a model whose sparse weights are stored, saved and multiplied as sparse ones.

    CSR    the entries in use as float32, their columns as int32, and where each row begins: 8 bytes an entry
    2:4    of each four neighbours in a row two, and in 2 bits each which: 17 bytes for 32 dense ones

A convolution is a product of its weight, (outputs, inputs * kernel), with the image's patches (im2col). The
product by CSR is torch's, by MKL where it is there; 2:4 is a form for storing, and for processors that
multiply by it (Mishra et al. 2021, arXiv:2104.08378): here it is made dense for the product.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic import kernels
from laconic.core import arguments
from laconic.core.errors import AttachError
from laconic.lowbit.called import Called, read

Form = Literal["csr", "2:4", "auto"]
BUFFERS = {"csr": ("rows", "columns", "values"), "2:4": ("places", "values")}
MOST = 0.5  # density above which CSR is larger than the dense weight


class SparseWeight(nn.Module):
    """A matrix (n, m) with few entries, stored as CSR or, two of each four, as 2:4. Not trained."""

    rows: Tensor
    columns: Tensor
    places: Tensor
    values: Tensor

    def __init__(self, weight: Tensor, form: str) -> None:
        super().__init__()
        self.form, self.shape = form, tuple(weight.shape)
        made = _csr(weight) if form == "csr" else _two_of_four(weight)
        for name, tensor in made.items():
            self.register_buffer(name, tensor)

    def matrix(self) -> Tensor:
        """What multiplies: CSR, or dense for 2:4."""
        return self.csr() if self.form == "csr" else self.dense()

    def csr(self) -> Tensor:
        """The matrix as torch's sparse CSR tensor, on the same memory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(
                self.rows, self.columns, self.values, self.shape, check_invariants=False
            )

    def dense(self) -> Tensor:
        """The matrix, float32 (n, m)."""
        if self.form == "csr":
            return self.csr().to_dense()
        n, m = self.shape
        whole = self.values.new_zeros(n * m // 4, 4)
        places = kernels.unpack_bits(self.places.cpu(), 2, self.values.numel()).long().view(-1, 2)
        return whole.scatter_(1, places.to(whole.device), self.values.view(-1, 2)).view(n, m)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in BUFFERS[self.form]:  # another model of this kind may have other positions
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, getattr(self, name).new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"{self.shape[0]} x {self.shape[1]}, {self.form}, {self.values.numel()} entries"


class SparseLinear(nn.Module):
    """y = x W^T + b, x (..., inputs), with a sparse W."""

    bias: Tensor | None

    def __init__(self, layer: nn.Linear, form: str) -> None:
        super().__init__()
        self.weight = SparseWeight(layer.weight.detach(), form)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = (self.weight.matrix() @ (x.flatten(0, -2).T if x.dim() > 1 else x[:, None])).T
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias


class SparseConv2d(nn.Module):
    """A convolution of x (n, c, h, w), or (c, h, w), with one group, by a sparse weight."""

    bias: Tensor | None

    def __init__(self, layer: nn.Conv2d, form: str) -> None:
        super().__init__()
        self.kernel, self.stride = layer.kernel_size, layer.stride
        self.padding, self.dilation = layer.padding, layer.dilation
        self.weight = SparseWeight(layer.weight.detach().flatten(1), form)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            one: Tensor = self.forward(x[None])
            return one[0]
        assert not isinstance(self.padding, str)
        sides = zip(x.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        shape = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]
        weight = self.weight.matrix()
        flat = [  # image by image: the patches of one stay in cache
            weight @ F.unfold(image, self.kernel, self.dilation, self.padding, self.stride)[0]
            for image in torch.split(x, 1)
        ]
        y = torch.stack(flat).view(len(x), -1, *shape)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)


def export(model: nn.Module, form: Form = "auto") -> nn.Module:
    """A copy of the model, for inference, whose sparse layers are stored sparse.

    Linear layers and Conv2d layers (of one group, padded with zeros) of which at most half of the weights are
    not zero become `SparseLinear` and `SparseConv2d`; all others stay what they are. The result is saved by
    its `state_dict()`, and loads into another export of the same architecture, under
    `torch.load(weights_only=True)`. Outputs are those of the model but for the order of additions.

    Args:
        model: It does not change. A weight's entries in use are those that are not zero.
        form: "csr"; "2:4", for which each four neighbours of a row have at most two entries; "auto"
            (default): for each weight the smaller of these, 2:4 only where it allows that.

    Raises:
        SpecError: `form` is none of these.
        AttachError: No layer is sparse; or "2:4" is asked for, and a sparse layer's weight is not so.

    >>> net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> _ = net[0].weight.data.masked_fill_(torch.rand(64, 64) > 0.1, 0)
    >>> [type(layer).__name__ for layer in export(net)]
    ['SparseLinear', 'ReLU', 'Linear']
    """
    arguments.choice("form", form, get_args(Form))
    made = copy.deepcopy(model)
    found: dict[str, SparseLinear | SparseConv2d] = {}
    names = dict(made.named_modules())
    left = read(names)
    for name, layer in names.items():
        if not isinstance(layer, (nn.Linear, nn.Conv2d)) or layer in left or not _is_sparse(layer):
            continue
        chosen = form if form != "auto" else _smaller(layer.weight.detach().flatten(1))
        if chosen == "2:4" and not _is_two_of_four(layer.weight.detach().flatten(1)):
            raise AttachError(f"{name!r} has more than two of four neighbours in use: take form='csr'")
        found[name] = (
            SparseLinear(layer, chosen) if isinstance(layer, nn.Linear) else SparseConv2d(layer, chosen)
        )
    if not found:
        raise AttachError(
            "no layer of this model is sparse: of each Linear and Conv2d layer more than half of the weights"
            " are not zero; train it with laconic.sparsity.rigl(model, optimizer, ...)"
        )
    if "" in found:
        return found[""].eval()
    for name, layer in found.items():
        parent, _, key = name.rpartition(".")
        setattr(made.get_submodule(parent), key, layer)
    Called(made, found.values())
    return made.eval()


def nbytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers: of an exported one all that is stored.

    >>> nbytes(nn.Linear(3, 2))
    32
    """
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))


def _is_sparse(layer: nn.Linear | nn.Conv2d) -> bool:
    if isinstance(layer, nn.Conv2d) and (
        layer.groups > 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    ):
        return False
    return int((layer.weight != 0).sum()) <= MOST * layer.weight.numel()


def _is_two_of_four(weight: Tensor) -> bool:
    return weight.shape[1] % 4 == 0 and int((weight.reshape(-1, 4) != 0).sum(1).max()) <= 2


def _smaller(weight: Tensor) -> str:
    csr = 8 * int((weight != 0).sum()) + 4 * (len(weight) + 1)  # bytes
    return "2:4" if _is_two_of_four(weight) and 17 * weight.numel() < 8 * csr else "csr"


def _csr(weight: Tensor) -> dict[str, Tensor]:
    used = weight != 0
    rows = torch.cat([used.new_zeros(1, dtype=torch.int32), used.sum(1).cumsum(0).to(torch.int32)])
    return {"rows": rows, "columns": used.nonzero()[:, 1].to(torch.int32), "values": weight[used]}


def _two_of_four(weight: Tensor) -> dict[str, Tensor]:
    fours = weight.reshape(-1, 4)
    places = (fours != 0).to(torch.uint8).topk(2, dim=1).indices.sort(dim=1).values
    codes = kernels.pack_bits(places.flatten().int().cpu(), 2).to(weight.device)
    return {"places": codes, "values": fours.gather(1, places).flatten()}
