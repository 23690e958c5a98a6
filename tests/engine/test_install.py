"""scripts/install.py: what it asks of pip, with a pip that installs nothing."""

import importlib.metadata
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("install_script", ROOT / "scripts/install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakePip:
    """Stands in for `subprocess`: notes what pip is asked, and the constraints at that moment."""

    def __init__(self):
        self.calls = []
        self.constraints = []
        self.status = 0

    def run(self, command, check):
        assert command[1:4] == ["-m", "pip", "install"]
        self.calls.append(command[4:])
        if "--constraint" in command:
            path = Path(command[command.index("--constraint") + 1])
            self.constraints = self.constraints or path.read_text().splitlines()
        return SimpleNamespace(returncode=self.status)

    @property
    def requirements(self):
        """What was asked for, without options and their values."""
        calls = (call for call in self.calls if "--editable" not in call)
        return [name for call in calls for name in call[call.index("--constraint") + 2 :]]


@pytest.fixture
def pip(monkeypatch, script):
    """A pip that installs nothing."""
    fake = FakePip()
    monkeypatch.setattr(script, "subprocess", fake)
    return fake


@pytest.fixture
def environment_with(monkeypatch, script):
    """A function that lets the environment seem to have some versions, and this checkout or not."""

    def pretend(versions, from_here=True):
        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(script.importlib.metadata, "version", version)
        monkeypatch.setattr(script, "is_installed_from_here", lambda: from_here)

    return pretend


EVERYTHING = {
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "numpy": "2.1.0",
    "hypothesis": "6.140.0",
    "pytest": "9.0.0",
    "pytest-xdist": "3.8.0",
    "typer": "0.20.0",
    "rich": "14.0.0",
    "jinja2": "3.1.4",
    "ruff": "0.14.0",
    "mypy": "1.18.0",
    "build": "1.3.0",
    "pyyaml": "6.0.2",
    "setuptools": "80.0.0",
    "wheel": "0.45.0",
}


def without(*names):
    return {name: version for name, version in EVERYTHING.items() if name not in names}


def test_where_everything_is_there_nothing_is_asked_of_pip(script, pip, environment_with):
    environment_with(EVERYTHING)
    script.main("test", "lint")
    assert pip.calls == []


def test_everything_is_what_the_project_asks_for(script):
    pyproject = script.tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    wanted = [*pyproject["project"]["dependencies"], *extras["test"], *extras["lint"]]
    wanted += pyproject["build-system"]["requires"]
    names = {name.partition(">")[0] for name in wanted}
    assert names == set(EVERYTHING)


def test_a_checkout_that_is_not_installed_is_installed_without_asking_a_registry(
    script, pip, environment_with
):
    environment_with(EVERYTHING, from_here=False)
    script.main()
    (call,) = pip.calls
    assert {"--no-index", "--no-deps", "--no-build-isolation", "--editable"} <= set(call)
    assert call[-1] == str(ROOT)


def test_what_is_missing_is_asked_for_and_nothing_else(script, pip, environment_with):
    environment_with(without("hypothesis", "rich"))
    script.main()
    assert [name.partition(">")[0] for name in pip.requirements] == ["hypothesis", "rich"]
    assert not any("--upgrade" in call for call in pip.calls)


def test_a_torch_that_is_there_is_neither_asked_for_nor_pinned(script, pip, environment_with):
    environment_with(without("hypothesis", "ruff"))
    script.main("lint")
    asked = " ".join(pip.requirements)
    assert "torch" not in asked
    assert "triton" not in asked
    pinned = [line.partition("==")[0] for line in pip.constraints]
    assert "hypothesis" in pinned
    assert not set(pinned) & {"torch", "triton", "numpy"}


def test_on_a_fresh_machine_everything_comes_under_the_constraints(script, pip, environment_with):
    environment_with({}, from_here=False)
    script.main("test", "lint")
    assert {name.partition(">")[0] for name in pip.requirements} == set(EVERYTHING)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert pip.constraints == [line for line in pins if "==" in line]
    assert any(line.startswith("torch==") for line in pip.constraints)
    assert "--editable" in pip.calls[-1]


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_torch_that_is_too_old_is_not_replaced_but_named(script, pip, environment_with, package):
    environment_with({**EVERYTHING, package: "1.0"})
    with pytest.raises(SystemExit) as raised:
        script.main()
    assert f"{package} 1.0 is installed, but pagefault needs {package}>=" in str(raised.value)
    assert pip.calls == []


def test_another_package_that_is_too_old_is_asked_for(script, pip, environment_with):
    environment_with({**EVERYTHING, "hypothesis": "6.0.0"})
    script.main()
    assert [name.partition(">")[0] for name in pip.requirements] == ["hypothesis"]


def test_a_pip_that_fails_stops_the_script_and_leaves_no_file(script, pip, environment_with):
    environment_with(without("rich"))
    pip.status = 1
    with pytest.raises(SystemExit, match=r"can't be installed: rich>="):
        script.main()
    assert len(pip.calls) == 1
    assert not (ROOT / ".constraints-missing.txt").exists()


def test_what_only_linters_need_may_be_missing(script, pip, environment_with, capsys):
    environment_with(without("ruff"))
    pip.status = 1
    script.main("lint")
    assert "not installed, so what needs it is left out: ruff>=" in capsys.readouterr().out
