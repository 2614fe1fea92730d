"""Compression of what backward needs, within a `with` block: who saves a tensor, and what is kept."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage, nn, overrides
from torch.overrides import TorchFunctionMode

from laconic.activations import compiled, state
from laconic.activations.calls import Call
from laconic.activations.coding import Coding
from laconic.activations.kept import Coded, Exact, Input, Kept, Order, Shape, TwoValued
from laconic.activations.later import Later
from laconic.activations.layer import Layer
from laconic.activations.ledger import Ledger
from laconic.activations.statistics import statistics
from laconic.activations.twins import Key, Twins, elements
from laconic.activations.windows import Places, Windows
from laconic.core.errors import AttachError, NonFiniteError
from laconic.core.inference import outside_inference_mode
from laconic.core.step_listeners import after_each_step
from laconic.core.warning import warn
from laconic.optim.unwrapping import stepping, unwrap
from laconic.transforms.transform import StoredInputs, TransformHandle

_sessions: WeakSet[Session] = WeakSet()  # that are told of steps
_lock = threading.Lock()  # ranks can be threads


@outside_inference_mode("state_dict", "load_state_dict")
class Session(TorchFunctionMode, TransformHandle):
    """Coded activations of one model: the result of `compress`. Open it for forward passes."""

    def __init__(self, model: nn.Module, coding: Coding, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__()
        self.coding = coding
        self.ledger: Ledger | None = None
        self._optimizer = None if optimizer is None else stepping(unwrap(optimizer))
        self.model = model
        self._layers = {
            id(weight): Layer(name, weight, coding, self._momentum)
            for name, weight in model.named_parameters()
        }
        self._call: Call | None = None
        self._label = "input"
        self._later: Later | None = None
        self._twins = Twins()
        self._key = 0
        self._kept = self._inputs = 0  # tensors in this block, and inputs of layers among them
        self._told = False
        self._open = False
        self._own: dict[int, UntypedStorage] = {}  # held, as an address that is free is used again
        self._hooks = ExitStack()
        with _lock:
            _sessions.add(self)
        after_each_step(_after_step)

    def bounds(self) -> dict[str, float | None]:
        """The error bound of each layer that was called; None before its first statistics."""
        return {layer.label: layer.bound for layer in self._layers.values() if layer.calls}

    def state_dict(self) -> dict[str, Any]:
        """What the layers' bounds follow from, the key of the next rounding, and the coding's spec."""
        return state.of(self._layers.values(), self._key, self.coding)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken, with the same model.

        Under another spec, as with a smaller share, bounds are solved anew from what was learned.

        Raises:
            StateError: The state is of a model with other parameters, or damaged. Nothing has changed.
        """
        state.check(saved, self._layers.values())
        self._key, alike = saved["key"], saved.get("coding") == repr(self.coding)
        for layer in self._layers.values():
            layer.load(saved["layers"][layer.name], alike)

    def stats(self) -> StoredInputs:
        """Return the bytes in the ledger; 0 without one."""
        rows = [] if self.ledger is None else [*self.ledger.rows.values()]
        return StoredInputs(sum(kept for _, kept in rows), sum(dense for dense, _ in rows))

    def training(self) -> Session:
        """Return the session, which is open for all steps."""
        return self

    def before_step(self, *, evaluated: bool) -> None:
        """Count the bytes that the forward pass before an evaluation keeps."""
        if evaluated:
            self.ledger = Ledger()

    def figures(self) -> dict[str, Any]:
        """Return the bytes since `before_step`; none if a loss of a rank skipped the evaluated step."""
        found = {} if self.ledger is None else asdict(self.stats())
        self.ledger = None
        return found

    def remove(self) -> None:
        """Forget the layers: activations are saved as they are from now on."""
        with _lock:
            _sessions.discard(self)
        self._layers = {}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A block after which nothing has been learned in it."""
        before = self._key, {name: vars(layer).copy() for name, layer in self._layers.items()}
        try:
            yield
        finally:
            self._key = before[0]
            for name, fields in before[1].items():
                vars(self._layers[name]).update(fields)

    def __enter__(self) -> Session:
        if compiled.inside():
            raise compiled.refuse("the function that opens `compress` is")
        if opened():
            raise AttachError("activations are compressed already: leave the inner `compress` out")
        with _lock:
            if self._open:
                raise AttachError(
                    "this session is open in another thread: a session serves one thread at a time, so call"
                    " compress for each thread"
                )
            self._open = True
        own = [*self.model.parameters(), *self.model.buffers()]
        self._own = {each._cdata: each for each in (tensor.untyped_storage() for tensor in own)}
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        self._kept, self._inputs, self._told = 0, 0, False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        self._own = {}
        self._open = False
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        self._settle()
        if kind is None:
            self._tell()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = Call.of(func, args, kwargs) if torch.is_grad_enabled() else None
        if call is None:
            outer, self._call = self._call, None
            try:
                return func(*args, **kwargs)
            finally:
                self._call = outer
        call.layer = self._layer(call)
        if call.layer is not None and compiled.inside():
            raise compiled.refuse(f"{call.layer.label or 'the model'} runs in a function that is")
        due = call.layer is not None and self.coding.adaptive and call.layer.begin(call.input)
        watched = statistics(call) if due else None
        outer, self._call = self._call, call
        try:
            out = func(*args, **kwargs)
        finally:
            self._call = outer
        if watched is not None and call.layer is not None and isinstance(out, Tensor) and out.requires_grad:
            call.layer.watch(out, watched(out))
        return out

    def _tell(self) -> None:
        """Warn, once a block, where backward keeps something and no layer's input is coded."""
        if self._kept and not self._inputs and not self._told:
            self._told = True
            warn(
                "no input of a layer is coded in this block, and what backward needs is kept as it is: layers"
                " are known by the weights of the model that `compress` was given, and are not seen where"
                " these are computed (parametrised, FSDP2), in regions of torch.utils.checkpoint, in"
                " nn.MultiheadAttention and in graphs of torch.jit",
            )

    def _unpack(self, kept: Kept) -> Tensor:
        self._tell()
        return kept.unpack()

    def _layer(self, call: Call) -> Layer | None:
        """The layer whose weight's gradient reads the call's input."""
        weight = call.given.get("weight")
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            return None
        if call.op == "batch_norm" and (self.coding.norms == "exact" or not call.given.get("training")):
            return None
        return self._layers.get(id(weight))

    def _pack(self, saved: Tensor) -> Kept:
        plain = type(saved) in (Tensor, nn.Parameter) and saved.layout is torch.strided
        if not plain or self._is_own(saved):
            return Exact.of(saved)
        self._kept += 1
        call, key = self._call, elements(saved)
        role = call.role(saved) if call is not None else ""
        if self._later is not None and not (role == "input" and self._later.key == key):
            self._settle()
        if call is None:
            return self._count(saved, Exact.of(saved), "elsewhere")
        label = self._label = (
            call.layer.label if call.layer else f"{self._label.partition(' ')[0]} > {call.op}"
        )
        if role == "relu":
            self._later = Later(saved, key, label)
            return self._count(saved, self._later, label, again=True)
        if role == "input" or role == "norm":
            return self._input(saved, call, key)
        kept: Kept = Exact.of(saved)
        if role == "mask":
            kept = TwoValued.of(saved, saved.amax() if saved.dtype is not torch.bool else saved.new_ones(()))
        elif role == "shape":
            kept = Shape.of(saved)
        elif role == "places":
            given = ("kernel_size", "stride", "padding", "dilation")
            options = {name.removesuffix("_size"): call.given[name] for name in given if name in call.given}
            kept = Places.of(saved, Windows.of(call.input, **options))
        return self._count(saved, kept, label)

    def _is_own(self, saved: Tensor) -> bool:
        """Whether it is the model's: known when the block was opened, or the weight of the present call."""
        place = saved.untyped_storage()._cdata
        weight = self._call.given.get("weight") if self._call is not None else None
        return place in self._own or (
            isinstance(weight, Tensor)
            and weight.layout is torch.strided
            and weight.untyped_storage()._cdata == place
        )

    def _input(self, saved: Tensor, call: Call, key: Key) -> Kept:
        """An input of a layer, coded within its bound, or the same tensor as another layer coded it."""
        assert call.layer is not None
        self._inputs += 1
        bound = call.layer.current(saved) if self.coding.adaptive else 0.0
        coded = self._twins.find(key)
        if coded is not None and coded.bound <= bound:
            kept = Input(coded, Order.of(saved), call.layer)
            return self._count(saved, kept, call.layer.label, again=True)
        shared = self._later is not None and self.coding.keeps_signs
        self._key += 1
        try:
            coded = Coded.of(saved, self.coding, bound, shared, self._key)
        except NonFiniteError as error:
            raise NonFiniteError(f"the input of {call.layer.label or 'the model'}: {error}") from None
        self._twins.add(key, saved, coded)
        self._settle(coded if shared else None)
        return self._count(saved, Input(coded, Order.of(saved), call.layer), call.layer.label)

    def _settle(self, coded: Coded | None = None) -> None:
        if self._later is not None:
            nbytes = self._later.settle(coded)
            if self.ledger is not None:
                self.ledger.settle(self._later.label, nbytes)
            self._later = None

    def _count(self, saved: Tensor, kept: Kept, label: str, *, again: bool = False) -> Kept:
        """Enter a saved tensor in the ledger; `again`: what is kept of it was entered before, or will be."""
        if self.ledger is not None:
            nbytes = 0 if again else None if isinstance(kept, Exact) else kept.nbytes
            self.ledger.add(label, saved, nbytes)
        return kept

    def stepped(self, held: Container[int]) -> None:
        """An optimiser that holds the parameters with these ids has stepped."""
        for place, layer in self._layers.items():
            if place in held:
                layer.stepped()

    def _momentum(self, weight: Tensor) -> Tensor | None:
        """What the optimiser has of it, if it is known and has any."""
        state = self._optimizer.state.get(weight, {}) if self._optimizer is not None else {}
        held = state.get("momentum_buffer", state.get("exp_avg"))
        return held if isinstance(held, Tensor) else None


def _after_step(held: frozenset[int]) -> None:
    with _lock:
        sessions = [*_sessions]
    for session in sessions:
        session.stepped(held)


def opened() -> bool:
    """Whether a session is open in this thread."""
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, Session) for mode in modes)
