"""A width, batch or length not seen before compiles nothing new: held over a sweep of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .case import Case
from .conformance import session
from .device import prepare, resolve_device
from .family import Dialect, Domain, Family, Tensor, family_named
from .garbage import is_refused
from .oracle.slots import Holes
from .specialisations import INTEGERS, Sweep, Variants, install
from .stream import draw_cases

# A launcher may choose among a few shapes of a launch, by the sizes that it gets.
MOST_VARIANTS = 8

NUM_CASES = 600

# Elements that outputs of one case in so many have beyond those that are filled.
SPARE, ONE_IN = 2**18, 8

# Elements of a table, gaps between rows included; a larger one would have to be filled.
MOST_CELLS = 2**22


class TooManyVariants(AssertionError):
    """A kernel is compiled anew for sizes that it should take at run time."""


def assert_no_new_variants(
    function: Callable[..., Any],
    family: Family | str | None = None,
    *,
    most: int = MOST_VARIANTS,
    overflow_slot: int = 0,
    holes: Holes = "divert",
    without: Iterable[str] = (),
    page_size: int = 16,
    cases: Iterable[Case] = (),
    num_cases: int = NUM_CASES,
    seed: int = 0,
    device: str | None = None,
) -> Variants:
    """Return the variants that a function's kernels have over a sweep of sizes, which are few.

    Width and pitch of the table, batch size, lengths and sizes of outputs change from case to case;
    page size and dtypes do not. In the interpreter kernels are not run: what a launcher does must
    not depend on what they write.

    Args:
        function: A launcher; called with positional arguments in the contract's order.
        family: Which contract; the function's name says, if this does not.
        most: How many variants a kernel may have.
        overflow_slot: Where overflow and holes go in the function's dialect.
        holes: What a negative page id means in it.
        without: Edges that no case may have, because the function can't do them.
        page_size: Tokens per page.
        cases: More cases, which come first.
        num_cases: How many are drawn.
        seed: Of those.
        device: "auto", "cpu" or "cuda", or None for the session's.

    Raises:
        TooManyVariants: A kernel has more.
        AssertionError: The sweep says nothing: an integer that a kernel takes at run time was never
            1, or never a multiple of 16, or never anything else.
    """
    __tracebackhide__ = True
    from .calls import Calls
    from .target import Target

    if not isinstance(family, Family):
        family = family_named(family or function.__name__)
    resolved = resolve_device(session.device if device is None else device)
    prepare(resolved)
    left_out = dict.fromkeys(without, "excluded by the caller")
    target = Target(
        function.__name__,
        {family.name: function},
        dialect=Dialect(overflow_slot, holes),
        without=left_out,
    )
    calls = Calls(target, resolved)
    recorder = install()
    if recorder.missing:
        raise AssertionError(f"variants can't be counted: {recorder.missing}")
    domain = dataclasses.replace(target.domain, page_sizes=(page_size,), dtype_choices=(0,))
    with recorder.sweeping() as sweep:
        for case in (*cases, *_drawn(family, domain, num_cases, seed)):
            calls.call(family.name, case)
    _expect_few(sweep.variants, most)
    _expect_all_integers(sweep)
    return sweep.variants


def _drawn(family: Family, domain: Domain, num_cases: int, seed: int) -> Iterator[Case]:
    """Yield cases of all sizes that a function takes."""
    drawn: list[Case] = []
    draw_cases(family.strategy(domain), num_cases, seed, drawn.append)
    for i, case in enumerate(drawn):
        is_wide = any(case.span_of(table) > MOST_CELLS for table in case.tables())
        if not is_wide and not is_refused(family, case):
            yield case if i % ONE_IN else _with_spare(family, case)


def _with_spare(family: Family, case: Case) -> Case:
    layout = {name: case.placement(name) for name in case.PLAIN}
    for argument in family.arguments(case):
        if isinstance(argument, Tensor) and argument.values is None:
            placement = layout[argument.name]
            layout[argument.name] = dataclasses.replace(placement, spare=SPARE)
    return case.replace(layout=tuple(layout.items()))


def _expect_few(variants: Variants, most: int) -> None:
    for name, kernel in variants.items():
        if len(kernel.seen) > most:
            raise TooManyVariants(
                f"{name.rpartition('.')[2]}: {len(kernel.seen)} variants for one page size and "
                f"one pairing of dtypes, but should be at most {most}\n  {kernel}"
            )


def _expect_all_integers(sweep: Sweep) -> None:
    for name, parameters in sweep.integers.items():
        for parameter, sorts in parameters.items():
            missing = [sort for sort in INTEGERS if sort not in sorts]
            if missing:
                raise AssertionError(
                    f"{name.rpartition('.')[2]}: the sweep says nothing, {parameter} was never "
                    f"{' or '.join(missing)}"
                )
