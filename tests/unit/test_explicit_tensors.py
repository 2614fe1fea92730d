"""Every tensor in `src` is created with a dtype and a device, whatever torch's global settings are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.test_architecture import FILES, SOURCE

FILLED = "empty empty_permuted empty_strided eye full ones zeros"
DRAWN = "normal rand randint randn randperm"
RANGES = "arange linspace logspace range tril_indices triu_indices"
CONVERTED = "as_tensor asarray scalar_tensor tensor"
SPARSE = "sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor"
WINDOWS = "bartlett_window blackman_window hamming_window hann_window kaiser_window fft.fftfreq fft.rfftfreq"
CREATORS = frozenset(f"{FILLED} {DRAWN} {RANGES} {CONVERTED} {SPARSE} {WINDOWS}".split())
NORMS = "BatchNorm1d BatchNorm2d BatchNorm3d GroupNorm LayerNorm"
PRODUCTS = "Conv1d Conv2d Conv3d Embedding GRU GRUCell Linear LSTM LSTMCell MultiheadAttention RNN"
LAYERS = frozenset(f"{NORMS} {PRODUCTS}".split())
TYPED = "BoolTensor ByteTensor DoubleTensor FloatTensor IntTensor LongTensor Tensor"
GLOBAL = "get_default_device get_default_dtype set_default_device set_default_dtype set_default_tensor_type"
# They read torch's global settings and take no other; `ldexp` computes powers of two in the default dtype.
FORBIDDEN = frozenset(f"{TYPED} {GLOBAL} ldexp".split())
EXCEPTIONS = {
    "tools/tasks: nn": "the models of `laconic train` follow torch's settings, as any user's model does",
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls of `torch.NAME(...)` and `nn.NAME(...)`, with their names as written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            root: ast.expr = node.func
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ("torch", "nn"):
                yield ast.unparse(node.func).replace("torch.nn.", "nn."), node


def implicit(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that depend on torch's default dtype or device, and the call there."""
    for name, call in calls(tree):
        root, _, short = name.partition(".")
        given = {keyword.arg for keyword in call.keywords}
        if short in (CREATORS if root == "torch" else LAYERS) and not given >= {"dtype", "device"}:
            yield call.lineno, f"{name} without dtype= and device="
        elif name == "torch.Generator" and not (call.args or "device" in given):
            yield call.lineno, f"{name} without a device"
        elif name == "torch.load" and "map_location" not in given:
            yield call.lineno, f"{name} without map_location="
        elif root == "torch" and short in FORBIDDEN:
            yield call.lineno, name
        elif name == "torch.where" and floats(call.args[1:]):
            yield call.lineno, f"{name} of two numbers, whose result has the default dtype"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for alias in node.names:
                if alias.name in CREATORS | FORBIDDEN - {"Tensor"}:
                    yield node.lineno, f"from torch import {alias.name}"


def floats(values: list[ast.expr]) -> bool:
    """Whether all are numbers, or names of constants, and one is written as a float."""
    plain = [each.operand if isinstance(each, ast.UnaryOp) else each for each in values]
    constants = [each.value for each in plain if isinstance(each, ast.Constant)]
    named = [each for each in plain if isinstance(each, ast.Name) and each.id.isupper()]
    return len(constants) + len(named) == len(values) and any(isinstance(each, float) for each in constants)


def test_every_tensor_has_an_explicit_dtype_and_device() -> None:
    found, used = [], set()
    for path in FILES:
        place = path.relative_to(SOURCE)
        for line, what in implicit(ast.parse(path.read_text())):
            exception = (
                f"{'/'.join(place.parts[: 2 if place.parts[0] == 'tools' else 1])}: {what.partition('.')[0]}"
            )
            used.add(exception)
            if exception not in EXCEPTIONS:
                found.append(f"{place}:{line}: {what}")
    assert not found, "\n".join(found)
    assert used >= set(EXCEPTIONS), f"exceptions that nothing needs: {set(EXCEPTIONS) - used}"
    for bad in (
        "torch.zeros(3)",
        "torch.tensor(1.0, dtype=torch.float32)",
        "torch.arange(n, device=x.device)",
        "torch.nn.Linear(2, 2)",
        "torch.Generator()",
        "torch.where(x > 0, 1.0, -SLOPE)",
        "from torch import zeros",
    ):
        assert [*implicit(ast.parse(bad))], bad
