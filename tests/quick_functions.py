"""Functions of Triton's language that go to numpy at once, where they have been met with such arguments.

As `tests.quick_operators`: what types and shapes are computed in, and what is broadcast to what, depends on
the arguments' types alone. It is found out once, by the function itself; what it gave to numpy, or what came
of it, must be what the quick way gives or makes, or that way is not taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.quick_operators import maker, quick_operator

_Function = Callable[..., Any]

_UNARY: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "rsqrt": lambda data: 1 / np.sqrt(data),
}
# As `numpy.nanmax` and `numpy.nanmin` compute them, which go through much else.
_REDUCED: dict[str, Callable[..., Any]] = {
    "sum": np.add.reduce,
    "max": np.fmax.reduce,
    "min": np.fmin.reduce,
}


def quick_functions(interpreter: Any, plain: dict[str, _Function]) -> dict[str, _Function]:
    """Those of `plain`, functions of the language by name, each by the quick way if there is one."""
    made: dict[str, _Function] = dict(plain)
    quick: dict[str, Callable[[Any, _Function], _Function]] = {
        "load": _quick_load,
        "store": _quick_store,
        "where": _quick_where,
        "arange": _quick_constant,
        "full": _quick_constant,
        "program_id": _quick_program_id,
        "to": _quick_cast,
    }
    for name in made.keys() & quick.keys():
        made[name] = quick[name](interpreter, plain[name])
    for name in made.keys() & _UNARY.keys():
        made[name] = _quick_unary(interpreter, plain[name], _UNARY[name])
    for name in made.keys() & {"minimum", "maximum"}:
        made[name] = _quick_extremum(interpreter, name, plain[name])
    return made


def quick_reductions(interpreter: Any) -> dict[str, _Function]:
    """Those of the language by name: they are functions in Triton, which the interpreter interprets too."""
    plain = {name: getattr(interpreter.tl, name) for name in _REDUCED}
    return {name: _quick_reduction(interpreter, plain[name], _REDUCED[name]) for name in plain}


def _kind_of(interpreter: Any) -> Callable[[Any], Any]:
    """What ways depend on of an argument: the type of a tensor, or a constant itself."""
    tensor, constant = interpreter.tl.tensor, interpreter.tl.constexpr

    def kind(value: Any) -> Any:
        if type(value) is tensor:
            return value.type.name
        if value is None:
            return None
        if type(value) is constant:
            value = value.value
        return (type(value), value or repr(value))  # zeros have signs

    return kind


def _recorded(interpreter: Any, name: str, call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """What `call` returns, and the arrays that it had the interpreter's operation `name` work on, at last."""
    builder = interpreter.interpreter_builder
    operation, arrays = getattr(builder, name), []

    def recording(*args: Any) -> Any:
        arrays[:] = [getattr(one, "data", None) for one in args]
        return operation(*args)

    setattr(builder, name, recording)
    try:
        return call(), arrays
    finally:
        delattr(builder, name)


def _is_same(one: Any, other: Any) -> bool:
    same = isinstance(other, np.ndarray) and one.dtype == other.dtype and one.shape == other.shape
    return bool(same and one.tobytes() == other.tobytes())


def _is_plain(*types: Any) -> bool:
    """Whether numpy knows such scalars, and converts one to another as Triton does."""
    return not any(one.is_ptr() or one.is_bf16() or one.is_fp8() for one in types)


def _as(interpreter: Any, given: Any, dtype: Any, recorded: Any) -> Callable[[Any], Any] | None:
    """Makes numbers of type `dtype` of such as `given`: a constant, which is `recorded`, or a tensor's."""
    if not isinstance(given, interpreter.tl.tensor):
        return lambda value: recorded
    if given.dtype == dtype:
        return lambda value: value.handle.data
    if not _is_plain(given.dtype, dtype) or dtype.is_bool():
        return None
    to = interpreter._get_np_dtype(dtype)
    return lambda value: value.handle.data.astype(to)


def _quick_load(interpreter: Any, plain: _Function) -> _Function:
    tensor, kind, like = interpreter.tl.tensor, _kind_of(interpreter), maker(interpreter)
    read = interpreter._interpreter.load
    ways: dict[Any, Any] = {}

    def learn(pointer: Any, mask: Any, other: Any) -> tuple[Any, Any]:
        found, arrays = _recorded(interpreter, "create_masked_load", lambda: plain(pointer, mask, other))
        element, data = found.dtype, pointer.handle.data
        is_known = mask is None or (type(mask) is tensor and mask.dtype.is_bool())
        if not is_known or type(other) is tensor or pointer.dtype.element_ty != element:
            return False, found
        everywhere = np.ones(data.shape, dtype=bool)
        wide = everywhere if mask is None else mask.handle.data & everywhere
        if not (_is_same(data, arrays[0]) and _is_same(wide, arrays[1])):
            return False, found
        dtype = interpreter._get_np_dtype(element)
        filled = arrays[2] if arrays[2] is not None else np.zeros(data.shape, dtype)
        way = (everywhere, filled, dtype, found)
        return (way if _is_same(read(data, wide, filled, dtype), found.handle.data) else False), found

    def load(pointer: Any, mask: Any = None, other: Any = None, **others: Any) -> Any:
        if others or type(pointer) is not tensor:
            return plain(pointer, mask, other, **others)
        key = (pointer.type.name, kind(mask), kind(other))
        way = ways.get(key)
        if not way:
            if way is None:
                ways[key], found = learn(pointer, mask, other)
                return found
            return plain(pointer, mask, other)
        everywhere, filled, dtype, first = way
        wide = everywhere if mask is None else mask.handle.data & everywhere
        return like(first, read(pointer.handle.data, wide, filled, dtype))

    return load


def _quick_store(interpreter: Any, plain: _Function) -> _Function:
    tensor, kind = interpreter.tl.tensor, _kind_of(interpreter)
    write = interpreter._interpreter.store
    ways: dict[Any, Any] = {}

    def learn(pointer: Any, value: Any, mask: Any) -> tuple[Any, Any]:
        found, arrays = _recorded(interpreter, "create_masked_store", lambda: plain(pointer, value, mask))
        data = pointer.handle.data
        if mask is not None and not (type(mask) is tensor and mask.dtype.is_bool()):
            return False, found
        convert = _as(interpreter, value, pointer.dtype.element_ty, arrays[1])
        if convert is None or pointer.dtype.element_ty.is_bool():
            return False, found
        everywhere = np.ones(data.shape, dtype=bool)
        wide = everywhere if mask is None else mask.handle.data & everywhere
        known = zip((data, convert(value), wide), arrays, strict=False)
        return ((convert, everywhere, found) if all(_is_same(*pair) for pair in known) else False), found

    def store(pointer: Any, value: Any, mask: Any = None, **others: Any) -> Any:
        if others or type(pointer) is not tensor:
            return plain(pointer, value, mask, **others)
        key = (pointer.type.name, kind(value), kind(mask))
        way = ways.get(key)
        if not way:
            if way is None:
                ways[key], found = learn(pointer, value, mask)
                return found
            return plain(pointer, value, mask)
        convert, everywhere, first = way
        wide = everywhere if mask is None else mask.handle.data & everywhere
        write(pointer.handle.data, convert(value), wide)
        return first  # void

    return store


def _quick_where(interpreter: Any, plain: _Function) -> _Function:
    tensor, kind, like = interpreter.tl.tensor, _kind_of(interpreter), maker(interpreter)
    ways: dict[Any, Any] = {}

    def learn(condition: Any, x: Any, y: Any) -> tuple[Any, Any]:
        found, arrays = _recorded(interpreter, "create_select", lambda: plain(condition, x, y))
        if type(condition) is not tensor or not condition.dtype.is_bool():
            return False, found
        of_x, of_y = (
            _as(interpreter, one, found.dtype, array) for one, array in zip((x, y), arrays[1:], strict=True)
        )
        if of_x is None or of_y is None:
            return False, found
        again = np.where(condition.handle.data, of_x(x), of_y(y))
        return ((of_x, of_y, found) if _is_same(again, found.handle.data) else False), found

    def where(condition: Any, x: Any, y: Any, **_: Any) -> Any:
        key = (kind(condition), kind(x), kind(y))
        way = ways.get(key)
        if not way:
            if way is None:
                ways[key], found = learn(condition, x, y)
                return found
            return plain(condition, x, y)
        of_x, of_y, first = way
        return like(first, np.where(condition.handle.data, of_x(x), of_y(y)))

    return where


def _quick_constant(interpreter: Any, plain: _Function) -> _Function:
    """Of constants: made once, since nothing changes what tensors hold."""
    constant = interpreter.tl.constexpr
    known: dict[Any, Any] = {}

    def key_of(value: Any) -> Any:
        if type(value) is constant:
            value = value.value
        if isinstance(value, (list, tuple)):
            return tuple([key_of(one) for one in value])
        if isinstance(value, (int, float)):
            return (type(value), value or repr(value))
        if isinstance(value, interpreter.tl.dtype):
            return value.name
        raise TypeError

    def make(*args: Any, **kwargs: Any) -> Any:
        try:
            key = (*map(key_of, args), *[(name, key_of(kwargs[name])) for name in kwargs if name[0] != "_"])
        except TypeError:
            return plain(*args, **kwargs)
        if key not in known:
            known[key] = plain(*args, **kwargs)
        return known[key]

    return make


def _quick_program_id(interpreter: Any, plain: _Function) -> _Function:
    builder, constant = interpreter.interpreter_builder, interpreter.tl.constexpr
    known: dict[int, Any] = {}

    def program_id(axis: Any, **_: Any) -> Any:
        number = builder.grid_idx[axis.value if type(axis) is constant else axis]
        if number not in known:
            known[number] = plain(axis)
        return known[number]

    return program_id


def _quick_cast(interpreter: Any, plain: _Function) -> _Function:
    constant, like = interpreter.tl.constexpr, maker(interpreter)
    ways: dict[Any, Any] = {}

    def to(self: Any, dtype: Any, *args: Any, **others: Any) -> Any:
        if type(dtype) is constant:
            dtype = dtype.value
        if args or others:
            return plain(self, dtype, *args, **others)
        key = (self.type.name, dtype.name)
        way = ways.get(key)
        if not way:
            found = plain(self, dtype)
            if way is None:
                convert = _as(interpreter, self, dtype, None)
                is_same = convert is not None and _is_same(convert(self), found.handle.data)
                ways[key] = is_same and (found is self, convert, found)
            return found
        is_self, convert, first = way
        return self if is_self else like(first, convert(self))

    return to


def _quick_unary(interpreter: Any, plain: _Function, compute: Callable[[Any], Any]) -> _Function:
    tensor, like = interpreter.tl.tensor, maker(interpreter)
    ways: dict[str, Any] = {}

    def operate(x: Any, **_: Any) -> Any:
        if type(x) is not tensor:
            return plain(x)
        first = ways.get(x.type.name)
        if not first:
            found = plain(x)  # which refuses what the function is not for
            if first is None:
                ways[x.type.name] = _is_same(compute(x.handle.data), found.handle.data) and found
            return found
        return like(first, compute(x.handle.data))

    return operate


def _quick_extremum(interpreter: Any, name: str, plain: _Function) -> _Function:
    tensor = interpreter.tl.tensor
    operate = quick_operator(interpreter, name, plain)

    def extremum(x: Any, y: Any, **others: Any) -> Any:
        return plain(x, y, **others) if others or type(x) is not tensor else operate(x, y)

    return extremum


def _quick_reduction(interpreter: Any, plain: _Function, compute: Callable[..., Any]) -> _Function:
    tensor, constant, like = interpreter.tl.tensor, interpreter.tl.constexpr, maker(interpreter)
    ways: dict[Any, Any] = {}

    def reduce(input: Any, axis: Any = None, **others: Any) -> Any:
        if type(axis) is constant:
            axis = axis.value
        if others or type(input) is not tensor or not isinstance(axis, int):
            return plain(input, axis, **others)
        key = (input.type.name, axis)
        first = ways.get(key)
        if not first:
            found = plain(input, axis)
            if first is None:
                is_same = input.dtype.primitive_bitwidth >= 32 and _is_plain(input.dtype)
                again = compute(input.handle.data, axis=axis) if is_same else None
                is_same = is_same and _is_same(np.array([again]) if np.ndim(again) == 0 else again,
                                               found.handle.data)  # fmt: skip
                ways[key] = is_same and found
            return found
        made = compute(input.handle.data, axis=axis)
        return like(first, made if first.type.is_block() else np.array([made]))

    return reduce
