"""What came back from both replicas, held against what the oracle says."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import reached
from .addresses import Misstep
from .case import Case, CaseError
from .family import Expected, Family, TensorValue
from .memory import NUMPY_DTYPES, POISONS, Cell, Plan, Words
from .verdict import Finding, Verdict, sorted_findings

Pair = tuple[int, int]


@dataclass(frozen=True)
class Outcome:
    """What one call on one replica came back with, besides memory.

    Attributes:
        returned: By path, as `Family.returned` takes the result apart.
        raised: The exception, if it raised.
        warnings: The warnings that it logged.
        missteps: Accesses that the address oracle did not allow.
        launched: The kernels that it launched, where the address oracle has seen them.
    """

    returned: Mapping[str, Any]
    raised: BaseException | None
    warnings: tuple[str, ...]
    missteps: tuple[Misstep, ...] = ()
    launched: tuple[str, ...] = ()

    def fetched(self) -> dict[str, Any]:
        """Return what was returned with every tensor on the host, once the device is done."""
        return {
            path: _on_host(value) if _has_elements(value) else value
            for path, value in self.returned.items()
        }


def _has_elements(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda")
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements on the host; from a device they are queued, and not waited for."""
    if tensor.device.type == "cpu":
        return tensor.detach()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def _short_of(error: BaseException) -> str:
    """Return whose memory did not suffice, "host" or "device", or "" for another error."""
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    is_of_torch = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return "host" if isinstance(error, MemoryError) or is_of_torch else ""


class Comparison:
    """Compares both replicas of one case with what the oracle says.

    Args:
        family: The function's family.
        case: The case.
        plan: Where its tensors lie.
        expected: What the oracle says.
        device: "cpu" or "cuda", where the call ran.
    """

    def __init__(
        self, family: Family, case: Case, plan: Plan, expected: Expected, device: str
    ) -> None:
        self._family = family
        self._case = case
        self._plan = plan
        self._expected = expected
        self._writes = {} if expected.raises else expected.writes
        self._device = device
        self._findings: list[Finding] = []
        self._summary: list[str] = []

    def verdict(
        self,
        before: Words,
        after: Words,
        outcomes: Sequence[Outcome],
        fetched: Sequence[Mapping[str, Any]],
    ) -> Verdict:
        """Return everything that is wrong.

        Args:
            before: Both replicas before the call.
            after: Both replicas after it.
            outcomes: What the calls on them came back with.
            fetched: What was returned, with every tensor on the host.
        """
        self._report_missteps(outcomes)
        raised = self._compare_exceptions(outcomes)
        self._compare_memory(before, after, values_matter=not raised)
        if not raised:
            self._compare_returned(outcomes[0].returned, fetched)
            self._compare_warnings(outcomes[0].warnings)
            self._compare_launches(outcomes[0].launched)
        return Verdict(self._family.name, sorted_findings(self._findings), tuple(self._summary))

    def _report_missteps(self, outcomes: Sequence[Outcome]) -> None:
        """Report each sort of access once, whichever replica it happened in."""
        for misstep in (misstep for outcome in outcomes for misstep in outcome.missteps):
            kind, role = misstep.kind, f"{misstep.access} of {misstep.tensor}"
            if kind == "footprint":
                # What the comparison of memory would find, were the value another.
                kind, role = self._kind_of_stray(misstep.tensor), misstep.tensor
            what = {
                "address": "which is no element of it",
                "row": "a row that belongs to no request of the call",
                "footprint": "which the contract does not name",
                "race": "which another program touches",
                "needless": "which the result does not need",
            }[misstep.kind]
            headline = f"{misstep.access} of {misstep.place}, {what}"
            where = f"{misstep.source}, in {misstep.kernel}, program {misstep.program}"
            self._add_once(Finding(kind, role, headline, (where, misstep.detail)))

    def _compare_launches(self, launched: Sequence[str]) -> None:
        if launched and not self._expected.may_launch:
            headline = f"{self._family.name} launched {launched[0]}, but has nothing to write"
            self._findings.append(Finding("launch", launched[0], headline))

    def _add_once(self, finding: Finding) -> None:
        """Add a finding, unless one of its kind and role is there."""
        if all((finding.kind, finding.role) != (f.kind, f.role) for f in self._findings):
            self._findings.append(finding)

    def _kind_of_stray(self, tensor: str) -> str:
        """Return the kind of a write to an element that the contract does not name."""
        region = next(region for region in self._plan.regions if region.name == tensor)
        return "input changed" if region.is_input and tensor not in self._writes else "outside"

    def _compare_exceptions(self, outcomes: Sequence[Outcome]) -> bool:
        """Compare what was raised; return whether anything was or should have been."""
        expected = self._expected.raises
        reached.count(reached.EXCEPTIONS, expected is not None)
        for outcome in outcomes:
            error = outcome.raised
            if error is None and expected is not None:
                headline = f"{self._family.name} returned, but should raise {expected.__name__}"
                self._findings.append(Finding("not refused", expected.__name__, headline))
                return True
            if error is not None and (expected is None or not isinstance(error, expected)):
                wanted = f", but should raise {expected.__name__}" if expected else ""
                headline = f"{self._family.name} raised {type(error).__name__}{wanted}"
                lines = tuple(str(error).strip().splitlines()[:3])
                short_of = _short_of(error)
                kind, role = ("memory", short_of) if short_of else ("raised", type(error).__name__)
                self._findings.append(Finding(kind, role, headline, lines))
                return True
        return expected is not None

    def _compare_memory(self, before: Words, after: Words, values_matter: bool) -> None:
        num_words = self._plan.num_bytes // 4
        wanted = before.copy()
        halves = (slice(0, num_words), slice(num_words, 2 * num_words))
        for region in self._plan.regions:
            if region.name not in self._writes:
                continue
            writes = self._writes[region.name]
            indices: Any
            if isinstance(writes, Mapping):
                indices = region.positions_of(writes)
                values: Sequence[int | None] = list(writes.values())
            else:
                indices, values = slice(len(writes)), writes
            if len(values):
                reached.count(reached.VALUES, len(values))
                array, is_open = _settled(region.name, values, region.dtype)
                for half in halves:
                    elements = self._plan.elements(wanted[half], region)
                    if is_open is not None:
                        found = self._plan.elements(after[half], region)[indices]
                        array = np.where(is_open, found, array)
                    elements[indices] = array
        for half, poison in zip(halves, POISONS):
            reached.count(reached.poison(poison), len(after[half]) > 0)
        reached.count(reached.MEMORY, len(halves))
        if np.array_equal(after, wanted):
            return
        replicas = [_Replica(before[half], after[half], wanted[half]) for half in halves]
        cells = {
            self._plan.cell_at(4 * int(word))
            for replica in replicas
            for word in np.flatnonzero(replica.after != replica.wanted)
        }
        strays = []
        by_tensor: dict[str, list[Cell]] = defaultdict(list)
        for cell in sorted(cells, key=lambda cell: (cell.region.start_bytes, cell.offset)):
            if self._may_be_written(cell):
                by_tensor[cell.region.name].append(cell)
            else:
                strays.append(cell)
        self._report_strays(strays, replicas)
        if values_matter:
            for name, wrong in by_tensor.items():
                self._report_cells(name, wrong, replicas)
        if not strays:
            self._summary.append("guards intact; inputs intact")

    def _may_be_written(self, cell: Cell) -> bool:
        writes = self._writes.get(cell.region.name)
        if writes is None or cell.index is None:
            return False
        return cell.index in writes if isinstance(writes, Mapping) else cell.index < len(writes)

    def _report_strays(self, strays: Sequence[Cell], replicas: Sequence[_Replica]) -> None:
        groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell in strays:
            name = cell.region.name
            kind = "outside" if cell.index is None else self._kind_of_stray(name)
            groups[kind, name].append(cell)
        for (kind, name), cells in groups.items():
            replica = next(
                r for r in replicas if cells[0].value(r.after) != cells[0].value(r.before)
            )
            found, was = cells[0].value(replica.after), cells[0].value(replica.before)
            headline = f"{cells[0]} = {found}, but should still be {was}"
            lines = [f"{_count(len(cells), 'cell')} in or beside {name} changed"]
            for known in [f for f in self._findings if (f.kind, f.role) == (kind, name)]:
                # The address oracle has seen the write too, and knows the line.
                self._findings.remove(known)
                lines += [known.headline, *known.lines]
            self._findings.append(Finding(kind, name, headline, tuple(lines)))

    def _report_cells(self, name: str, cells: Sequence[Cell], replicas: Sequence[_Replica]) -> None:
        wrong = []
        for cell in cells:
            assert cell.index is not None
            found = (cell.value(replicas[0].after), cell.value(replicas[1].after))
            wrong.append((cell.index, str(cell), found, cell.value(replicas[0].wanted)))
        self._report_values(
            name, wrong, len(self._writes[name]), was_input=cells[0].region.is_input
        )

    def _report_values(
        self,
        where: str,
        wrong: Sequence[tuple[int, str, Pair, int]],
        total: int,
        was_input: bool = False,
    ) -> None:
        """Report wrong elements of one tensor, the first of each kind.

        Args:
            where: The tensor or the path of what was returned.
            wrong: Flat index, place, what both replicas hold, what they should hold.
            total: Elements compared.
            was_input: Whether they held input, and not poison, before the call.
        """
        if not wrong:
            return
        seen = set()
        for index, place, found, should in wrong:
            kind, headline = _judge(place, found, should, was_input)
            different = found[0] if found[0] != should else found[1]
            explanation = self._family.explain(self._case, where, index, different)
            role = f"{where.split('[')[0]}: {explanation.role}"
            if (kind, role) not in seen:
                seen.add((kind, role))
                self._findings.append(Finding(kind, role, headline, explanation.lines))
        self._summary.append(f"{len(wrong)} of {_count(total, 'element')} of {where} differ")

    def _compare_returned(
        self, returned: Mapping[str, Any], fetched: Sequence[Mapping[str, Any]]
    ) -> None:
        expected = self._expected.returns
        if expected is None:
            if any(value is not None for value in returned.values()):
                self._wrong_return("result", "returned something, but should return None")
            return
        missing = [path for path in expected if path not in returned]
        surplus = [path for path in returned if path not in expected]
        if missing or surplus:
            what = f"without {missing[0]}" if missing else f"with {surplus[0]}"
            self._wrong_return("result", f"returned something {what}")
            return
        for path, wanted in expected.items():
            found = [f[path] for f in fetched]
            is_tensor = isinstance(wanted, TensorValue)
            reached.count(reached.RETURNED_TENSORS if is_tensor else reached.RETURNED_NUMBERS)
            if isinstance(wanted, TensorValue):
                self._compare_tensor(path, wanted, returned[path], found)
            elif any(type(value) is not int for value in found):
                self._wrong_return(path, f"{path} is {found[0]!r}, but should be an int")
            elif found != [wanted, wanted]:
                self._report_values(path, [(0, path, (found[0], found[1]), wanted)], 1)

    def _compare_tensor(
        self, path: str, wanted: TensorValue, tensor: Any, elements: Sequence[Any]
    ) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            self._wrong_return(path, f"{path} is {tensor!r}, but should be a tensor")
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        device = "cpu" if wanted.on_host else self._device
        found = (dtype, list(tensor.shape), tensor.device.type)
        should = (wanted.dtype, list(wanted.shape), device)
        if found != should:
            text = "{} is {} {} on {}, but should be {} {} on {}"
            self._wrong_return(path, text.format(path, *found, *should))
            return
        values = [e.numpy().ravel() for e in elements]
        correct, is_open = _settled(path, wanted.values, wanted.dtype)
        is_wrong = (values[0] != correct) | (values[1] != correct)
        if is_open is not None:
            is_wrong &= ~is_open
        wrong = []
        for index in np.flatnonzero(is_wrong):
            place = path + "".join(f"[{i}]" for i in np.unravel_index(index, wanted.shape))
            pair = (int(values[0][index]), int(values[1][index]))
            wrong.append((int(index), place, pair, int(correct[index])))
        self._report_values(path, wrong, len(correct))

    def _wrong_return(self, path: str, what: str) -> None:
        headline = f"{self._family.name}: {what}"
        self._findings.append(Finding("returned", path.split("[")[0], headline))

    def _compare_warnings(self, found: Sequence[str]) -> None:
        wanted = self._expected.warnings
        if wanted is None:
            return
        reached.count(reached.WARNINGS, len(wanted))
        if len(found) != len(wanted):
            headline = f"{_count(len(found), 'warning')} logged, but should be {len(wanted)}"
            self._findings.append(Finding("log", "count", headline, tuple(found[:3])))
            return
        for message, words in zip(found, wanted):
            # "request-1" names no width of 1: a word is what stands between blanks and signs.
            missing = Counter(words) - Counter(re.findall(r"[\w-]+", message))
            if missing:
                headline = f"a warning does not say {next(iter(missing))}"
                self._findings.append(Finding("log", "words", headline, (repr(message),)))
                return


@dataclass(frozen=True)
class _Replica:
    """The words of one replica: before the call, after it, and as they should be after it."""

    before: Words
    after: Words
    wanted: Words


def _settled(
    name: str, values: Sequence[int | None], dtype: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Return what the oracle says, and which elements may hold anything; None for no such."""
    if None not in values:
        return _array(name, values, dtype), None
    is_open = np.array([value is None for value in values])
    return _array(name, [value or 0 for value in values], dtype), is_open


def _array(name: str, values: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Return what the oracle says as an array, or refuse the case as outside the domain."""
    try:
        return np.array(values, dtype=NUMPY_DTYPES[dtype])
    except OverflowError as error:
        raise CaseError(f"{name}: the answer does not fit {dtype}") from error


def _judge(place: str, found: Pair, should: int, was_input: bool) -> tuple[str, str]:
    """Return the kind of a wrong element, and what to say of it."""
    if found[0] == found[1]:
        return "value", f"{place} = {found[0]}, but should be {should}"
    if found == POISONS and not was_input:
        return "unwritten", f"{place} was not written, but should be {should}"
    either = f"{place} = {found[0]} or {found[1]}, by what lay in memory"
    return "stale", f"{either}, but should be {should}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
