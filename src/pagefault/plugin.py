"""The pytest plugin: options, workers, seeds, and the fixtures that properties use."""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from . import github
from .device import (
    DeviceError,
    count_workers,
    prepare,
    resolve_device,
    versions,
    visible_gpus,
)

if TYPE_CHECKING:
    from .target import Target

_SEED = "pagefault_seed"
# Properties of a test's report: the case that it has found, and the kernel's line if it is known.
_CASE, _SPOT = "pagefault.case", "pagefault.kernel"

# Each is --pagefault-NAME, and --NAME where no other plugin or conftest has an option of that name.
_OPTIONS: dict[str, dict[str, Any]] = {
    "target": {
        "default": "ours",
        "help": "What to test: a name, a module, or a path to a .py file.",
    },
    "device": {
        "default": "auto",
        "help": "Where kernels run: auto, cpu (Triton's interpreter) or cuda (compiled).",
    },
    "shards": {
        "default": 1,
        "help": "Split each property over so many streams, each with a seed of its own.",
    },
    "in-process": {
        "action": "store_true",
        "help": "Run properties in pytest's own process, which a kernel can end; for debuggers.",
    },
    "case-time": {
        "default": "60",
        "help": "Seconds after which a case counts as a hang.",
    },
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagefault", "paged KV cache kernels")
    for name, settings in _OPTIONS.items():
        words = f"{settings['help']} Short: --{name}, where nothing else is called so."
        group.addoption(
            f"--pagefault-{name}",
            dest=f"pagefault_{name.replace('-', '_')}",
            **{**settings, "help": words},
        )


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Iterator[None]:
    """Take short names for long ones, and choose the device before a conftest imports a kernel.

    An option that is registered twice stops pytest, and conftests register theirs last: so the
    short names are not registered but replaced, once everybody has had their turn.
    """
    # Options that make no sense yet may be another's, and are refused later if they are ours.
    with contextlib.suppress(pytest.UsageError, DeviceError):
        known = parser.parse_known_args(_in_full(args, parser), copy.copy(early_config.option))
        early_config.known_args_namespace = known
        prepare(resolve_device(known.pagefault_device), _gpu_slot())
    yield
    args[:] = _in_full(args, parser)


def _in_full(args: Sequence[str], parser: pytest.Parser) -> list[str]:
    """Return arguments with our short names replaced by the long ones."""
    groups = [parser._anonymous, *parser._groups]
    taken = {name for group in groups for option in group.options for name in option.names()}
    full = {f"--{n}": f"--pagefault-{n}" for n in _OPTIONS if f"--{n}" not in taken}
    end = args.index("--") if "--" in args else len(args)
    replaced = []
    for argument in args[:end]:
        name, equals, value = argument.partition("=")
        replaced.append(full.get(name, name) + equals + value)
    return [*replaced, *args[end:]]


@pytest.hookimpl(trylast=True)  # After Hypothesis, which loads the profile.
def pytest_configure(config: pytest.Config) -> None:
    from .conformance import session

    shards = str(config.getoption("pagefault_shards"))
    if not shards.isdecimal() or int(shards) < 1:
        raise pytest.UsageError(f"--shards {shards!r}, but should be a number from 1")
    config.option.pagefault_shards = int(shards)
    try:
        device = resolve_device(config.getoption("pagefault_device"))
    except DeviceError as error:
        raise pytest.UsageError(str(error)) from error
    prepare(device, _gpu_slot())
    session.device = device
    session.seed = _base_seed(config)
    session.is_isolating = not (
        config.getoption("pagefault_in_process") or config.getoption("usepdb", False)
    )
    session.case_seconds = _positive_seconds(config.getoption("pagefault_case_time"))
    session.out = config.rootpath / ".pagefault" / "cases"


def _positive_seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise pytest.UsageError(f"--case-time {text!r}, but should be a number of seconds above 0")


def _gpu_slot() -> int | None:
    """Return the number of this xdist worker, or None where it is not one."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return int(worker[2:]) if worker.startswith("gw") and worker[2:].isdecimal() else None


def _base_seed(config: pytest.Config) -> int:
    """Return the seed that all others are derived from, the same in every worker."""
    given = getattr(config, "workerinput", {}).get(_SEED)
    if given is None:
        from hypothesis import settings

        wanted = config.getoption("hypothesis_seed", None)
        if wanted is not None and str(wanted).lstrip("-").isdecimal():
            given = int(wanted)
        elif settings().derandomize:
            given = 0
        else:
            given = random.getrandbits(32)
    return int(given)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give an xdist worker the seed of the run."""
    from .conformance import session

    node.workerinput[_SEED] = session.seed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return what `-n auto` means: cores, or a few workers for each GPU."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # Whoever set it knows better; xdist looks at it itself.
    # xdist asks before pytest is configured.
    try:
        return count_workers(resolve_device(config.getoption("pagefault_device")))
    except DeviceError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header(config: pytest.Config) -> str:
    from hypothesis import settings

    from .conformance import session

    gpus = f" ({len(visible_gpus())} visible)" if session.device == "cuda" else " (interpreter)"
    return ", ".join(
        [
            f"pagefault: device {session.device}{gpus}",
            *(f"{name} {version}" for name, version in versions().items()),
            f"target {config.getoption('pagefault_target')}",
            f"profile {getattr(settings, '_current_profile', None)}",
            f"seed {session.seed}",
        ]
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note with a test's report where the case lies that it has found: JUnit XML has it then."""
    from .conformance import NonConformance

    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, NonConformance):
        spot = github.kernel_spot(str(error))
        item.user_properties.append((_CASE, str(error.path)))
        if spot is not None:
            item.user_properties.append((_SPOT, f"{spot.file}:{spot.line}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """In a job of GitHub's, show each finding beside the kernel's line, or the test's."""
    if not github.are_wanted():
        return
    for report in terminalreporter.getreports("failed"):
        noted = dict(report.user_properties)
        if _CASE in noted:
            message = report.longrepr.reprcrash.message.partition(": ")[2]
            test, line, _ = report.location
            file, _, kernel_line = noted.get(_SPOT, f"{test}:{(line or 0) + 1}").rpartition(":")
            spot = github.Spot(file, int(kernel_line))
            # On a line of its own, which is all that GitHub looks at.
            terminalreporter.ensure_newline()
            terminalreporter.write_line(github.annotation(message, report.nodeid, spot))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pagefault_shard" in metafunc.fixturenames:
        shards = metafunc.config.getoption("pagefault_shards")
        metafunc.parametrize(
            "pagefault_shard", range(shards), ids=[f"shard{shard}" for shard in range(shards)]
        )


@pytest.fixture(scope="session")
def pagefault_target(request: pytest.FixtureRequest) -> Target:
    """The target that `--target` names."""
    from .target import TargetError, load_target

    try:
        return load_target(request.config.getoption("pagefault_target"))
    except TargetError as error:
        pytest.exit(str(error), returncode=2)


@pytest.fixture
def conforms(
    request: pytest.FixtureRequest, pagefault_target: Target, pagefault_shard: int
) -> Callable[[str], None]:
    """A function that holds the target to a family's contract, for this test's shard."""
    from .conformance import check_family
    from .family import family_named

    name = request.config.getoption("pagefault_target")

    def check(family_name: str) -> None:
        __tracebackhide__ = True
        if family_name not in pagefault_target.functions:
            pytest.skip(f"target {name}: {pagefault_target.skipped[family_name]}")
        check_family(
            pagefault_target,
            family_named(family_name),
            shard=pagefault_shard,
            named=name,
        )

    return check
