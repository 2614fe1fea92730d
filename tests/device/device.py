"""Stand-in for a GPU: the device `gpu:0`, whose tensors are backed by CPU memory.

A `Gpu` tensor holds a CPU tensor. Every operation runs on the held tensors, under a `TorchDispatchMode` that
raises where devices mix as CUDA does, and counts (see `counting`). It serves the plain torch code of any
device: no Triton kernels, no streams, no collectives.

`install` changes the whole process, so only the processes of `tests/device` call it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import counting

NAME = "gpu"
SETUP = "_setup_privateuseone_for_python_backend"  # private: pytorch #157859
ACROSS = {"copy_", "_to_copy"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # indices may be on the host
SCALARS = {"fill_", "masked_fill", "masked_fill_", "where", "lift_fresh", "scatter"}  # 0-dim operands too


def missing() -> str | None:
    """Return why this torch has no stand-in device; None if it has."""
    if not hasattr(backend_registration, SETUP):
        return f"torch {torch.__version__} has no torch.utils.backend_registration.{SETUP}"
    return None


class Gpu(Tensor):
    """A tensor on `gpu:0`, backed by a CPU tensor with the same shape, strides and dtype."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Gpu:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=f"{NAME}:0",
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, Gpu), "data of one device cannot become that of another"
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert gpu:0 device type tensor to numpy: use Tensor.cpu() first")
        return self.detach().cpu().numpy()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Gpu:
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"gpu({self.held!r})"


class OnDevice(TorchDispatchMode):
    """Makes `gpu` a device of this thread: factories and copies to it give `Gpu` tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __enter__(self) -> OnDevice:
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # torch.tensor(x, device=) makes x on the host and copies it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on the held tensors, check its devices, and count it."""
    name = func.overloadpacket.__name__
    tensors = [*tensors_of(args), *tensors_of(kwargs.values())]
    gpus = [each for each in tensors if isinstance(each, Gpu)]
    hosts = [each for each in tensors if not isinstance(each, Gpu)]
    to_gpu = destination(name, gpus, args, kwargs)
    if not gpus and not to_gpu:
        return func(*args, **kwargs)
    check_devices(func, name, gpus, hosts, args)
    if to_gpu and kwargs.get("generator") is not None:
        raise RuntimeError(
            f"{func}: expected a generator of gpu:0, found one of {kwargs['generator'].device}"
        )
    inside = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if kwargs.get("device") is not None:
        inside["device"] = torch.device("cpu")
    result = func(*map(unwrapped, args), **{key: unwrapped(value) for key, value in inside.items()})
    held = [each.held if isinstance(each, Gpu) else each for each in tensors]
    counting.record(func, kwargs, held, result, copies(name, gpus, hosts, args, to_gpu))
    if not to_gpu:
        return args[0] if name == "copy_" else result
    known = {id(each.held): each for each in gpus}
    if isinstance(result, (tuple, list)):
        return type(result)(_wrapped(func, each, known) for each in result)
    return _wrapped(func, result, known)


def destination(name: str, gpus: list[Gpu], args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the result of an operation is on the device."""
    if name == "copy_":
        return isinstance(args[0], Gpu)
    asked = kwargs.get("device")
    return bool(gpus) if asked is None else torch.device(asked).type == NAME


def copies(name: str, gpus: list[Gpu], hosts: list[Tensor], args: Any, to_gpu: bool) -> str:
    """Return "to the device" or "to the host" for an operation that copies there; else ""."""
    if name in ACROSS:
        from_gpu = isinstance(args[1] if name == "copy_" else args[0], Gpu)
        return {(False, True): "to the device", (True, False): "to the host"}.get((from_gpu, to_gpu), "")
    return "to the device" if name in INDEXED and any(each.dim() for each in hosts) else ""


def check_devices(func: Any, name: str, gpus: list[Gpu], hosts: list[Tensor], args: Any) -> None:
    """Raise where CUDA would, as tensors of the host and of the device mix."""
    if not gpus or not hosts or name in ACROSS:
        return
    if name in INDEXED and isinstance(args[0], Gpu):
        wrong = [each for each in hosts if each.dim() and each.dtype not in (torch.int64, torch.bool)]
    elif torch.Tag.pointwise in func.tags or name in SCALARS:
        wrong = [each for each in hosts if each.dim()]
        if func._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], Gpu):
            wrong = hosts
    else:
        wrong = hosts
    if wrong:
        shapes = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in wrong)
        raise RuntimeError(f"{func}: expected all tensors on one device, found gpu:0 and cpu ({shapes})")


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments, those in lists too."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (tuple, list)):
            yield from tensors_of(each)


def unwrapped(value: Any) -> Any:
    """Return an argument with the held tensor in place of each `Gpu`."""
    if isinstance(value, Gpu):
        return value.held
    if isinstance(value, (tuple, list)):
        return type(value)(map(unwrapped, value))
    return value


def _wrapped(func: Any, x: Any, known: dict[int, Gpu]) -> Any:
    if not isinstance(x, Tensor):
        return x
    wrapper = known.get(id(x))
    if wrapper is None:
        return Gpu(x)
    if wrapper.shape != x.shape or wrapper.stride() != x.stride() or wrapper.dtype != x.dtype:
        raise NotImplementedError(f"the stand-in device cannot run {func}: it changes a tensor's shape")
    return wrapper


class _Module:
    """What `torch.gpu` is."""

    def __init__(self) -> None:
        self._dummy = backend_registration._DummyBackendModule()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dummy, name)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def install() -> None:
    """Make `gpu` a device of this process, in every thread that starts from now on, and in this one."""
    getattr(backend_registration, SETUP)(NAME, backend_module=_Module())
    start = threading.Thread.start

    def start_on_device(thread: threading.Thread) -> None:
        inner = thread.run

        def outer() -> None:
            with OnDevice():
                inner()

        thread.run = outer  # type: ignore[method-assign]
        start(thread)

    threading.Thread.start = start_on_device  # type: ignore[method-assign]
    OnDevice().__enter__()
