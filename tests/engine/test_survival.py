"""A kernel that ends or blocks the process of a property: pytest goes on, and names the case."""

import pytest

FAMILY = "compute_out_cache_loc"

ENDINGS = {
    "segfault": ("ctypes.string_at(0)", "the process died: SIGSEGV"),
    "abort": ("os.abort()", "the process died: SIGABRT"),
    "exit": ("os._exit(7)", "the process died: exit status 7"),
    "hang": ("time.sleep(1000)", "compute_out_cache_loc had not returned after"),
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.fixture
def test_file(folder, plain_target):
    """A function that writes a test of a function that ends so where a batch has three tokens."""

    def write(ending):
        (folder / "kernels_of_mine.py").write_text(
            f"import ctypes\nimport os\nimport time\n\n{plain_target.read_text()}\n"
            f"right = {FAMILY}\n\n\n"
            f"def {FAMILY}(out, rows, lengths, starts, table, page_size):\n"
            f"    if lengths.sum() >= 3:\n"
            f"        {ending}\n"
            f"    right(out, rows, lengths, starts, table, page_size)\n"
        )
        path = folder / "test_mine.py"
        path.write_text(
            "import kernels_of_mine\n"
            "from pagefault import assert_conforms\n\n\n"
            f"def test_wrong():\n    assert_conforms(kernels_of_mine.{FAMILY})\n\n\n"
            f"def test_right():\n    assert_conforms(kernels_of_mine.right, {FAMILY!r})\n"
        )
        return path

    return write


@pytest.mark.parametrize(
    "name",
    ["segfault", *(pytest.param(n, marks=pytest.mark.slow) for n in ENDINGS if n != "segfault")],
)
def test_a_property_fails_with_the_smallest_case_and_the_others_run(
    name, test_file, run_pytest, pagefault, folder
):
    ending, message = ENDINGS[name]
    test_file(ending)
    process = run_pytest("--device", "cpu", "--case-time", "2", "--hypothesis-seed=1")
    assert "1 failed, 1 passed" in process.stdout, process.stdout + process.stderr
    assert f"NonConformance: {FAMILY}" in process.stdout
    assert message in process.stdout
    if name != "hang":  # Each try of that takes two seconds, more than there is time for.
        assert "minimal: no single step makes it smaller" in process.stdout
        (case,) = (folder / ".pagefault" / "cases").glob("*.json")
        assert '"input_lengths": [3]' in case.read_text()


@pytest.mark.slow
def test_in_process_a_debugger_sees_what_ends_it(test_file, run_pytest):
    test_file("raise SystemExit(9)")
    process = run_pytest("--device", "cpu", "--pagefault-in-process")
    assert "raised SystemExit" in process.stdout
    test_file("os._exit(9)")
    assert run_pytest("--device", "cpu", "--in-process").returncode == 9


def test_what_a_property_raises_besides_is_raised(run_pytest, folder):
    (folder / "test_mine.py").write_text(
        "from pagefault import assert_conforms\n\n\n"
        "def test_unknown():\n"
        f"    assert_conforms(print, {FAMILY!r}, num_cases='several')\n"
    )
    process = run_pytest("--device", "cpu")
    assert "1 failed" in process.stdout
    assert "TypeError" in process.stdout


@pytest.mark.parametrize("text", ["0", "-1", "soon"])
def test_a_time_that_is_none_is_refused(text, run_pytest):
    process = run_pytest("--case-time", text)
    assert process.returncode == 4
    assert f"--case-time '{text}', but should be a number of seconds above 0" in process.stderr
