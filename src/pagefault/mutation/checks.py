"""Which check of the harness a finding is of, for what each of them is worth."""

from __future__ import annotations

from collections.abc import Iterable

from ..verdict import Finding

# By the kind of a finding; `_of_memory` tells the checks of writes apart.
_OF_KIND = {
    "value": "values",
    "unwritten": "values",
    "returned": "values",
    "log": "warnings",
    "stale": "poison and order",
    "address": "addresses",
    "row": "rows",
    "race": "races",
    "needless": "needless reads",
    "launch": "launches",
    "raised": "exceptions",
    "not refused": "exceptions",
    "died": "process",
    "hang": "process",
    "memory": "process",
}
_OF_BYTES, _OF_WRITES = "memory", "footprints"
GARBAGE = "garbage"

CHECKS = {
    "values": "every element of every output, and what is returned",
    "memory": "every byte that the contract does not name is what it was",
    "poison and order": "two poisons, and two orders of the programs, give one answer",
    "addresses": "every access lies in an element of its tensor",
    "rows": "no row of a request that is not in the call is touched",
    "footprints": "no cell is written that the contract does not name, its old value included",
    "races": "no cell is written by one program and touched by another",
    "needless reads": "no cell of a page table is read that the result does not need",
    "launches": "nothing is launched where there is nothing to write",
    "exceptions": "what must raise does, and nothing else",
    "warnings": "as many as the contract says, each naming what it must",
    "garbage": "a call with garbage in its device tensors ends and stays inside them",
    "process": "the process neither dies nor hangs, nor takes all memory",
}


def checks_of(findings: Iterable[Finding], is_garbage: bool) -> list[str]:
    """Return the checks that have found something, in the order of `CHECKS`.

    Args:
        findings: Of one call.
        is_garbage: Whether its device tensors held garbage; then the call was that check's alone.
    """
    found: set[str] = set()
    for finding in findings:
        found |= {GARBAGE} if is_garbage else _of_finding(finding)
    return [check for check in CHECKS if check in found]


def _of_finding(finding: Finding) -> set[str]:
    if finding.kind not in ("outside", "input changed"):
        return {_OF_KIND.get(finding.kind, "process")}
    # One finding where both have seen a write: the address oracle names the access.
    text = "\n".join([finding.headline, *finding.lines])
    is_access = ", which the contract does not name" in text
    is_byte = "but should still be" in finding.headline
    return {check for check, is_it in ((_OF_WRITES, is_access), (_OF_BYTES, is_byte)) if is_it}
