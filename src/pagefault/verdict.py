"""A verdict: everything that is wrong with one call, in the field's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Signature(NamedTuple):
    """What tells two findings apart.

    Attributes:
        family: The function's name.
        kind: What sort of thing went wrong, a key of `KINDS`.
        role: Where: the tensor, or the kind of cell that differs first.
    """

    family: str
    kind: str
    role: str

    def __str__(self) -> str:
        return f"{self.family}: {self.kind}: {self.role}"


# Most telling first: a verdict's signature is that of its first kind.
KINDS = {
    "device error": "the device reported an error; the process can't go on",
    "died": "the process died",
    "hang": "a call that had not returned when its time was over",
    "memory": "a call for which the memory did not suffice",
    "address": "an access outside every tensor of the launch",
    "raised": "an exception that the contract does not name",
    "not refused": "bad input that was taken",
    "outside": "a write outside the cells that the contract names",
    "row": "an access in a row of the page table that belongs to no request of the call",
    "capture": "a call that can't be captured in a CUDA graph, but should",
    "race": "a cell that one program writes and another reads or writes",
    "input changed": "an input that no longer holds what it held",
    "returned": "a returned value of another structure, shape, dtype or device",
    "stale": "an answer that depends on bytes that are no input",
    "unwritten": "a cell that should have been written and was not",
    "value": "a wrong value",
    "log": "a warning that is missing, wrong or too many",
    "launch": "a launch with nothing to write, where the contract rules that out",
    "needless": "a read of a cell that the result does not need",
}


@dataclass(frozen=True)
class Finding:
    """One kind of thing that is wrong in one kind of place.

    Attributes:
        kind: A key of `KINDS`.
        role: Where: the tensor, or the kind of cell that differs first.
        headline: What was found, what it should be, where.
        lines: More about the first such place.
    """

    kind: str
    role: str
    headline: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What is wrong with one call; nothing, if there are no findings.

    Attributes:
        family: The function's name.
        findings: Most telling first.
        summary: What can be said of the call as a whole ("3 of 9 elements differ").
    """

    family: str
    findings: tuple[Finding, ...] = ()
    summary: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def signature(self) -> Signature:
        """The signature of the first finding; only where there is one."""
        first = self.findings[0]
        return Signature(self.family, first.kind, first.role)

    @property
    def fatal(self) -> bool:
        """Whether the process that saw it can't launch anything any more."""
        return any(finding.kind == "device error" for finding in self.findings)

    def with_more(self, *findings: Finding) -> Verdict:
        """Return the verdict with more findings."""
        if not findings:
            return self
        return Verdict(self.family, sorted_findings([*self.findings, *findings]), self.summary)

    def text(self) -> str:
        """Return the report: each finding with its lines, then the summary."""
        if self.passed:
            return f"{self.family}: passed"
        lines: list[str] = []
        for finding in self.findings:
            lines.append(finding.headline)
            lines.extend(f"  {line}" for line in finding.lines)
        if self.summary:
            lines.append(f"  {'; '.join(self.summary)}")
        return "\n".join(lines)


def sorted_findings(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return findings with the most telling kinds first, otherwise in their order."""
    order = list(KINDS)
    return tuple(sorted(findings, key=lambda finding: order.index(finding.kind)))
