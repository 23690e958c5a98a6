"""Every single-step change of a function that a mutation run tries.

A change is an edit of the source text inside one expression or statement; all other text stays, and
so do the numbers of the lines. Docstrings, annotations, messages of exceptions and what only tunes
a launch are left alone. So is what changes no value, in any function:

- the axis of a sum over a vector, which has one;
- a cast to 32 bits that is dropped in a kernel: the same number in a wider type;
- a cast of what is stored, or to the type of a cell: a store casts.

And one fault is made once, not once for each function that it passes through:

- A constant does not become what another change of its line makes of it: `a > 0` says `a >= 1`.
- Two arguments that a device function hands on as it was given them are swapped in the kernel.
- What a masked-off lane loads becomes one other number.
- A cast of a size or of a program's number to 64 bits becomes one to 32, as if it were dropped;
  that of what was loaded, which may have 64 bits, is dropped too.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
LOGIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_OPERATIONS = {**ARITHMETIC, **LOGIC}
_DROPPED = {
    ast.Add: "term dropped",
    ast.Sub: "term dropped",
    ast.Mult: "factor dropped",
    ast.FloorDiv: "divisor dropped",
    ast.Mod: "divisor dropped",
    ast.LShift: "shift dropped",
    ast.RShift: "shift dropped",
    ast.BitAnd: "condition dropped",
    ast.BitOr: "condition dropped",
}
# Their first operand alone would be another quantity, and not one that somebody forgot.
_ONE_SIDED = (ast.Sub, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift)

_CLAMPS = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
# Calls whose arguments in another order mean the same, or nothing.
_UNORDERED = frozenset(
    [*_CLAMPS, "where", "isinstance", "getattr", "zip", "arange", "warning", "full", "cumsum"]
)
# What comes of these has a type that the caller's tensors say.
_LOADS = frozenset(["load", "gather"])
_CASTS = frozenset(["to", "long", "int"])
# Keywords that say where or how fast, and not what.
_TUNING = frozenset(
    ["num_warps", "num_stages", "non_blocking", "pin_memory", "device", "axis", "strict"]
)


@dataclass(frozen=True)
class Edit:
    """Text in place of other text.

    Attributes:
        operator: What sort of change it is.
        start: Where the old text starts in the source, in characters.
        end: Where it ends.
        text: The new text.
    """

    operator: str
    start: int
    end: int
    text: str


class Source:
    """The text of a module, with the places of its nodes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    @cached_property
    def tree(self) -> ast.Module:
        """The module's syntax tree."""
        return ast.parse(self.text)

    def _offset(self, line: int, column_bytes: int) -> int:
        before = self._lines[line - 1].encode()[:column_bytes].decode()
        return self._starts[line - 1] + len(before)

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        """Return where a node starts, in characters."""
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        """Return where a node ends, in characters."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        return self.text[self.start(node) : self.end(node)]

    def line_number(self, offset: int) -> int:
        """Return the number of the line that a character is in."""
        return bisect_right(self._starts, offset)

    def lines_at(self, edit: Edit) -> tuple[str, str]:
        """Return the lines of an edit before and after it, each as one without indentation."""
        start = self._starts[self.line_number(edit.start) - 1]
        end = self._starts[self.line_number(edit.end)]
        before = self.text[start:end]
        after = self.text[start : edit.start] + edit.text + self.text[edit.end : end]
        return " ".join(before.split()), " ".join(after.split())

    def edited(self, edit: Edit) -> str:
        """Return the module's text with an edit, every other line under its number."""
        lost_lines = self.text.count("\n", edit.start, edit.end) - edit.text.count("\n")
        return self.text[: edit.start] + edit.text + "\n" * lost_lines + self.text[edit.end :]


def is_jit(function: ast.FunctionDef) -> bool:
    """Return whether a function is compiled by Triton: a kernel, or what kernels call."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def edits_of(
    source: Source, function: ast.FunctionDef, handed_on: frozenset[str] = frozenset()
) -> list[Edit]:
    """Return every edit of a function's body, each text once, in the order of the source.

    Args:
        source: The module's.
        function: One of its functions.
        handed_on: Names of parameters whose swaps are made where the function is called.
    """
    edits: dict[tuple[int, int, str], Edit] = {}
    same = _same_value(function)
    made_otherwise = set(_made_otherwise(function))
    names = frozenset(
        node.id for node in ast.walk(function) if isinstance(node, ast.Name)
    ) | frozenset(argument.arg for argument in function.args.args)
    for node in _nodes_of(function):
        for edit in _edits_at(source, node, names, handed_on):
            if node in same and edit.operator in ("cast dropped", "constant"):
                continue
            if edit.operator == "constant" and (node, edit.text) in made_otherwise:
                continue
            if source.text[edit.start : edit.end] != edit.text:
                edits.setdefault((edit.start, edit.end, edit.text), edit)
    return sorted(edits.values(), key=lambda edit: (edit.start, edit.end, edit.text))


def _same_value(function: ast.FunctionDef) -> set[ast.AST]:
    """Return the casts and constants of a function whose change changes no value."""
    found: set[ast.AST] = set()
    if not is_jit(function):
        return found
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        arguments = node.args[1:2]
        match node.func.attr:
            case "cumsum" | "store":
                found.update(arguments)
            case "to" if _changes_no_value(node.func.value, ast.unparse(node.args[0])):
                found.add(node)
    return found


def _made_otherwise(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str]]:
    """Yield constants, and what they need not become: another operator says the same of integers.

    `a >= 1` is `a > 0`, and `a + 0` is `a`.
    """
    for node in ast.walk(function):
        match node:
            case ast.Compare(
                ops=[ast.GtE() | ast.Lt()], comparators=[ast.Constant(int(value)) as c]
            ):
                yield c, str(value + 1)
            case ast.Compare(
                ops=[ast.LtE() | ast.Gt()], comparators=[ast.Constant(int(value)) as c]
            ):
                yield c, str(value - 1)
            case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(1) as c):
                yield c, "0"


def _changes_no_value(number: ast.expr, dtype: str) -> bool:
    """Return whether a cast of a kernel's can be dropped with no fault, or none of its own."""
    if dtype == "tl.int64":
        return not any(getattr(node, "attr", "") in _LOADS for node in ast.walk(number))
    # A cast to the type of something else is there because that has to be of one type.
    return dtype == "tl.int32" or dtype.endswith((".element_ty", ".dtype"))


def _nodes_of(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes whose change may change what the function does."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)) or _is_docstring(node):
            continue
        if isinstance(node, ast.keyword) and node.arg in _TUNING:
            continue
        yield node
        if isinstance(node, ast.keyword) and node.arg == "other":
            continue
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                children = value if isinstance(value, list) else [value]
                pending += [child for child in children if isinstance(child, ast.AST)]


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _edits_at(
    source: Source, node: ast.AST, names: frozenset[str], handed_on: frozenset[str]
) -> Iterator[Edit]:
    match node:
        case ast.Compare():
            yield from _comparisons(source, node)
        case ast.BinOp():
            yield from _operations(source, node)
        case ast.AugAssign():
            yield from _assigned_operations(source, node)
        case ast.BoolOp():
            yield from _conjunctions(source, node)
        case ast.UnaryOp():
            yield from _signs(source, node)
        case ast.Constant():
            yield from _constants(source, node)
        case ast.Call():
            yield from _calls(source, node, handed_on)
        case ast.Attribute() if node.attr == "int64":
            yield _replaced(source, "cast narrowed", node, f"{source.of(node.value)}.int32")
        case ast.keyword() if node.arg == "mask":
            yield _replaced(source, "mask dropped", node.value, "True")
        case ast.keyword(arg="other", value=ast.Constant() | ast.UnaryOp() as value):
            yield _replaced(source, "other changed", value, str(ast.literal_eval(value) + 1))
        case ast.If() | ast.While() | ast.IfExp():
            yield from _branches(source, node)
        case ast.Return() if isinstance(node.value, ast.Tuple):
            yield from _swaps(source, "results swapped", node.value.elts)
        case ast.Expr() if isinstance(node.value, ast.Call):
            yield _replaced(source, "statement dropped", node, "pass")
    if isinstance(node, ast.expr):
        yield from _strides(source, node, names)


def _replaced(source: Source, operator: str, node: ast.expr | ast.stmt, text: str) -> Edit:
    return Edit(operator, source.start(node), source.end(node), text)


def _token(source: Source, left: ast.expr, right: ast.expr, token: str) -> tuple[int, int]:
    """Return where an operator's token stands between two operands."""
    gap_start = source.end(left)
    gap = source.text[gap_start : source.start(right)]
    found = re.search(re.escape(token).replace(r"\ ", r"\s+"), gap)
    assert found is not None
    return gap_start + found.start(), gap_start + found.end()


def _comparisons(source: Source, node: ast.Compare) -> Iterator[Edit]:
    operands = [node.left, *node.comparators]
    for left, operator, right in zip(operands, node.ops, node.comparators):
        token, others = COMPARISONS.get(type(operator), ("", ()))
        for other in others:
            yield Edit("comparison", *_token(source, left, right, token), other)


def _operations(source: Source, node: ast.BinOp) -> Iterator[Edit]:
    kind = type(node.op)
    if kind not in _OPERATIONS:
        return
    token, other = _OPERATIONS[kind]
    start, end = _token(source, node.left, node.right, token)
    # With the parentheses that the operands' own places leave out.
    left = source.text[source.start(node) : start].rstrip()
    right = source.text[end : source.end(node)].lstrip()
    has_pointer = [_has_pointer(node.left), _has_pointer(node.right)]
    if not any(has_pointer) or kind is ast.Add:
        yield Edit("logic" if kind in LOGIC else "arithmetic", start, end, other)
    dropped = _DROPPED[kind]
    if not has_pointer[1]:
        yield _replaced(source, dropped, node, left)
    if not has_pointer[0] and kind not in _ONE_SIDED:
        yield _replaced(source, dropped, node, right)
    if kind in _ONE_SIDED:
        wrapped = f"({left})" if isinstance(node.left, ast.BinOp) else left
        yield _replaced(source, "operands swapped", node, f"{right} {token} {wrapped}")


def _has_pointer(node: ast.AST) -> bool:
    """Return whether an operand is a pointer: it is never what somebody forgot."""
    return any(isinstance(n, ast.Name) and n.id.endswith("_ptr") for n in ast.walk(node))


def _assigned_operations(source: Source, node: ast.AugAssign) -> Iterator[Edit]:
    if type(node.op) in _OPERATIONS:
        token, other = _OPERATIONS[type(node.op)]
        start, end = _token(source, node.target, node.value, f"{token}=")
        yield Edit("arithmetic", start, end, f"{other}=")
        yield Edit("term dropped", start, end, "=")
    yield _replaced(source, "statement dropped", node, "pass")


def _conjunctions(source: Source, node: ast.BoolOp) -> Iterator[Edit]:
    token, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in pairwise(node.values):
        yield Edit("logic", *_token(source, left, right, token), other)
    for value in node.values:
        rest = [source.of(v) for v in node.values if v is not value]
        yield _replaced(source, "condition dropped", node, f" {token} ".join(rest))


def _signs(source: Source, node: ast.UnaryOp) -> Iterator[Edit]:
    if isinstance(node.operand, ast.Constant):
        return  # A negative number is a constant.
    start = source.start(node)
    token = {ast.USub: "-", ast.Not: "not ", ast.Invert: "~"}.get(type(node.op))
    if token is not None:
        yield Edit("sign dropped", start, start + len(token), "")


def _constants(source: Source, node: ast.Constant) -> Iterator[Edit]:
    if isinstance(node.value, bool):
        yield _replaced(source, "constant", node, str(not node.value))
    elif isinstance(node.value, int):
        start = source.start(node)
        is_negative = source.text[:start].endswith("-") and not re.search(
            r"[\w)\]]\s*-$", source.text[:start]
        )
        value = -node.value if is_negative else node.value
        for other in (value + 1, value - 1):
            # The minus of a power or product stays with its first factor.
            yield Edit("constant", start - is_negative, source.end(node), str(other))


def _calls(source: Source, node: ast.Call, handed_on: frozenset[str]) -> Iterator[Edit]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    is_method = isinstance(node.func, ast.Attribute) and not _is_module(node.func.value)
    if is_method and (_is_cast(node, name) or name == "clamp"):
        receiver = source.text[source.start(node) : source.end(node.func) - len(name)]
        operator = "clamp dropped" if name == "clamp" else "cast dropped"
        yield _replaced(source, operator, node, receiver.rstrip().removesuffix("."))
    if name in _CLAMPS and len(node.args) == 2 and not node.keywords:
        for argument in node.args:
            yield _replaced(source, "clamp dropped", node, _operand(source, argument))
        start = source.end(node.func) - len(name)
        yield Edit("clamp turned", start, start + len(name), _CLAMPS[name])
    if name == "where" and len(node.args) == 3:
        yield from _swaps(source, "branches swapped", node.args[1:])
        for branch in node.args[1:]:
            yield _replaced(source, "branch always", node, _operand(source, branch))
    if name not in _UNORDERED:
        yield from _swaps(source, "arguments swapped", node.args, handed_on)


def _is_cast(node: ast.Call, name: str) -> bool:
    """Return whether a call of a method gives a tensor another dtype, and not another device."""
    return name in _CASTS and not any(keyword.arg in _TUNING for keyword in node.keywords)


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("tl", "torch", "triton", "np", "math")


def _operand(source: Source, node: ast.expr) -> str:
    """Return the text of an argument so that it can stand where its call stood."""
    is_plain = isinstance(node, (ast.Name, ast.Call, ast.Attribute, ast.Subscript))
    return source.of(node) if is_plain else f"({source.of(node)})"


def _swaps(
    source: Source,
    operator: str,
    nodes: list[ast.expr],
    handed_on: frozenset[str] = frozenset(),
) -> Iterator[Edit]:
    """Yield the swaps of two neighbours."""
    for left, right in pairwise(nodes):
        if {source.of(left), source.of(right)} <= handed_on:
            continue
        # Nobody swaps a pointer with a number.
        if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
            continue
        if _has_pointer(left) != _has_pointer(right):
            continue
        between = source.text[source.end(left) : source.start(right)]
        text = source.of(right) + between + source.of(left)
        yield Edit(operator, source.start(left), source.end(right), text)


def _branches(source: Source, node: ast.If | ast.While | ast.IfExp) -> Iterator[Edit]:
    is_return = isinstance(node, ast.If) and len(node.body) == 1
    is_return = is_return and isinstance(node.body[0], ast.Return)  # type: ignore[index]
    never = "early return removed" if is_return else "branch never"
    if isinstance(node, ast.While):
        never = "loop dropped"
    yield _replaced(source, never, node.test, "False")
    if not isinstance(node, ast.While):
        yield _replaced(source, "branch always", node.test, "True")


def _strides(source: Source, node: ast.expr, names: frozenset[str]) -> Iterator[Edit]:
    """Yield a table's width for the distance of its rows, and the other way round."""
    match node:
        case ast.Name(id="row_stride" | "max_pages", ctx=ast.Load()):
            other = {"row_stride": "max_pages", "max_pages": "row_stride"}[node.id]
            if other in names:
                yield _replaced(source, "stride for width", node, other)
        case ast.Call(func=ast.Attribute(value=table, attr="stride"), args=[ast.Constant(value=0)]):
            yield _replaced(source, "stride for width", node, f"{source.of(table)}.shape[1]")
