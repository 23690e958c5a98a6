"""The report: what stands in the page and in the Markdown, and where it comes from."""

import dataclasses
import html
import json
import re
from html.parser import HTMLParser

import pytest

from pagefault.family import family_named
from pagefault.finding_record import FIXED
from pagefault.findings import FindingsError, FindingsFolder
from pagefault.report import (
    MOST_FINDINGS,
    MOST_MARKDOWN_CHARACTERS,
    duration,
    report_of_campaign,
    report_of_folder,
)
from pagefault.result import FAILS, PASSES
from pagefault.verdict import Signature

NUM_EDGES = len(family_named("compute_out_cache_loc").all_edges)

VOID_TAGS = {"meta", "line", "polyline", "polygon", "br"}


class Page(HTMLParser):
    """What is in a page: tags, attributes, and text by the tag it stands in."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID_TAGS:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, text):
        self.texts.append((self._open[-1] if self._open else "", text.strip()))

    def inside(self, tag):
        return [text for where, text in self.texts if where == tag and text]


@pytest.fixture
def folder(found, context, tmp_path):
    """A folder with two findings."""
    findings = FindingsFolder(tmp_path / "findings")
    for fault in ("clamped", "wrong stride"):
        findings.add(found(fault), context(), 3, {})
    return findings.path


def test_a_finding_is_told_with_all_that_is_known_of_it(folder):
    page = Page(report_of_folder(folder).html())
    said = " ".join(text for _, text in page.texts)
    (value,) = folder.glob("compute_out_cache_loc-value-*")
    for needed in (
        "2 findings",
        "out_cache_loc[1] = 24, but should be 0",
        "a wrong value",
        "10 of 10 runs on cpu of here",
        "3 times in 1 run",
        "minimal: no single step makes it smaller",
        f"pagefault repro {value} --device cpu",
        '"cache_start": [1, 0]',
        "found 24",
        "should be 0",
        "commit 0123abc",
    ):
        assert needed in said, needed
    assert page.inside("dt").count("expected") == 1


def test_the_worst_comes_first(folder):
    kinds = [part.record.signature.kind for part in report_of_folder(folder).findings]
    assert kinds == ["address", "value"]


def test_a_page_fetches_nothing_and_runs_nothing(folder, campaign):
    for report in (report_of_folder(folder), report_of_campaign(**campaign("clamped"))):
        page = Page(report.html())
        assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
        links = {a[k] for _, a in page.tags for k in ("href", "src") if k in a}
        assert all(link.startswith("#") for link in links)
        assert "url(" not in report.html()
        assert "@import" not in report.html()
        assert not [name for _, a in page.tags for name in a if name.startswith("on")]


def test_what_a_kernel_says_is_no_markup(found, context, tmp_path):
    evil = "<script>alert(1)</script> </pre> & `|` ```\n## no heading"
    spoilt = dataclasses.replace(found("clamped"), verdict=evil, how_small=evil)
    FindingsFolder(tmp_path).add(spoilt, context(target="<b>.py"), 1, {})
    report = report_of_folder(tmp_path)
    page = Page(report.html())
    assert not [tag for tag, _ in page.tags if tag in ("script", "b")]
    assert html.escape("<script>alert(1)") in report.html()
    outside_fences = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", report.markdown())
    assert "## no heading" not in outside_fences
    assert "script" not in re.sub(r"`[^`\n]*`", "", outside_fences)


def test_a_table_can_be_read_without_eyes(folder):
    page = Page(report_of_folder(folder).html())
    tags = [tag for tag, _ in page.tags]
    assert ("html", {"lang": "en"}) in page.tags
    assert tags.count("h1") == 1
    assert tags.index("h1") < tags.index("h2") < tags.index("h3") < tags.index("h4")
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")
    boxes = [a for _, a in page.tags if a.get("class") == "scroll"]
    assert boxes
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in boxes)


def test_marks_are_words_and_not_colours_alone(folder):
    cells = re.findall(r"<td class=\"([a-z ]+)\">(.*?)</td>", report_of_folder(folder).html())
    assert len(cells) > 4
    for marks, content in cells:
        for mark in set(marks.split()) - {"gap", "wrong"}:
            assert mark in content
        assert "wrong" not in marks.split() or re.search("found|wrong", content)


def test_nothing_is_written_in_the_folder(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    report_of_folder(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_finding_that_cannot_be_read_is_named(folder):
    (address,) = folder.glob("*-address-*")
    (address / "finding.json").write_text('{"schema": 1')
    report = report_of_folder(folder)
    assert len(report.findings) == 1
    assert address.name in report.html()
    assert address.name in report.markdown()


def test_a_fixed_finding_is_no_open_one(folder, context):
    (address,) = folder.glob("*-address-*")
    FindingsFolder(folder).add_pass(address.name, context(run=2))
    report = report_of_folder(folder)
    assert [part.record.status for part in report.fixed] == [FIXED]
    assert report.outcome == "1 finding"
    assert "Fixed since" in report.html()
    assert "### Fixed since" in report.markdown()


def test_the_folder_of_one_finding_is_a_report_of_its_own(folder):
    (address,) = folder.glob("*-address-*")
    assert report_of_folder(address).outcome == "1 finding"


def test_an_empty_folder_has_no_open_findings(tmp_path):
    assert "No open findings" in report_of_folder(tmp_path).html()


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(FindingsError, match="can't be read: No such file"):
        report_of_folder(tmp_path / "none")


def test_a_finding_of_a_family_that_is_not_installed_is_told_without_cells(folder):
    (path,) = folder.glob("*-address-*/finding.json")
    document = json.loads(path.read_text())
    document["smallest"]["case"]["family"] = "elsewhere"
    path.write_text(json.dumps(document))
    said = report_of_folder(folder).html()
    assert "no tensors drawn: no family" in said
    assert "read of req_to_page[0][1]" in said


def test_a_needless_read_is_replayed_as_one(found, context, tmp_path):
    signature = Signature("compute_out_cache_loc", "needless", "read of req_to_pages")
    FindingsFolder(tmp_path).add(
        dataclasses.replace(found("clamped"), signature=signature), context(), 1, {}
    )
    (part,) = report_of_folder(tmp_path).findings
    assert part.replay.endswith("--device cpu --strict")


def many_findings(found, context, number, path):
    folder = FindingsFolder(path)
    for i in range(number):
        signature = Signature("compute_out_cache_loc", "value", f"out_cache_loc: role {i}")
        verdict = found("clamped").verdict + "\n  and so on" * 60
        made = dataclasses.replace(found("clamped"), signature=signature, verdict=verdict)
        folder.add(made, context(), 1, {})
    return report_of_folder(path)


def test_many_findings_fit_into_a_comment(found, context, tmp_path):
    report = many_findings(found, context, 80, tmp_path)
    text = report.markdown()
    assert 1000 < len(text) <= MOST_MARKDOWN_CHARACTERS + 100
    assert text.endswith("Too long for a comment: report.html has the rest.\n")
    assert text.count("```") % 2 == 0


def test_too_many_findings_are_named(found, context, tmp_path):
    report = many_findings(found, context, MOST_FINDINGS + 2, tmp_path)
    assert report.outcome == f"{MOST_FINDINGS + 2} findings"
    assert len(report.findings) == MOST_FINDINGS
    assert "2 findings not shown" in report.html()


def test_a_long_case_is_cut(found, context, tmp_path):
    document = json.loads(found("clamped").case)
    document["req_to_pages"] = {
        "num_rows": 9,
        "max_pages": 999,
        "edits": [[1, i, 1] for i in range(3000 // 4)] + [[2, i, 1] for i in range(999)],
    }
    long = dataclasses.replace(found("clamped"), case=json.dumps(document))
    FindingsFolder(tmp_path).add(long, context(), 1, {})
    assert re.search(r"… \d+ characters more", report_of_folder(tmp_path).html())


def test_a_campaign_is_told_with_what_ran_and_what_was_never_reached(campaign):
    arguments = campaign("clamped") | {"paths": {}}
    arguments["result"].rechecked.update({"a bug": PASSES, "another": FAILS})
    report = report_of_campaign(**arguments, void="too short; no hole", troubles=["disk full"])
    page = Page(report.html())
    said = " ".join(text for _, text in page.texts)
    for needed in (
        "500 cases in 10 s, 50 a second, on cpu of here",
        f"2 of {NUM_EDGES}",
        "hole: 3",
        "zero length: first",
        "1 of 2 pass",
        "Void run: too short\nno hole",
        "disk full",
        "25 on average",
        "the target has no function of this name",
        "the case could not be written",
    ):
        assert needed in said, needed
    assert [a["role"] for tag, a in page.tags if tag == "svg"] == ["img"]
    assert all(a["aria-label"] for tag, a in page.tags if tag == "svg")
    assert f"2 of {NUM_EDGES}" in report.markdown()


def test_a_run_that_found_nothing_says_so(campaign):
    report = report_of_campaign(**campaign())
    assert report.outcome == "Nothing found"
    assert report.markdown().startswith("## pagefault: Nothing found\n")


def test_a_void_run_is_no_good_news(campaign):
    report = report_of_campaign(**campaign(), void="no case ran")
    assert report.outcome == "Void run: it proves nothing"
    assert 'class="void"' in report.html()


def test_an_earlier_finding_that_passes_is_fixed(campaign, folder):
    (earlier,) = (p for p in report_of_folder(folder).findings if "value" in p.folder)
    report = report_of_campaign(**campaign(), fixed={folder / "x": earlier.record})
    assert report.outcome == "Nothing found"
    assert "Fixed since" in report.html()


def test_a_block_of_markdown_is_closed_and_tables_are_tables(campaign):
    text = report_of_campaign(**campaign("clamped", "one too many")).markdown()
    assert text.count("```") % 2 == 0
    assert "\n\n| kernel | kind | what is wrong |\n| --- | --- | --- |\n| `compute" in text
    assert "\n\n| family | cases | a second | edges | findings |\n| --- |" in text
    assert "<details><summary>Smallest case</summary>\n\n```json\n{" in text
    assert "\n\n\n\n" not in text


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (59.6, "1 min"), (3600, "1 h"), (3661, "1 h 1 min 1 s")]
)
def test_a_time_is_said_in_words(seconds, words):
    assert duration(seconds) == words


def test_the_command_makes_a_report_of_a_folder(folder, pagefault, tmp_path):
    process = pagefault("report", folder, "--into", "out", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"2 findings in {folder}: out/report.html, out/report.md")
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")


def test_the_command_refuses_what_is_no_folder(pagefault, tmp_path):
    process = pagefault("report", "none", "--into", "out", cwd=tmp_path)
    assert process.returncode == 2
    assert process.stderr == "pagefault: 'none' can't be read: No such file or directory\n"


def test_the_command_says_where_a_report_can_not_be_written(folder, pagefault, tmp_path):
    (tmp_path / "out").write_text("")
    for words in (["report", folder, "--into", "out"], ["fuzz", "--report", "out"]):
        process = pagefault(*words, cwd=tmp_path)
        assert process.returncode == 2
        assert "'out' can't be written: " in process.stderr


def test_a_run_writes_its_report(pagefault, found, tmp_path):
    from pathlib import Path

    faulty = Path(__file__).parents[1] / "faulty" / "compute_out_cache_loc" / "overflow_clamped.py"
    process = pagefault(
        *("fuzz", "--target", faulty, "--device", "cpu", "--workers", "1", "--seed", "1"),
        *("--max-cases", "64", "--report", "out"),
        cwd=tmp_path,
        GITHUB_ACTIONS="true",
    )
    assert process.returncode == 1, process.stdout + process.stderr
    said = (tmp_path / "out" / "report.html").read_text()
    assert "out_cache_loc: overflow token" in said
    assert "cases in" in said
    assert "replay: " not in said
    (folder,) = (tmp_path / ".pagefault" / "findings").glob("*-value-*")
    assert f"python {folder.relative_to(tmp_path)}/repro.py" in said
    assert f"::error file={faulty},line=33," in process.stdout
