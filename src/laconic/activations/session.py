"""Session of compressed activations."""

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
from laconic.activations.coding import CodingRule
from laconic.activations.layer import Layer
from laconic.activations.ledger import Ledger
from laconic.activations.pool_indices import PoolIndices, Windows
from laconic.activations.saved import (
    BitMask,
    DeferredRelu,
    Encoded,
    EncodedInput,
    Exact,
    Key,
    MemoryOrder,
    SavedTensor,
    ShapeOnly,
    SharedEncodings,
    elements,
)
from laconic.activations.torch_call import Call, statistics
from laconic.core.errors import AttachError, NonFiniteError
from laconic.core.inference import outside_inference_mode
from laconic.core.warning import warn
from laconic.optim.unwrapping import stepping, unwrap
from laconic.transforms.step_callbacks import after_each_step
from laconic.transforms.transform import StoredInputs, TransformHandle

_sessions: WeakSet[Session] = WeakSet()
_lock = threading.Lock()  # ranks can be threads


@outside_inference_mode("state_dict", "load_state_dict")
class Session(TorchFunctionMode, TransformHandle):
    """Compressed activations of one model, returned by `compress`. Enter it for forward passes."""

    def __init__(self, model: nn.Module, coding: CodingRule, optimizer: torch.optim.Optimizer | None) -> None:
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
        self._deferred: DeferredRelu | None = None
        self._shared = SharedEncodings()
        self._key = 0
        self._num_saved = self._num_inputs = 0  # in this block
        self._warned = False
        self._open = False
        self._own: dict[int, UntypedStorage] = {}  # references, as a freed address would be reused
        self._hooks = ExitStack()
        with _lock:
            _sessions.add(self)
        after_each_step(_after_step)

    def bounds(self) -> dict[str, float | None]:
        """Return each called layer's error bound; None before its first statistics."""
        return {layer.label: layer.bound for layer in self._layers.values() if layer.calls}

    def state_dict(self) -> dict[str, Any]:
        """Return the layers' statistics, the key of the next rounding and the coding's spec."""
        return state.to_dict(self._layers.values(), self._key, self.coding)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a state of the same model. With a different spec, bounds are solved from its statistics.

        Raises:
            StateError: The state is damaged or of another model; nothing is changed.
        """
        state.check(saved, self._layers.values())
        self._key, same_coding = saved["key"], saved.get("coding") == repr(self.coding)
        for layer in self._layers.values():
            layer.load(saved["layers"][layer.name], same_coding)

    def stats(self) -> StoredInputs:
        rows = [] if self.ledger is None else [*self.ledger.rows.values()]
        return StoredInputs(sum(kept for _, kept in rows), sum(dense for dense, _ in rows))

    def training(self) -> Session:
        return self

    def before_step(self, *, evaluated: bool) -> None:
        if evaluated:
            self.ledger = Ledger()

    def figures(self) -> dict[str, Any]:
        found = {} if self.ledger is None else asdict(self.stats())
        self.ledger = None
        return found

    def remove(self) -> None:
        """Detach from the layers."""
        with _lock:
            _sessions.discard(self)
        self._layers = {}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self._key, {name: vars(layer).copy() for name, layer in self._layers.items()}
        try:
            yield
        finally:
            self._key = before[0]
            for name, fields in before[1].items():
                vars(self._layers[name]).update(fields)

    def __enter__(self) -> Session:
        if compiled.is_compiling():
            raise compiled.compiled_error("the function that opens `compress` is")
        if is_open():
            raise AttachError("activations are compressed already: remove the inner `compress`")
        with _lock:
            if self._open:
                raise AttachError("this session is open in another thread: call compress once per thread")
            self._open = True
        own = [*self.model.parameters(), *self.model.buffers()]
        self._own = {each._cdata: each for each in (tensor.untyped_storage() for tensor in own)}
        super().__enter__()  # type: ignore[no-untyped-call]
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        self._num_saved, self._num_inputs, self._warned = 0, 0, False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        self._own = {}
        self._open = False
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        self._resolve()
        if kind is None:
            self._warn_if_nothing_coded()

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
        if call.layer is not None and compiled.is_compiling():
            raise compiled.compiled_error(f"{call.layer.label or 'the model'} runs in a function that is")
        due = call.layer is not None and self.coding.adaptive and call.layer.begin(call.input)
        recorder = statistics(call) if due else None
        outer, self._call = self._call, call
        try:
            out = func(*args, **kwargs)
        finally:
            self._call = outer
        if recorder is not None and call.layer is not None and isinstance(out, Tensor) and out.requires_grad:
            call.layer.watch(out, recorder(out))
        return out

    def _warn_if_nothing_coded(self) -> None:
        if self._num_saved and not self._num_inputs and not self._warned:
            self._warned = True
            warn(
                "no input of a layer is coded in this block, so saved tensors stay uncompressed: layers are"
                " recognised by the weights of the model passed to `compress`; layers with computed weights"
                " (parametrised, FSDP2) and layers in torch.utils.checkpoint, nn.MultiheadAttention and"
                " torch.jit are not recognised",
            )

    def _unpack(self, kept: SavedTensor) -> Tensor:
        self._warn_if_nothing_coded()
        return kept.unpack()

    def _layer(self, call: Call) -> Layer | None:
        weight = call.given.get("weight")
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            return None
        if call.op == "batch_norm" and (self.coding.norms == "exact" or not call.given.get("training")):
            return None
        return self._layers.get(id(weight))

    def _pack(self, saved: Tensor) -> SavedTensor:
        plain = type(saved) in (Tensor, nn.Parameter) and saved.layout is torch.strided
        if not plain or self._is_own(saved):
            return Exact.of(saved)
        self._num_saved += 1
        call, key = self._call, elements(saved)
        role = call.role(saved) if call is not None else ""
        if self._deferred is not None and not (role == "input" and self._deferred.key == key):
            self._resolve()
        if call is None:
            return self._count(saved, Exact.of(saved), "elsewhere")
        after = f"{self._label.partition(' ')[0]} > {call.op}"
        label = self._label = call.layer.label if call.layer else after
        if role == "relu":
            self._deferred = DeferredRelu(saved, key, label)
            return self._count(saved, self._deferred, label, again=True)
        if role == "input" or role == "norm":
            return self._input(saved, call, key)
        kept: SavedTensor = Exact.of(saved)
        if role == "mask":
            kept = BitMask.of(saved, saved.amax() if saved.dtype is not torch.bool else saved.new_ones(()))
        elif role == "shape":
            kept = ShapeOnly.of(saved)
        elif role == "places":
            given = ("kernel_size", "stride", "padding", "dilation")
            options = {name.removesuffix("_size"): call.given[name] for name in given if name in call.given}
            kept = PoolIndices.of(saved, Windows.of(call.input, **options))
        return self._count(saved, kept, label)

    def _is_own(self, saved: Tensor) -> bool:
        place = saved.untyped_storage()._cdata
        weight = self._call.given.get("weight") if self._call is not None else None
        if not isinstance(weight, Tensor) or weight.layout is not torch.strided:
            return place in self._own
        return place in self._own or weight.untyped_storage()._cdata == place

    def _input(self, saved: Tensor, call: Call, key: Key) -> SavedTensor:
        assert call.layer is not None
        self._num_inputs += 1
        bound = call.layer.current(saved) if self.coding.adaptive else 0.0
        coded = self._shared.find(key)
        if coded is not None and coded.bound <= bound:
            kept = EncodedInput(coded, MemoryOrder.of(saved), call.layer)
            return self._count(saved, kept, call.layer.label, again=True)
        shared = self._deferred is not None and self.coding.keeps_signs
        self._key += 1
        try:
            coded = Encoded.of(saved, self.coding, bound, shared, self._key)
        except NonFiniteError as error:
            raise NonFiniteError(f"the input of {call.layer.label or 'the model'}: {error}") from None
        self._shared.add(key, saved, coded)
        self._resolve(coded if shared else None)
        return self._count(saved, EncodedInput(coded, MemoryOrder.of(saved), call.layer), call.layer.label)

    def _resolve(self, coded: Encoded | None = None) -> None:
        if self._deferred is not None:
            nbytes = self._deferred.resolve(coded)
            if self.ledger is not None:
                self.ledger.resolve(self._deferred.label, nbytes)
            self._deferred = None

    def _count(self, saved: Tensor, kept: SavedTensor, label: str, *, again: bool = False) -> SavedTensor:
        """Enter a tensor in the ledger; `again`: its bytes are entered elsewhere."""
        if self.ledger is not None:
            nbytes = 0 if again else None if isinstance(kept, Exact) else kept.nbytes
            self.ledger.add(label, saved, nbytes)
        return kept

    def stepped(self, held: Container[int]) -> None:
        for place, layer in self._layers.items():
            if place in held:
                layer.stepped()

    def _momentum(self, weight: Tensor) -> Tensor | None:
        state = self._optimizer.state.get(weight, {}) if self._optimizer is not None else {}
        held = state.get("momentum_buffer", state.get("exp_avg"))
        return held if isinstance(held, Tensor) else None


def _after_step(held: frozenset[int]) -> None:
    with _lock:
        sessions = [*_sessions]
    for session in sessions:
        session.stepped(held)


def is_open() -> bool:
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, Session) for mode in modes)
