"""The command `pagefault`."""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import __version__
from .campaign import Plan, Result, run
from .case import CaseError
from .conformance import replay_line, write_case
from .device import DeviceError, count_workers, device_name, prepare, resolve_device, versions
from .family import FamilyError, case_from_json, families, family_named
from .findings import Context, Filing, FindingsError, FindingsFolder, read_finding
from .findings import merge as merge_findings
from .isolation import check_in_child
from .soak import demanded_checks
from .soak import why_void as why_soak_is_void
from .specialisations import json_of, lines_of
from .target import DESCRIPTIONS, KnownFault, Target, TargetError, load_target
from .verdict import Signature

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
FINDINGS = Path(".pagefault/findings")

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
    family: Annotated[
        list[str] | None, typer.Option(help="A function to test; may be given several times.")
    ] = None,
    time_: Annotated[
        str, typer.Option("--time", help="How long: 60s, 5m, 8h.", metavar="DURATION")
    ] = "60s",
    max_cases: Annotated[int | None, typer.Option(min=1, help="Stop after so many cases.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; drawn and shown.")] = None,
    workers: Annotated[
        str, typer.Option(help="Processes, or auto: cores, or some for each GPU.")
    ] = "auto",
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
) -> None:
    """Draw cases and check the target against the oracle until the time is over.

    Exit status: 0 nothing found, 1 findings, 2 bad usage or a target that can't be loaded,
    3 a void run (no case ran, or edges were not reached that a run of its length must reach; of
    a soak all edges, all checks and all cases), 130 interrupted with nothing found.
    """
    seconds = _duration("--time", time_)
    case_seconds = _duration("--case-time", case_time)
    if memory not in MEMORIES:
        raise Usage(f"--memory {memory!r}, but should be one of {', '.join(MEMORIES)}")
    resolved = resolve_device(device)
    num_workers = _num_workers(workers, resolved)
    seed = secrets.randbits(32) if seed is None else seed
    if json_ is not None:
        _check_writable(json_)
    prepare(resolved)
    loaded = load_target(target)
    names = _chosen_families(family, set(loaded.functions), loaded.skipped)
    _prepare_folder(out)
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
    )
    console = Console()
    _print_header(console, plan)
    if earlier:
        console.print(f"{len(earlier)} findings of earlier runs in {findings}", soft_wrap=True)
    filing = Filing(folder, Context.of(plan), loaded)
    result = _run_watched(plan, console, filing)
    filing.take(result, is_over=True)
    void = _why_void(plan, result, loaded)
    paths = _write_cases(out, result)
    _print_closing(console, plan, result, loaded, paths, filing, void)
    for line in folder.set_aside:
        console.print(Text(line), soft_wrap=True)
    if json_ is not None:
        skipped = {name: why for name, why in loaded.skipped.items() if name not in names}
        try:
            _write_json(json_, plan, result, loaded, paths, filing, void, skipped)
        except OSError as error:
            console.print(Text(f"--json {str(json_)!r} can't be written: {_reason(error)}"))
    if result.findings or result.lane_failures:
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
    target = target or "ours"
    prepare(resolved)
    try:
        family, loaded_case = case_from_json(text)
    except CaseError as error:
        raise Usage(f"case {str(case)!r}: {error}") from error
    loaded = load_target(target)
    if family.name not in loaded.functions:
        raise Usage(f"target {target!r} has no {family.name}: {loaded.skipped[family.name]}")
    from .checker import Checker

    # The device is the child's alone, and so is a death.
    verdict = check_in_child(
        lambda case: Checker(loaded, resolved, strict=strict).check_thoroughly(family, case),
        family,
        loaded_case,
        Plan.case_seconds,
    )
    print(verdict.text())
    raise typer.Exit(FOUND_NOTHING if verdict.passed else FOUND_SOMETHING)


@app.command()
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Folders of findings.")],
    into: Annotated[Path, typer.Option(help="Where they are joined; what is there stays.")],
) -> None:
    """Join findings of several runs or machines by signature.

    The same folders in any order, any number of times, give the same result.
    """
    findings, damaged = merge_findings(folders, into)
    for name, finding in findings.items():
        print(f"{into / name}: {finding.signature}; seen {finding.count} times")
    for line in damaged:
        print(line)
    print(f"{len(findings)} findings in {into}")


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


def _duration(option: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text.strip())
    if not match or float(match[1]) <= 0:
        raise Usage(f"{option} {text!r}, but should be like 60s, 5m or 8h")
    return float(match[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[match[2]]


def _num_workers(text: str, device: str) -> int:
    if text == "auto":
        return count_workers(device)
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


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Usage(f"--out {str(folder)!r} can't be written: {_reason(error)}") from error


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


def _print_header(console: Console, plan: Plan) -> None:
    parts = [f"{name} {version}" for name, version in versions().items()]
    console.print(Text(" · ".join(parts), style="dim"), soft_wrap=True)
    limit = f", at most {plan.max_cases} cases" if plan.max_cases else ""
    console.print(
        f"target {plan.target} on {device_name(plan.device)}; {len(plan.families)} families; "
        f"{plan.num_workers} workers; {plan.seconds:g} s{limit}; seed {plan.seed}",
        soft_wrap=True,
        highlight=False,
    )


def _run_watched(plan: Plan, console: Console, filing: Filing) -> Result:
    started = time.monotonic()
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:

            def show(result: Result) -> None:
                filing.take(result)
                live.update(_progress(plan, result, started))

            return run(plan, show)
    last = started

    def report(result: Result) -> None:
        nonlocal last
        filing.take(result)
        now = time.monotonic()
        if now - last >= REPORT_SECONDS:
            last = now
            print(_one_line(result, now - started), flush=True)

    return run(plan, report)


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
    for failure in result.lane_failures:
        console.print()
        console.print(Text(failure), soft_wrap=True)
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
    for line in lines_of(result.variants):
        console.print(Text(line), soft_wrap=True)
    if plan.is_soak:
        console.print(_check_table(plan, result, target))
    if result.unchecked:
        console.print(Text(result.unchecked), soft_wrap=True)
    for failure in result.failures:
        console.print(Text(failure), soft_wrap=True)
    if result.interrupted:
        console.print("interrupted")
    if void:
        console.print(Text("void run: " + void.replace("; ", "\n  ")), soft_wrap=True)


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
    ran = {
        name: {
            "cases": tally.cases,
            "seconds": round(tally.seconds, 3),
            "edges": dict(sorted(tally.edges.items())),
        }
        for name, tally in result.tallies.items()
    }
    document = {
        "target": plan.target,
        "device": plan.device,
        "versions": versions(),
        "seed": plan.seed,
        "workers": plan.num_workers,
        "seconds": round(result.seconds, 3),
        "void": void,
        "unchecked": result.unchecked,
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
        "lane_failures": result.lane_failures,
        "known": [
            {"signature": fault.signature, "count": times, "reason": fault.reason}
            for fault, times in _known(plan, result, target)
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
