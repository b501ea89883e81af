"""Triton's interpreter without what takes it most of its time and changes no result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from typing import Any

import numpy as np

from tests.quick_functions import quick_functions, quick_reductions
from tests.quick_operators import quick_methods


def make_quick() -> None:
    """Patch Triton's interpreter, where anybody has imported Triton; of another version what is as it was."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    for patch in (
        _patch_language_once,
        _count_no_overflows,
        _remember_types,
        _remember_shapes,
        _convert_small_floats_by_table,
        _call_directly,
    ):
        with contextlib.suppress(AttributeError):
            patch(interpreter)


def _patch_language_once(interpreter: Any) -> None:
    """Patch Triton's language once a launch, and find out once what of it is to be patched.

    Triton 3.9 does so again in every call of a device function, `tl.sum` and the like, and goes through all
    of its modules for it: nothing in them is as it was before the launch until that has ended.
    """
    language, patch, scope_of_none = interpreter.tl, interpreter._patch_lang, interpreter._LangPatchScope
    patched: set[int] = set()
    known: dict[frozenset[int], list[tuple[Any, str, Any, Any]]] = {}
    absent = object()

    @functools.cache
    def modules_of(function: Any) -> frozenset[int]:
        seen = map(id, function.__globals__.values())
        return frozenset(seen) & {id(language), id(language.core)}

    def patched_for(function: Any, modules: frozenset[int]) -> Any:
        if patched:
            return patch(function)
        scope = scope_of_none()
        if modules not in known:
            scope = patch(function)
            # Of what was changed twice only the first is as it was before.
            before = {(id(owner), name): (owner, name, was) for owner, name, was in reversed(scope._changes)}
            known[modules] = [
                (owner, name, was, getattr(owner, name, absent)) for owner, name, was in before.values()
            ]
            return scope
        for owner, name, was, made in known[modules]:
            scope._changes.append((owner, name, was))
            setattr(owner, name, made)
        return scope

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
        if modules and modules <= patched:
            return scope_of_none()  # of a device function: nothing to restore
        scope = patched_for(function, modules)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        patched.update(modules)
        return scope

    interpreter._patch_lang = patch_once


def _count_no_overflows(interpreter: Any) -> None:
    """Sums and products of integers are computed once.

    They are computed again with 64 bits, and compared, for an assertion that is made in debug mode only.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_types(interpreter: Any) -> None:
    """What is known of types is worked out once for each."""
    semantic, core = interpreter.TritonSemantic, interpreter.tl.core
    np_dtype_of, computation_type = interpreter._get_np_dtype, semantic.computation_type_impl
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    np_dtypes: dict[str, Any] = {}
    computed: dict[Any, Any] = {}
    plain = {int, float, bool, core.dtype, core.block_type, core.pointer_type, core.tensor}

    def remembered_np_dtype(of: Any) -> Any:
        scalar = of.scalar
        found = np_dtypes.get(scalar.name)
        if found is None:
            found = np_dtypes[scalar.name] = np_dtype_of(scalar)
        return found

    def remembered_computation(self: Any, a: Any, a_alone: bool, b: Any, b_alone: bool, divides: bool) -> Any:
        key = (a.name, a_alone, b.name, b_alone, divides)
        found = computed.get(key)
        if found is None:
            found = computed[key] = computation_type(self, a, a_alone, b, b_alone, divides)
        return found

    interpreter._get_np_dtype = remembered_np_dtype
    semantic.computation_type_impl = remembered_computation
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _remember_shapes(interpreter: Any) -> None:
    """Shapes are checked, and said as tuples of Triton's constants, once for each."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = semantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        key = (element_ty.name, sizes)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> Any:
        same = left.shape is right.shape  # of tensors, each is there once
        return (left, right) if same else broadcast(self, left, right)

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    semantic.broadcast_impl_value = broadcast_if_needed


def _convert_small_floats_by_table(interpreter: Any) -> None:
    """Floats of 8 and 16 bits that numpy does not know are looked up, once all there are were converted."""
    convert = interpreter._convert_float
    tables: dict[Any, Any] = {}

    def looked_up(numbers: Any, of: Any, to: Any, rounding: Any) -> Any:
        if of.primitive_bitwidth > 16:
            return convert(numbers, of, to, rounding)
        bits = np.dtype(f"uint{of.primitive_bitwidth}")
        key = (of.name, to.name, rounding)
        if key not in tables:
            tables[key] = convert(np.arange(1 << of.primitive_bitwidth, dtype=bits), of, to, rounding)
        return tables[key][np.ascontiguousarray(numbers).view(bits)]

    interpreter._convert_float = looked_up


def _call_directly(interpreter: Any) -> None:
    """Operations of the language are called with what they need, and not through two functions more.

    What is patched at a launch is looked for once.
    """
    semantic, core = interpreter.interpreter_semantic, interpreter.tl.core
    wrapper = core.builtin(lambda: None).__code__

    def called_directly(member: Any) -> Any:
        called = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def with_semantic(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return called(*args, **kwargs)

        return with_semantic

    @functools.cache
    def builtins_of(owner: Any) -> list[tuple[str, Any, Any]]:
        found = [pair for pair in inspect.getmembers(owner) if core.is_builtin(pair[1])]
        direct = {name: called_directly(member) for name, member in found}
        direct = quick_functions(interpreter, direct)
        if owner is core.tensor:
            direct = quick_methods(interpreter, direct)
        return [(name, member, direct[name]) for name, member in found]

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name, member, direct in builtins_of(owner):
            if getattr(owner, name) is member:  # else it is patched already
                scope.set_attr(owner, name, direct)
        if owner is interpreter.tl:
            for name, quick in reductions.items():
                scope.set_attr(owner, name, quick)

    reductions = quick_reductions(interpreter)
    interpreter._patch_builtin = patch_builtin
