"""A side case: a legal case that is held to something other than its function's contract.

That is what a soak checks beside legal cases: that garbage in device tensors does no harm, and what
must hold between calls. A side case is found, made smaller, filed and checked again as a case is.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .case import Case
from .family import Family, case_from_json, family_named
from .verdict import Verdict

if TYPE_CHECKING:
    from .checker import Checker
    from .target import Target


class SideCase(ABC):
    """A legal case, and what it is held to.

    Attributes:
        case: The legal case.
        FIELD: What its JSON has beside the fields of the case.
    """

    FIELD: ClassVar[str]
    case: Case

    @abstractmethod
    def __str__(self) -> str:
        """Return the line of a report that says what it is held to."""

    @property
    @abstractmethod
    def held_to(self) -> str:
        """What it is held to, in a word or two: part of the signature of what is found."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, ...]:
        """How much there is beside the case, to tell which of two is smaller."""

    @abstractmethod
    def value(self) -> Any:
        """Return what `FIELD` holds in JSON."""

    @abstractmethod
    def simpler(self, family: Family) -> Iterator[Self]:
        """Yield side cases that one step makes simpler, the largest steps first."""

    @abstractmethod
    def why_not(self, family: Family, target: Target) -> str:
        """Return why a target can't be held to it, or ""."""

    @abstractmethod
    def judge(self, checker: Checker, family: Family, thoroughly: bool) -> Verdict:
        """Return what is wrong, whatever it is held to; `check` says that in the signature too."""

    @abstractmethod
    def as_family(self, family: Family) -> Family:
        """Return a family whose call and expectation for the legal case are those of this one.

        Raises:
            ValueError: There is none, since it is no single call; the message says so.
        """

    def check(self, checker: Checker, family: Family, thoroughly: bool = False) -> Verdict:
        """Return what is wrong.

        Args:
            checker: Of the target.
            family: The case's family.
            thoroughly: Whether to try every memory.
        """
        return self.told(self.judge(checker, family, thoroughly))

    def told(self, verdict: Verdict) -> Verdict:
        """Return a verdict whose signatures say what the case was held to.

        The same fault in a legal case is another finding, which says more.
        """
        findings = [
            finding
            if finding.role.startswith(self.held_to)
            else replace(finding, role=f"{self.held_to}: {finding.role}")
            for finding in verdict.findings
        ]
        return replace(verdict, findings=tuple(findings))

    def to_json(self, family: str) -> str:
        """Return the case as JSON text with one more field; `pagefault repro` reads it back."""
        text = self.case.to_json(family).rstrip().removesuffix("}").rstrip()
        return f"{text},\n  {json.dumps(self.FIELD)}: {json.dumps(self.value())}\n}}\n"


AnyCase = Case | SideCase


def legal_part(case: AnyCase) -> Case:
    """Return the legal case of any case."""
    return case.case if isinstance(case, SideCase) else case


def told(case: AnyCase, verdict: Verdict) -> Verdict:
    """Return the verdict on a case that others have come to, such as that its process died."""
    return case.told(verdict) if isinstance(case, SideCase) else verdict


def why_not(family: Family, case: AnyCase, target: Target) -> str:
    """Return why a target can't be held to what a case is held to, or ""."""
    if not isinstance(case, SideCase):
        return ""
    if target.against is not None:
        return "two targets are held against each other in legal cases alone"
    return case.why_not(family, target)


def cause(family: str, case: AnyCase) -> str:
    """Return what to blame for what a case does to its process: a function, or what holds it."""
    return f"{case.held_to}: {family}" if isinstance(case, SideCase) else family


def check_any(checker: Checker, family: Family, case: AnyCase, thoroughly: bool = True) -> Verdict:
    """Return what is wrong with a target's answer to any case.

    Args:
        checker: Of the target.
        family: The case's family.
        case: The case.
        thoroughly: Whether to try every way to check it.
    """
    if isinstance(case, SideCase):
        return case.check(checker, family, thoroughly)
    return (checker.check_thoroughly if thoroughly else checker.check)(family, case)


def any_case_from_json(text: str) -> tuple[Family, AnyCase]:
    """Return a case of any sort and its family from JSON text.

    Raises:
        CaseError: The text describes none.
        FamilyError: Its family is not installed.
    """
    from .garbage import Garbage
    from .relations import Related

    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    for sort in (Garbage, Related):
        if isinstance(document, dict) and sort.FIELD in document:
            value = document.pop(sort.FIELD)
            family = family_named(str(document.get("family")))
            return family, sort.of(family.from_json(json.dumps(document)), value)
    return case_from_json(text)
