"""The command `pagefault`."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import __version__, github
from .campaign import Plan, Result, run
from .case import CaseError
from .conformance import replay_line, write_case
from .corpus import CORPUS, corpora_of
from .corpus import merge as merge_corpora
from .device import DeviceError, count_workers, device_name, prepare, resolve_device, versions
from .family import FamilyError, families, family_named
from .finding_record import FIXED, Record
from .findings import Context, Filing, FindingsError, FindingsFolder, read_finding
from .findings import merge as merge_findings
from .isolation import check_in_child
from .pace import Pace
from .recheck import Again, of_bugs, of_findings
from .report import report_of_campaign, report_of_folder
from .result import FAILS, PASSES
from .side_case import AnyCase, any_case_from_json, check_any, why_not
from .soak import demanded_checks, some_of
from .soak import why_void as why_soak_is_void
from .specialisations import json_of, lines_of
from .state import State, open_campaign
from .target import DESCRIPTIONS, KnownFault, Target, TargetError, load_target, pair_name, pair_of
from .verdict import Signature, Verdict

if TYPE_CHECKING:
    from .cluster import Cluster

FOUND_NOTHING, FOUND_SOMETHING, BAD_USAGE, VOID_RUN, INTERRUPTED = 0, 1, 2, 3, 130

MEMORIES = ("mixed", "arena", "guard", "net")

# How often a run that nobody watches says how far it is.
REPORT_SECONDS = 10.0

app = typer.Typer(
    help="Property-based differential testing of the Triton kernels of paged KV caches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

TargetOption = Annotated[
    str, typer.Option(help="A name (see `pagefault targets`), a module, or a path to a .py file.")
]
AgainstOption = Annotated[
    str,
    typer.Option(
        help="Hold the target against this one, named as --target is, and not against the oracle.",
        metavar="TARGET",
    ),
]
FINDINGS = Path(".pagefault/findings")
CAMPAIGNS = Path(".pagefault/campaigns")
BUGS = Path("bugs")
EQUIVALENT_MUTANTS = Path("tests/equivalent_mutants.toml")

StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict", help="Report reads of table cells that the result does not need (interpreter)."
    ),
]
DeviceOption = Annotated[
    str, typer.Option(help="auto, cpu (Triton's interpreter) or cuda (compiled).")
]


class Usage(Exception):
    """Something that was asked for and can't be done; the message is one line."""


def main() -> None:
    """Run the command; every foreseeable error is one line and exit status 2."""
    try:
        app()
    except (Usage, TargetError, FamilyError, CaseError, DeviceError, FindingsError) as error:
        print(f"pagefault: {error}", file=sys.stderr)
        sys.exit(BAD_USAGE)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"pagefault {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Property-based differential testing of the Triton kernels of paged KV caches."""


@app.command()
def fuzz(
    target: TargetOption = "ours",
    against: AgainstOption = "",
    family: Annotated[
        list[str] | None, typer.Option(help="A function to test; may be given several times.")
    ] = None,
    time_: Annotated[
        str,
        typer.Option(
            "--time",
            help="How long to draw cases: 60s, 5m, 8h; what is found is made smaller after it.",
            metavar="DURATION",
        ),
    ] = "60s",
    max_cases: Annotated[int | None, typer.Option(min=1, help="Stop after so many cases.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; drawn and shown.")] = None,
    workers: Annotated[
        str, typer.Option(help="Processes, or auto: cores, or some for each GPU.")
    ] = "auto",
    ray: Annotated[
        str | None,
        typer.Option(
            help="Run the workers on the Ray cluster of this address, or auto for the one here.",
            metavar="ADDRESS",
        ),
    ] = None,
    device: DeviceOption = "auto",
    case_time: Annotated[
        str, typer.Option(help="A case that takes longer is a hang.", metavar="DURATION")
    ] = "60s",
    memory: Annotated[
        str, typer.Option(help="Where tensors lie on a GPU: mixed, arena, guard or net.")
    ] = "mixed",
    strict: StrictOption = False,
    out: Annotated[Path, typer.Option(help="Where the cases of findings go.")] = Path(
        ".pagefault/cases"
    ),
    findings: Annotated[
        Path, typer.Option(help="Where findings go, a folder each, and those of earlier runs are.")
    ] = FINDINGS,
    soak: Annotated[
        bool,
        typer.Option(
            "--soak", help="Garbage and relations too; void unless every edge and check is reached."
        ),
    ] = False,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write what was run and found here.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="A folder for report.html, to read, and report.md, for a comment."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on where a campaign of this target was that was killed, if any."
        ),
    ] = False,
    machine: Annotated[
        str | None, typer.Option(help="Name of this machine, which the cases depend on.")
    ] = None,
    state: Annotated[
        Path, typer.Option(help="Where campaigns keep what --resume needs, a folder each.")
    ] = CAMPAIGNS,
    bugs: Annotated[
        Path | None,
        typer.Option(help="Cases to check first, such as reported bugs; bugs/ where it is there."),
    ] = None,
) -> None:
    """Draw cases and check the target against the oracle until the time is over.

    With --against, against another implementation: what both write or return must be equal.

    Exit status: 0 nothing found, 1 findings, 2 bad usage or a target that can't be loaded,
    3 a void run (no case ran, or edges were not reached that a run of its length must reach; of
    a soak all edges, all checks and all cases), 130 interrupted with nothing found.
    """
    seconds = _duration("--time", time_)
    case_seconds = _duration("--case-time", case_time)
    if memory not in MEMORIES:
        raise Usage(f"--memory {memory!r}, but should be one of {', '.join(MEMORIES)}")
    target = pair_name(target, against)
    if len(pair_of(target)) > 1:
        for option, wanted in (("--soak", soak), ("--strict", strict)):
            if wanted:
                raise Usage(f"{option} needs the contract: it can't be asked for with --against")
    resolved = resolve_device(device)
    cluster = None if ray is None else _connected(ray, resolved)
    num_workers = _num_workers(workers, resolved, cluster)
    seed = secrets.randbits(32) if seed is None else seed
    if json_ is not None:
        _check_writable(json_)
    if bugs is not None and not bugs.is_dir():
        raise Usage(f"--bugs {str(bugs)!r} is no folder")
    prepare(resolved)
    loaded = load_target(target)
    names = _chosen_families(family, set(loaded.functions), loaded.skipped)
    _prepare_folder("--out", out)
    if report is not None:
        _prepare_folder("--report", report)
    folder = FindingsFolder(findings)
    earlier = folder.load()
    plan = Plan(
        target,
        names,
        resolved,
        seconds,
        max_cases,
        seed,
        num_workers,
        case_seconds,
        memory,
        is_soak=soak,
        strict=strict,
        machine=platform.node() if machine is None else machine,
    )
    console = Console()
    context = Context.of(plan)
    opened = open_campaign(plan, context.run, state, resume)
    plan = opened.state.plan
    context = dataclasses.replace(context, run=opened.state.run)
    _print_header(console, plan, "" if ray is None else f" on the Ray cluster {ray}")
    if loaded.against is not None:
        for reason in dict.fromkeys(loaded.skipped.values()):
            of_it = [name for name, why in loaded.skipped.items() if why == reason]
            console.print(Text(f"not compared: {', '.join(of_it)}: {reason}"), soft_wrap=True)
    for line in opened.lines:
        console.print(Text(line), soft_wrap=True)
    opened.state.add_filed(earlier.values())
    again = _select_again(plan, opened.state, earlier, bugs)
    if earlier:
        console.print(f"{len(earlier)} findings of earlier runs in {findings}", soft_wrap=True)
    filing = Filing(folder, context, loaded)
    pace = Pace(samples=[(0.0, opened.state.result.cases)])
    with closing(opened.folder):
        start = partial(
            run,
            plan,
            folder=opened.folder,
            state=opened.state,
            recheck=again,
            processes=None if cluster is None else cluster.processes(plan),
        )
        result = _run_watched(plan, console, filing, pace, start)
        filing.take(result, is_over=True)
        pace.take(result.cases, is_over=True)
        opened.end()
    void = _why_void(plan, result, loaded)
    paths = _write_cases(out, result)
    _print_closing(console, plan, result, loaded, paths, filing, void)
    _print_rechecked(console, findings, earlier, result)
    troubles = [*folder.set_aside, *filing.pass_failures.values(), *opened.folder.troubles]
    for line in troubles:
        console.print(Text(line), soft_wrap=True)
    if json_ is not None:
        skipped = {name: why for name, why in loaded.skipped.items() if name not in names}
        try:
            _write_json(json_, plan, result, loaded, paths, filing, void, skipped)
        except OSError as error:
            console.print(Text(f"--json {str(json_)!r} can't be written: {_reason(error)}"))
    if report is not None:
        troubles = [*filing.failures.values(), *troubles]
        fixed = {
            findings / name: record
            for name, record in earlier.items()
            if result.rechecked.get(name) == PASSES
        }
        written = report_of_campaign(
            plan, result, loaded, context, paths, filing.paths, pace, void, troubles, fixed
        )
        try:
            console.print(Text(f"report: {written.write(report)[0]}"), soft_wrap=True)
        except OSError as error:
            console.print(Text(f"--report {str(report)!r} can't be written: {_reason(error)}"))
    if github.are_wanted():
        _annotate(plan, result, loaded, paths)
    if result.findings:
        raise typer.Exit(FOUND_SOMETHING)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(VOID_RUN if void else FOUND_NOTHING)


@app.command()
def repro(
    case: Annotated[Path, typer.Argument(help="The JSON of a case, or the folder of a finding.")],
    target: Annotated[
        str | None, typer.Option(help="As `fuzz` takes it; a finding knows its own.")
    ] = None,
    against: AgainstOption = "",
    device: DeviceOption = "auto",
    strict: StrictOption = False,
) -> None:
    """Run one case and print the verdict.

    Exit status: 0 it passes, 1 it fails, 2 the case or the target can't be loaded.
    """
    resolved = resolve_device(device)
    if case.is_dir():
        finding = read_finding(case)
        text = finding.smallest.case
        target = target or finding.runs[finding.smallest.run].target
    else:
        try:
            text = case.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Usage(f"case {str(case)!r} can't be read: {_reason(error)}") from error
    target = pair_name(target or "ours", against)
    if strict and len(pair_of(target)) > 1:
        raise Usage("--strict needs the contract: it can't be asked for with --against")
    prepare(resolved)
    try:
        family, loaded_case = any_case_from_json(text)
    except CaseError as error:
        raise Usage(f"case {str(case)!r}: {error}") from error
    loaded = load_target(target)
    if family.name not in loaded.functions:
        raise Usage(f"target {target!r} has no {family.name}: {loaded.skipped[family.name]}")
    reason = why_not(family, loaded_case, loaded)
    if reason:
        raise Usage(f"case {str(case)!r} says nothing of target {target!r}: {reason}")
    from .checker import Checker

    def check(case: AnyCase) -> Verdict:
        return check_any(Checker(loaded, resolved, strict=strict), family, case)

    # The device is the child's alone, and so is a death.
    verdict = check_in_child(check, family, loaded_case, Plan.case_seconds)
    print(verdict.text())
    raise typer.Exit(FOUND_NOTHING if verdict.passed else FOUND_SOMETHING)


@app.command()
def merge(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of findings, or whole .pagefault folders.")
    ],
    into: Annotated[Path, typer.Option(help="Where they are joined; what is there stays.")],
) -> None:
    """Join findings of several runs or machines by signature, and their corpora.

    The same folders in any order, any number of times, give the same result. Of whole .pagefault
    folders the findings go into `findings`, and the corpora into `corpus.jsonl`.
    """
    are_whole = [(folder / "findings").is_dir() for folder in folders]
    if any(are_whole) and not all(are_whole):
        raise Usage("some of these folders have findings inside, and some are folders of findings")
    inside = "findings" if all(are_whole) else ""
    findings_into = into / inside
    findings, damaged = merge_findings([folder / inside for folder in folders], findings_into)
    for name, finding in findings.items():
        print(f"{findings_into / name}: {finding.signature}; seen {finding.count} times")
    if all(are_whole):
        path = into / CORPUS
        corpus, more = merge_corpora([f for folder in folders for f in corpora_of(folder)], path)
        damaged += more
        print(f"about {sum(corpus.num_sets().values())} sets of edges in {path}")
    for line in damaged:
        print(line)
    print(f"{len(findings)} findings in {findings_into}")


@app.command(name="report")
def report_(
    findings: Annotated[Path, typer.Argument(help="A folder of findings, or that of one.")],
    into: Annotated[Path, typer.Option(help="A folder for report.html and report.md.")],
    target: Annotated[
        str | None,
        typer.Option(help="Whose dialect the cells are drawn in; pagefault's own otherwise."),
    ] = None,
) -> None:
    """Make a report from a folder of findings alone; nothing is run."""
    dialects = {}
    if target is not None:
        prepare(resolve_device("auto"))
        loaded = load_target(target)
        dialects = {name: loaded.terms_of(name).dialect for name in families()}
    made = report_of_folder(findings, dialects)
    try:
        page, text = made.write(into)
    except OSError as error:
        raise Usage(f"--into {str(into)!r} can't be written: {_reason(error)}") from error
    for line in made.damaged:
        print(line)
    print(f"{made.outcome} in {findings}: {page}, {text}")


@app.command()
def targets() -> None:
    """List the targets that have a name, and the functions that can be tested."""
    console = Console()
    table = Table("target", "what it is", box=None, pad_edge=False)
    for name, description in DESCRIPTIONS.items():
        table.add_row(name, description)
    console.print(table)
    console.print("Any module, and any .py file, that defines one of these is a target as well:")
    for family in families().values():
        console.print(f"  {family.name}({', '.join(family.parameters)})", soft_wrap=True)


@app.command()
def mutate(
    target: TargetOption = "ours",
    family: Annotated[
        list[str] | None,
        typer.Option(help="Try what this launcher reaches; may be given several times."),
    ] = None,
    function: Annotated[
        list[str] | None,
        typer.Option(help="Change this function alone; may be given several times."),
    ] = None,
    cases: Annotated[
        int, typer.Option(min=1, help="Calls that a mutant is tried on at most.")
    ] = 300,
    every: Annotated[int, typer.Option(min=1, help="Of so many mutants try one.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the cases.")] = 1,
    workers: Annotated[str, typer.Option(help="Processes, or auto: cores.")] = "auto",
    strict: StrictOption = False,
    equivalent: Annotated[
        Path | None,
        typer.Option(help="The reviewed file; of our kernels that in tests/, where it is there."),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--listed", help="Try those alone that are listed as equivalent.")
    ] = False,
    survived: Annotated[
        Path | None,
        typer.Option(
            help="How many cases those have survived: read for the tables; with --listed, tried "
            "until it is --cases, written after every round, and gone on from."
        ),
    ] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", help="Write the score and a row per mutant here.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here.")] = None,
) -> None:
    """Change the target's kernels and launchers one step at a time: what of it is found?

    In the interpreter; the source is never touched. Exit status: 0 the run is complete, 1 a mutant
    that is listed as equivalent was killed or is none, 2 bad usage, 3 the original fails, 130
    interrupted.
    """
    if len(pair_of(target)) > 1:
        raise Usage(f"--target {target!r}: one target can be changed at a time")
    num_workers = _num_workers(workers, "cpu")
    for path in (json_, markdown):
        if path is not None:
            _check_writable(path)
    prepare("cpu")
    loaded = load_target(target)
    names = _chosen_families(family, set(loaded.functions), loaded.skipped)
    from .mutation import command, reviewed, tables
    from .mutation.survival import Survival, SurvivalError

    if equivalent is None and target == "ours" and EQUIVALENT_MUTANTS.is_file():
        equivalent = EQUIVALENT_MUTANTS
    try:
        survival = Survival(survived) if survived else None
    except SurvivalError as error:
        raise Usage(f"--survived {error}") from error
    try:
        known = reviewed.read_reviewed(equivalent) if equivalent else reviewed.Reviewed()
    except reviewed.ReviewedError as error:
        raise Usage(f"--equivalent {error}") from error
    wanted = command.Wanted(
        target, names, cases, seed, num_workers, strict, known, function or (), listed, every
    )
    if listed and survival:
        made = command.try_listed(wanted, loaded, _shown(Console()), survival)
    else:
        made = command.mutate(wanted, loaded, _shown(Console()))
    for line in tables.lines_of(made):
        print(line)
    if json_ is not None:
        json_.write_text(json.dumps(tables.json_of(made), indent=2) + "\n")
    if markdown is not None:
        about = ", ".join(f"{name} {version}" for name, version in versions().items())
        line = f"pagefault mutate --target {target}" + " --strict" * strict
        markdown.write_text(tables.markdown_of(made, line, about, survival))
    if made.errors():
        raise typer.Exit(FOUND_SOMETHING)
    if made.interrupted:
        raise typer.Exit(INTERRUPTED)
    is_done = bool(made.outcomes or (listed and survival))
    raise typer.Exit(FOUND_NOTHING if is_done and not made.faults else VOID_RUN)


def _shown(console: Console) -> Callable[[str, int, int], None]:
    """Return what shows how far a mutation run is: in place, or a line now and then."""
    from .mutation.command import Pace as StagePace

    pace, last = StagePace(), time.monotonic()

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        line, now = pace.line(stage, done, total), time.monotonic()
        if console.is_terminal:
            console.print(Text(line), end="\r" if done < total else "\n", soft_wrap=True)
        elif now - last >= REPORT_SECONDS or done == total:
            last = now
            print(line, flush=True)

    return show


def _duration(option: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text.strip())
    if not match or float(match[1]) <= 0:
        raise Usage(f"{option} {text!r}, but should be like 60s, 5m or 8h")
    return float(match[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[match[2]]


def _connected(address: str, device: str) -> Cluster:
    """Return the Ray cluster of an address."""
    try:
        from .cluster import Cluster, ClusterError
    except ImportError as error:
        raise Usage("--ray needs Ray: pip install 'pagefault[ray]'") from error
    try:
        return Cluster(address, device)
    except ClusterError as error:
        raise Usage(f"--ray {address!r}: {error}") from error


def _num_workers(text: str, device: str, cluster: Cluster | None = None) -> int:
    if text == "auto":
        return count_workers(device) if cluster is None else cluster.num_workers
    if not text.isdecimal() or int(text) < 1:
        raise Usage(f"--workers {text!r}, but should be auto or a number from 1")
    return int(text)


def _chosen_families(
    wanted: list[str] | None, present: set[str], skipped: Mapping[str, str]
) -> list[str]:
    for name in wanted or []:
        family_named(name)
        if name not in present:
            raise Usage(f"the target has no {name}: {skipped[name]}")
    return [name for name in families() if name in present and (not wanted or name in wanted)]


def _prepare_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Usage(f"{option} {str(folder)!r} can't be written: {_reason(error)}") from error


def _check_writable(path: Path) -> None:
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise Usage(f"--json {str(path)!r} can't be written: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _print_header(console: Console, plan: Plan, where: str) -> None:
    parts = [f"{name} {version}" for name, version in versions().items()]
    console.print(Text(" · ".join(parts), style="dim"), soft_wrap=True)
    limit = f", at most {plan.max_cases} cases" if plan.max_cases else ""
    console.print(
        f"target {plan.target} on {device_name(plan.device)}; {len(plan.families)} families; "
        f"{plan.num_workers} workers{where}; {plan.seconds:g} s{limit}; seed {plan.seed}; "
        f"machine {plan.machine}",
        soft_wrap=True,
        highlight=False,
    )


def _select_again(
    plan: Plan, state: State, earlier: Mapping[str, Record], bugs: Path | None
) -> list[Again]:
    """Return the cases that are checked before any is drawn; reasons go where outcomes go."""
    # What a resumed campaign has found itself is no earlier finding.
    records = {name: record for name, record in earlier.items() if state.run not in record.runs}
    selected = of_findings(records, plan)
    folder = BUGS if bugs is None else bugs
    if folder.is_dir():
        selected = selected.with_more(of_bugs(folder))
    done = state.result.rechecked
    for name, reason in selected.left_out.items():
        done.setdefault(name, reason)
    return [
        item
        for item in selected.items
        if item.family in plan.families and done.get(item.name) not in (PASSES, FAILS)
    ]


def _print_rechecked(
    console: Console, findings: Path, earlier: Mapping[str, Record], result: Result
) -> None:
    """Print what came of the cases that were checked first."""
    others: Counter[str] = Counter()
    for name, outcome in result.rechecked.items():
        line = "" if outcome == PASSES else f"{name}: {outcome}"
        if name in earlier:
            line = _about_finding(findings / name, earlier[name], outcome, result)
        else:
            others[outcome] += 1
        if line:
            console.print(Text(line), soft_wrap=True)
    if others:
        console.print(
            f"{others[PASSES]} of {others.total()} other known cases pass", highlight=False
        )


def _about_finding(path: Path, record: Record, outcome: str, result: Result) -> str:
    """Return what there is to say of an earlier finding whose case was checked again."""
    if outcome == FAILS:
        return f"{'open again' if record.status == FIXED else 'still open'}: {path}"
    if outcome != PASSES:
        return f"{path}: {outcome}"
    if record.status == FIXED:
        return ""
    line = f"fixed: {path}: its case passes now"
    return f"{line}, but its fault was found again" * (record.signature in result.findings) or line


def _run_watched(
    plan: Plan,
    console: Console,
    filing: Filing,
    pace: Pace,
    start: Callable[[Callable[[Result], None]], Result],
) -> Result:
    started = time.monotonic()
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:

            def show(result: Result) -> None:
                filing.take(result)
                pace.take(result.cases)
                live.update(_progress(plan, result, started))

            return start(show)
    last = started

    def report(result: Result) -> None:
        nonlocal last
        filing.take(result)
        pace.take(result.cases)
        now = time.monotonic()
        if now - last >= REPORT_SECONDS:
            last = now
            print(_one_line(result, now - started), flush=True)

    return start(report)


def _one_line(result: Result, elapsed: float) -> str:
    seen = sum(len(tally.edges) for tally in result.tallies.values())
    reachable = sum(len(family_named(name).all_edges) for name in result.tallies)
    return (
        f"{elapsed:6.0f} s  {result.cases} cases  {result.cases / max(elapsed, 0.1):.0f} a second  "
        f"{seen} of {reachable} edges  {len(result.findings)} findings"
    )


def _progress(plan: Plan, result: Result, started: float) -> Group:
    line = _one_line(result, time.monotonic() - started)
    return Group(Text(line), _tally_table(result))


def _tally_table(result: Result) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("family")
    for heading in ("cases", "a second", "edges", "findings"):
        table.add_column(heading, justify="right")
    for name, tally in result.tallies.items():
        findings = sum(signature.family == name for signature in result.findings)
        pace = tally.cases / tally.seconds if tally.seconds else 0
        edges = f"{len(tally.edges)} of {len(family_named(name).all_edges)}"
        table.add_row(name, str(tally.cases), f"{pace:.0f}", edges, str(findings))
    return table


def _check_table(plan: Plan, result: Result, target: Target) -> Table:
    """Return how often each check was carried out, those of the soak first."""
    checks = result.checks
    table = Table("check", box=None, pad_edge=False)
    table.add_column("times", justify="right")
    for check in dict.fromkeys([*demanded_checks(plan, target), *sorted(checks)]):
        table.add_row(check, str(checks[check]))
    return table


def _why_void(plan: Plan, result: Result, target: Target) -> str:
    if result.failures:
        return f"{len(result.failures)} of the workers failed"
    if result.cases == 0 and not result.findings:
        return "no case ran"
    if plan.is_soak:
        return "; ".join(why_soak_is_void(plan, result, target))
    unreached = result.unreached(lambda name: target.terms_of(name).without)
    return "; ".join(
        f"{name} has not reached: {', '.join(edges)}" for name, edges in unreached.items()
    )


def _print_closing(
    console: Console,
    plan: Plan,
    result: Result,
    target: Target,
    paths: Mapping[Signature, Path],
    filing: Filing,
    void: str,
) -> None:
    for found in sorted(result.findings.values(), key=lambda found: found.size):
        console.print()
        console.print(Text(str(found.signature), style="bold red"), soft_wrap=True)
        console.print(Text(found.verdict), soft_wrap=True)
        console.print(Text(f"  {found.how_small}"), soft_wrap=True)
        times = result.counts[found.signature]
        if times > 1:
            console.print(Text(f"  seen {times} times"))
        if found.reproduced is not None:
            console.print(Text(f"  shows in {found.reproduced}"), soft_wrap=True)
        folder = filing.paths.get(found.signature)
        path = paths.get(found.signature, folder)
        if path is None:
            console.print(Text(found.case), soft_wrap=True)
        else:
            replay = replay_line(path, plan.target, plan.device)
            console.print(Text(f"  {replay}"), soft_wrap=True)
        failure = filing.failures.get(found.signature)
        console.print(Text(f"  {failure or f'finding: {folder}'}"), soft_wrap=True)
    console.print()
    for fault, times in _known(plan, result, target):
        console.print(
            Text(f"known: {fault.signature}: {fault.reason}; seen {times} times"), soft_wrap=True
        )
    console.print(_tally_table(result))
    batches = _median(result)
    tiles = sum(tally.edges["more than one tile"] for tally in result.tallies.values())
    console.print(
        f"{result.cases} cases in {result.seconds:.0f} s, "
        f"{result.cases / max(result.seconds, 0.1):.0f} a second; median batch {batches}; "
        f"{100 * tiles / max(1, result.cases):.0f} % of cases with more than one tile; "
        f"{len(result.findings)} findings",
        soft_wrap=True,
        highlight=False,
    )
    for line in _coverage_lines(result, target):
        console.print(Text(line), soft_wrap=True)
    for line in lines_of(result.variants):
        console.print(Text(line), soft_wrap=True)
    if plan.is_soak:
        console.print(_check_table(plan, result, target))
    if result.unchecked:
        console.print(Text(result.unchecked), soft_wrap=True)
    if result.lost:
        console.print(result.lost, highlight=False)
    for failure in result.failures:
        console.print(Text(failure), soft_wrap=True)
    if result.interrupted:
        console.print("interrupted")
    if void:
        console.print(Text("void run: " + void.replace("; ", "\n  ")), soft_wrap=True)


def _annotate(plan: Plan, result: Result, target: Target, paths: Mapping[Signature, Path]) -> None:
    """Print what makes GitHub show each finding beside the kernel's line."""
    for found in result.findings.values():
        function = target.functions[found.signature.family]
        spot = github.kernel_spot(found.verdict) or github.function_spot(function)
        message = f"{found.verdict}\n  {found.how_small}"
        if found.signature in paths:
            message += f"\n  {replay_line(paths[found.signature], plan.target, plan.device)}"
        print(github.annotation(message, str(found.signature), spot), flush=True)


def _coverage_lines(result: Result, target: Target) -> list[str]:
    """Return which edges no case had, and how many sets of edges there were."""
    never = result.never_reached(lambda name: target.terms_of(name).without)
    lines = []
    for name, edges in never.items():
        count = f"{len(edges)} of {len(family_named(name).all_edges)} edges"
        named = f": {some_of(edges)}" if result.tallies[name].cases else ""
        lines.append(f"{name} never reached {count}{named}")
    if not never:
        lines.append("every edge was reached")
    num_sets = sum(result.edge_sets.values())
    lines.append(f"about {num_sets} sets of edges were reached by now, earlier campaigns included")
    return lines


def _write_cases(out: Path, result: Result) -> dict[Signature, Path]:
    """Write the case of each finding, and return where; without those that can't be written."""
    paths = {}
    for signature, found in result.findings.items():
        with suppress(OSError):
            family = family_named(signature.family)
            paths[signature] = write_case(out, family, signature, found.case)
    return paths


def _known(plan: Plan, result: Result, target: Target) -> list[tuple[KnownFault, int]]:
    """Return the known faults of the functions that were run, and how often each was seen."""
    return [
        (fault, result.known[i])
        for i, fault in enumerate(target.known_faults)
        if fault.family in plan.families
    ]


def _median(result: Result) -> int:
    sizes = sorted(
        size for tally in result.tallies.values() for size in tally.batch_sizes.elements()
    )
    return sizes[len(sizes) // 2] if sizes else 0


def _write_json(
    path: Path,
    plan: Plan,
    result: Result,
    target: Target,
    paths: Mapping[Signature, Path],
    filing: Filing,
    void: str,
    skipped: dict[str, str],
) -> None:
    never = result.never_reached(lambda name: target.terms_of(name).without)
    ran = {
        name: {
            "cases": tally.cases,
            "seconds": round(tally.seconds, 3),
            "edges": dict(sorted(tally.edges.items())),
            "edge_sets": result.edge_sets.get(name, 0),
            "never": never.get(name, []),
        }
        for name, tally in result.tallies.items()
    }
    document = {
        "target": plan.target,
        "device": plan.device,
        "versions": versions(),
        "seed": plan.seed,
        "machine": plan.machine,
        "workers": plan.num_workers,
        "workers_lost": result.num_lost,
        "seconds": round(result.seconds, 3),
        "void": void,
        "unchecked": result.unchecked,
        "rechecked": result.rechecked,
        "checks": dict(sorted(result.checks.items())),
        "specialisations": json_of(result.variants),
        "families": {**ran, **{name: {"skipped": reason} for name, reason in skipped.items()}},
        "findings": [
            {
                "signature": str(found.signature),
                "kind": found.signature.kind,
                "family": found.signature.family,
                "case": str(paths.get(found.signature, "")),
                "folder": str(filing.paths.get(found.signature, "")),
                "count": result.counts[found.signature],
                "minimal": found.how_small,
                "verdict": found.verdict,
            }
            for found in result.findings.values()
        ],
        "known": [
            {"signature": fault.signature, "count": times, "reason": fault.reason}
            for fault, times in _known(plan, result, target)
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
