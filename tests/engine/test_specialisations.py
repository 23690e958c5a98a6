"""Which variants of a kernel are noted, and how they are told."""

import pickle

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from pagefault.conformance import session
from pagefault.specialisations import (
    Recorder,
    Treatment,
    add_variants,
    install,
    json_of,
    lines_of,
)

IN_INTERPRETER = pytest.mark.skipif(session.device == "cuda", reason="about the interpreter")

NAME = f"{__name__}.copy_kernel"


@triton.jit
def copy_kernel(source, target, count, size: tl.constexpr):
    lane = tl.arange(0, size)
    tl.store(target + lane, tl.load(source + lane, mask=lane < count), mask=lane < count)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])
def plain_copy_kernel(source, target, count, size: tl.constexpr):
    lane = tl.arange(0, size)
    tl.store(target + lane, tl.load(source + lane, mask=lane < count), mask=lane < count)


@triton.jit
def maybe_copy_kernel(source, target, count, size: tl.constexpr):
    if source is not None:
        copy_kernel(source, target, count, size)


def words(dtype=torch.int32, offset=0):
    return torch.zeros(64, dtype=dtype)[offset:]


def noted(*launches, kernel=copy_kernel):
    """Return what a new recorder has noted of launches of a kernel, each a tuple of arguments."""
    recorder = install()
    recorder._binders.clear()
    recorder.take_new()
    for arguments in launches:
        kernel[(1,)](*arguments)
    return recorder.take_new()


@IN_INTERPRETER
def test_the_recorder_works_on_this_triton():
    assert install().missing == ""


@IN_INTERPRETER
def test_integers_and_alignment_make_variants():
    launches = [(words(), words(), count, 16) for count in (1, 16, 32, 5, 7)]
    launches += [(words(offset=1), words(), 5, 16)]
    (variants,) = noted(*launches).values()
    assert len(variants.seen) == 4
    assert variants.values()["count"] == [
        Treatment("i32", "1"),
        Treatment("i32", "a multiple of 16"),
        Treatment("i32", "neither"),
    ]
    assert variants.values()["source"] == [
        Treatment("*i32", "aligned"),
        Treatment("*i32", "not aligned"),
    ]
    assert variants.unseen() == {"target": ["not aligned"]}


@IN_INTERPRETER
def test_what_a_kernel_leaves_out_makes_no_variants():
    launches = [(words(offset=o), words(), n, 16) for o in (0, 1) for n in (1, 5, 16)]
    (variants,) = noted(*launches, kernel=plain_copy_kernel).values()
    assert len(variants.seen) == 1
    assert variants.unseen() == {}


@IN_INTERPRETER
def test_a_tensor_that_is_left_out_is_a_variant_of_its_own():
    launches = [(None, words(), 5, 16), (words(), words(), 5, 16)]
    (variants,) = noted(*launches, kernel=maybe_copy_kernel).values()
    assert len(variants.seen) == 2
    assert variants.values()["source"] == [Treatment("", "None"), Treatment("*i32", "aligned")]
    assert variants.unseen()["source"] == ["not aligned"]


@IN_INTERPRETER
def test_dtypes_constants_and_warps_make_variants():
    launches = [
        (words(torch.int64), words(), 5, 16),
        (words(), words(torch.int64), 5, 16),
        (words(), words(), 5, 32),
    ]
    (variants,) = noted(*launches, kernel=plain_copy_kernel).values()
    assert len(variants.seen) == 3
    assert variants.dtype_pairings() == (3, 4)
    recorder = install()
    plain_copy_kernel[(1,)](words(), words(), 5, 32, num_warps=8)
    add_variants({NAME: variants}, {NAME: next(iter(recorder.take_new().values()))})
    assert [t.value for t in variants.values()["num_warps"]] == ["4", "8"]
    assert str(variants).startswith("4 variants: 3 of 4 pairings of dtypes; size 16, 32; ")


@IN_INTERPRETER
def test_a_variant_is_reported_once_and_joins_those_of_others():
    first = noted((words(), words(), 1, 16))
    assert install().take_new() == {}
    copy_kernel[(1,)](words(), words(), 1, 16)
    assert install().take_new() == {}
    second = pickle.loads(pickle.dumps(noted((words(), words(), 1, 16), (words(), words(), 5, 16))))
    together = {}
    add_variants(together, first)
    add_variants(together, second)
    assert len(together[NAME].seen) == 2
    assert len(first[NAME].seen) == 1
    (line,) = lines_of(together)
    assert line.startswith("copy_kernel: 2 variants: ")
    assert "count never a multiple of 16" in line
    report = json_of(together)[NAME]
    assert report["variants"] == 2
    assert report["seen"]["count"] == ["i32 1", "i32 neither"]
    assert report["unseen"]["source"] == ["not aligned"]


@IN_INTERPRETER
def test_a_sweep_notes_launches_and_runs_none():
    target = words()
    recorder = install()
    recorder.take_new()
    with recorder.sweeping() as sweep:
        copy_kernel[(1,)](target + 1, target, 16, 16)
        copy_kernel[(1,)](target + 1, target, 7, 16)
    assert not target.any()
    assert sweep.integers[NAME]["count"] == {"a multiple of 16", "neither"}
    assert len(sweep.variants[NAME].seen) == 2
    assert recorder.take_new() == {}


@IN_INTERPRETER
def test_a_variant_that_is_compiled_is_what_the_interpreter_says():
    """Triton's compilation, up to the compiler itself, which needs a GPU."""
    recorder = install()
    launches = [
        (words(), words(offset=1), 1, 16),
        (words(torch.int64), words(), 32, 16),
        (words(), words(), 5, 32),
    ]
    (interpreted,) = noted(*launches).values()
    kernel = recorder._binders[copy_kernel.fn].kernel
    backend = recorder._binders[copy_kernel.fn].backend
    bind = recorder._binders[copy_kernel.fn].bind
    compiled = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", InterpretedFunction.run)
        patch.setattr(JITFunction, "_do_compile", lambda kernel, *given: compiled.append(given))
        own = Recorder()
        for arguments in launches:
            bound, specialisation, rest = bind(*arguments)
            options, signature, constants, attributes = kernel._pack_args(
                backend, rest, bound, specialisation, rest
            )
            kernel._do_compile("key", signature, 0, constants, options, attributes, False)
        (noted_ones,) = own.take_new().values()
    assert len(compiled) == 3
    assert noted_ones == interpreted
