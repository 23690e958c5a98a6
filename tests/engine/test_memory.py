"""Guarded memory and the comparison: each test plants one fault in a right function.

The functions are plain torch. Tensors of a case are views of one arena, so a function can reach any
word of it through the storage of the tensors that it is given, as a kernel could.
"""

import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagefault.case import PageTable, Placement
from pagefault.checker import Checker
from pagefault.family import Tensor, family_named
from pagefault.memory import END_GUARD_BYTES, GUARD_BYTES, POISONS, HostMemory, Plan
from pagefault.strategies.chunked_prefill import ChunkingCase
from pagefault.strategies.out_cache_loc import OutCacheLocCase
from pagefault.strategies.req_to_page import UpdateBlockTableCase, UpdateReqToPageCase
from pagefault.stream import draw_cases
from pagefault.target import Target

# Requests in rows 1 and 0: slots 23, 36 and 28, 29, 30. The table has a gap of 2 behind each row.
SLOTS = OutCacheLocCase(
    req_pool_indices=(1, 0),
    input_lengths=(2, 3),
    cache_start=(3, 0),
    req_to_pages=PageTable.from_rows([[7, 4], [5, 9]]),
    page_size=4,
    layout=(("out_cache_loc", Placement(spare=2)), ("req_to_pages", Placement(pitch=2))),
)
PAGES = UpdateReqToPageCase(
    req_pool_indices=(1,),
    begins=(1,),
    new_occupied_pages=((60, 61),),
    req_to_page=PageTable.from_rows([[7, 4, 2], [5, 9, 8]]),
    layout=(("req_to_page", Placement(pitch=2)),),
)
CHUNKS = ChunkingCase(prefix_lens=(5, 2), num_chunks=2, batch_size=2, chunk_len=3)


def check(function, case, family_name):
    """Return the verdict on a function."""
    target = Target("planted", {family_name: function})
    return Checker(target, "cpu").check(family_named(family_name), case)


def kinds_of(verdict):
    return [finding.kind for finding in verdict.findings]


@pytest.fixture
def check_slots(plain):
    """A function that checks SLOTS with some code after the right function."""

    def run(spoil, case=SLOTS):
        def compute_out_cache_loc(*arguments):
            plain.functions["compute_out_cache_loc"](*arguments)
            spoil(*arguments)

        return check(compute_out_cache_loc, case, "compute_out_cache_loc")

    return run


@pytest.fixture
def check_pages(plain):
    """A function that checks PAGES with some code after the right function."""

    def run(spoil):
        def update_req_to_page(*arguments):
            plain.functions["update_req_to_page"](*arguments)
            spoil(*arguments)

        return check(update_req_to_page, PAGES, "update_req_to_page")

    return run


def cell_of(tensor, element):
    """Return the cell at an element counted from a tensor's first one, wherever that lies."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + element)


@pytest.mark.parametrize(
    "family_name",
    ["compute_out_cache_loc", "update_req_to_page", "update_block_table", "chunking"],
)
def test_a_right_function_in_plain_torch_passes(plain, family_name):
    family = family_named(family_name)
    checker = Checker(plain, "cpu")
    verdicts = []
    draw_cases(
        family.strategy(checker.domain(family)),
        60,
        5,
        lambda case: verdicts.append(checker.check(family, case)),
    )
    assert len(verdicts) == 60
    assert {verdict.text() for verdict in verdicts} == {f"{family_name}: passed"}


def test_nothing_planted_is_nothing_found(check_slots, check_pages):
    assert check_slots(lambda *arguments: None).passed
    assert check_pages(lambda *arguments: None).passed


# Memory


STRAYS = [
    pytest.param("out_cache_loc", -1, "outside", "out_cache_loc: element 1 before its start"),
    pytest.param("out_cache_loc", 5, "outside", "out_cache_loc[5]", id="spare element"),
    pytest.param("out_cache_loc", 7, "outside", "out_cache_loc: element 0 past its end"),
    pytest.param(
        "req_to_pages", 2, "outside", "req_to_pages: element 0 of the gap behind row 0", id="gap"
    ),
    pytest.param(
        "req_to_pages", 3, "outside", "req_to_pages: element 1 of the gap behind row 0", id="gap 1"
    ),
    pytest.param("req_to_pages", 6, "outside", "req_to_pages: element 0 past its end"),
    pytest.param("req_to_pages", 4, "input changed", "req_to_pages[1][0]", id="table cell"),
    pytest.param("req_pool_indices", 1, "input changed", "req_pool_indices[1]", id="index"),
    pytest.param("cache_start", 0, "input changed", "cache_start[0]", id="start"),
    pytest.param("cache_start", -2, "outside", "cache_start: element 2 before its start"),
    pytest.param("input_lengths", 20, "outside", "between input_lengths and cache_start"),
]


@pytest.mark.parametrize(("name", "element", "kind", "place"), STRAYS)
def test_one_stray_write_is_reported_with_its_place(check_slots, name, element, kind, place):
    parameters = family_named("compute_out_cache_loc").parameters

    def spoil(*arguments):
        cell_of(arguments[parameters.index(name)], element).fill_(77)

    verdict = check_slots(spoil)
    assert kinds_of(verdict) == [kind]
    headline = verdict.findings[0].headline
    if place.startswith("between"):
        assert headline.split(":")[0] in place
    else:
        assert headline.startswith(f"{place} = 77, but should still be ")
    assert "guards intact" not in verdict.text()


def test_a_write_to_the_ends_of_the_arena_is_reported(check_slots):
    num_words = len_of_arena(SLOTS) // 4
    for word in (0, num_words - 1, num_words, 2 * num_words - 1):

        def spoil(out_cache_loc, *others, word=word):
            out_cache_loc.as_strided((1,), (1,), word).fill_(77)

        assert kinds_of(check_slots(spoil)) == ["outside"]


def len_of_arena(case):
    arguments = family_named("compute_out_cache_loc").arguments(case)
    return Plan(case, [a for a in arguments if isinstance(a, Tensor)]).num_bytes


def test_every_word_of_the_arena_is_watched(check_slots):
    """Change each word of both replicas in turn, and see each change but none twice."""
    num_words = 2 * len_of_arena(SLOTS) // 4
    # The end guards are long and alike: their words by tens, all others one by one.
    end_guard = END_GUARD_BYTES // 4
    half = num_words // 2
    words = [
        word
        for word in range(num_words)
        if end_guard - 40 <= word % half < half - end_guard + 40 or word % 10 == 0
    ]
    missed = []
    for word in words:
        calls = []

        def spoil(out_cache_loc, *others, word=word, calls=calls):
            calls.append(word)
            if len(calls) == 2:  # Once for both replicas, when both are written.
                out_cache_loc.as_strided((1,), (1,), word).bitwise_xor_(1)

        if check_slots(spoil).passed:
            missed.append(word)
    assert missed == []
    assert len(words) > 600


@pytest.mark.parametrize("byte", range(4))
def test_one_byte_of_a_guard_is_enough(check_slots, byte):
    def spoil(out_cache_loc, *others):
        cell_of(out_cache_loc, -1).view(torch.uint8)[byte] ^= 1

    assert kinds_of(check_slots(spoil)) == ["outside"]


@pytest.mark.parametrize("poison", POISONS)
def test_a_stray_write_of_a_poison_is_seen_in_the_other_replica(check_slots, poison):
    def spoil(out_cache_loc, *others):
        cell_of(out_cache_loc, -1).fill_(poison)

    verdict = check_slots(spoil)
    assert kinds_of(verdict) == ["outside"]
    other = POISONS[poison == POISONS[0]]
    assert f"before its start = {poison}, but should still be {other}" in verdict.text()


def test_a_page_table_cell_that_no_request_names_keeps_its_value(check_pages):
    def spoil(req_to_page, *others):
        req_to_page[1, 0] = 77

    verdict = check_pages(spoil)
    assert kinds_of(verdict) == ["outside"]
    assert verdict.findings[0].headline == "req_to_page[1][0] = 77, but should still be 5"


def test_a_spill_into_the_gap_of_a_pitched_table_is_reported(check_pages):
    def spoil(req_to_page, *others):
        cell_of(req_to_page, 3).fill_(77)

    headline = check_pages(spoil).findings[0].headline
    assert headline.startswith("req_to_page: element 0 of the gap behind row 0 = 77")


def test_tensors_start_where_their_offset_says_and_guards_lie_between_them():
    placed = SLOTS.replace(
        layout=tuple((name, Placement(p.dtype, offset=1)) for name, p in SLOTS.PLAIN.items())
    )
    tensors = [
        argument
        for argument in family_named("compute_out_cache_loc").arguments(placed)
        if isinstance(argument, Tensor)
    ]
    plan = Plan(placed, tensors)
    for tensors_of_replica in HostMemory().place(plan, tensors).tensors:
        for tensor in tensors_of_replica:
            assert tensor.data_ptr() % 16 == tensor.element_size()
    for region, following in zip(plan.regions, plan.regions[1:]):
        assert following.start_bytes - region.end_bytes >= GUARD_BYTES


def test_the_two_replicas_differ_in_poison_and_in_nothing_else():
    arguments = family_named("compute_out_cache_loc").arguments(SLOTS)
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    plan = Plan(SLOTS, tensors)
    before = HostMemory().place(plan, tensors).before
    first, second = np.split(before, 2)
    is_poison = first != second
    inputs = [region for region in plan.regions if region.is_input]
    for region in inputs:
        elements = plan.elements(first, region)
        assert np.array_equal(
            elements[elements != POISONS[0]], plan.elements(second, region)[elements != POISONS[0]]
        )
    output = plan.elements(is_poison.astype(np.int32), plan.regions[0])
    assert output.all()
    assert is_poison[: END_GUARD_BYTES // 4].all()


# Values


@pytest.mark.parametrize("out_dtype", ["int32", "int64"])
@pytest.mark.parametrize("element", range(5))
def test_each_element_is_compared(check_slots, out_dtype, element):
    case = SLOTS.replace(layout=(("out_cache_loc", Placement(out_dtype)),))

    def spoil(out_cache_loc, *others):
        out_cache_loc[element] += 1

    verdict = check_slots(spoil, case)
    right = [23, 36, 28, 29, 30][element]
    assert kinds_of(verdict) == ["value"]
    expected = f"out_cache_loc[{element}] = {right + 1}, but should be {right}"
    assert verdict.findings[0].headline == expected
    assert "1 of 5 elements of out_cache_loc differ" in verdict.text()


def test_the_upper_half_of_an_int64_element_is_compared(check_slots):
    case = SLOTS.replace(layout=(("out_cache_loc", Placement("int64")),))

    def spoil(out_cache_loc, *others):
        out_cache_loc[1] += 2**32

    headline = check_slots(spoil, case).findings[0].headline
    assert headline == f"out_cache_loc[1] = {36 + 2**32}, but should be 36"


@pytest.mark.parametrize("column", [1, 2])
def test_each_new_page_is_compared(check_pages, column):
    def spoil(req_to_page, *others):
        req_to_page[1, column] += 1

    verdict = check_pages(spoil)
    assert kinds_of(verdict) == ["value"]
    assert verdict.findings[0].headline.startswith(f"req_to_page[1][{column}] = ")


CHUNK_CELLS = [
    (name, chunk, column)
    for name in ("starts", "ends", "len_in_chunk", "cum_seq_lens")
    for chunk in range(2)
    for column in range(2 + (name == "cum_seq_lens"))
]


def check_chunks(plain, spoil):
    """Return the verdict on the right chunks after `spoil` has had them; it returns the result."""

    def chunking(*arguments):
        chunks = plain.functions["chunking"](*arguments)
        for name in ("starts", "ends", "len_in_chunk", "cum_seq_lens"):
            setattr(chunks, name, getattr(chunks, name).clone())
        return spoil(chunks)

    return check(chunking, CHUNKS, "chunking")


@pytest.mark.parametrize(("name", "chunk", "column"), CHUNK_CELLS)
def test_each_element_of_a_returned_tensor_is_compared(plain, name, chunk, column):
    def spoil(chunks):
        getattr(chunks, name)[chunk, column] -= 1
        return chunks

    verdict = check_chunks(plain, spoil)
    assert kinds_of(verdict) == ["value"]
    assert verdict.findings[0].headline.startswith(f"chunks.{name}[{chunk}][{column}] = ")


# What a result may depend on


def test_an_output_that_was_not_written_is_unwritten(plain):
    def compute_out_cache_loc(*arguments):
        """Do nothing."""

    verdict = check(compute_out_cache_loc, SLOTS, "compute_out_cache_loc")
    assert kinds_of(verdict) == ["unwritten"]
    assert verdict.findings[0].headline == "out_cache_loc[0] was not written, but should be 23"
    assert "5 of 5 elements of out_cache_loc differ" in verdict.text()


def test_an_answer_made_from_what_the_output_held_is_stale(check_slots):
    def spoil(out_cache_loc, *others):
        out_cache_loc[2] = 28 + cell_of(out_cache_loc, 6).item()

    verdict = check_slots(spoil)
    assert kinds_of(verdict) == ["stale"]
    values = " or ".join(str(28 + poison) for poison in POISONS)
    expected = f"out_cache_loc[2] = {values}, by what lay in memory, but should be 28"
    assert verdict.findings[0].headline == expected


@pytest.mark.parametrize("element", [-1, 2], ids=["before", "behind"])
def test_an_answer_made_from_what_lies_beside_an_input_is_stale(check_slots, element):
    def spoil(out_cache_loc, req_pool_indices, *others):
        out_cache_loc[0] += cell_of(req_pool_indices, element).item()

    assert kinds_of(check_slots(spoil)) == ["stale"]


def test_an_answer_that_is_wrong_in_one_replica_only_is_stale(check_slots):
    def spoil(out_cache_loc, *others):
        if cell_of(out_cache_loc, 6).item() == POISONS[1]:
            out_cache_loc[4] = 1

    verdict = check_slots(spoil)
    assert kinds_of(verdict) == ["stale"]
    assert "out_cache_loc[4] = 30 or 1" in verdict.text()


# Exceptions


@pytest.mark.parametrize(
    "error", [RuntimeError("out of\nresources"), SystemExit(3), KeyError(5)], ids=repr
)
def test_an_exception_is_reported_with_its_words(check_slots, error):
    def spoil(*arguments):
        raise error

    verdict = check_slots(spoil)
    assert kinds_of(verdict) == ["raised"]
    name = type(error).__name__
    assert verdict.findings[0].headline == f"compute_out_cache_loc raised {name}"
    assert verdict.signature.role == name


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        (MemoryError(), "host"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: no"), "host"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB."), "device"),
    ],
    ids=repr,
)
def test_memory_that_does_not_suffice_is_a_kind_of_its_own(check_slots, error, whose):
    def spoil(*arguments):
        raise error

    verdict = check_slots(spoil)
    assert kinds_of(verdict) == ["memory"]
    assert verdict.signature.role == whose


def test_what_a_function_wrote_before_it_raised_is_looked_at(check_slots):
    def spoil(out_cache_loc, *others):
        cell_of(out_cache_loc, -1).fill_(77)
        raise RuntimeError

    assert kinds_of(check_slots(spoil)) == ["raised", "outside"]


BAD_CHUNKS = dataclasses.replace(CHUNKS, chunk_len=0)


def test_bad_input_that_is_refused_passes(plain):
    assert check(plain.functions["chunking"], BAD_CHUNKS, "chunking").passed


def test_bad_input_that_is_taken_is_not_refused():
    verdict = check(lambda *arguments: None, BAD_CHUNKS, "chunking")
    assert kinds_of(verdict) == ["not refused"]
    assert verdict.findings[0].headline == "chunking returned, but should raise ValueError"


def test_bad_input_that_is_refused_with_another_exception_is_reported():
    def chunking(*arguments):
        raise TypeError("no")

    verdict = check(chunking, BAD_CHUNKS, "chunking")
    assert kinds_of(verdict) == ["raised"]
    expected = "chunking raised TypeError, but should raise ValueError"
    assert verdict.findings[0].headline == expected


def test_a_refusal_after_the_first_write_is_reported():
    case = UpdateBlockTableCase((9,), (0,), ((4,),), PageTable(2, 2), (1,))
    assert case.refusal

    def update_block_table(forward_op, device, req_to_page):
        req_to_page[1, 0] = 4
        raise ValueError("pool index 9")

    verdict = check(update_block_table, case, "update_block_table")
    assert kinds_of(verdict) == ["input changed"]
    assert verdict.findings[0].headline.startswith("req_to_page[1][0] = 4")


# Returned values


def without(name):
    def spoil(chunks):
        delattr(chunks, name)
        return chunks

    return spoil


def changed(name, change):
    def spoil(chunks):
        setattr(chunks, name, change(getattr(chunks, name)))
        return chunks

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda chunks: None, "chunking: returned something without", id="None"),
        pytest.param(lambda chunks: (chunks,), "returned something without", id="in a tuple"),
        pytest.param(without("ends"), "returned something without", id="a field missing"),
        pytest.param(
            changed("ends", lambda t: t.tolist()),
            "chunks.ends is [[3, 2], [5, 2]], but should be a tensor",
            id="a list",
        ),
        pytest.param(
            changed("ends", lambda t: t.long()),
            "chunks.ends is int64 [2, 2] on cpu, but should be int32 [2, 2] on cpu",
            id="dtype",
        ),
        pytest.param(
            changed("ends", lambda t: t.flatten()),
            "chunks.ends is int32 [4] on cpu, but should be int32 [2, 2] on cpu",
            id="shape",
        ),
        pytest.param(
            changed("cum_seq_lens", lambda t: t[:, :2]),
            "chunks.cum_seq_lens is int32 [2, 2] on cpu, but should be int32 [2, 3] on cpu",
            id="too short",
        ),
    ],
)
def test_a_returned_value_of_another_structure_is_reported(plain, spoil, words):
    verdict = check_chunks(plain, spoil)
    assert kinds_of(verdict) == ["returned"]
    assert words in verdict.findings[0].headline


def test_a_function_that_writes_in_place_returns_nothing(plain):
    def compute_out_cache_loc(*arguments):
        plain.functions["compute_out_cache_loc"](*arguments)
        return arguments[0]

    verdict = check(compute_out_cache_loc, SLOTS, "compute_out_cache_loc")
    assert kinds_of(verdict) == ["returned"]
    assert "returned something, but should return None" in verdict.text()


# Warnings


CLAMPED = UpdateBlockTableCase((1, 0), (1, 3), ((4, 5), (6,)), PageTable(2, 2), (2, 1))


@pytest.mark.parametrize(
    ("log", "words"),
    [
        pytest.param(lambda warn: None, "0 warnings logged, but should be 2", id="missing"),
        pytest.param(
            lambda warn: warn("request-0: 2 at 1 of 2"),
            "1 warning logged, but should be 2",
            id="one for both",
        ),
        pytest.param(
            lambda warn: [warn("request-0 2 1 2"), warn("request-1 1 3 2"), warn("again")],
            "3 warnings logged, but should be 2",
            id="surplus",
        ),
        pytest.param(
            lambda warn: [warn("request-0 2 1 2"), warn("some request 1 3 2")],
            "a warning does not say request-1",
            id="without its request",
        ),
        pytest.param(
            lambda warn: [warn("request-1 1 3 2"), warn("request-0 2 1 2")],
            "a warning does not say request-0",
            id="in another order",
        ),
    ],
)
def test_a_warning_that_is_missing_or_wrong_is_reported(plain, monkeypatch, log, words):
    right = plain.functions["update_block_table"]
    monkeypatch.setattr(logging.getLogger(right.__module__), "disabled", True)

    def update_block_table(*arguments):
        right(*arguments)
        log(logging.getLogger("planted").warning)

    verdict = check(update_block_table, CLAMPED, "update_block_table")
    assert kinds_of(verdict) == ["log"]
    assert verdict.findings[0].headline == words


def test_a_warning_for_each_clamped_request_passes(plain):
    assert check(plain.functions["update_block_table"], CLAMPED, "update_block_table").passed


def test_what_is_logged_below_a_warning_is_nobodys_business(plain):
    def update_block_table(*arguments):
        logging.getLogger("planted").info("clamping")
        plain.functions["update_block_table"](*arguments)

    assert check(update_block_table, CLAMPED, "update_block_table").passed


def test_one_fault_of_each_kind_is_reported_with_the_most_telling_first(check_slots):
    def spoil(out_cache_loc, *others):
        out_cache_loc[0] = 1
        cell_of(out_cache_loc, -1).fill_(77)

    verdict = check_slots(spoil)
    assert kinds_of(verdict) == ["outside", "value"]
    assert verdict.signature.kind == "outside"


def test_a_result_that_has_any_attribute_is_taken_as_it_is(plain):
    def chunking(*arguments):
        right = plain.functions["chunking"](*arguments)
        return SimpleNamespace(**vars(right), extra=1)

    assert check(chunking, CHUNKS, "chunking").passed
