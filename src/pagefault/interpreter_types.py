"""What Triton's interpreter works out from types alone, worked out once for each type.

It interprets a kernel a scalar or a vector at a time, and spends most of that time on types: the
shape of each result, the type that two operands have in common, the array type that holds it. The
arrays themselves are small. Nothing here changes what is computed or refused: where a pair of types
is not one of the plain ones, the interpreter's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# What `changes` yields: an object, the name of an attribute, and its value during a launch.
Change = tuple[Any, str, Any]

_INTEGERS = {
    f"{sign}int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1)) if not sign else (0, 2**bits)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
"""By the name of an integer type, its least value and the one past its largest."""

_PLAIN = {*_INTEGERS, "int1"}
"""Types of which two operands need no cast."""


def keep_array_types(interpreter: Any) -> None:
    """Let the interpreter look up which NumPy type holds a Triton type only once for each."""
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def array_type(type_: Any) -> Any:
        name = type_.scalar.name
        if name not in known:
            known[name] = look_up(type_)
        return known[name]

    interpreter._get_np_dtype = array_type


def changes(interpreter: Any) -> Iterator[Change]:
    """Yield what is to be other than it is while kernels are interpreted.

    To be called once the language is patched as the interpreter patches it.

    Args:
        interpreter: The module `triton.runtime.interpreter`.
    """
    core = interpreter.tl.core
    semantic = type(interpreter.interpreter_semantic)
    shapes = _Shapes(core)
    operands = _Operands(interpreter, semantic)
    yield core.block_type, "__init__", shapes.init_block_type
    yield core.tensor, "__init__", shapes.init_tensor
    yield core.dtype, "to_ir", _kept_by_name(core.dtype.to_ir)
    yield semantic, "binary_op_type_checking_impl", operands.check
    yield semantic, "broadcast_impl_value", operands.broadcast
    yield semantic, "cast", operands.cast
    yield semantic, "computation_type_impl", operands.common_type


def direct(builtin: Any, interpreter: Any) -> Any:
    """Return what a function of Triton's language does in the interpreter, without its wrappers.

    Returns None if it is not wrapped in the way that is known here.
    """
    wrapper = interpreter.tl.core.builtin(lambda: None)
    if getattr(builtin, "__code__", None) is not wrapper.__code__:
        return None
    function = builtin.__wrapped__
    semantic = interpreter.interpreter_semantic

    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*arguments, **named)

    return call


def _kept_by_name(to_ir: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[str, Any] = {}

    def kept(type_: Any, builder: Any) -> Any:
        if type_.name not in known:
            known[type_.name] = to_ir(type_, builder)
        return known[type_.name]

    return kept


class _Shapes:
    """Constructors of vector types and tensors that share what equal ones have in common.

    A vector type that was made during a launch has the attribute `_shared`: the shape of its
    tensors and how many elements they have, the same objects for all types of that shape.
    """

    def __init__(self, core: Any) -> None:
        constexpr, dtype, own_tuple = core.constexpr, core.dtype, core.tuple
        init_block_type, init_tensor = core.block_type.__init__, core.tensor.__init__
        known: dict[tuple[Any, ...], dict[str, Any]] = {}
        of_vectors: dict[tuple[int, ...], tuple[Any, Any]] = {}
        of_scalars = own_tuple([]), constexpr(1)

        def block_type(self: Any, element_ty: Any, shape: Any) -> None:
            sizes = tuple([s.value if type(s) is constexpr else s for s in shape])
            pointee = getattr(element_ty, "element_ty", element_ty)
            key = element_ty.name, getattr(element_ty, "address_space", 0), sizes
            attributes = known.get(key)
            if attributes is None:
                init_block_type(self, element_ty, shape)
                # A pointer to pointers does not say in its name where those point.
                if type(pointee) is dtype and all(type(size) is int for size in sizes):
                    if sizes not in of_vectors:
                        shape_of_tensor = own_tuple([constexpr(size) for size in sizes])
                        of_vectors[sizes] = shape_of_tensor, constexpr(self.numel)
                    self._shared = of_vectors[sizes]
                    known[key] = dict(self.__dict__)
            else:
                self.__dict__.update(attributes)

        def tensor(self: Any, handle: Any, type: Any) -> None:
            shared = type.__dict__.get("_shared") if type.is_block() else of_scalars
            if shared is None:
                init_tensor(self, handle, type)
                return
            self.handle = handle
            self.type = type
            self.dtype = type.scalar
            self.shape, self.numel = shared

        self.init_block_type = block_type
        self.init_tensor = tensor


class _Operands:
    """What operands are turned into before they are added, compared and so on."""

    def __init__(self, interpreter: Any, semantic: Any) -> None:
        import numpy as np

        core = interpreter.tl.core
        tensor, dtype, block_type = core.tensor, core.dtype, core.block_type
        handle_of = interpreter.TensorHandle
        array_type = interpreter._get_np_dtype
        check, common_type = semantic.binary_op_type_checking_impl, semantic.computation_type_impl
        broadcast, cast = semantic.broadcast_impl_value, semantic.cast
        known: dict[tuple[Any, ...], Any] = {}

        def filled(value: Any, element: Any, of_handle: Any, like: Any) -> Any:
            """Return a vector of one value; the type of its handle may be another than its own."""
            type_ = like.type
            if type_.scalar is not element:
                type_ = block_type(element, type_.shape)
            data = np.empty([size.value for size in like.shape], array_type(of_handle))
            data[...] = value
            return tensor(handle_of(data, of_handle), type_)

        def constant(value: int, like: Any) -> Any:
            """Return an integer as an operand beside a tensor."""
            element = like.type.scalar
            if like.type.is_block():
                return filled(value, element, element, like)
            return tensor(handle_of(np.array([value], array_type(element)), element), element)

        def spread(scalar: Any, like: Any) -> Any:
            """Return a scalar as a vector of the shape of another."""
            handle = scalar.handle
            return filled(handle.data, scalar.type.scalar, handle.dtype.scalar, like)

        def broadcast_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
            if lhs.shape is rhs.shape:
                return lhs, rhs
            if not rhs.type.is_block():
                return lhs, spread(rhs, lhs)
            if not lhs.type.is_block():
                return spread(lhs, rhs), rhs
            both: tuple[Any, Any] = broadcast(self, lhs, rhs)
            return both

        def cast_integer(self: Any, input: Any, dst_ty: Any, *arguments: Any, **named: Any) -> Any:
            source, element = input.type.scalar, dst_ty.scalar
            if source.name == element.name and type(source) is dtype:
                return input
            is_plain = source.name in _PLAIN and element.name in _INTEGERS
            if not is_plain or arguments or named:
                return cast(self, input, dst_ty, *arguments, **named)
            data = input.handle.data.astype(array_type(element))
            is_block = input.type.is_block()
            type_ = block_type(element, input.type.shape) if is_block else dst_ty
            return tensor(handle_of(data, element), type_)

        def check_operands(
            self: Any,
            lhs: Any,
            rhs: Any,
            allow_lhs_ptr: bool = False,
            allow_rhs_ptr: bool = False,
            arithmetic_check: bool = True,
            div_or_mod: bool = False,
        ) -> Any:
            if type(lhs) is tensor and type(rhs) is tensor:
                a, b = lhs.type.scalar, rhs.type.scalar
                if a.name in _PLAIN and b.name in _PLAIN:
                    if a.name != b.name and arithmetic_check:
                        common = self.computation_type_impl(a, False, b, False, div_or_mod)
                        lhs, rhs = self.cast(lhs, common), self.cast(rhs, common)
                    return self.broadcast_impl_value(lhs, rhs)
                if allow_lhs_ptr and a.is_ptr() and b.name in _PLAIN:
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(lhs) is tensor and type(rhs) is int:
                least, end = _INTEGERS.get(lhs.type.scalar.name, (0, 0))
                if least <= rhs < end:
                    return lhs, constant(rhs, lhs)
            elif type(lhs) is int and type(rhs) is tensor:
                least, end = _INTEGERS.get(rhs.type.scalar.name, (0, 0))
                if least <= lhs < end:
                    return constant(lhs, rhs), rhs
            return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

        def common_type_of(
            self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool
        ) -> Any:
            if type(a) is not dtype or type(b) is not dtype:
                return common_type(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
            key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
            if key not in known:
                known[key] = common_type(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
            return known[key]

        self.broadcast = broadcast_value
        self.cast = cast_integer
        self.check = check_operands
        self.common_type = common_type_of
