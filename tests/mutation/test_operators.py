"""What each operator makes of a line."""

import ast

import pytest

from pagefault.mutation.operators import Source, edits_of

LINES = {
    "comparison": ("x = a < b", {"x = a <= b", "x = a >= b"}),
    "arithmetic": ("x = a + b", {"x = a - b"}),
    "logic": ("x = a & b", {"x = a | b"}),
    "constant": ("x = f(-1)", {"x = f(0)", "x = f(-2)"}),
    "term dropped": ("x = p_ptr + a", {"x = p_ptr"}),
    "factor dropped": ("x = a * b", {"x = a", "x = b"}),
    "divisor dropped": ("x = a // b", {"x = a"}),
    "shift dropped": ("x = a << b", {"x = a"}),
    "condition dropped": ("f(mask=a & (b < c))", {"f(mask=a)", "f(mask=(b < c))"}),
    "operands swapped": ("x = a - b - c", {"x = c - (a - b)", "x = b - a - c"}),
    "arguments swapped": ("f(a, b, p_ptr, c)", {"f(b, a, p_ptr, c)"}),
    "results swapped": ("return a, b", {"return b, a"}),
    "clamp dropped": ("x = tl.minimum(a, b + 1)", {"x = a", "x = (b + 1)"}),
    "clamp turned": ("x = min(a, b)", {"x = max(a, b)"}),
    "branches swapped": ("x = tl.where(a, b, c)", {"x = tl.where(a, c, b)"}),
    "branch always": ("if a: f()", {"if True: f()"}),
    "branch never": ("if a: f()", {"if False: f()"}),
    "early return removed": ("if a: return", {"if False: return"}),
    "loop dropped": ("while a: f()", {"while False: f()"}),
    "cast dropped": ("x = (a + b).to(tl.int64)", {"x = (a + b)"}),
    "cast narrowed": ("x = a.to(tl.int64)", {"x = a.to(tl.int32)"}),
    "other changed": ("x = f(a, other=-1)", {"x = f(a, other=0)"}),
    "mask dropped": ("f(a, mask=b, other=0)", {"f(a, mask=True, other=0)"}),
    "sign dropped": ("x = -(-a // b)", {"x = (-a // b)", "x = -(a // b)"}),
    "statement dropped": ("tl.store(a, b)", {"pass"}),
    "stride for width": ("x = t.stride(0) + s", {"x = t.shape[1] + s"}),
}


def changed(line, operator=None):
    """Return the lines that an operator, or any, makes of one."""
    source = Source(f"def f(row_stride):\n    {line}\n")
    function = source.tree.body[0]
    return {
        source.edited(edit).splitlines()[1].strip()
        for edit in edits_of(source, function)
        if operator in (None, edit.operator)
    }


@pytest.mark.parametrize("operator", LINES)
def test_an_operator_makes_what_it_says(operator):
    line, wanted = LINES[operator]
    assert changed(line, operator) == wanted


@pytest.mark.parametrize(
    "line",
    [
        pytest.param('"""Return 1 + 1."""', id="docstring"),
        pytest.param('raise ValueError(f"{a + 1}")', id="exception"),
        pytest.param("x: tl.constexpr", id="annotation"),
    ],
)
def test_what_says_nothing_of_the_result_is_left_alone(line):
    assert changed(line) == set()


def test_what_only_tunes_a_launch_is_left_alone():
    assert changed("k[g](a, num_warps=4)") == {"pass"}


@pytest.mark.parametrize(
    ("line", "operator"),
    [
        ("x = tl.cumsum(a, 0)", "constant"),
        ("x = (a + b).to(tl.int32)", "cast dropped"),
        ("tl.store(p_ptr, a.to(tl.int64))", "cast dropped"),
        ("x = a.to(tl.int64)", "cast dropped"),
        ("x = a.to(p_ptr.dtype.element_ty)", "cast dropped"),
    ],
)
def test_what_changes_no_value_in_a_kernel_is_left_alone(line, operator):
    source = Source(f"@triton.jit\ndef f(a):\n    {line}\n")
    assert operator not in {edit.operator for edit in edits_of(source, source.tree.body[0])}
    assert changed(line, operator) != set()


@pytest.mark.parametrize(
    ("line", "constants"),
    [
        ("x = a >= 0", {"x = a >= -1"}),
        ("x = a < 3", {"x = a < 2"}),
        ("x = a <= 3", {"x = a <= 4"}),
        ("x = a > 0", {"x = a > 1"}),
        ("x = a - 1", {"x = a - 2"}),
        ("x = a == 0", {"x = a == 1", "x = a == -1"}),
    ],
)
def test_a_constant_does_not_become_what_another_change_makes_of_it(line, constants):
    assert changed(line, "constant") == constants
    assert len(changed(line)) > len(constants)


def test_arguments_that_are_handed_on_are_swapped_where_they_come_from():
    source = Source("def f(a, b, c):\n    g(a, b, c, c + 1)\n")
    (function,) = source.tree.body
    swaps = [
        source.edited(edit).splitlines()[1].strip()
        for edit in edits_of(source, function, frozenset("abc"))
        if edit.operator == "arguments swapped"
    ]
    assert swaps == ["g(a, b, c + 1, c)"]


def test_lines_keep_their_numbers():
    lines = ["def f():", "x = g(", "a,", "mask=(", "b & c", "),", ")", "y = 1", ""]
    text = "\n    ".join(lines).rstrip(" ")
    source = Source(text)
    for edit in edits_of(source, source.tree.body[0]):
        edited = source.edited(edit)
        ast.parse(edited)
        assert edited.count("\n") == text.count("\n")
        assert edit.start > text.index("y") or edited.splitlines()[7] == "    y = 1"
