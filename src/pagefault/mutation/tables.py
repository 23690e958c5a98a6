"""What a mutation run says: JSON, Markdown and lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .campaign import KILLED, SURVIVED, TIMED_OUT, Outcome
from .checks import CHECKS
from .reviewed import Equivalent, Reviewed
from .survival import Survival
from .trial import CALLS_FOR_OTHERS, SECONDS_A_CALL

EQUIVALENT = "equivalent"


@dataclass(frozen=True)
class Report:
    """What became of the mutants of a run.

    Attributes:
        target: As it was asked for.
        seed: Of the cases.
        num_cases: Calls that a mutant was tried on at most.
        strict: Whether needless reads were findings.
        num_mutants: How many there are; more than outcomes where a run was interrupted.
        outcomes: In the order of the source.
        reviewed: What people have said.
        is_whole: Whether all mutants of the target were to be tried.
        interrupted: Whether somebody ended the run.
        faults: What the original itself did wrong, one line each.
    """

    target: str
    seed: int
    num_cases: int
    strict: bool
    num_mutants: int
    outcomes: Sequence[Outcome]
    reviewed: Reviewed
    is_whole: bool
    interrupted: bool
    faults: Sequence[str]

    @cached_property
    def _listed(self) -> dict[tuple[str, ...], Equivalent]:
        return {entry.key: entry for entry in self.reviewed.equivalent}

    def status(self, outcome: Outcome) -> str:
        """Return a mutant's status, in which a survivor that is listed is EQUIVALENT."""
        is_listed = outcome.mutant.key in self._listed
        return EQUIVALENT if is_listed and outcome.status == SURVIVED else outcome.status

    def with_status(self, *statuses: str) -> list[Outcome]:
        """Return the outcomes of some statuses."""
        return [outcome for outcome in self.outcomes if self.status(outcome) in statuses]

    @property
    def score(self) -> float:
        """The part of those that are not listed that was found; 1 where there are none."""
        return _score(Counter(map(self.status, self.outcomes)))

    def errors(self) -> list[str]:
        """Return what is wrong with the reviewed file: entries killed, or of no mutant."""
        lines = [
            f"listed as equivalent, but {o.status} by {o.first_checks[0]} after {o.num_cases} "
            f"cases: {' / '.join(o.mutant.diff())}"
            for o in self.outcomes
            if o.status != SURVIVED and o.mutant.key in self._listed
        ]
        if self.is_whole and not self.interrupted:
            known = {outcome.mutant.key for outcome in self.outcomes}
            lines += [
                f"listed as equivalent, but no mutant: {entry.file}, {entry.function}: "
                f"{entry.before} / {entry.after}"
                for key, entry in self._listed.items()
                if key not in known
            ]
        return lines


def _score(counts: Mapping[str, int]) -> float:
    found = counts.get(KILLED, 0) + counts.get(TIMED_OUT, 0)
    told_apart = found + counts.get(SURVIVED, 0)
    return found / told_apart if told_apart else 1.0


def worth_of_checks(outcomes: Iterable[Outcome]) -> dict[str, tuple[int, int, int]]:
    """Return by check how many mutants it saw, saw in the first wrong call, and alone saw."""
    saw, first, alone = Counter[str](), Counter[str](), Counter[str]()
    for outcome in outcomes:
        saw.update(outcome.checks)
        first.update(outcome.first_checks)
        if len(outcome.checks) == 1:
            alone.update(outcome.checks)
    return {check: (saw[check], first[check], alone[check]) for check in CHECKS}


def json_of(report: Report) -> dict[str, Any]:
    """Return the report as JSON has it."""
    return {
        "target": report.target,
        "seed": report.seed,
        "cases": report.num_cases,
        "strict": report.strict,
        "interrupted": report.interrupted,
        "mutants": report.num_mutants,
        "score": round(report.score, 4),
        "killed": len(report.with_status(KILLED)),
        "survived": len(report.with_status(SURVIVED)),
        "equivalent": len(report.with_status(EQUIVALENT)),
        "timed_out": len(report.with_status(TIMED_OUT)),
        "errors": report.errors(),
        "faults": list(report.faults),
        "checks": {
            check: {"saw": saw, "first": first, "alone": alone}
            for check, (saw, first, alone) in worth_of_checks(report.outcomes).items()
        },
        "rows": [_row(report, outcome) for outcome in report.outcomes],
    }


def _row(report: Report, outcome: Outcome) -> dict[str, Any]:
    mutant = outcome.mutant
    return {
        "file": mutant.file,
        "line": mutant.line,
        "function": mutant.function,
        "operator": mutant.operator,
        "before": mutant.before,
        "after": mutant.after,
        "families": list(mutant.families),
        "status": report.status(outcome),
        "cases": outcome.num_cases,
        "family": outcome.family,
        "kind": outcome.kind,
        "headline": outcome.headline,
        "first_checks": list(outcome.first_checks),
        "checks": list(outcome.checks),
        "seconds": round(outcome.seconds, 3),
    }


def lines_of(report: Report) -> list[str]:
    """Return what a run prints when it ends."""
    lines: list[str] = []
    for outcome in report.with_status(SURVIVED):
        lines += [*outcome.mutant.diff(), f"  survived {outcome.num_cases} cases", ""]
    lines += _table_lines(_check_rows(report))
    counts = Counter(map(report.status, report.outcomes))
    lines += [
        "",
        f"{len(report.outcomes)} of {report.num_mutants} mutants: {counts[KILLED]} killed, "
        f"{counts[TIMED_OUT]} timed out, {counts[SURVIVED]} survived, "
        f"{counts[EQUIVALENT]} equivalent; score {100 * report.score:.1f} %",
        *report.faults,
        *report.errors(),
    ]
    return [*lines, "interrupted"] if report.interrupted else lines


def markdown_of(report: Report, command: str, about: str, survival: Survival | None = None) -> str:
    """Return the tables for docs/.

    Args:
        report: The report.
        command: What makes them.
        about: The versions that were run.
        survival: How many cases the listed mutants have survived, if anybody has looked.
    """
    counts = Counter(map(report.status, report.outcomes))
    parts = [
        "# Mutants",
        f"Made by `{command}` ({about}), and not edited by hand. Each mutant is one step away from "
        f"the kernels of `{report.target}` and was tried on {report.num_cases} calls of seed "
        f"{report.seed} at most, those of all functions that it is part of together, and for "
        f"{SECONDS_A_CALL * report.num_cases:g} s at most as long as nothing had found it"
        + ("; the run was interrupted." if report.interrupted else "."),
        f"{len(report.outcomes)} mutants: {counts[KILLED]} killed, {counts[TIMED_OUT]} timed out, "
        f"{counts[SURVIVED]} survived, {counts[EQUIVALENT]} equivalent. Score: "
        f"{100 * report.score:.1f} % of those that are not equivalent were found, half of them "
        f"within {_median_cases(report)} calls.",
        "The calls are the same for every mutant of a statement: of those that were drawn for its "
        "functions, half of them with garbage in their device tensors, those that reach the "
        "statement, which copies of the modules with probes have counted. Sizes are drawn near the "
        "numbers in the target's own source too. Where the target names other launches, such as "
        "small ones, in which a small batch reaches every loop, calls take them in turn with what "
        "its functions choose.",
        "## What each check is worth",
        "A check *saw* a mutant if it had a finding in any call that was made; *only it* are the "
        "mutants that no other check saw, and that would have survived without it. Calls go on "
        f"until a second check has seen a mutant; where values or garbage alone have, for "
        f"{CALLS_FOR_OTHERS} calls. "
        "A finding that is ignored is not a check that is off: the address oracle also keeps wild "
        "accesses from memory, where other checks might have seen them.",
        _markdown_table(_check_rows(report)),
        "## Functions",
        _markdown_table(_rows_by(report, "function", lambda o: _place(o))),
        "## Changes",
        _markdown_table(_rows_by(report, "change", lambda o: o.mutant.operator)),
        "## Functions and checks",
        "How many mutants of a function each check saw first; several may at once.",
        _markdown_table(_place_rows(report)),
        "## Survivors",
        _survivors(report.with_status(SURVIVED)),
        "## Equivalent",
        _equivalents(report, survival),
        "## Left out",
        "One fault is made once: where two changes of a line say the same of integers, there is "
        "one; two arguments that a device function hands on as it was given "
        "them are swapped in the kernel alone, and what a masked-off lane loads becomes one other "
        "number. In a kernel a cast to 32 bits is not dropped, nor one of what is stored, which "
        "the store casts, nor one to the type of something else: no value changes. A cast to 64 "
        "bits of what is not loaded becomes one to 32, as if it were dropped. Beside that:",
        "\n".join(
            f"- `{rule.statement}` in `{rule.function}` of `{rule.file}`: {rule.reason}"
            for rule in report.reviewed.left_out
        )
        or "Nothing.",
    ]
    return "\n\n".join(parts) + "\n"


Rows = list[list[str]]


def _median_cases(report: Report) -> int:
    found = sorted(o.num_cases for o in report.with_status(KILLED, TIMED_OUT))
    return found[len(found) // 2] if found else 0


def _place(outcome: Outcome) -> str:
    return f"`{outcome.mutant.file}` `{outcome.mutant.function}`"


def _check_rows(report: Report) -> Rows:
    rows = [["check", "what it holds a call to", "saw", "saw at once", "only it"]]
    for check, (saw, first, alone) in worth_of_checks(report.outcomes).items():
        only = str(alone) if alone else "kills nothing by itself"
        rows.append([check, CHECKS[check], str(saw), str(first), only])
    return rows


def _rows_by(report: Report, heading: str, key: Callable[[Outcome], str]) -> Rows:
    groups: dict[str, Counter[str]] = {}
    for outcome in report.outcomes:
        groups.setdefault(key(outcome), Counter())[report.status(outcome)] += 1
    rows = [[heading, "mutants", "killed", "timed out", "survived", "equivalent", "score"]]
    for name, counts in sorted(groups.items()):
        numbers = [counts[s] for s in (KILLED, TIMED_OUT, SURVIVED, EQUIVALENT)]
        score = f"{100 * _score(counts):.1f} %"
        rows.append([name, str(counts.total()), *map(str, numbers), score])
    return rows


def _place_rows(report: Report) -> Rows:
    groups: dict[str, Counter[str]] = {}
    for outcome in report.outcomes:
        groups.setdefault(_place(outcome), Counter()).update(outcome.first_checks)
    used = [check for check in CHECKS if any(counts[check] for counts in groups.values())]
    rows = [["function", *used]]
    for name, counts in sorted(groups.items()):
        rows.append([name, *(str(counts[check] or "") for check in used)])
    return rows


def _survivors(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "None."
    return "```diff\n" + "\n\n".join("\n".join(o.mutant.diff()) for o in outcomes) + "\n```"


def _equivalents(report: Report, survival: Survival | None) -> str:
    if not report.reviewed.equivalent:
        return "None is listed."
    rows = [["function", "change", "before", "after", "why nothing tells it apart"]]
    rows += [
        [
            f"`{entry.file}` `{entry.function}`",
            entry.operator,
            f"`{entry.before}`",
            f"`{entry.after}`",
            entry.reason,
        ]
        for entry in report.reviewed.equivalent
    ]
    if survival is not None:
        rows[0].append("cases survived")
        for row, entry in zip(rows[1:], report.reviewed.equivalent):
            row.append(f"{survival.cases(entry.key):,}")
    return _markdown_table(rows)


def _markdown_table(rows: Rows) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in rows[0]) + " |", *lines[1:]])


def _table_lines(rows: Rows) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
