"""A finding as a script, `repro.py`, that needs torch, Triton and the kernel, and not pagefault."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import standalone
from .case import MAX_CELLS_WRITTEN_AS_ROWS, Case, PageTable
from .family import Argument, Expected, Family, HostTensor, Plain, TensorValue
from .target import REGISTRY, Target, file_of
from .verdict import Signature

# Where a finding keeps copies of the target's files.
KERNEL_FOLDER = "kernel"

# What ends or blocks the process is called in one of its own, for so long.
SECONDS_OF_KIND = {"hang": 10.0, "died": 60.0, "device error": 60.0}

# Elements that a script fills, gaps included.
MOST_ELEMENTS = 1_000_000

_LONGEST_LINE = 96
_SHORT_LIST = 24
_SHORTEST_RUN = 5


class ScriptError(ValueError):
    """A finding that can't be written as a script; the message is one line that says why."""


@dataclass(frozen=True)
class Kernel:
    """Where a function under test comes from.

    Attributes:
        sources: Files and modules that a script tries, in this order.
        files: What is copied for the record: the file and those that it imports from beside it.
        needs_pagefault: Whether one of them imports pagefault.
    """

    sources: tuple[str, ...]
    files: Mapping[str, bytes]
    needs_pagefault: bool


def kernel_of(target: Target, function: str) -> Kernel:
    """Return where a function of a target comes from.

    A file, and a module of pagefault's own, is loaded by its path, or else from the copy; any
    other module by its name, since it belongs to a package.

    Raises:
        TargetError: It has no file.
        ScriptError: The file can't be read.
    """
    if target.against is not None:
        raise ScriptError("it is where two implementations differ: pagefault repro shows it")
    path = file_of(target.name, function)
    try:
        files = dict(_with_what_is_beside(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise ScriptError(f"{path} can't be read: {error}") from error
    by_path = target.name.endswith(".py") or target.name in REGISTRY
    sources = (str(path), f"{KERNEL_FOLDER}/{path.name}") if by_path else (target.name,)
    imports = {name for text in files.values() for name, _ in _imports(text)}
    return Kernel(sources, files, by_path and "pagefault" in imports)


def _with_what_is_beside(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the text of a file, and of the files beside it that it imports."""
    waiting, seen = [path], {path}
    while waiting:
        current = waiting.pop()
        text = current.read_bytes()
        yield current.name, text
        for name, _ in _imports(text):
            beside = path.parent / f"{name}.py"
            if beside not in seen and beside.is_file():
                seen.add(beside)
                waiting.append(beside)


def _imports(text: bytes) -> Iterator[tuple[str, int]]:
    """Yield the first name of each module that a file imports, and how many dots precede it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((name.split(".")[0], node.level) for name in names)


def script_of(
    target: Target,
    family: Family,
    signature: Signature,
    case: Case,
    verdict: str,
    device: str,
    kernel: Kernel,
) -> str:
    """Return the text of a script that makes a case's call and says what is wrong with it.

    Args:
        target: For its dialect.
        family: The case's family.
        signature: The finding's.
        case: The smallest that shows it.
        verdict: The report's text, and what is known of the case's size.
        device: Where it was found.
        kernel: Where the function comes from.

    Raises:
        ScriptError: An argument is an object that can't be written down, or too large.
    """
    expected = family.expect(case, target.terms_of(family.name).dialect)
    seconds = SECONDS_OF_KIND.get(signature.kind, 0.0)
    parts = [
        f'"""{_quoted(_header(signature, verdict, device, kernel))}"""\n\n{_IMPORTS.strip()}',
        "# The first that is there is taken.\n"
        + ("KERNELS = " + _wrapped("[", map(json.dumps, kernel.sources), "]", indent=0)),
        _call(family, case),
        _expected(family, expected) + "\n\n# From here on every repro.py is the same.",
        _DEFINITIONS,
        'if __name__ == "__main__":\n'
        f"    expected = Expected(**EXPECTED)\n"
        f'    sys.exit(main("{family.name}", KERNELS, call, expected, "{device}", {seconds:g}))',
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


def _header(signature: Signature, verdict: str, device: str, kernel: Kernel) -> str:
    needs = "Needs torch, Triton and the kernel's file"
    if not kernel.sources[0].endswith(".py"):
        needs = f"Needs torch, Triton and the module {kernel.sources[0]}"
    needs += (
        ", and pagefault too, which that file imports."
        if kernel.needs_pagefault
        else "; neither pagefault nor Hypothesis."
    )
    lines = [
        *(str(signature), "", verdict, ""),
        f"Found on {device}. {needs}",
        "",
        "    python repro.py                the kernel where it lay, or else its copy beside this",
        "    python repro.py KERNEL.py      another version of it",
        "    DEVICE=cuda python repro.py    compiled, on a GPU; DEVICE=cpu: interpreted",
        "",
        "Triton's interpreter shows each access outside the tensors; on a GPU",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python repro.py does.",
        "",
        "Exit status: 1 the fault shows, 0 it does not, 2 the kernel can't be loaded.",
        "",
    ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def _standalone_parts() -> tuple[str, str]:
    """Return the imports and the definitions of the module that scripts bring along."""
    source = inspect.getsource(standalone)
    docstring, *others = ast.parse(source).body
    last = max(n.end_lineno or 0 for n in others if isinstance(n, (ast.Import, ast.ImportFrom)))
    lines = source.splitlines()
    return "\n".join(lines[docstring.end_lineno : last]), "\n".join(lines[last:])


_IMPORTS, _DEFINITIONS = _standalone_parts()


def _call(family: Family, case: Case) -> str:
    arguments = family.arguments(case)
    lines = [line for argument in arguments for line in _argument(argument, case)]
    passed = _wrapped("    return function(", (a.name for a in arguments), ")", indent=4)
    return "\n".join(
        [
            "def call(function, memory):",
            f'    """Call {family.name} with the tensors of the case."""',
            *(f"    {line}" for line in lines),
            passed,
        ]
    )


def _argument(argument: Argument, case: Case) -> Iterator[str]:
    """Yield the lines that make an argument."""
    name = argument.name
    if isinstance(argument, Plain):
        yield f"{name} = {_plain(argument)}"
        return
    at = case.placement(name)
    words = [f"torch.{at.dtype}"]
    if at.offset:
        words.append(f"offset={at.offset}")
    if isinstance(argument, HostTensor):
        yield f"{name} = " + _wrapped("host_tensor(", [_numbers(argument.values), *words], ")")
        return
    if argument.values is None:
        spare = f" + {at.spare}" if at.spare else ""
        words = [f'"{name}"', f"{argument.shape[0]}{spare}", *words]
        yield f"{name} = " + _wrapped("memory.output(", words, ")")
        return
    if isinstance(argument.values, PageTable):
        span = argument.shape[0] * (argument.shape[1] + at.pitch)
        if span > MOST_ELEMENTS:
            raise ScriptError(f"{name} spans {span} elements, but a script fills {MOST_ELEMENTS}")
        values = _table(argument.values)
        if 0 in argument.shape:
            words.append(f"shape={argument.shape}")
        if at.pitch:
            words.append(f"row_stride={argument.shape[1] + at.pitch}")
        if argument.values.edits and values != _rows(argument.values):
            yield f"rows = {values}"
            edits = _wrapped("[", map(str, argument.values.edits), "]")
            yield f"for row, column, page_id in {edits}:"
            yield "    rows[row][column] = page_id"
            values = "rows"
    else:
        values = _numbers(argument.values)
    yield f"{name} = " + _wrapped("memory.tensor(", [f'"{name}"', values, *words], ")")


def _plain(argument: Plain) -> str:
    value = argument.make("cpu")
    if value == "cpu":
        return "memory.device"
    if isinstance(value, SimpleNamespace):
        fields = [f"{name}={_literal(argument, item)}" for name, item in vars(value).items()]
        return _wrapped("types.SimpleNamespace(", fields, ")")
    return _literal(argument, value)


def _literal(argument: Plain, value: Any) -> str:
    for written in (json.dumps, repr):
        try:
            text = written(value)
            if ast.literal_eval(text) == value:
                return text
        except (TypeError, ValueError, SyntaxError):
            continue
    raise ScriptError(f"argument {argument.name} is {value!r}, which is no literal")


def _rows(table: PageTable) -> str:
    return _wrapped("[", (str(list(row)) for row in table.rows), "]")


def _table(table: PageTable) -> str:
    """Return an expression for the rows of a table; edits are left out where it is large."""
    if table.num_cells <= MAX_CELLS_WRITTEN_AS_ROWS:
        return _rows(table)
    cell = f"{table.first} + {table.step} * (row * {table.max_pages} + column)"
    row = f"[{cell} for column in range({table.max_pages})]"
    return f"[{row} for row in range({table.num_rows})]"


def _expected(family: Family, expected: Expected) -> str:
    fields: dict[str, str] = {}
    writes = {} if expected.raises else expected.writes
    written = {
        name: _by_index(values) if isinstance(values, Mapping) else _numbers(values)
        for name, values in writes.items()
    }
    fields["writes"] = _dict(written)
    if expected.rows:
        fields["rows"] = _dict({n: _numbers(sorted(rows)) for n, rows in expected.rows.items()})
    if expected.raises:
        fields["raises"] = json.dumps(expected.raises.__name__)
    if expected.warnings is not None:
        fields["warnings"] = json.dumps(expected.warnings)
    if expected.returns is not None:
        fields["results"] = _wrapped("[", map(json.dumps, family.results), "]")
        fields["returns"] = _dict({p: _returned(v) for p, v in expected.returns.items()})
    lines = [f'    "{name}": {text},' for name, text in fields.items()]
    return "\n".join(["# What is right; see the class below.", "EXPECTED = {", *lines, "}"])


def _by_index(values: Mapping[int, int | None]) -> str:
    return _wrapped("{", (f"{index}: {value}" for index, value in values.items()), "}", indent=8)


def _returned(value: int | TensorValue) -> str:
    if isinstance(value, int):
        return str(value)
    device = "cpu" if value.on_host else ""
    return f'("{value.dtype}", "{device}", {list(value.shape)}, {_numbers(value.values)})'


def _dict(items: Mapping[str, str]) -> str:
    if not items:
        return "{}"
    return "\n".join(
        ["{", *(f'        "{name}": {text},' for name, text in items.items()), "    }"]
    )


def _numbers(values: Sequence[int | None]) -> str:
    """Return an expression for a list of numbers; long ones that go up evenly become ranges.

    >>> _numbers([5, 0, 0])
    '[5, 0, 0]'
    >>> _numbers([*range(30), 7, *[0] * 9])
    '[*range(0, 30), 7, *[0] * 9]'
    """
    if len(values) <= _SHORT_LIST:
        return _wrapped("[", map(str, values), "]", indent=8)
    pieces = []
    first = 0
    while first < len(values):
        end, step = _run(values, first)
        if end - first < _SHORTEST_RUN:
            pieces.append(str(values[first]))
            end = first + 1
        elif step:
            start, by = values[first], "" if step == 1 else f", {step}"
            assert start is not None
            pieces.append(f"*range({start}, {start + step * (end - first)}{by})")
        else:
            pieces.append(f"*[{values[first]}] * {end - first}")
        first = end
    return _wrapped("[", pieces, "]", indent=8)


def _run(values: Sequence[int | None], first: int) -> tuple[int, int]:
    """Return where a run of numbers with one difference ends, and the difference."""
    end = first + 1
    start = values[first]
    following = values[end] if end < len(values) else None
    step = 0 if start is None or following is None else following - start
    while end < len(values):
        value, before = values[end], values[end - 1]
        is_next = value is before if value is None or before is None else value - before == step
        if not is_next:
            break
        end += 1
    return end, step


def _wrapped(opening: str, items: Iterable[str], closing: str, indent: int = 4) -> str:
    """Return a bracketed list on one line, or on several that are indented further."""
    items = list(items)
    joined = ", ".join(items)
    if len(opening) + len(joined) + len(closing) + 2 * indent <= _LONGEST_LINE:
        return f"{opening}{joined}{closing}"
    inside = " " * (indent + 4)
    lines = [inside]
    for item in items:
        if lines[-1] != inside and len(lines[-1]) + len(item) > _LONGEST_LINE:
            lines.append(inside)
        lines[-1] += f"{item}, "
    body = "\n".join(line.rstrip() for line in lines)
    return f"{opening}\n{body}\n{' ' * indent}{closing}"
