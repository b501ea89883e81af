"""Operators of Triton's interpreter that go to numpy at once, where they have been met with such operands.

An operator of two tensors goes through a dozen functions, which find out what types are computed in, before
numpy adds a few numbers. That depends on the operands' types and shapes alone, of which there are few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_Computes = Callable[[Any, Any], Any]

_COMPARISONS: dict[str, _Computes] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_ARITHMETIC: dict[str, _Computes] = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
_BITWISE: dict[str, _Computes] = {
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
}
_DIVISIONS: dict[str, _Computes] = {
    "__truediv__": np.divide,
    "__floordiv__": lambda a, b: (a - np.fmod(a, b)) // b,
    "__mod__": np.fmod,
}
_EXTREMA: dict[
    str, tuple[_Computes, _Computes]
] = {  # of integers, and of floats, where numbers win over NaNs
    "minimum": (np.minimum, np.fmin),
    "maximum": (np.maximum, np.fmax),
}
_TURNED = {name.replace("__", "__r", 1): name for name in (*_ARITHMETIC, *_DIVISIONS)}
_OPERATORS = {**_COMPARISONS, **_ARITHMETIC, **_BITWISE, **_DIVISIONS}


def quick_methods(interpreter: Any, plain: dict[str, Callable[[Any, Any], Any]]) -> dict[str, Any]:
    """Those of `plain`, methods of tensors by name, each by the quick way if there is one."""
    quick: dict[str, Any] = dict(plain)
    for name in quick.keys() & {*_OPERATORS, *_TURNED}:
        quick[name] = quick_operator(interpreter, name, plain[name])
    if "__getitem__" in quick:
        quick["__getitem__"] = quick_index(interpreter, plain["__getitem__"])
    return quick


def quick_operator(interpreter: Any, name: str, plain: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Does what the operator `plain` of tensors does, called `name`.

    Operands whose like was not met before are given to `plain`, and what numpy makes of them is compared with
    what comes of it: only if that is the same, the next of their kind go to numpy.
    """
    tensor, constant, like = interpreter.tl.tensor, interpreter.tl.constexpr, maker(interpreter)
    ways: dict[Any, Any] = {}

    def operate(self: Any, other: Any, **_: Any) -> Any:
        kind = type(other)
        if kind is tensor:
            key: Any = (self.type.name, other.type.name)
        else:
            if kind is constant:
                other = other.value
                kind = type(other)
            key = (self.type.name, kind, other or repr(other))  # zeros have signs
        way = ways.get(key)
        if not way:
            if way is None:
                ways[key], found = _learnt(interpreter, name, plain, self, other)
                return found
            return plain(self, other)
        compute, first = way
        return like(first, compute(self.handle.data, other.handle.data if kind is tensor else None))

    return operate


def quick_index(interpreter: Any, plain: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Does what `plain`, indexing of tensors, does: it adds axes of size one and nothing else."""
    like, whole = maker(interpreter), slice(None)
    ways: dict[Any, Any] = {}

    def index(self: Any, slices: Any, **_: Any) -> Any:
        if type(slices) is not tuple or any(one is not None and one != whole for one in slices):
            return plain(self, slices)
        key = (self.type.name, tuple([one is None for one in slices]))
        first = ways.get(key)
        if first is None:
            first = plain(self, slices)  # which refuses too many
            if self.type.is_block():
                ways[key] = first
            return first
        return like(first, self.handle.data[slices])

    return index


def maker(interpreter: Any) -> Callable[[Any, Any], Any]:
    """Makes tensors like one there is, of other data, without what their initialisation checks."""
    tensor, handle_of, new = interpreter.tl.tensor, interpreter.TensorHandle, object.__new__

    def like(first: Any, data: Any) -> Any:
        handle = new(handle_of)
        handle.data, handle.dtype, handle.attr = data, first.handle.dtype, {}
        made = new(tensor)
        made.handle = handle
        made.type, made.dtype, made.shape, made.numel = first.type, first.dtype, first.shape, first.numel
        return made

    return like


def _learnt(
    interpreter: Any, name: str, plain: Callable[[Any, Any], Any], left: Any, right: Any
) -> tuple[Any, Any]:
    """The quick way for such operands, False if there is none; and what `plain` makes of these."""
    found = plain(left, right)
    is_tensor = isinstance(right, interpreter.tl.tensor)
    compute = _way(interpreter, name, left, right)
    if compute is None:
        return False, found
    again = compute(left.handle.data, right.handle.data if is_tensor else None)
    expected = found.handle.data
    is_same = again.dtype == expected.dtype and again.shape == expected.shape
    is_same = is_same and np.array_equal(again, expected, equal_nan=again.dtype.kind == "f")
    return (compute, found) if is_same else False, found


def _way(interpreter: Any, name: str, left: Any, right: Any) -> _Computes | None:
    """How numpy computes what an operator does with such operands, if it is known."""
    semantic, is_tensor = interpreter.interpreter_semantic, isinstance(right, interpreter.tl.tensor)
    if not is_tensor and type(right) not in (int, float):
        return None
    types = left.dtype, right.dtype if is_tensor else semantic.to_tensor_type(right)
    if types[0].is_ptr():
        width = max(1, types[0].element_ty.primitive_bitwidth // 8)
        if name != "__add__" or not types[1].is_int_signed():
            return None
        if is_tensor:
            return lambda a, b: a + width * b.astype(np.uint64)
        bytes_on = np.array([width * right], dtype=np.int64).astype(np.uint64)
        return lambda a, _: a + bytes_on
    plain_name = _TURNED.get(name, name)
    divides = plain_name in _DIVISIONS
    common = semantic.computation_type_impl(types[0], False, types[1], not is_tensor, divides)
    if any(one.is_ptr() or one.is_bf16() or one.is_fp8() for one in (*types, common)):
        return None
    if common.is_bool() and plain_name not in _BITWISE:
        return None
    if common.is_int() and plain_name == "__truediv__":
        return None
    dtype = interpreter._get_np_dtype(common)
    operate = _EXTREMA[name][common.is_floating()] if name in _EXTREMA else _OPERATORS[plain_name]

    def turned(a: Any, b: Any) -> Any:
        return operate(b, a)

    compute: _Computes = turned if name in _TURNED else operate
    if not is_tensor:
        value = semantic.scalar_constant(right, common).handle.data
        return lambda a, _: compute(a if a.dtype == dtype else a.astype(dtype), value)
    if types[0] == common and types[1] == common:
        return compute
    return lambda a, b: compute(
        a if a.dtype == dtype else a.astype(dtype), b if b.dtype == dtype else b.astype(dtype)
    )
