"""A record: all that is known of one finding, as a value that only grows.

Of two cases the smaller one is kept, of two counts of one run the larger one: records can be joined
in any order and any number of times, with one result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from .verdict import Signature

SCHEMA = 1

# What is known of a case's size, the best first.
_CERTAINTIES = ("minimal:", "not known to be minimal:", "not shrunk:", "not shrunk yet:")


# Whether a fault is still there, as the newest run has it.
OPEN, FIXED = "open", "fixed"


def certainty_of(how_small: str) -> int:
    """Return how much is known of a case's size, by the words that say it; 0 is the most."""
    return [how_small.startswith(words) for words in (*_CERTAINTIES, "")].index(True)


class Rate(NamedTuple):
    """How often a case shows its finding: so many times in so many runs."""

    shown: int
    of: int

    def __str__(self) -> str:
        return f"{self.shown} of {self.of} runs"


@dataclass(frozen=True)
class Run:
    """One run that has seen a finding.

    Attributes:
        count: How often.
        first_seen: When, UTC.
        last_seen: When, UTC.
        target: As `load_target` took it.
        commit: Of the repository that the target lies in, or "".
        seed: Of the run.
        machine: Its name.
        device: Its name for people.
        driver: Version of the GPU's driver, or "".
        memory: Where tensors lay on a GPU.
        versions: Of what an answer may depend on.
    """

    count: int
    first_seen: str
    last_seen: str
    target: str
    commit: str
    seed: int
    machine: str
    device: str
    driver: str
    memory: str
    versions: Mapping[str, str]

    def joined(self, other: Run) -> Run:
        """Return what both know of the same run."""

        def constant(run: Run) -> str:
            fixed = dataclasses.replace(run, count=0, first_seen="", last_seen="")
            return _canonical(dataclasses.asdict(fixed))

        return dataclasses.replace(
            max(self, other, key=constant),
            count=max(self.count, other.count),
            first_seen=min(self.first_seen, other.first_seen),
            last_seen=max(self.last_seen, other.last_seen),
        )


@dataclass(frozen=True)
class Passed:
    """That a run has checked a finding's case again, and nothing was wrong.

    Attributes:
        at: When, UTC.
        commit: Of the repository that the target lies in, or "".
        machine: Its name.
        device: Its name for people.
    """

    at: str
    commit: str
    machine: str
    device: str

    def joined(self, other: Passed) -> Passed:
        """Return what both know of the same run."""
        return max(self, other, key=lambda passed: _canonical(dataclasses.asdict(passed)))


@dataclass(frozen=True)
class Smallest:
    """The smallest case that shows a finding.

    Attributes:
        size: How large it is, see `size_of`.
        case: Its JSON.
        how_small: What is known of its size.
        verdict: What is wrong with it.
        device: "cpu" or "cuda".
        run: The id of the run that has it.
        files: Digests of `repro.py` and of the copies of the target's files, by name.
    """

    size: tuple[int, ...]
    case: str
    how_small: str
    verdict: str
    device: str
    run: str
    files: Mapping[str, str] = field(default_factory=dict)

    def smaller(self, other: Smallest) -> Smallest:
        """Return the smaller one; of the same case what is known best, then what is newest."""
        if self._rank != other._rank:
            return min(self, other, key=lambda smallest: smallest._rank)
        return max(self, other, key=lambda s: (s.run, _canonical(dataclasses.asdict(s))))

    @property
    def _rank(self) -> tuple[tuple[int, ...], str, int]:
        return self.size, _canonical(json.loads(self.case)), certainty_of(self.how_small)


@dataclass(frozen=True)
class Record:
    """All that is known of one finding.

    Attributes:
        target: The name of the target's module or file.
        signature: What tells it apart from other findings of the target.
        smallest: The smallest case.
        reproduced: How often that case shows it, by device and run.
        runs: Those that have seen it, by id.
        passed: Those that have checked its case again and seen nothing, by id.
    """

    target: str
    signature: Signature
    smallest: Smallest
    reproduced: Mapping[str, Mapping[str, Rate]]
    runs: Mapping[str, Run]
    passed: Mapping[str, Passed] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """FIXED where the newest run has checked it again and not seen it, else OPEN."""
        newest = max({*self.runs, *self.passed})
        return OPEN if newest in self.runs else FIXED

    @property
    def name(self) -> str:
        """The name of the finding's folder."""
        digest = hashlib.sha256(f"{self.target}/{self.signature}".encode()).hexdigest()
        kind = re.sub(r"\W+", "-", self.signature.kind)
        return f"{re.sub(r'[^0-9A-Za-z_.-]', '-', self.signature.family)}-{kind}-{digest[:8]}"

    @property
    def count(self) -> int:
        """How often it was seen, in all runs."""
        return sum(run.count for run in self.runs.values())

    def joined(self, other: Record) -> Record:
        """Return what both know; in any order and any number of times the same."""
        smallest = self.smallest.smaller(other.smallest)
        reproduced: dict[str, dict[str, Rate]] = {}
        for record in (self, other):
            # A rate is that of a case, and lost with it.
            if record.smallest.case == smallest.case:
                for device, rates in record.reproduced.items():
                    known = reproduced.setdefault(device, {})
                    for run, rate in rates.items():
                        known[run] = max(known.get(run, rate), rate, key=lambda r: (r.of, r.shown))
        runs = dict(self.runs)
        for run_id, theirs in other.runs.items():
            runs[run_id] = runs[run_id].joined(theirs) if run_id in runs else theirs
        passed = dict(self.passed)
        for run_id, there in other.passed.items():
            passed[run_id] = passed[run_id].joined(there) if run_id in passed else there
        return dataclasses.replace(
            self, smallest=smallest, reproduced=reproduced, runs=runs, passed=passed
        )

    def to_json(self) -> str:
        """Return the text of the `finding.json`."""
        smallest = dataclasses.asdict(self.smallest)
        smallest["case"] = json.loads(self.smallest.case)
        document = {
            "schema": SCHEMA,
            "target": self.target,
            **self.signature._asdict(),
            "status": self.status,
            "count": self.count,
            "smallest": {**smallest, "files": dict(sorted(self.smallest.files.items()))},
            "reproduced": {
                device: dict(sorted(rates.items()))
                for device, rates in sorted(self.reproduced.items())
            },
            "runs": {id_: dataclasses.asdict(run) for id_, run in sorted(self.runs.items())},
            "passed": {
                id_: dataclasses.asdict(there) for id_, there in sorted(self.passed.items())
            },
        }
        return as_lines(document, depth=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record that a `finding.json` describes.

        Raises:
            ValueError: It describes none; the message says why.
        """
        document = json.loads(text)
        if _field(document, "schema", int) != SCHEMA:
            raise ValueError(f"schema: {document['schema']}, but should be {SCHEMA}")
        smallest = dict(_field(document, "smallest", dict))
        smallest["size"] = _numbers(_field(smallest, "size", list))
        smallest["case"] = as_lines(_field(smallest, "case", dict)) + "\n"
        runs = _field(document, "runs", dict)
        if smallest.get("run") not in runs:
            raise ValueError(f"smallest.run: {smallest.get('run')!r}, but should be one of runs")
        for name in _field(smallest, "files", dict):
            if not re.fullmatch(r"(kernel/)?[^/.][^/]*", name):
                raise ValueError(f"smallest.files: {name!r} is no name of a file here")
        reproduced = _field(document, "reproduced", dict)
        passed = _field({"passed": {}, **document}, "passed", dict)
        return cls(
            _field(document, "target", str),
            Signature(*(_field(document, name, str) for name in Signature._fields)),
            _made(Smallest, smallest),
            {
                device: {run: Rate(*_numbers(rate)) for run, rate in rates.items()}
                for device in reproduced
                for rates in [_field(reproduced, device, dict)]
            },
            {run: _made(Run, _field(runs, run, dict)) for run in runs},
            {run: _made(Passed, _field(passed, run, dict)) for run in passed},
        )

    def text(self) -> str:
        """Return the report: the verdict, how often it shows and was seen, and where."""
        lines = [str(self.signature), "", self.smallest.verdict, f"  {self.smallest.how_small}", ""]
        for device, rates in sorted(self.reproduced.items()):
            shown, of = (sum(numbers) for numbers in zip(*rates.values()))
            lines.append(f"shows in {Rate(shown, of)} on {device}")
        if not self.reproduced:
            lines.append("how often it shows was not measured")
        times, runs = _count(self.count, "time"), _count(len(self.runs), "run")
        first = min(run.first_seen for run in self.runs.values())
        last = max(run.last_seen for run in self.runs.values())
        lines.append(f"seen {times} in {runs}, first {first}, last {last}")
        if self.status == FIXED:
            there = self.passed[max(self.passed)]
            commit = f", commit {there.commit}" if there.commit else ""
            lines.append(f"fixed: its case passed {there.at} on {there.device}{commit}")
        lines += ["", "Where this case was found:"]
        run = self.runs[self.smallest.run]
        for name, value in dataclasses.asdict(run).items():
            if name == "versions":
                value = ", ".join(f"{package} {version}" for package, version in value.items())
            if name not in ("count", "first_seen", "last_seen") and value != "":
                lines.append(f"  {name}: {value}")
        return "\n".join(lines) + "\n"


def _canonical(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def as_lines(document: Mapping[str, Any], depth: int = 1, indent: int = 0) -> str:
    """Return an object as JSON, with a line for each entry of its first levels."""
    if not document:
        return "{}"
    margin = " " * (indent + 2)
    lines = [
        f"{margin}{json.dumps(name)}: "
        + (
            as_lines(value, depth - 1, indent + 2)
            if depth > 1 and isinstance(value, Mapping)
            else json.dumps(value)
        )
        for name, value in document.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"


def _field(document: Any, name: str, type_: type) -> Any:
    value = document.get(name) if isinstance(document, dict) else None
    if not isinstance(value, type_):
        raise ValueError(f"{name}: {value!r}, but should be of type {type_.__name__}")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ValueError(f"{values!r}, but should be a list of integers")
    return tuple(values)


_TYPES = {"int": int, "str": str, "tuple[int, ...]": tuple, "Mapping[str, str]": dict}


def _made(cls: Any, fields: dict[str, Any]) -> Any:
    """Return an object of a dataclass, if all fields are there and of the right type."""
    known = {f.name: _field(fields, f.name, _TYPES[str(f.type)]) for f in dataclasses.fields(cls)}
    return cls(**known)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
