"""A report: what was run and found, as a page to read and as Markdown for a pull request.

The page is one file without scripts, and nothing in it is fetched from elsewhere.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import __version__
from .conformance import replay_line
from .family import Dialect
from .finding_record import FIXED, Rate, Record
from .findings import FindingsError, read_finding
from .grids import MARKS, Grid, grids_of
from .pace import Chart, Pace
from .places import Place, places_in
from .result import PASSES
from .side_case import SideCase, any_case_from_json, legal_part
from .specialisations import lines_of
from .verdict import KINDS, Signature

if TYPE_CHECKING:
    from .findings import Context
    from .plan import Plan
    from .result import Result
    from .target import Target

HTML, MARKDOWN = "report.html", "report.md"

# A longer case is not printed whole: it lies in the finding's folder.
MOST_CASE_CHARACTERS = 20_000
# GitHub takes no comment of more than 65,536 characters.
MOST_MARKDOWN_CHARACTERS = 60_000
# Of more findings the others are only named.
MOST_FINDINGS = 100


@dataclass(frozen=True)
class FindingPart:
    """One finding as a report shows it.

    Attributes:
        record: All that is known of it.
        replay: The line that runs its case again, or says where it lies.
        folder: Where the finding lies, or "".
        grids: Tensors in which it shows.
        no_grids: Why there are none, or "".
    """

    record: Record
    replay: str
    folder: str = ""
    grids: Sequence[Grid] = ()
    no_grids: str = ""

    @property
    def meaning(self) -> str:
        """What its kind is, in words."""
        return KINDS.get(self.record.signature.kind, "")

    @property
    def headline(self) -> str:
        """The first line of its verdict."""
        return self.record.smallest.verdict.partition("\n")[0]

    @property
    def place(self) -> Place | None:
        """The first cell that is wrong, if the verdict names one."""
        wrong = (p for p in places_in(self.record.smallest.verdict) if not p.is_source)
        return next(wrong, None)

    @property
    def rates(self) -> Mapping[str, Rate]:
        """How often it shows, by device."""
        return {
            device: Rate(sum(r.shown for r in rates.values()), sum(r.of for r in rates.values()))
            for device, rates in sorted(self.record.reproduced.items())
        }

    @property
    def case(self) -> str:
        """The smallest case as JSON, or its start."""
        text = self.record.smallest.case.rstrip()
        more = len(text) - MOST_CASE_CHARACTERS
        return text if more <= 0 else f"{text[:-more]}\n… {more} characters more"

    @property
    def has_script(self) -> bool:
        """Whether a script beside the case shows it without pagefault."""
        return bool(self.folder) and (Path(self.folder) / "repro.py").is_file()

    @property
    def seen(self) -> str:
        """How often it was seen, and when."""
        runs = self.record.runs.values()
        first, last = min(run.first_seen for run in runs), max(run.last_seen for run in runs)
        times = f"{_count(self.record.count, 'time')} in {_count(len(runs), 'run')}"
        return f"{times}, first {_readable(first)}, last {_readable(last)}"

    @property
    def where(self) -> Mapping[str, str]:
        """Where its case was found, by name."""
        run = self.record.runs[self.record.smallest.run]
        facts = {
            "target": run.target,
            "commit": run.commit,
            "seed": str(run.seed),
            "machine": run.machine,
            "device": run.device,
            "driver": run.driver,
            "memory": run.memory,
            "versions": _versions(run.versions),
        }
        return {name: value for name, value in facts.items() if value}


@dataclass(frozen=True)
class FamilyPart:
    """What was run of one family.

    Attributes:
        name: Its name.
        cases: How many.
        pace: Cases a second, over its own time.
        findings: How many.
        reached: How many cases have touched each edge that was reached.
        never: Edges that none has.
        barred: Edges that no case may have, with the reason.
        edge_sets: About how many different sets of edges there were, earlier campaigns included.
    """

    name: str
    cases: int
    pace: float
    findings: int
    reached: Mapping[str, int]
    never: Sequence[str]
    barred: Mapping[str, str] = field(default_factory=dict)
    edge_sets: int = 0


@dataclass(frozen=True)
class CampaignPart:
    """What a campaign has run.

    Attributes:
        summary: The run in a few words.
        facts: What to say of it, by name.
        families: What was run of each.
        skipped: Families that were not run, by the reason.
        checks: How often each check was carried out.
        variants: Which of Triton's variants were run, a line each.
        known: Known faults, a line each.
        rechecked: What came of the cases that were checked again first, by name.
        troubles: What could not be checked or written, and workers that failed or were lost.
        void: Why it proves nothing, or "".
        chart: Cases a second, or None where it was too short.
    """

    summary: str
    facts: Mapping[str, str]
    families: Sequence[FamilyPart]
    skipped: Mapping[str, Sequence[str]] = field(default_factory=dict)
    checks: Mapping[str, int] = field(default_factory=dict)
    variants: Sequence[str] = ()
    known: Sequence[str] = ()
    rechecked: Mapping[str, str] = field(default_factory=dict)
    troubles: Sequence[str] = ()
    void: str = ""
    chart: Chart | None = None

    @property
    def num_passing(self) -> int:
        """How many of the cases that were checked again pass."""
        return len(self.rechecked) - len(self.not_passing)

    @property
    def not_passing(self) -> Mapping[str, str]:
        """What came of the others, by name."""
        return {name: outcome for name, outcome in self.rechecked.items() if outcome != PASSES}


@dataclass(frozen=True)
class Report:
    """What a report says.

    Attributes:
        about: What it is a report of.
        findings: Those that are open, most telling first.
        others: Open ones that are only named, because there are too many.
        fixed: Those that are not there any more.
        campaign: What was run, or None where only the findings are known.
        damaged: Findings that could not be read, a line each.
        made: When, UTC.
    """

    about: str
    findings: Sequence[FindingPart]
    others: Sequence[FindingPart] = ()
    fixed: Sequence[FindingPart] = ()
    campaign: CampaignPart | None = None
    damaged: Sequence[str] = ()
    made: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))

    @property
    def num_findings(self) -> int:
        """How many findings are open."""
        return len(self.findings) + len(self.others)

    @property
    def outcome(self) -> str:
        """The report in a few words."""
        if self.num_findings:
            return _count(self.num_findings, "finding")
        if self.campaign is not None and self.campaign.void:
            return "Void run: it proves nothing"
        return "Nothing found" if self.campaign else "No open findings"

    def html(self) -> str:
        """Return the page."""
        return _rendered("report.html.j2", report=self, marks=MARKS, version=__version__)

    def markdown(self) -> str:
        """Return the Markdown, short enough for a comment."""
        text = ""
        # Cases go first, then grids, then whole findings from the end.
        for cases, grids in ((True, True), (False, True), (False, False)):
            text = _rendered("report.md.j2", report=self, cases=cases, grids=grids)
            if len(text) <= MOST_MARKDOWN_CHARACTERS:
                return text
        return text[:MOST_MARKDOWN_CHARACTERS].rpartition("\n### ")[0] + (
            f"\n\nToo long for a comment: {HTML} has the rest.\n"
        )

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both into a folder, which is made if it is missing, and return where.

        Raises:
            OSError: They can't be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        page, text = folder / HTML, folder / MARKDOWN
        page.write_text(self.html(), encoding="utf-8")
        text.write_text(self.markdown(), encoding="utf-8")
        return page, text


def report_of_folder(
    folder: Path, dialects: Mapping[str, Dialect] = MappingProxyType({})
) -> Report:
    """Return the report of a folder of findings.

    Args:
        folder: The folder; nothing is written there.
        dialects: Of the target, by family, where it is not ours; it decides what stands in cells
            beside the wrong one.

    Raises:
        FindingsError: It is no folder of findings.
    """
    records: dict[Path, Record] = {}
    damaged = []
    for path in _folders_of_findings(folder):
        try:
            records[path] = read_finding(path)
        except FindingsError as error:
            damaged.append(str(error))
    parts = [
        _part(record, _replay_of(record, path), str(path), dialects)
        for path, record in records.items()
    ]
    fixed = [part for part in parts if part.record.status == FIXED]
    still_there = [part for part in parts if part.record.status != FIXED]
    return _report(f"findings in {folder}", still_there, fixed, damaged=damaged)


def report_of_campaign(
    plan: Plan,
    result: Result,
    target: Target,
    context: Context,
    paths: Mapping[Signature, Path],
    folders: Mapping[Signature, Path],
    pace: Pace,
    void: str = "",
    troubles: Sequence[str] = (),
    fixed: Mapping[Path, Record] = MappingProxyType({}),
) -> Report:
    """Return the report of a campaign.

    Args:
        plan: What was to run.
        result: What ran and was found.
        target: What was tested.
        context: What findings on disk say of the run.
        paths: The case of each finding that was written.
        folders: The folder of each finding that was written.
        pace: Cases a second.
        void: Why the run proves nothing, or "".
        troubles: What could not be written, a line each.
        fixed: Earlier findings whose cases pass now, by their folders.
    """
    dialects = {name: target.terms_of(name).dialect for name in plan.families}
    parts = []
    for signature, found in result.findings.items():
        record = context.record(found, max(1, result.counts[signature]), {})
        folder = folders.get(signature)
        if folder is not None:
            replay = _replay_of(record, folder)
        elif signature in paths:
            line = replay_line(paths[signature], plan.target, plan.device)
            replay = line.removeprefix("replay: ")
        else:
            replay = "the case could not be written; it is printed below"
        parts.append(_part(record, replay, str(folder or ""), dialects))
    campaign = _campaign_part(plan, result, target, context, pace, void, troubles)
    return _report(
        f"target {plan.target}",
        parts,
        [_part(r, _replay_of(r, path), str(path), dialects) for path, r in fixed.items()],
        campaign=campaign,
    )


def _report(
    about: str, parts: Iterable[FindingPart], fixed: Iterable[FindingPart], **more: Any
) -> Report:
    order = list(KINDS)

    def rank(part: FindingPart) -> tuple[Any, ...]:
        signature, smallest = part.record.signature, part.record.smallest
        kind = order.index(signature.kind) if signature.kind in order else len(order)
        return kind, smallest.size, signature

    parts, fixed = sorted(parts, key=rank), sorted(fixed, key=rank)
    return Report(about, parts[:MOST_FINDINGS], parts[MOST_FINDINGS:], fixed, **more)


def _folders_of_findings(folder: Path) -> list[Path]:
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise FindingsError(f"{str(folder)!r} can't be read: {error.strerror}") from error
    if folder / "finding.json" in paths:
        return [folder]
    return [path for path in paths if path.is_dir() and not path.name.startswith(".")]


def _replay_of(record: Record, folder: Path) -> str:
    """Return the line that runs the case of a finding's folder, which knows its target."""
    words = ["pagefault", "repro", str(folder), "--device", record.smallest.device]
    # Nothing is wrong with such a case for who does not ask.
    strict = ["--strict"] if record.signature.kind == "needless" else []
    return shlex.join([*words, *strict])


def _part(record: Record, replay: str, folder: str, dialects: Mapping[str, Dialect]) -> FindingPart:
    try:
        family, case = any_case_from_json(record.smallest.case)
        if isinstance(case, SideCase):
            family = case.as_family(family)
        places = places_in(record.smallest.verdict)
        grids = grids_of(family, legal_part(case), places, dialects.get(family.name, Dialect()))
    except Exception as error:  # Whatever a family's own code does: the finding is shown.
        return FindingPart(record, replay, folder, no_grids=f"no tensors drawn: {error}")
    return FindingPart(record, replay, folder, grids)


def _campaign_part(
    plan: Plan,
    result: Result,
    target: Target,
    context: Context,
    pace: Pace,
    void: str,
    troubles: Sequence[str],
) -> CampaignPart:
    limit = f", at most {plan.max_cases} cases" if plan.max_cases else ""
    per_second = result.cases / max(result.seconds, 0.1)
    ended = " (interrupted)" if result.interrupted else ""
    facts = {
        "target": plan.target,
        "commit": context.commit,
        "device": context.device_name,
        "driver": context.driver,
        "machine": context.machine,
        "asked for": f"{duration(plan.seconds)}{limit}",
        "ran": f"{duration(result.seconds)}{ended}",
        "cases": f"{result.cases:,}",
        "workers": str(plan.num_workers),
        "seed": str(plan.seed),
        "memory": context.memory,
        "versions": _versions(context.versions),
    }
    never = result.never_reached(lambda name: target.terms_of(name).without)
    skipped: dict[str, list[str]] = {}
    for name, reason in target.skipped.items():
        if name not in result.tallies:
            skipped.setdefault(reason, []).append(name)
    return CampaignPart(
        f"{_count(result.cases, 'case')} in {facts['ran']}, {per_second:,.0f} a second, "
        f"on {context.device_name}",
        {name: value for name, value in facts.items() if value},
        [_family_part(name, result, target, never.get(name, [])) for name in result.tallies],
        skipped,
        dict(sorted(result.checks.items())),
        lines_of(result.variants),
        [
            f"{fault.signature}: {fault.reason}; seen {_count(result.known[i], 'time')}"
            for i, fault in enumerate(target.known_faults)
            if fault.family in plan.families
        ],
        dict(result.rechecked),
        [*filter(None, [result.unchecked, result.lost]), *result.failures, *troubles],
        void,
        Chart.of(pace),
    )


def _family_part(name: str, result: Result, target: Target, never: Sequence[str]) -> FamilyPart:
    tally = result.tallies[name]
    return FamilyPart(
        name,
        tally.cases,
        tally.cases / tally.seconds if tally.seconds else 0.0,
        sum(signature.family == name for signature in result.findings),
        dict(sorted(tally.edges.items())),
        never,
        target.terms_of(name).without,
        result.edge_sets.get(name, 0),
    )


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(8 * 3600), duration(75), duration(2.4)
    ('8 h', '1 min 15 s', '2 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 s"


def _readable(moment: str) -> str:
    """Return a moment in UTC as people write it."""
    return moment.replace("T", " ").replace("Z", " UTC")


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _fenced(text: str, language: str = "") -> str:
    """Return a block of code in Markdown, whatever the text has in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def _as_cell(text: object) -> str:
    """Return text that breaks no line and no cell of a table in Markdown."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())


def _as_code(text: object) -> str:
    """Return text as code that breaks no line and no cell of a table in Markdown."""
    plain = " ".join(str(text).replace("|", "\\|").replace("`", "'").split())
    return f"`{plain}`"


def _grid_text(grid: Grid) -> str:
    return f"{grid.name} {list(grid.shape)}\n{grid.text()}"


def _legend(grids: Iterable[Grid]) -> str:
    """Return what the letters in the text of grids mean."""
    there = {mark for grid in grids for mark in grid.marks}
    words = [
        f"`{'!' if mark == 'wrong' else mark[0]}` {meaning}"
        for mark, meaning in MARKS.items()
        if mark in there
    ]
    return "; ".join(words)


def _rendered(template: str, **values: Any) -> str:
    return str(_templates().get_template(template).render(**values))


@functools.cache
def _templates() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pagefault"),
        autoescape=lambda name: name is None or ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        duration=duration,
        fenced=_fenced,
        as_cell=_as_cell,
        as_code=_as_code,
        count=_count,
        grid_text=_grid_text,
        legend=_legend,
    )
    return environment
