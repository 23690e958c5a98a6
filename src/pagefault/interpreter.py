"""Triton's interpreter, made to compute as a GPU does, and faster.

Works on what Triton 3.6 to 3.9 have in `triton.runtime.interpreter`; where a part of that is
missing, the interpreter is left as it is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import FunctionType
from typing import Any

from . import interpreter_types

_tuned = False


def tune() -> None:
    """Tune the interpreter of this process; a second call does nothing."""
    global _tuned
    if _tuned:
        return
    _tuned = True
    from triton.runtime import interpreter

    _let_integers_wrap(interpreter)
    if _keeps_types(interpreter):
        interpreter_types.keep_array_types(interpreter)
    _patch_language_once_a_launch(interpreter)


def _keeps_types(interpreter: Any) -> bool:
    """Return whether the interpreter has all that `interpreter_types` works on."""
    core = interpreter.tl.core
    semantic = type(getattr(interpreter, "interpreter_semantic", None))
    places = [
        (interpreter, ("_get_np_dtype", "TensorHandle")),
        (core, ("block_type", "tensor", "dtype", "tuple", "constexpr", "builtin")),
        (semantic, ("binary_op_type_checking_impl", "broadcast_impl_value")),
        (semantic, ("cast", "computation_type_impl")),
    ]
    return all(hasattr(place, name) for place, names in places for name in names)


def _let_integers_wrap(interpreter: Any) -> None:
    """Turn off the interpreter's own overflow assertions.

    They stop at 32-bit sums that a compiled kernel lets wrap, in lanes that are masked off too,
    and cost a third of the time.
    """
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _index_of(tensor: Any) -> int:
    """Return a scalar of the interpreter as an int."""
    return int(tensor.handle.data.item())


def _truth_of(tensor: Any) -> bool:
    """Return a scalar of the interpreter as a bool; only scalars have a truth."""
    data = tensor.handle.data
    return bool(data.item()) if data.size == 1 else True


class _NothingToRestore:
    def restore(self) -> None:
        """Leave the language patched: an outer scope restores it."""


def _patch_language_once_a_launch(interpreter: Any) -> None:
    """Patch `triton.language` when a launch starts, and not again for each device function.

    What there is to patch is looked up for the first launch alone, which else takes a third of the
    time of a small one.
    """
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_MISSING")):
        return
    patch_language = interpreter._patch_lang
    language = interpreter.tl
    # The interpreter patches the modules that a function's globals name.
    sees_all = FunctionType((lambda: None).__code__, {"tl": language, "core": language.core})
    is_patched = False

    # What the first launch has changed, as (object, name, patched, original).
    changes: list[tuple[Any, str, Any, Any]] = []

    def patch_all() -> None:
        if changes:
            for place, name, patched, _ in changes:
                setattr(place, name, patched)
            return
        scope = patch_language(sees_all)
        # Triton 3.6 converts arrays of one element to a number, which NumPy 2.5 refuses.
        scope.set_attr(language.tensor, "__index__", _index_of)
        scope.set_attr(language.tensor, "__bool__", _truth_of)
        if _keeps_types(interpreter):
            times = Counter((id(place), name) for place, name, _ in scope._changes)
            for place, name, original in list(scope._changes):
                call = interpreter_types.direct(original, interpreter)
                if call is not None and times[id(place), name] == 1:
                    scope.set_attr(place, name, call)
            for place, name, value in interpreter_types.changes(interpreter):
                scope.set_attr(place, name, value)
        originals: dict[tuple[int, str], tuple[Any, Any]] = {}
        for place, name, original in scope._changes:
            originals.setdefault((id(place), name), (place, original))
        for (_, name), (place, original) in originals.items():
            changes.append((place, name, vars(place)[name], original))

    class Scope:
        def restore(self) -> None:
            nonlocal is_patched
            is_patched = False
            for place, name, _, original in changes:
                if original is interpreter._MISSING:
                    delattr(place, name)
                else:
                    setattr(place, name, original)

    def patch(fn: Any) -> Scope | _NothingToRestore:
        nonlocal is_patched
        if is_patched:
            return _NothingToRestore()
        patch_all()
        is_patched = True
        return Scope()

    interpreter._patch_lang = patch
