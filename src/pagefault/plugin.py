"""The pytest plugin: options, workers, seeds, and the fixtures that properties use."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .target import Target

_SEED = "pagefault_seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagefault", "paged KV cache kernels")
    options: list[tuple[str, dict[str, Any]]] = [
        (
            "target",
            {"default": "ours", "help": "What to test: a name, a module, or a path to a .py file."},
        ),
        (
            "device",
            {
                "default": "auto",
                "choices": ["auto", "cpu", "cuda"],
                "help": "Where kernels run: cpu is Triton's interpreter.",
            },
        ),
        (
            "shards",
            {
                "default": 1,
                "type": int,
                "help": "Split each property over so many streams of cases, with seeds of their own.",
            },
        ),
    ]
    for name, settings in options:
        dest = f"pagefault_{name}"
        try:
            group.addoption(f"--{name}", f"--pagefault-{name}", dest=dest, **settings)
        except ValueError:  # Another plugin has taken the short name.
            group.addoption(f"--pagefault-{name}", dest=dest, **settings)


def pytest_configure(config: pytest.Config) -> None:
    from .conformance import session
    from .device import DeviceError, prepare, resolve_device

    if config.getoption("pagefault_shards") < 1:
        raise pytest.UsageError("--shards should be at least 1")
    try:
        device = resolve_device(config.getoption("pagefault_device"))
    except DeviceError as error:
        raise pytest.UsageError(str(error)) from error
    prepare(device, _worker_number(config))
    session.device = device
    session.seed = _base_seed(config)
    session.out = config.rootpath / ".pagefault" / "cases"


def _worker_number(config: pytest.Config) -> int:
    worker: str = getattr(config, "workerinput", {}).get("workerid", "gw0")
    return int(worker.removeprefix("gw"))


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
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return what `-n auto` means: cores, or a few workers for each GPU."""
    from .conformance import session
    from .device import count_workers

    return count_workers(session.device)


def pytest_report_header(config: pytest.Config) -> str:
    from hypothesis import settings

    from .conformance import session
    from .device import versions, visible_gpus

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
            replay="" if name == "ours" else f" --target {name}",
        )

    return check
