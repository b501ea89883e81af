"""A CUDA device emulated on the CPU, to find without a GPU what would fail on one.

Tensors "on" it say that their device is `cuda:0`, and so take the code that GPUs take; what is computed with
them is computed by torch on the CPU, operation by operation. Emulated are the rules a program can break:

- operands lie on one device, but for scalars and indices of the host;
- operations that make the host wait are known, and raise under `torch.cuda.set_sync_debug_mode("error")`;
- while a CUDA graph is captured nothing may wait, nor be copied to or from the host; a replay runs what was
  captured again, with the tensors and numbers of the capture: it sees nothing of what the host does.

Triton's kernels run in its interpreter, and are captured too. Not emulated: streams (all is done in order),
the reuse of memory between graphs, speed, bfloat16 products in Triton, FlashInfer, NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.emulated_tensor import BrokenRule, DeviceTensor, host_of
from tests.plain_trees import tree_leaves, tree_map

IS_NEEDED = not torch.cuda.is_available()
CPU = torch.device("cpu")
MEMORY = 4 << 30

#: Operations with sizes that depend on values, or that return one: the host waits for them.
WAITING = {
    "item", "_local_scalar_dense", "is_nonzero", "nonzero", "argwhere", "masked_select", "unique_dim",
    "_unique", "_unique2", "unique_consecutive", "equal", "allclose", "multinomial", "histc", "bincount",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Emulation(TorchDispatchMode):
    """Computes operations of the emulated device, and sees what they break.

    Attributes:
        waits: names of operations the host has waited for.
        launches: operations and kernels launched on the device.
        num_transfers: copies between host and device.
    """

    def __init__(self) -> None:
        """Of an idle device."""
        super().__init__()
        self.waits: list[str] = []
        self.launches: list[str] = []
        self.num_transfers = 0
        self.pinned: set[int] = set()
        # Copies to the host that nobody has waited for: until then it finds other values there.
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_arrived = 0
        self.debug: int | str = "default"
        self.graph: EmulatedGraph | None = None

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if self.graph is not None:
            raise BrokenRule(f"{what} makes the host wait within a capture")
        if self.debug in ("error", 2):
            raise BrokenRule(f"{what} makes the host wait")
        self.waits.append(what)
        self.arrive(self.num_copies)

    @property
    def num_copies(self) -> int:
        """To the host, begun without waiting."""
        return self.num_arrived + len(self.under_way)

    def arrive(self, number: int) -> None:
        """The first of all copies are there."""
        while self.num_arrived < number:
            target, source = self.under_way.pop(0)
            with _disable_current_modes():
                target.copy_(source)
            self.num_arrived += 1

    def launch(self, name: str, run: Callable[[], Any]) -> Any:
        """Do something on the device."""
        out = run()
        self.launched(name, run, out)
        return out

    def launched(self, name: str, run: Callable[[], Any], out: Any) -> None:
        """Count what was done, or remember it if it is captured."""
        if self.graph is None:
            self.launches.append(name)
        else:
            self.graph.steps.append((run, [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        # Views of tensors made outside of inference mode are refused if they are wrapped within it.
        with torch.inference_mode(False), torch.no_grad():
            return self._dispatch(func, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if name in ("to", "_to_copy"):
            given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            return self._moved(name, given)
        if name == "copy_":
            return self._copied(*args, **kwargs)
        if kwargs.pop("pin_memory", None):
            return self.pin(func(*args, **kwargs))
        on_device = any(isinstance(t, DeviceTensor) for t in tensors)
        if kwargs.get("device") is not None:  # of a new tensor
            on_device = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = CPU
        if not on_device:
            return func(*args, **kwargs)
        return self._computed(func, name, args, kwargs, tensors)

    def _moved(self, name: str, given: dict[str, Any]) -> torch.Tensor:
        """`Tensor.to`, to a device or type or both."""
        source: torch.Tensor = given.pop("self")
        other = given.pop("other", source)
        device, dtype = given.pop("device", None) or other.device, given.pop("dtype", None) or other.dtype
        there = torch.device(device).type == "cuda"
        lazily, copies = given.pop("non_blocking", False), given.pop("copy", name == "_to_copy")
        given.pop("layout", None), given.pop("pin_memory", None)
        if there == isinstance(source, DeviceTensor):
            if dtype == source.dtype and not copies and not given.get("memory_format"):
                return source
            if not there:
                return source.to(dtype, copy=copies, **given)
            inner = source.inner
            return DeviceTensor(self.launch(name, lambda: inner.to(dtype, copy=True, **given)))
        self._cross(name, source, there=there, lazily=lazily)
        # Devices have memory of their own.
        moved = host_of(source).to(dtype, copy=True, **given)
        return DeviceTensor(moved) if there else moved

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """`Tensor.copy_`."""
        there = isinstance(target, DeviceTensor)
        if non_blocking and isinstance(source, DeviceTensor) and target.data_ptr() in self.pinned:
            if self.graph is not None:
                raise BrokenRule(f"copy_ of {tuple(source.shape)} from the device within a capture")
            self.num_transfers += 1
            self.under_way.append((target, source.inner.clone()))
            target.fill_(-7)
            return target
        if there != isinstance(source, DeviceTensor):
            self._cross("copy_", source, there=there, lazily=non_blocking)
        if not (there and isinstance(source, DeviceTensor)):
            host_of(target).copy_(host_of(source))
        else:
            self.launch("copy_", lambda: host_of(target).copy_(host_of(source)))
        return target

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember that a tensor of the host lies in pinned memory."""
        self.pinned.add(tensor.data_ptr())
        weakref.finalize(tensor, self.pinned.discard, tensor.data_ptr())
        return tensor

    def _cross(self, name: str, source: torch.Tensor, *, there: bool, lazily: bool) -> None:
        """Between host and device."""
        self.num_transfers += 1
        what = f"{name} of {tuple(source.shape)} {'to' if there else 'from'} the device"
        if self.graph is not None:
            raise BrokenRule(f"{what} within a capture")
        if source.numel() and not (there and lazily and source.data_ptr() in self.pinned):
            self.wait(what)

    def _computed(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Any other operation whose results lie on the device."""
        strangers = [t for t in tensors if not isinstance(t, DeviceTensor)]
        if name in INDEXING:
            indices = [i for i in args[1] if i is not None]
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
                self.wait(f"{name} by a mask")
            if any(not isinstance(i, DeviceTensor) for i in indices):
                self.wait(f"{name} by indices of the host")
            strangers = [t for t in strangers if all(t is not i for i in indices)]
        if any(t.dim() for t in strangers):
            places = [f"{tuple(t.shape)} on {t.device}" for t in tensors]
            raise BrokenRule(f"{func}: tensors on different devices: {', '.join(places)}")
        if name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None
                               and any(isinstance(a, torch.Tensor) for a in args[1:])):  # fmt: skip
            self.wait(name)
        args, kwargs = tree_map(_clone_of_scalars, (args, kwargs))
        wrapped = {id(t.inner): t for t in tree_leaves((args, kwargs)) if isinstance(t, DeviceTensor)}

        def run() -> Any:
            return func(*tree_map(host_of, args), **tree_map(host_of, kwargs))

        if name.startswith(("empty", "new_empty")):
            out = run()
        elif func._schema.is_mutable:
            out = self.launch(name, run)
        else:
            out = run()
            if not _pointers(out) <= _pointers(tree_map(host_of, (args, kwargs))):  # else a view
                self.launched(name, run, out)

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return wrapped[id(value)] if id(value) in wrapped else DeviceTensor(value)

        return tree_map(wrap, out)


def _pointers(tree: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}


def _clone_of_scalars(value: Any) -> Any:
    """Scalars of the host are read at the launch."""
    if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor) and value.dim() == 0:
        return value.clone()
    return value


class _Generator:
    """Of random numbers: those of the device are of the CPU."""

    def __new__(cls, device: Any = None) -> Any:
        return torch._C.Generator()


class EmulatedGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    device: Emulation

    def __init__(self, keep_graph: bool = False) -> None:
        """Empty."""
        self.steps: list[tuple[Callable[[], Any], list[torch.Tensor]]] = []

    def replay(self) -> None:
        """Do the captured operations again; what they return goes where it went at the capture."""
        self.device.launches.append("replay")
        for run, first in self.steps:
            with _disable_current_modes():
                again = [t for t in tree_leaves(run()) if isinstance(t, torch.Tensor)]
                for old, new in zip(first, again, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def emulated_cuda() -> Iterator[Emulation]:
    """This thread has a GPU within the context."""
    device = Emulation()

    class Stream:
        def wait_stream(self, other: Stream) -> None: ...

        def synchronize(self) -> None:
            device.wait("a stream")

    plain_pin = torch.Tensor.pin_memory

    @contextlib.contextmanager
    def capture(graph: EmulatedGraph, pool: Any = None, **options: Any) -> Iterator[None]:
        assert device.graph is None
        device.graph = graph
        try:
            yield
        finally:
            device.graph = None

    def pin(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if isinstance(tensor, DeviceTensor):
            return plain_pin(tensor)
        return device.pin(tensor.clone())

    def debug(mode: int | str) -> None:
        device.debug = mode
        warnings.warn(  # as torch does, once a process; where that raises, the mode is set nevertheless
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
            "operations",
            stacklevel=2,
        )

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at, self.num_copies, self.num_looks = 0.0, 0, 0

        def record(self, stream: Any = None) -> None:
            self.at, self.num_copies = time.perf_counter(), device.num_copies

        def synchronize(self) -> None:
            if device.graph is not None:
                raise BrokenRule("an event makes the host wait within a capture")
            device.waits.append("an event")
            device.arrive(self.num_copies)

        def query(self) -> bool:
            self.num_looks += 1
            device.arrive(self.num_copies if self.num_looks > 2 else 0)  # it takes a while
            return device.num_arrived >= self.num_copies

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

    cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "empty_cache": lambda: None,
        "synchronize": lambda of=None: device.wait("torch.cuda.synchronize"),
        "mem_get_info": lambda of=None: (MEMORY // 2, MEMORY),
        "memory_allocated": lambda of=None: 0,
        "memory_reserved": lambda of=None: 0,
        "get_device_capability": lambda of=None: (9, 0),
        "get_device_properties": lambda of=None: SimpleNamespace(
            multi_processor_count=132, total_memory=MEMORY
        ),
        "get_device_name": lambda of=None: "an emulated GPU",
        "current_stream": lambda of=None: Stream(),
        "Stream": Stream,
        "stream": lambda of: contextlib.nullcontext(),
        "Event": Event,
        "CUDAGraph": type("CUDAGraph", (EmulatedGraph,), {"device": device}),
        "graph": capture,
        "graph_pool_handle": lambda: (0, 0),
        "set_sync_debug_mode": debug,
    }
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pin))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(_triton_of(device))
        stack.enter_context(_guard_without_cuda())
        # Parameters that `Module.to` moves become tensors of the device, in place of pointing into one.
        moves = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, moves)
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        stack.enter_context(device)
        yield device


@contextlib.contextmanager
def _guard_without_cuda() -> Iterator[None]:
    """Without CUDA torch has nothing that changes the current device, and so refuses some operations.

    What does nothing, as for tensors of `meta`, does for a single device.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    before, guards[cuda] = guards[cuda], guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


@contextlib.contextmanager
def _triton_of(device: Emulation) -> Iterator[None]:
    """Kernels take tensors of the emulated device, and only those."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        yield
        return
    plain = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        for tensor in tensors:
            if not isinstance(tensor, DeviceTensor):
                raise BrokenRule(f"{kernel.__name__}: {tuple(tensor.shape)} is not on the device")
        inner, named = tree_map(host_of, (args, kwargs))

        def launch() -> None:
            # What memory held may be no numbers; a GPU does not warn of it.
            with _disable_current_modes(), np.errstate(all="ignore"):
                plain(kernel, *inner, grid=grid, warmup=warmup, **named)

        device.launch(kernel.__name__, launch)

    with mock.patch.object(InterpretedFunction, "run", run):
        yield
