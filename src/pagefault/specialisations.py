"""Which of Triton's variants of each kernel a run has exercised.

Triton compiles a kernel anew for each set of dtypes and of compile-time constants, and, unless the
kernel asks it not to, for integers that are 1 or a multiple of 16 and for pointers that are one. On
a GPU a variant is noted when Triton compiles it; in the interpreter, where nothing is compiled,
Triton's own code says of each launch which variant a GPU would run.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

ONE, MULTIPLE, NEITHER = INTEGERS = ("1", "a multiple of 16", "neither")
ALIGNED, UNALIGNED = ALIGNMENTS = ("aligned", "not aligned")

# Of the options that a kernel is compiled with, those that a launch chooses.
OPTIONS = ("num_warps", "num_stages", "num_ctas")

# A constant of more values than this is counted, not listed.
MOST_VALUES = 6

_NEEDED = ("JITFunction", "create_function_from_signature")


class Treatment(NamedTuple):
    """What one parameter of a variant is compiled for.

    Attributes:
        type: Triton's name of its type, such as "i32" or "*i64"; "" for a constant.
        value: A constant's value, one of INTEGERS or ALIGNMENTS where Triton looks at that, or "".
    """

    type: str
    value: str


Variant = tuple[Treatment, ...]


@dataclass
class KernelVariants:
    """The variants of one kernel.

    Attributes:
        parameters: Their names, then OPTIONS.
        menus: Per parameter the values that Triton tells apart, where these are INTEGERS or
            ALIGNMENTS.
        seen: The variants, a treatment for each parameter.
    """

    parameters: tuple[str, ...]
    menus: tuple[tuple[str, ...], ...]
    seen: set[Variant] = field(default_factory=set)

    def values(self) -> dict[str, list[Treatment]]:
        """Return the treatments that each parameter has had, sorted."""
        return {
            name: sorted({variant[i] for variant in self.seen}, key=_by_number)
            for i, name in enumerate(self.parameters)
        }

    def unseen(self) -> dict[str, list[str]]:
        """Return the values that Triton would tell apart and has not been given, by parameter."""
        missing = {}
        for (name, treatments), menu in zip(self.values().items(), self.menus):
            absent = [value for value in menu if value not in {t.value for t in treatments}]
            if absent:
                missing[name] = absent
        return missing

    def dtype_pairings(self) -> tuple[int, int]:
        """Return how many pairings of dtypes of tensors there were, of how many of these dtypes."""
        pairings = {
            tuple(treatment.type for treatment in variant if treatment.type.startswith("*"))
            for variant in self.seen
        }
        types = [{t.type for t in treatments} for treatments in self.values().values()]
        return len(pairings), prod(len(own) for own in types if any("*" in type_ for type_ in own))

    def __str__(self) -> str:
        num_pairings, num_possible = self.dtype_pairings()
        parts = [f"{num_pairings} of {num_possible} pairings of dtypes"]
        for name, treatments in self.values().items():
            values = [t.value for t in treatments if not t.type]
            if 1 < len(values) <= MOST_VALUES:
                parts.append(f"{name} {', '.join(values)}")
            elif values[1:]:
                parts.append(f"{name} {len(values)} values")
        for name, absent in self.unseen().items():
            parts.append(f"{name} never {' or '.join(absent)}")
        return f"{_count(len(self.seen), 'variant')}: {'; '.join(parts)}"


def _by_number(treatment: Treatment) -> tuple[str, float, str]:
    """Return what treatments are sorted by: numbers by size, then words."""
    value = treatment.value
    return treatment.type, int(value) if value.isdecimal() else float("inf"), value


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# By "module.kernel".
Variants = dict[str, KernelVariants]


def add_variants(known: Variants, new: Mapping[str, KernelVariants]) -> None:
    """Add variants to those that are known."""
    for name, kernel in new.items():
        if name in known:
            # An optional tensor that is left out has no menu.
            menus = zip(known[name].menus, kernel.menus)
            known[name].menus = tuple(max(pair, key=len) for pair in menus)
            known[name].seen |= kernel.seen
        else:
            known[name] = dataclasses.replace(kernel, seen=set(kernel.seen))


def lines_of(variants: Variants) -> list[str]:
    """Return a line for each kernel."""
    return [f"{name.rpartition('.')[2]}: {variants[name]}" for name in sorted(variants)]


def json_of(variants: Variants) -> dict[str, Any]:
    """Return what there is to say of variants as JSON has it."""
    return {
        name: {
            "variants": len(kernel.seen),
            "dtype_pairings": dict(zip(("seen", "of"), kernel.dtype_pairings())),
            "seen": {
                parameter: [" ".join(filter(None, treatment)) for treatment in treatments]
                for parameter, treatments in kernel.values().items()
            },
            "unseen": kernel.unseen(),
        }
        for name, kernel in sorted(variants.items())
    }


@dataclass
class Sweep:
    """What launches of a sweep were given.

    Attributes:
        variants: The variants that they ran.
        integers: By kernel and parameter: which of INTEGERS the values of a run-time integer were.
    """

    variants: Variants = field(default_factory=dict)
    integers: dict[str, dict[str, set[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )


class Recorder:
    """Notes the variants of the launches of this process.

    Attributes:
        missing: What Triton lacks that this needs, or "".
    """

    def __init__(self) -> None:
        from triton.runtime import interpreter, jit

        self._new: Variants = {}
        self._sweep: Sweep | None = None
        self._binders: dict[Any, _Binder | None] = {}
        self.missing = _what_is_missing(jit, interpreter)
        if not self.missing:
            self._watch_compilations(jit.JITFunction)
            self._watch_interpreter(interpreter.InterpretedFunction)

    def take_new(self) -> Variants:
        """Return the variants that are new since the last call."""
        new, self._new = self._new, {}
        return new

    @contextmanager
    def sweeping(self) -> Iterator[Sweep]:
        """Give the launches inside to a sweep; the interpreter only notes them, and runs none."""
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        # On a GPU what was compiled before is not compiled again, but launched all the same.
        def run_watched(kernel: Any, *arguments: Any, **named: Any) -> Any:
            self._see(kernel, arguments, named)
            return run(kernel, *arguments, **named)

        sweep = Sweep()
        self._sweep = sweep
        JITFunction.run = run_watched
        try:
            yield sweep
        finally:
            self._sweep = None
            JITFunction.run = run

    def _watch_compilations(self, jit_function: Any) -> None:
        # Triton's hooks are called at the same place; but with a hook set, a kernel that takes a
        # constant that JSON can't hold, such as a function, does not compile on Triton 3.6.
        compile_variant = jit_function._do_compile

        def compile_watched(kernel: Any, key: Any, *arguments: Any, **named: Any) -> Any:
            compiled = compile_variant(kernel, key, *arguments, **named)
            signature, _, constants, options, attributes = arguments[:5]
            variant = _variant(kernel, signature, constants, attributes, options)
            self._note(self._new, kernel, variant)
            return compiled

        jit_function._do_compile = compile_watched

    def _watch_interpreter(self, interpreted_function: Any) -> None:
        run = interpreted_function.run

        def run_watched(kernel: Any, *arguments: Any, **named: Any) -> Any:
            self._see(kernel, arguments, named)
            if self._sweep is not None:
                return None
            return run(kernel, *arguments, **named)

        interpreted_function.run = run_watched

    def _see(self, launched: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Note the variant that a GPU runs, or would run for a launch in the interpreter."""
        if launched.fn not in self._binders:
            self._binders[launched.fn] = _binder_of(launched)
        binder = self._binders[launched.fn]
        if binder is None:
            return
        options = {name: named[name] for name in named if name not in ("grid", "warmup")}
        try:
            bound, specialisation, rest = binder.bind(*arguments, **options)
            key = (*specialisation, *rest.items())
            if self._sweep is not None:
                self._note_integers(self._sweep, binder.kernel, bound)
            elif key in binder.seen:
                return
            else:
                binder.seen.add(key)
            packed = binder.kernel._pack_args(binder.backend, options, bound, specialisation, rest)
        except Exception:  # A launch that Triton refuses is the launch's to report.
            return
        launch_options, signature, constants, attributes = packed
        variant = _variant(binder.kernel, signature, constants, attributes, launch_options)
        self._note(
            self._new if self._sweep is None else self._sweep.variants, binder.kernel, variant
        )

    def _note(self, into: Variants, kernel: Any, variant: Variant) -> None:
        noted = KernelVariants(*_menus(kernel, variant), {variant})
        add_variants(into, {_name_of(kernel): noted})

    def _note_integers(self, sweep: Sweep, kernel: Any, bound: Mapping[str, Any]) -> None:
        for parameter in kernel.params:
            value = bound[parameter.name]
            if type(value) is int and not parameter.is_constexpr:
                sort = ONE if value == 1 else NEITHER if value % 16 else MULTIPLE
                sweep.integers[_name_of(kernel)][parameter.name].add(sort)


@dataclass
class _Binder:
    """What tells the variants of a kernel apart: Triton's own code for a GPU."""

    kernel: Any
    backend: Any
    bind: Callable[..., Any]
    seen: set[Any] = field(default_factory=set)


def _binder_of(launched: Any) -> _Binder | None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    try:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        is_compiled = isinstance(launched, JITFunction)
        kernel = launched if is_compiled else JITFunction(launched.fn, **launched.kwargs)
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    except Exception:  # A kernel that only the interpreter takes has no variants.
        return None
    return _Binder(kernel, backend, bind)


def _variant(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[tuple[int, ...], Any],
    attributes: Mapping[tuple[int, ...], Any],
    options: Any,
) -> Variant:
    """Return a variant from what Triton compiles it with."""
    treatments = []
    for i, parameter in enumerate(kernel.params):
        type_ = signature[parameter.name]
        menu = _menu(parameter, type_, constants.get((i,)))
        if type_ == "constexpr" and menu:
            treatment = Treatment("i32", ONE)  # Triton makes a constant of an integer that is 1.
        elif type_ == "constexpr":
            treatment = Treatment("", str(constants.get((i,))))
        elif menu:
            is_multiple = any("tt.divisibility" in pair for pair in attributes.get((i,), ()))
            multiple, other = (MULTIPLE, NEITHER) if menu == INTEGERS else ALIGNMENTS
            treatment = Treatment(type_, multiple if is_multiple else other)
        else:
            treatment = Treatment(type_, "")
        treatments.append(treatment)
    chosen = [Treatment("", str(getattr(options, name, ""))) for name in OPTIONS]
    return (*treatments, *chosen)


def _menu(parameter: Any, type_: str, value: Any) -> tuple[str, ...]:
    """Return what Triton tells apart of a parameter's values, beside their types."""
    if parameter.is_constexpr or parameter.do_not_specialize:
        return ()
    looks_at_alignment = not parameter.do_not_specialize_on_alignment
    if type_.startswith("*"):
        return ALIGNMENTS if looks_at_alignment else ()
    if not _is_integer(type_, value):
        return ()
    return INTEGERS if looks_at_alignment else (ONE, NEITHER)


def _is_integer(type_: str, value: Any) -> bool:
    if type_ == "constexpr":
        return type(value) is int
    return type_.startswith(("i", "u")) and type_ != "u1"


def _name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


def _menus(kernel: Any, variant: Variant) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names of a kernel's parameters and OPTIONS, and the menu of each."""
    names = tuple(parameter.name for parameter in kernel.params)
    menus = tuple(
        _menu(parameter, treatment.type, None)
        for parameter, treatment in zip(kernel.params, variant)
    )
    return (*names, *OPTIONS), (*menus, *((),) * len(OPTIONS))


def _what_is_missing(jit: Any, interpreter: Any) -> str:
    for name in _NEEDED:
        if not hasattr(jit, name):
            return f"triton.runtime.jit has no {name}"
    for name in ("_do_compile", "_pack_args"):
        if not hasattr(jit.JITFunction, name):
            return f"triton's JITFunction has no {name}"
    if not hasattr(interpreter, "InterpretedFunction"):
        return "triton.runtime.interpreter has no InterpretedFunction"
    return ""


_recorder: Recorder | None = None


def install() -> Recorder:
    """Return the recorder of this process, made on the first call."""
    global _recorder
    if _recorder is None:
        _recorder = Recorder()
    return _recorder
