"""The jobs to copy: their YAML is what GitHub takes, and what they run exists."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from pagefault.cli import app

yaml = pytest.importorskip("yaml", reason="the package `pyyaml` is not installed")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
GUIDE = ROOT / "docs" / "ci.md"
COMMAND = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs_of(path):
    return yaml.safe_load(path.read_text())["jobs"]


def steps_of(path):
    return [step for job in jobs_of(path).values() for step in job["steps"]]


def commands_in(script):
    """Return the simple commands of a shell script, as words."""
    commands = []
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        commands.append([])
        for word in lexer:
            if set(word) <= set(";&|()<>") or word in ("if", "then", "fi"):
                commands.append([])
            else:
                commands[-1].append(word)
    return [command for command in commands if command]


def complaint(words):
    """Return what is wrong with a command that is ours to know, or None."""
    name = Path(words[0]).name
    if name == "make":
        return complaint_of_make(words[1:])
    if words[1:3] == ["-m", "pytest"]:
        return complaint_of_pytest(words[3:])
    if words[1:3] == ["-m", "pagefault"]:
        return complaint_of_pagefault(words[3:])
    if name == "pagefault":
        return complaint_of_pagefault(words[1:])
    if name == "run":
        return None if (ROOT / words[0]).is_file() else f"no file {words[0]}"
    return None


def complaint_of_make(words):
    for word in words:
        variable, is_set, value = word.partition("=")
        if not is_set and word not in TARGETS:
            return f"make has no target {word}"
        if is_set and variable not in VARIABLES:
            return f"make has no variable {variable}"
        if variable == "FUZZ_ARGS":
            return complaint_of_pagefault(["fuzz", *shlex.split(value)])
    return None


def complaint_of_pagefault(words):
    if words[0] not in COMMAND.commands:
        return f"pagefault has no command {words[0]}"
    try:
        COMMAND.commands[words[0]].make_context(words[0], [*words[1:]])
    except Exception as error:
        return f"pagefault {words[0]}: {error}"
    return None


def complaint_of_pytest(words):
    known = {"-n", "-q", "--device", "--target", "--shards", "--junitxml"}
    unknown = [w for w in words if w.startswith("-") and w.partition("=")[0] not in known]
    return f"pytest has no {unknown[0]}" if unknown else None


def test_the_three_jobs_are_there():
    assert [path.stem for path in WORKFLOWS] == ["gpu", "nightly", "pull-request"]


@each_workflow
def test_what_a_job_runs_exists(path):
    commands = [words for step in steps_of(path) for words in commands_in(step.get("run", ""))]
    assert commands
    assert [complaint(words) for words in commands if complaint(words)] == []


@pytest.mark.parametrize(
    "script",
    [
        "make no-such-target",
        "make fuzz NO_SUCH_ARGS=1",
        'make fuzz FUZZ_ARGS="--no-such-option"',
        "python3 -m pagefault fuzz --no-such-option 3",
        "[ -f x ] || venv/bin/pagefault no-such-command",
        "python3 -m pytest --no-such-option",
        "no/such/run",
    ],
)
def test_a_command_that_does_not_exist_would_be_seen(script):
    assert any(complaint(words) for words in commands_in(script))


@each_workflow
def test_actions_are_pinned_by_commit_and_say_their_version(path):
    uses = re.findall(r"uses: (.*)", path.read_text())
    assert uses
    for action in uses:
        assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)


@each_workflow
def test_a_workflow_may_do_little_and_not_for_ever(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 480
        assert "permissions" not in job
    for step in steps_of(path):
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
        # What an event brings along is no part of a script.
        assert "${{" not in step.get("run", "")


@each_workflow
def test_pip_has_a_cache_and_what_was_found_is_kept(path):
    steps = steps_of(path)
    cached = [s for s in steps if "pip" in str(s.get("with", {}).get("cache", ""))]
    cached += [s for s in steps if "pip" in str(s.get("with", {}).get("path", ""))]
    assert cached
    (kept,) = (s for s in steps if s.get("uses", "").startswith("actions/upload-artifact"))
    assert kept["if"] == "always()"
    # .pagefault is a hidden folder, which is left out unless one asks.
    assert kept["with"]["include-hidden-files"] is True
    assert "report" in kept["with"]["path"].split()


def test_a_night_carries_its_findings_on():
    steps = steps_of(ROOT / ".github" / "workflows" / "nightly.yml")
    (restored,) = (s for s in steps if "cache/restore" in s.get("uses", ""))
    (saved,) = (s for s in steps if "cache/save" in s.get("uses", ""))
    assert saved["if"] == "always()"
    assert saved["with"]["path"] == restored["with"]["path"]
    assert saved["with"]["path"].split() == [".pagefault/findings", ".pagefault/campaigns"]
    assert saved["with"]["key"].startswith(restored["with"]["restore-keys"])


def guide_commands():
    """Return the commands of the guide that are pagefault's or make's."""
    text = GUIDE.read_text()
    lines = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    lines += re.findall(r"^[\d*]+ [\d*]+ \* \* \* (.*)$", text, re.MULTILINE)
    lines += re.findall(r"^(pagefault .*)$", text, re.MULTILINE)
    return lines


def test_what_the_guide_runs_exists():
    commands = [words for line in guide_commands() for words in commands_in(line)]
    ours = [
        words[words.index(w) :] for words in commands for w in words if w.endswith("/pagefault")
    ]
    ours += [words for words in commands if words[0] == "pagefault"]
    assert len(ours) == 3
    assert [complaint(words) for words in ours if complaint(words)] == []


def test_the_guide_has_a_timer_for_its_service():
    text = GUIDE.read_text()
    for needed in ("[Unit]", "[Service]", "[Timer]", "OnCalendar=", "WantedBy=timers.target"):
        assert needed in text


def test_links_of_the_guide_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", GUIDE.read_text()):
        assert (GUIDE.parent / link).exists(), link
