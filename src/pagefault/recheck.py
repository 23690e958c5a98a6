"""Cases that a campaign checks again before it draws new ones.

These are the cases of earlier findings of its target, those of reported bugs, and what the workers
of a killed campaign were about to launch. Each is checked in a forked child, which goes on with the
next one as long as it lives.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .case import CaseError
from .family import FamilyError, family_named
from .finding_record import OPEN, Record
from .findings import NUM_RUNS, target_name
from .isolation import SHRINK_CASE_SECONDS, death_verdict, hang_verdict
from .journal import Noted
from .lifetime import die_with_parent
from .memory_limit import limit_memory
from .plan import Plan
from .result import NOT_SHRUNK_YET
from .side_case import any_case_from_json, check_any, told, why_not
from .verdict import Signature, Verdict

if TYPE_CHECKING:
    from .checker import Checker

# All of it takes so long at most, or this share of the campaign's time where that is more.
MOST_SECONDS = 60.0
SHARE_OF_TIME = 0.1

# How the names of journals start.
JOURNALS = "journals/"

OUT_OF_TIME = "not checked again: the time for it was over"


@dataclass(frozen=True)
class Again:
    """A case to be checked again.

    Attributes:
        name: What messages call it: the name of a finding, of a bug or of a journal.
        family: The family's name.
        case: A case of any sort.
        signature: What it has shown, if it is a finding's.
        how_small: What is known of its size.
        times: How often to try; a case that shows its fault now and then has several tries.
        is_from_journal: Whether a process was about to launch it that somebody has killed.
        worker: The index of that worker, where it was one of this campaign.
        round_number: Of the family's round in which it was.
    """

    name: str
    family: str
    case: Any
    signature: Signature | None = None
    how_small: str = NOT_SHRUNK_YET
    times: int = 1
    is_from_journal: bool = False
    worker: int | None = None
    round_number: int = 0


class Selected(NamedTuple):
    """What is to be checked again, and what can't be: the reasons by name."""

    items: list[Again]
    left_out: dict[str, str]

    def with_more(self, other: Selected) -> Selected:
        return Selected([*self.items, *other.items], {**self.left_out, **other.left_out})


def of_findings(records: Mapping[str, Record], plan: Plan) -> Selected:
    """Return the cases of the findings that a campaign could see again, the open ones first.

    Those of other targets are no business of its, nor are those of another kind of device, where
    a case may pass that still fails on its own.
    """
    selected = Selected([], {})
    ours = {
        name: record
        for name, record in records.items()
        if record.target == target_name(plan.target) and record.smallest.device == plan.device
    }
    for name, record in sorted(ours.items(), key=lambda item: item[1].status != OPEN):
        try:
            family, case = any_case_from_json(record.smallest.case)
        except (CaseError, FamilyError) as error:
            selected.left_out[name] = f"not checked again: {error}"
            continue
        rates = [rate for rates in record.reproduced.values() for rate in rates.values()]
        always = all(rate.shown == rate.of for rate in rates)
        selected.items.append(
            Again(
                name,
                family.name,
                case,
                record.signature,
                record.smallest.how_small,
                1 if always else NUM_RUNS,
            )
        )
    return selected


def of_bugs(folder: Path) -> Selected:
    """Return the cases of the JSON files in a folder: cases, or reported bugs as in `bugs/`."""
    selected = Selected([], {})
    for path in sorted(folder.glob("*.json")):
        try:
            cases = _cases_of(json.loads(path.read_text(encoding="utf-8")))
            for i, document in enumerate(cases):
                name = f"{path}[{i}]" if len(cases) > 1 else str(path)
                family, case = any_case_from_json(json.dumps(document))
                selected.items.append(Again(name, family.name, case))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            selected.left_out[str(path)] = f"not checked again: {reason}"
    return selected


def _cases_of(document: object) -> list[object]:
    if isinstance(document, dict) and isinstance(document.get("cases"), list):
        cases = [item.get("case") for item in document["cases"] if isinstance(item, dict)]
        if len(cases) == len(document["cases"]):
            return cases
    return [document]


def of_journals(noted: Mapping[str, Noted]) -> Selected:
    """Return what processes were about to launch that were killed, by the name of their journal."""
    items = [
        Again(
            f"{JOURNALS}{name}",
            was.family,
            was.case,
            is_from_journal=True,
            worker=was.worker,
            round_number=was.round_number,
        )
        for name, was in noted.items()
    ]
    return Selected(items, {})


def check_again(plan: Plan, items: list[Again], stop: Any) -> Iterator[Verdict | str]:
    """Yield what is wrong with each case, or why it was not checked.

    This process must not touch the device.

    Args:
        plan: The campaign's.
        items: The cases.
        stop: An event that ends it early.
    """
    import torch

    from .checker import Checker
    from .target import load_target

    torch.set_num_threads(1)
    target = load_target(plan.target)
    checkers: dict[bool, Checker] = {}  # Of a child; here there is none.

    def check(item: Again) -> Verdict | str:
        family = family_named(item.family)
        if family.name not in target.functions:
            reason = target.skipped.get(family.name, "the target has no function of this name")
            return f"not checked again: {reason}"
        reason = why_not(family, item.case, target)
        if reason:
            return f"not checked again: {reason}"
        if not target.allows(family, item.case):
            return "not checked again: the target can't do such a case"
        strict = plan.strict or (item.signature is not None and item.signature.kind == "needless")
        if strict not in checkers:
            # All kinds of memory: a finding may show in one alone.
            checkers[strict] = Checker(target, plan.device, "mixed", strict)
        try:
            verdict = _first_failure(checkers[strict], item)
        except CaseError as error:
            return f"not checked again: {error}"
        if verdict.passed and item.signature is not None and checkers[strict].unchecked:
            return f"not checked again: {checkers[strict].unchecked}"
        return verdict

    seconds = min(plan.case_seconds, SHRINK_CASE_SECONDS[plan.device])
    deadline = time.monotonic() + max(MOST_SECONDS, SHARE_OF_TIME * plan.seconds)
    yield from in_children(
        check, items, seconds, lambda: time.monotonic() > deadline or stop.is_set()
    )


def _first_failure(checker: Checker, item: Again) -> Verdict:
    """Return the first verdict of several checks that is not passed, or the last one."""
    family = family_named(item.family)
    for _ in range(item.times):
        verdict = check_any(checker, family, item.case)
        if not verdict.fatal:
            verdict, _known = checker.target.without_known(family, item.case, verdict)
        if not verdict.passed:
            break
    return verdict


def in_children(
    check: Callable[[Again], Verdict | str],
    items: list[Again],
    seconds: float,
    is_over: Callable[[], bool],
) -> Iterator[Verdict | str]:
    """Yield what a check says of each case, or how the child ended that ran it.

    Args:
        check: Runs in a forked child, which is replaced when it has ended.
        items: The cases.
        seconds: How long one try of a case may take.
        is_over: Whether to leave out the rest.
    """
    num_done = 0
    while num_done < len(items):
        if is_over():
            yield from [OUT_OF_TIME] * (len(items) - num_done)
            return
        for answer in _in_one_child(check, items[num_done:], seconds, is_over):
            num_done += 1
            yield answer


def _in_one_child(
    check: Callable[[Again], Verdict | str],
    items: list[Again],
    seconds: float,
    is_over: Callable[[], bool],
) -> Iterator[Verdict | str]:
    """Yield answers as long as one child gives them, and how it ended."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    child = os.fork()
    if not child:
        die_with_parent(parent)
        limit_memory()
        _answer(check, items, sender)
    sender.close()
    try:
        for item in items:
            family = family_named(item.family)
            if is_over():
                return
            if not receiver.poll(seconds * item.times):
                yield told(item.case, hang_verdict(family, seconds))
                return
            try:
                answer = receiver.recv()
            except EOFError:
                status = os.waitpid(child, 0)[1]
                child = 0
                how = death_verdict(family, os.waitstatus_to_exitcode(status))
                yield told(item.case, how)
                return
            yield answer
            if isinstance(answer, Verdict) and answer.fatal:
                return
    finally:
        receiver.close()
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _answer(
    check: Callable[[Again], Verdict | str], items: Iterable[Again], channel: Connection
) -> NoReturn:
    """Send what a check says of each case, and end this process."""
    for item in items:
        try:
            answer = check(item)
        except BaseException as error:
            answer = f"not checked again: {type(error).__name__}: {error}"
        channel.send(answer)
    os._exit(0)
