"""Two implementations held against each other, without the oracle."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from pagefault.checker import WIDE_TABLE, Checker
from pagefault.conformance import session
from pagefault.family import families, family_named
from pagefault.stream import draw_cases
from pagefault.target import Target, TargetError, load_target, pair_of

FAULTY = Path(__file__).parents[1] / "faulty" / "compute_out_cache_loc" / "overflow_clamped.py"
SLOTS = family_named("compute_out_cache_loc")
CASE = SLOTS.case_type.from_fields(
    {
        "req_pool_indices": [1],
        "input_lengths": [3],
        "cache_start": [2],
        "req_to_pages": [[3, 10], [17, 24]],
        "page_size": 4,
    }
)
OURS = load_target("ours")
WHERE = session.device


def right(*arguments):
    OURS.functions[SLOTS.name](*arguments)


def verdict_on(a, b, case=CASE, family=SLOTS):
    """Return what a checker says of a case that two functions are called with."""
    other = Target("b.py", {family.name: b})
    target = Target("a.py against b.py", {family.name: a}, against=other)
    return Checker(target, session.device, "arena").check_thoroughly(family, case)


def test_a_cell_that_differs_says_what_both_have():
    def last_one_off(*arguments):
        right(*arguments)
        arguments[0][2] += 1

    verdict = verdict_on(right, last_one_off)
    assert verdict.text().splitlines()[0] == "out_cache_loc[2]: A: 96, B: 97"
    assert "A is a.py, B is b.py" in verdict.text()
    assert verdict.signature == (SLOTS.name, "value", "out_cache_loc: token")
    assert verdict_on(last_one_off, right).text().startswith("out_cache_loc[2]: A: 97, B: 96")
    assert verdict_on(last_one_off, last_one_off).passed


def test_a_cell_that_only_one_writes_says_so():
    def nothing(*arguments):
        pass

    assert verdict_on(right, nothing).text().startswith("out_cache_loc[0]: A: 70, B: not written")


def test_an_answer_that_depends_on_what_lay_in_memory_differs():
    def adds(*arguments):
        arguments[0].add_(1)

    said = verdict_on(right, adds).text()
    assert said.startswith("out_cache_loc[0]: A: 70, B: -6 or 12, by what lay in memory")


def test_a_write_beside_a_tensor_differs():
    def also_before(*arguments):
        right(*arguments)
        flat = arguments[0]
        flat.as_strided((1,), (1,), flat.storage_offset() + len(flat))[0] = 5

    verdict = verdict_on(right, also_before)
    assert verdict.signature == (SLOTS.name, "outside", "out_cache_loc")
    assert verdict.text().startswith("out_cache_loc: element 0 past its end: A: not written, B: 5")


def test_an_input_that_only_one_changes_differs():
    def consumes(*arguments):
        right(*arguments)
        arguments[3].zero_()

    assert verdict_on(right, consumes).text().startswith("cache_start[0]: A: 2, B: 0")


def test_one_that_raises_differs_from_one_that_does_not():
    def refuses(*arguments):
        raise ValueError("no such thing")

    def asserts(*arguments):
        raise AssertionError

    verdict = verdict_on(right, refuses)
    assert verdict.text().splitlines()[:2] == [
        "A: returned, B: raised ValueError",
        "  no such thing",
    ]
    assert verdict.signature == (SLOTS.name, "raised", "ValueError")
    # Engines refuse in their own ways.
    assert verdict_on(asserts, refuses).passed


CHUNKS = family_named("chunking")
PREFIXES = CHUNKS.case_type.from_fields(
    {"prefix_lens": [5, 2], "num_chunks": 2, "batch_size": 2, "chunk_len": 4}
)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(
            lambda chunks: chunks.ends.add_(1), "chunks.ends[0][0]: A: 4, B: 5", id="value"
        ),
        pytest.param(
            lambda chunks: chunks._replace(starts=chunks.starts.long()),
            f"chunks.starts: A: int32 [2, 2] on {WHERE}, B: int64 [2, 2] on {WHERE}",
            id="dtype",
        ),
        pytest.param(
            lambda chunks: chunks._replace(starts=chunks.starts[:1]),
            f"chunks.starts: A: int32 [2, 2] on {WHERE}, B: int32 [1, 2] on {WHERE}",
            id="shape",
        ),
        pytest.param(
            lambda chunks: None, f"chunks.starts: A: int32 [2, 2] on {WHERE}, B: ", id="none"
        ),
    ],
)
def test_what_is_returned_is_compared(spoil, said):
    ours = OURS.functions["chunking"]

    def spoilt(*arguments):
        chunks = ours(*arguments)
        changed = spoil(chunks)
        return chunks if isinstance(changed, torch.Tensor) else changed

    assert verdict_on(ours, spoilt, PREFIXES, CHUNKS).text().startswith(said)


@pytest.mark.parametrize("name", sorted(families()))
def test_ours_do_not_differ_from_ours(name):
    family = family_named(name)
    checker = Checker(load_target("ours against ours"), session.device)
    verdicts = []
    domain = checker.domain(family).excluding("more than 64 requests")
    assert WIDE_TABLE in domain.without
    draw_cases(
        family.strategy(domain), 12, 1, lambda case: verdicts.append(checker.check(family, case))
    )
    assert [verdict.text() for verdict in verdicts if not verdict.passed] == []
    assert len(verdicts) == 12


# What is no pair


def write(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


NOTHING = "def compute_out_cache_loc(a, b, c, d, e, f):\n    pass\n"


def test_functions_that_one_lacks_or_that_differ_on_purpose_are_not_compared(tmp_path):
    theirs = write(
        tmp_path, "theirs.py", NOTHING + NOTHING.replace("loc(", "loc_uniform(")
        + "pagefault_target = {'functions': {'compute_out_cache_loc': {'overflow_slot': -1}}}\n",
    )  # fmt: skip
    target = load_target(f"ours against {theirs}")
    assert [*target.functions] == ["compute_out_cache_loc_uniform"]
    assert target.skipped["chunking"].startswith(f"B, {theirs}, lacks it: ")
    said = target.skipped["compute_out_cache_loc"]
    assert said.startswith("they differ on purpose: ")
    assert "overflow_slot=-1" in said
    assert load_target(f"{theirs} against ours").skipped["chunking"].startswith(f"A, {theirs}, ")


def test_what_one_can_not_do_is_not_drawn(tmp_path):
    extra = "pagefault_target = {'without': {'hole': 'never there'}}\n"
    theirs = write(tmp_path, "theirs.py", NOTHING + extra)
    assert "hole" in load_target(f"ours against {theirs}").terms_of(SLOTS.name).without


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ours against ours against ours", "two can be held against each other, and not more"),
        ("ours against nobody", "target 'nobody' can't be imported"),
    ],
)
def test_what_is_no_pair_is_refused(name, words):
    with pytest.raises(TargetError, match=words):
        load_target(name)


def test_two_without_a_common_function_are_refused(tmp_path):
    a = write(tmp_path, "a.py", NOTHING)
    b = write(tmp_path, "b.py", NOTHING.replace("loc(", "loc_uniform("))
    with pytest.raises(TargetError, match=r"no function that can be compared: .*A, .* lacks it"):
        load_target(f"{a} against {b}")


def test_files_beside_which_one_name_lies_twice_are_refused(tmp_path):
    text = "from against_helper import *\n" + NOTHING
    a, b = (write(tmp_path / where, "kernel.py", text) for where in ("a", "b"))
    for where in ("a", "b"):
        write(tmp_path / where, "against_helper.py", "")
    with pytest.raises(TargetError, match="lies beside both"):
        load_target(f"{a} against {b}")


# The command


QUICK = ("--device", "cpu", "--workers", 1, "--seed", 3, "--time", "60s", "--max-cases", 128)


@pytest.fixture(scope="module")
def compared(pagefault, tmp_path_factory):
    """A folder in which a copy with a planted fault was held against ours, and what was said."""
    folder = tmp_path_factory.mktemp("against")
    shutil.copy(FAULTY, folder / "theirs.py")
    process = pagefault(
        "fuzz", "--target", "ours", "--against", "theirs.py", *QUICK, "--json", "report.json",
        "--report", "report", cwd=folder,
    )  # fmt: skip
    return folder, process


def test_a_fault_planted_in_a_copy_is_found_and_made_small(compared):
    folder, process = compared
    assert process.returncode == 1, process.stdout + process.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["target"] == "ours against theirs.py"
    (finding,) = [f for f in report["findings"] if f["kind"] == "value"]
    assert finding["signature"] == "compute_out_cache_loc: value: out_cache_loc: overflow token"
    assert finding["minimal"].startswith("minimal: no single step makes it smaller")
    assert finding["verdict"].startswith("out_cache_loc[0]: A: 0, B: ")
    case = json.loads((folder / finding["case"]).read_text())
    assert (len(case["req_pool_indices"]), case["input_lengths"]) == (1, [1])
    why = (folder / finding["folder"] / "no-repro.txt").read_text()
    assert "it is where two implementations differ" in why
    assert "not compared: chunking, " in process.stdout
    assert "B, theirs.py, lacks it: the target has no function of this name" in process.stdout
    for name in ("report.html", "report.md"):
        assert "A: 0, B: " in (folder / "report" / name).read_text()


@pytest.mark.slow
def test_a_difference_is_shown_again_by_its_folder_and_by_its_case(compared, pagefault):
    folder, process = compared
    report = json.loads((folder / "report.json").read_text())
    (finding,) = [f for f in report["findings"] if f["kind"] == "value"]
    line = f"pagefault repro {finding['case']} --target ours --against theirs.py --device cpu"
    assert line in process.stdout
    for arguments in ([finding["folder"]], [finding["case"], "--against", "theirs.py"]):
        again = pagefault("repro", *arguments, "--device", "cpu", cwd=folder)
        assert again.returncode == 1, again.stdout + again.stderr
        assert again.stdout.startswith("out_cache_loc[0]: A: 0, B: ")
    assert pagefault("repro", finding["case"], "--device", "cpu", cwd=folder).returncode == 0


@pytest.mark.slow
def test_differences_are_no_findings_of_either_alone(compared, pagefault):
    folder, _ = compared
    shutil.copytree(folder, folder / "alone")
    process = pagefault(
        "fuzz", "--target", "ours", "--family", SLOTS.name, *QUICK, cwd=folder / "alone"
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "still open" not in process.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fuzz", "--soak"], "--soak needs the contract"),
        (["fuzz", "--strict"], "--strict needs the contract"),
        (["repro", "case.json", "--strict"], "--strict needs the contract"),
    ],
)
def test_what_needs_the_contract_is_refused(pagefault, tmp_path, arguments, words):
    (tmp_path / "case.json").write_text(CASE.to_json(SLOTS.name))
    process = pagefault(*arguments, "--against", "ours", cwd=tmp_path)
    assert process.returncode == 2
    assert words in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_a_function_that_one_lacks_is_refused_by_name(pagefault, tmp_path):
    shutil.copy(FAULTY, tmp_path / "theirs.py")
    process = pagefault(
        "fuzz", "--against", "theirs.py", "--family", "chunking", *QUICK, cwd=tmp_path
    )
    assert process.returncode == 2
    assert "has no chunking: B, theirs.py, lacks it" in process.stderr


def test_names_of_pairs_are_taken_apart():
    assert pair_of("a.py against b.py") == ["a.py", "b.py"]
