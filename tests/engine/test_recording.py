"""Calls of a live launcher, written as cases: what was asked, and never a word to the engine."""

import json
import logging
import random
from contextlib import nullcontext

import pytest
import torch

import pagefault
from pagefault import recording
from pagefault.case import PageTable
from pagefault.checker import WIDE_TABLE, Checker
from pagefault.conformance import session
from pagefault.family import Plain, Tensor, case_from_json, families, family_named
from pagefault.memory import TORCH_DTYPES
from pagefault.stream import draw_cases
from pagefault.target import load_target

pytestmark = pytest.mark.skipif(session.device == "cuda", reason="an engine on the CPU")

OURS = load_target("ours").functions
SLOTS = family_named("compute_out_cache_loc")
CASE = SLOTS.case_type.from_fields(
    {
        "req_pool_indices": [2, 1],
        "input_lengths": [3, 1],
        "cache_start": [2, 9],
        "req_to_pages": [[3, 10], [17, 24], [31, -1]],
        "page_size": 4,
    }
)


def live(family, case):
    """Return the arguments of a call as an engine has them: parts of larger tensors."""
    values = []
    for argument in family.arguments(case):
        if isinstance(argument, Plain):
            values.append(argument.make("cpu"))
            continue
        at = case.placement(argument.name)
        shape = argument.shape if isinstance(argument, Tensor) else (len(argument.values),)
        columns = shape[1] if len(shape) == 2 else 1
        stride = columns + at.pitch if len(shape) == 2 else 1
        num_rows = shape[0] + (at.spare if argument.values is None else 0)
        storage = torch.full(
            (at.offset + num_rows * stride + 64,), -9, dtype=TORCH_DTYPES[at.dtype]
        )
        # Elements from a boundary of 64 bytes, as a case counts them.
        aligned = -storage.data_ptr() % 64 // storage.element_size()
        flat = storage[aligned + at.offset :]
        size = (num_rows, columns) if len(shape) == 2 else (num_rows,)
        tensor = flat.as_strided(size, (stride, 1)[: len(size)], flat.storage_offset())
        if argument.values is not None and tensor.numel():
            held = argument.values
            rows = [list(row) for row in held.rows] if isinstance(held, PageTable) else list(held)
            tensor.copy_(torch.tensor(rows))
        values.append(tensor)
    return values


def written(folder):
    """Return the cases in a folder."""
    return [case_from_json(path.read_text())[1] for path in sorted(folder.glob("*.json"))]


def without_other_rows(family, case):
    """Return a case of whose tables only the rows are left that belong to its requests."""
    rows = family.expect(case, pagefault.Dialect()).rows
    for name in case.tables():
        table = getattr(case, name)
        edits = tuple(
            (row, column, page_id)
            for row in rows.get(name, ())
            for column, page_id in enumerate(table.rows[row])
        )
        case = case.replace(
            **{name: PageTable(table.num_rows, table.max_pages, edits, first=1, step=1)}
        )
    return case


def without_lacking_entry(case):
    """Return a case of whose short list the entry that it lacks, which nobody sees, is nothing."""
    short = getattr(case, "short_list", 0)
    lists = (None, None, "req_pool_indices", "sizes", "begins", "new_occupied_pages")
    if lists[short] is None:
        return case
    nothing = {"new_occupied_pages": (), "sizes": len(case.new_occupied_pages[-1])}
    entries = getattr(case, lists[short])[:-1]
    return case.replace(**{lists[short]: (*entries, nothing.get(lists[short], 0))})


def with_seen_layout(family, case):
    """Return a case without what nobody sees of a layout: where an empty tensor starts, and how
    far apart rows lie of which there are none or one."""
    layout = dict(case.layout)
    for argument in family.arguments(case):
        if argument.name in layout:
            at = layout[argument.name]
            shape = argument.shape if isinstance(argument, Tensor) else (len(argument.values),)
            num_rows = shape[0] + (at.spare if getattr(argument, "values", None) is None else 0)
            is_empty = not num_rows or 0 in shape[1:]
            layout[argument.name] = pagefault.Placement(
                at.dtype, 0 if is_empty else at.offset, 0 if num_rows < 2 else at.pitch, at.spare
            )
    return case.replace(layout=tuple(layout.items()))


@pytest.mark.parametrize("name", sorted(families()))
def test_a_call_is_written_as_the_case_that_it_is(tmp_path, monkeypatch, name):
    monkeypatch.setattr(recording, "MOST_CELLS", 1 << 30)
    family = family_named(name)
    cases = []
    domain = Checker(load_target("ours"), "cpu").domain(family)
    domain = domain.excluding(WIDE_TABLE, "long rows", "more than 64 requests")
    draw_cases(family.strategy(domain), 25, 3, cases.append)
    calls = []
    for number, case in enumerate(cases):
        recorded = pagefault.record(
            lambda *arguments: calls.append(arguments), out=tmp_path / str(number), family=family
        )
        arguments = live(family, case)
        recorded(*arguments)
        assert not recorded.recorder.left_out
        (again,) = written(tmp_path / str(number))
        wanted = without_lacking_entry(without_other_rows(family, case))
        assert with_seen_layout(family, again) == with_seen_layout(family, wanted)
        assert all(mine is its for mine, its in zip(arguments, calls[-1]))


@pytest.mark.parametrize("name", sorted(families()))
def test_ours_are_right_in_every_call_that_is_held_against_the_oracle(tmp_path, name):
    family = family_named(name)
    recorded = pagefault.record(OURS[name], out=tmp_path, only_failing=True)
    domain = Checker(load_target("ours"), "cpu").domain(family)
    domain = domain.excluding(WIDE_TABLE, "long rows", "more than 64 requests")

    def call(case):
        try:
            recorded(*live(family, case))
        except ValueError:
            assert case.refusal

    logging.disable(logging.WARNING)
    try:
        draw_cases(family.strategy(domain), 15, 4, call)
    finally:
        logging.disable(logging.NOTSET)
    assert recorded.recorder.num_right == recorded.recorder.num_calls == 15
    assert written(tmp_path) == []


def test_a_step_that_lacks_an_entry_of_a_list_is_written(tmp_path):
    family = family_named("update_block_table")
    table = PageTable(2, 4, first=1, step=1)
    for short in range(1, 6):
        case = family.case_type((0, 1), (1, 2), ((3,), (4, 5)), table, (1, 2), short_list=short)
        folder = tmp_path / str(short)
        recorded = pagefault.record(OURS[family.name], out=folder)
        with pytest.raises(ValueError):
            recorded(*live(family, case))
        (again,) = written(folder)
        assert again.refusal == "list length"
        assert without_lacking_entry(again) == again
        lists = (vars(live(family, one)[0]) for one in (case, again))
        mine, its = ({**of_step, "request_ids": len(of_step["request_ids"])} for of_step in lists)
        assert mine == its


def test_a_step_whose_lists_differ_by_more_is_left_out(tmp_path):
    family = family_named("update_block_table")
    table = PageTable(2, 4, first=1, step=1)
    case = family.case_type((0, 1), (1, 2), ((3,), (4, 5)), table, (1, 2), short_list=2)
    arguments = live(family, case)
    arguments[0].begins.pop()
    recorded = pagefault.record(OURS[family.name], out=tmp_path)
    with pytest.raises(ValueError):
        recorded(*arguments)
    assert written(tmp_path) == []
    (reason,) = recorded.recorder.left_out
    assert "one entry of one list" in reason


def last_one_off(*arguments):
    OURS[SLOTS.name](*arguments)
    arguments[0][3] += 1


def consumes_its_input(*arguments):
    OURS[SLOTS.name](*arguments)
    arguments[3].zero_()


def raises(*arguments):
    raise RuntimeError("out of pages")


def returns_something(*arguments):
    OURS[SLOTS.name](*arguments)
    return 1


@pytest.mark.parametrize("faulty", [last_one_off, consumes_its_input, raises, returns_something])
def test_a_call_that_fails_is_written(tmp_path, faulty):
    recorded = pagefault.record(faulty, family=SLOTS.name, out=tmp_path, only_failing=True)
    # What the launcher raises is the engine's business.
    with pytest.raises(RuntimeError, match="out of pages") if faulty is raises else nullcontext():
        recorded(*live(SLOTS, CASE))
    assert (recorded.recorder.num_written, recorded.recorder.num_right) == (1, 0)
    assert written(tmp_path) == [without_other_rows(SLOTS, CASE)]


def test_a_table_that_a_call_writes_wrongly_is_noticed(tmp_path):
    family = family_named("update_req_to_page")
    case = family.case_type.from_fields(
        {
            "req_pool_indices": [1],
            "begins": [1],
            "new_occupied_pages": [[8]],
            "req_to_page": [[3, 10, 5], [17, 24, 6]],
        }
    )
    for column in (0, 1):

        def spoils(req_to_page, *arguments, column=column):
            OURS[family.name](req_to_page, *arguments)
            req_to_page[1, column] += 1

        recorded = pagefault.record(
            spoils, family=family, out=tmp_path / str(column), only_failing=True
        )
        recorded(*live(family, case))
        assert recorded.recorder.num_written == 1


def test_a_case_is_there_before_its_call_is_made(tmp_path):
    seen = []

    def looks(*arguments):
        seen.append(written(tmp_path))

    pagefault.record(looks, family=SLOTS, out=tmp_path)(*live(SLOTS, CASE))
    assert seen == [[without_other_rows(SLOTS, CASE)]]


def test_the_launcher_keeps_its_name_its_answer_and_its_named_arguments(tmp_path):
    def compute_out_cache_loc(out, rows, lengths, start, table, page_size=4):
        return len(out), page_size

    recorded = pagefault.record(compute_out_cache_loc, out=tmp_path)
    *first, start, table, _ = live(SLOTS, CASE)
    assert recorded(*first, table=table, start=start) == (4, 4)
    assert recorded.__name__ == "compute_out_cache_loc"
    assert written(tmp_path)[0].page_size == 4


def test_a_launcher_without_a_signature_is_recorded_by_position(tmp_path):
    class Compiled:
        __signature__ = "none"

        def __call__(self, *arguments):
            return "answer"

    recorded = pagefault.record(Compiled(), family=SLOTS, out=tmp_path)
    assert recorded(*live(SLOTS, CASE)) == "answer"
    assert written(tmp_path) == [without_other_rows(SLOTS, CASE)]


def test_one_in_so_many_is_recorded_and_the_random_numbers_of_the_engine_stay(tmp_path):
    calls = []
    recorded = pagefault.record(
        lambda *arguments: calls.append(arguments), family=SLOTS, out=tmp_path, one_in=10
    )
    recorded.recorder._random.seed(1)
    random.seed(5)
    before = random.getstate()
    arguments = live(SLOTS, CASE)
    for _ in range(1000):
        recorded(*arguments)
    assert random.getstate() == before
    assert len(calls) == recorded.recorder.num_calls == 1000
    # Equal calls are one case.
    assert recorded.recorder.num_written == 1
    assert 60 < recorded.recorder.num_known < 140


def changed(number):
    return live(SLOTS, CASE.replace(cache_start=(number, 0)))


def test_the_folder_has_no_more_cases_than_it_may(tmp_path):
    for _ in range(2):
        recorded = pagefault.record(
            lambda *arguments: None, family=SLOTS, out=tmp_path, max_cases=3
        )
        for number in range(5):
            recorded(*changed(number))
        assert len(written(tmp_path)) == 3
    assert recorded.recorder.left_out == {"the folder has as many cases as it may have": 5}


def test_the_folder_is_no_larger_than_it_may_be(tmp_path):
    recorded = pagefault.record(lambda *arguments: None, family=SLOTS, out=tmp_path, max_bytes=1000)
    for number in range(20):
        recorded(*changed(number))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 500 < sum(sizes) <= 1000
    assert recorded.recorder.left_out["the folder has no room for so large a case"] > 10


# What goes wrong


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda values: [*values[:5], "four"], "TypeError"),
        (lambda values: values[:3], "cache_start: None, but should be a tensor"),
        (lambda values: [values[0].float(), *values[1:]], "dtype: 'float32'"),
        (lambda values: [*values[:3], values[3] - 9, *values[4:]], "cache_start"),
        (lambda values: [*values[:4], 7, values[5]], "req_to_pages: 7, but should be a tensor"),
        (lambda values: [values[0][:2], *values[1:]], "CaseError: spare"),
    ],
    ids=["no number", "too few", "dtype", "outside the domain", "no table", "output too short"],
)
def test_what_is_no_case_is_counted_and_the_engine_gets_its_answer(tmp_path, caplog, spoil, words):
    def compute_out_cache_loc(out, rows, lengths, start=None, table=None, page_size=4):
        return "answer"

    recorded = pagefault.record(compute_out_cache_loc, out=tmp_path)
    arguments = spoil(live(SLOTS, CASE))
    with caplog.at_level(logging.WARNING, "pagefault"):
        assert [recorded(*arguments) for _ in range(3)] == ["answer"] * 3
    ((reason, times),) = recorded.recorder.left_out.items()
    assert times == 3
    assert words in reason
    assert len(caplog.records) == 1
    assert written(tmp_path) == []


def test_a_folder_that_can_not_be_written_is_asked_once(tmp_path):
    recorded = pagefault.record(lambda *arguments: 5, family=SLOTS, out=tmp_path / "cases")
    (tmp_path / "cases").rmdir()
    assert [recorded(*changed(number)) for number in range(3)] == [5, 5, 5]
    ((reason, times),) = recorded.recorder.left_out.items()
    assert reason.startswith("the folder can't be written: ")
    assert times == 3


def test_an_oracle_that_fails_does_not_reach_the_engine(tmp_path, monkeypatch):
    def fails(*arguments):
        raise ZeroDivisionError

    recorded = pagefault.record(OURS[SLOTS.name], out=tmp_path, only_failing=True)
    monkeypatch.setattr(recording, "_is_right", fails)
    recorded(*live(SLOTS, CASE))
    assert [*recorded.recorder.left_out] == ["ZeroDivisionError: "]


def test_reasons_are_counted_one_by_one_as_far_as_there_are_few(tmp_path):
    recorded = pagefault.record(lambda *arguments: None, family=SLOTS, out=tmp_path)
    for number in range(recording.MOST_REASONS + 5):
        recorded.recorder._leave_out(ValueError(number))
    assert recorded.recorder.left_out[recording.OTHER_REASONS] == 5


def test_of_many_cells_those_are_kept_that_the_oracle_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MOST_CELLS", 3)
    pagefault.record(lambda *arguments: None, family=SLOTS, out=tmp_path)(*live(SLOTS, CASE))
    (case,) = written(tmp_path)
    assert [list(row) for row in case.req_to_pages.rows] == [[1, 2], [3, 4], [31, -1]]
    dialect = pagefault.Dialect()
    assert SLOTS.expect(case, dialect).writes == SLOTS.expect(CASE, dialect).writes


@pytest.mark.parametrize("name", ["one_in", "max_cases", "max_bytes"])
def test_numbers_below_one_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}: 0, but should be at least 1"):
        pagefault.record(print, family=SLOTS, out=tmp_path, **{name: 0})


def test_a_launcher_of_no_family_is_refused(tmp_path):
    with pytest.raises(pagefault.family.FamilyError, match="no family 'print'"):
        pagefault.record(print, out=tmp_path)


ENGINE = """
import sys, types
import torch
import pagefault, pagefault.device
pagefault.device.prepare("cpu")
import engine_kernels

engine_kernels.compute_out_cache_loc = pagefault.record(
    engine_kernels.compute_out_cache_loc, out="cases", only_failing="only" in sys.argv
)
table = torch.tensor([[3, 10], [17, 24]], dtype=torch.int32)
for start in (1, 6, 7):
    out = torch.zeros(2, dtype=torch.int32)
    rows, lengths = torch.tensor([1]), torch.tensor([2], dtype=torch.int32)
    starts = torch.tensor([start], dtype=torch.int32)
    engine_kernels.compute_out_cache_loc(out, rows, lengths, starts, table, 4)
print(engine_kernels.compute_out_cache_loc.recorder.num_written)
"""
KERNELS = """
from pagefault.kernels import out_cache_loc


def compute_out_cache_loc(out, rows, lengths, starts, table, page_size):
    out_cache_loc.compute_out_cache_loc(out, rows, lengths, starts, table, page_size)
    out[int(starts[0]) + 2 > table.shape[1] * page_size :] += int(starts[0]) == 7
"""


@pytest.mark.parametrize(
    ("arguments", "num_written"), [pytest.param([], 3, marks=pytest.mark.slow), (["only"], 1)]
)
def test_repro_runs_what_an_engine_has_recorded(
    request, environment, tmp_path, arguments, num_written
):
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "engine_kernels.py").write_text(KERNELS)
    engine = recording_engine(tmp_path, environment, arguments)
    assert engine.stdout.strip() == str(num_written), engine.stderr
    statuses = {}
    for path in sorted((tmp_path / "cases").iterdir()):
        start = json.loads(path.read_text())["cache_start"][0]
        process = request.getfixturevalue("pagefault")(
            "repro", path, "--target", "engine_kernels.py", "--device", "cpu", cwd=tmp_path
        )
        statuses[start] = process.returncode
    expected = {1: 0, 6: 0, 7: 1}
    assert statuses == {start: expected[start] for start in statuses}
    assert 7 in statuses


def recording_engine(folder, environment, arguments):
    import subprocess
    import sys

    return subprocess.run(
        [sys.executable, "engine.py", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
