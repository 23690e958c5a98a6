"""Two implementations held against each other: what one call of each has come to.

No oracle says what is right. Both get the same case in the same memory, poison included, so that
whatever they write or return can be compared, cell by cell: outputs, what lies beside them, inputs.
Where both do the same, or both raise, nothing is wrong, whatever they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import reached
from .addresses import Misstep
from .case import Case
from .comparison import Outcome
from .family import Explanation, Family
from .memory import POISONS, Cell, Plan, Words
from .verdict import Finding, Verdict, sorted_findings


@dataclass(frozen=True)
class Answer:
    """What one implementation's calls on both replicas have come to.

    Attributes:
        name: The target's.
        after: Both replicas after the calls.
        outcomes: What each call came back with.
        returned: What was returned, by path, with every tensor on the host.
        far_writes: What was written far away, or "".
    """

    name: str
    after: Words
    outcomes: Sequence[Outcome]
    returned: Sequence[Mapping[str, Any]]
    far_writes: str = ""

    @property
    def raised(self) -> BaseException | None:
        """The exception of the first call that raised one."""
        return next((o.raised for o in self.outcomes if o.raised is not None), None)

    @property
    def outside(self) -> dict[tuple[str, str], Misstep]:
        """Accesses to no element of a tensor, which the interpreter has not carried out."""
        missteps = [misstep for outcome in self.outcomes for misstep in outcome.missteps]
        return {(m.access, m.tensor): m for m in missteps if m.kind == "address"}


def held_against(family: Family, case: Case, plan: Plan, a: Answer, b: Answer) -> Verdict:
    """Return in what two answers to a case differ.

    Args:
        family: The case's family.
        case: The case.
        plan: Where its tensors lay, in both.
        a: The target's answer.
        b: The answer of what it is held against.
    """
    reached.count(reached.PAIRS)
    found: list[Finding] = []
    summary: list[str] = []
    if not (a.raised and b.raised):
        found += _exceptions(a, b)
        found += _accesses(a, b)
        if not found:
            found += _cells(family, case, plan, a, b, summary)
            found += _returned(family, case, a, b)
    if found:
        summary.append(f"A is {a.name}, B is {b.name}")
    return Verdict(family.name, sorted_findings(found), tuple(summary))


def _exceptions(a: Answer, b: Answer) -> Iterator[Finding]:
    error = a.raised or b.raised
    if error is not None:
        said = [_said(answer.raised) for answer in (a, b)]
        lines = tuple(str(error).strip().splitlines()[:3])
        yield Finding("raised", type(error).__name__, f"A: {said[0]}, B: {said[1]}", lines)


def _said(error: BaseException | None) -> str:
    return "returned" if error is None else f"raised {type(error).__name__}"


def _accesses(a: Answer, b: Answer) -> Iterator[Finding]:
    """Yield accesses outside that only one of both has made."""
    for who, mine, other in (("A", a, b), ("B", b, a)):
        for (access, tensor), misstep in mine.outside.items():
            if (access, tensor) not in other.outside:
                headline = f"{who}: {access} of {misstep.place}, which is no element of it"
                where = f"{misstep.source}, in {misstep.kernel}, program {misstep.program}"
                lines = (where, misstep.detail)
                yield Finding("address", f"{who}: {access} of {tensor}", headline, lines)
        if mine.far_writes and not other.far_writes:
            yield Finding("outside", f"{who}: far away", f"{who}: {mine.far_writes}")


def _cells(
    family: Family, case: Case, plan: Plan, a: Answer, b: Answer, summary: list[str]
) -> Iterator[Finding]:
    num_words = plan.num_bytes // 4
    halves = (slice(0, num_words), slice(num_words, 2 * num_words))
    differ = {
        plan.cell_at(4 * int(word))
        for half in halves
        for word in np.flatnonzero(a.after[half] != b.after[half])
    }
    cells = sorted(differ, key=lambda cell: (cell.region.start_bytes, cell.offset))
    seen = set()
    for cell in cells:
        name, is_element = cell.region.name, cell.index is not None
        values = [
            (cell.value(answer.after[halves[0]]), cell.value(answer.after[halves[1]]))
            for answer in (a, b)
        ]
        role, lines = name, tuple[str, ...]()
        if is_element:
            role, lines = _explained(family, case, name, cell.index, values)
        kind = "value" if is_element else "outside"
        if (kind, role) not in seen:
            seen.add((kind, role))
            said = [_value(pair, cell) for pair in values]
            yield Finding(kind, role, f"{cell}: A: {said[0]}, B: {said[1]}", lines)
    for name in dict.fromkeys(cell.region.name for cell in cells):
        number = sum(cell.region.name == name for cell in cells)
        summary.append(f"{number} cells in or beside {name} differ")


def _value(pair: tuple[int, int], cell: Cell | None = None) -> str:
    """Return what an implementation has left in a cell of both replicas."""
    if pair[0] == pair[1]:
        return str(pair[0])
    if pair == POISONS and cell is not None and not cell.region.is_input:
        return "not written"
    return f"{pair[0]} or {pair[1]}, by what lay in memory"


def _explained(
    family: Family, case: Case, where: str, index: int | None, values: Sequence[tuple[int, int]]
) -> tuple[str, tuple[str, ...]]:
    """Return the role of a cell that differs, and lines about it and about both values."""
    lines: dict[str, None] = {}
    role = "cell"
    for pair in values:
        try:
            explanation = family.explain(case, where, index or 0, pair[0])
        except Exception:
            # A cell of which the contract says nothing, such as a spare element.
            explanation = Explanation("cell")
        role = explanation.role
        lines.update(dict.fromkeys(explanation.lines))
    return f"{where.split('[')[0]}: {role}", tuple(lines)


def _returned(family: Family, case: Case, a: Answer, b: Answer) -> Iterator[Finding]:
    of_a, of_b = a.outcomes[0].returned, b.outcomes[0].returned
    for path in [*of_a, *(path for path in of_b if path not in of_a)]:
        shapes = [_shape(path, answer) for answer in (a, b)]
        role = path.split("[")[0]
        if shapes[0] != shapes[1]:
            yield Finding("returned", role, f"{path}: A: {shapes[0]}, B: {shapes[1]}")
            return
        elements = [[_elements(r[path]) for r in answer.returned] for answer in (a, b)]
        wrong = (elements[0][0] != elements[1][0]) | (elements[0][1] != elements[1][1])
        for index in np.flatnonzero(wrong)[:1]:
            pairs = [(int(first[index]), int(second[index])) for first, second in elements]
            said = [_value(pair) for pair in pairs]
            value = a.returned[0][path]
            indices = np.unravel_index(index, getattr(value, "shape", (1,)))
            is_tensor = isinstance(value, torch.Tensor)
            place = path + "".join(f"[{i}]" for i in indices) * is_tensor
            role, lines = _explained(family, case, path, int(index), pairs)
            yield Finding("value", role, f"{place}: A: {said[0]}, B: {said[1]}", lines)


def _shape(path: str, answer: Answer) -> str:
    """Return what has to agree before elements can."""
    if path not in answer.outcomes[0].returned:
        return "not returned"
    value = answer.outcomes[0].returned[path]
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)} on {value.device.type}"
    return "an int" if type(value) is int else repr(value)


def _elements(value: Any) -> np.ndarray[Any, Any]:
    """Return the elements of what was returned; none of what is compared by its text."""
    if isinstance(value, torch.Tensor):
        elements: np.ndarray[Any, Any] = value.numpy().ravel()
        return elements
    return np.array([value] if type(value) is int else [], dtype=np.int64)
