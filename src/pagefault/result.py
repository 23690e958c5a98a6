"""A result: what a campaign has run and found so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from .family import Family, family_named
from .finding_record import Rate, certainty_of
from .minimal import size_of
from .side_case import AnyCase, SideCase
from .specialisations import Variants, add_variants
from .verdict import Signature, Verdict

# A family that has run this many cases must have reached its edges.
RUN_THAT_MUST_REACH = 1000

NOT_SHRUNK_YET = "not shrunk yet"

# What came of a case that was checked again; else the reason why it was not.
PASSES, FAILS = "passes", "fails"


@dataclass
class FamilyTally:
    """What was run of one family, and beside it."""

    cases: int = 0
    seconds: float = 0.0
    edges: Counter[str] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    variants: Variants = field(default_factory=dict)

    def add(self, other: FamilyTally) -> None:
        self.cases += other.cases
        self.seconds += other.seconds
        self.edges += other.edges
        self.batch_sizes += other.batch_sizes
        self.checks += other.checks
        add_variants(self.variants, other.variants)


@dataclass(frozen=True)
class Found:
    """One finding with its case.

    Attributes:
        signature: What tells it apart.
        case: The smallest case known, as JSON text.
        size: How large that is, see `size_of`.
        verdict: The report's text.
        how_small: What is known of its size.
        reproduced: How often the case has shown it again, or None where that was not tried.
    """

    signature: Signature
    case: str
    size: tuple[int, ...]
    verdict: str
    how_small: str
    reproduced: Rate | None = None

    @property
    def is_to_shrink(self) -> bool:
        """Whether nobody has tried to make the case smaller."""
        return self.how_small.startswith(NOT_SHRUNK_YET)

    @classmethod
    def of(
        cls,
        family: Family,
        case: AnyCase,
        verdict: Verdict,
        how_small: str = NOT_SHRUNK_YET,
        explained: str = "",
    ) -> Found:
        """Return the finding of a case that fails.

        Args:
            family: The case's family.
            case: The case.
            verdict: What is wrong with it.
            how_small: What is known of its size.
            explained: What else the report says.
        """
        about = f"  {case}" if isinstance(case, SideCase) else ""
        text = "\n".join(filter(None, [verdict.text(), about, explained]))
        return cls(
            verdict.signature, case.to_json(family.name), size_of(family, case), text, how_small
        )


@dataclass
class Result:
    """What a campaign ran and found.

    Attributes:
        tallies: By family.
        findings: By signature.
        counts: How often each was seen.
        known: How often each known fault was seen, by its place among the target's.
        seconds: How long it ran.
        interrupted: Whether it was ended early.
        failures: Of workers.
        unchecked: What could not be checked, and why, or "".
        rechecked: What came of the cases that were checked again first, by their name: PASSES,
            FAILS, or why one was not checked.
        edge_sets: About how many sets of edges all campaigns have reached that share a corpus, by
            family; known at the end.
        num_lost: How many workers were lost with their machine, and replaced.
    """

    tallies: dict[str, FamilyTally] = field(default_factory=dict)
    findings: dict[Signature, Found] = field(default_factory=dict)
    counts: Counter[Signature] = field(default_factory=Counter)
    known: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0
    interrupted: bool = False
    failures: list[str] = field(default_factory=list)
    unchecked: str = ""
    rechecked: dict[str, str] = field(default_factory=dict)
    edge_sets: Mapping[str, int] = field(default_factory=dict)
    num_lost: int = 0

    @property
    def cases(self) -> int:
        return sum(tally.cases for tally in self.tallies.values())

    @property
    def lost(self) -> str:
        """What is to be said of lost workers, or ""."""
        return f"workers lost with their machine: {self.num_lost}" if self.num_lost else ""

    @property
    def checks(self) -> Counter[str]:
        """How often each check was carried out, see `reached`."""
        return sum((tally.checks for tally in self.tallies.values()), Counter())

    @property
    def variants(self) -> Variants:
        """The variants of kernels that were run."""
        together: Variants = {}
        for tally in self.tallies.values():
            add_variants(together, tally.variants)
        return together

    def add(self, found: Found) -> None:
        """Keep a finding, or the smaller case of one that is known."""
        known = self.findings.get(found.signature)
        if known is None or _rank(found) <= _rank(known):
            self.findings[found.signature] = found

    def never_reached(self, without: Callable[[str], Collection[str]]) -> dict[str, list[str]]:
        """Return the edges that no case had that was run, by family.

        Args:
            without: Returns the edges that no case of a family may have.
        """
        return {
            name: sorted(edges)
            for name, tally in self.tallies.items()
            if (edges := family_named(name).all_edges - set(without(name)) - set(tally.edges))
        }

    def unreached(
        self,
        without: Callable[[str], Collection[str]] = lambda family: (),
        of_all: bool = False,
    ) -> dict[str, list[str]]:
        """Return the edges that a run of this length must have reached and has not, by family.

        Args:
            without: Returns the edges that no case of a family may have.
            of_all: Whether all must be reached, whatever the length.
        """
        missing = {}
        for name, tally in self.tallies.items():
            family = family_named(name)
            wanted = family.all_edges if of_all else family.must_reach
            edges = wanted - set(without(name)) - set(tally.edges)
            if edges and (of_all or tally.cases >= RUN_THAT_MUST_REACH):
                missing[name] = sorted(edges)
        return missing


def _rank(found: Found) -> tuple[tuple[int, ...], int]:
    """Return what the best of a signature has the least of."""
    return found.size, certainty_of(found.how_small)
