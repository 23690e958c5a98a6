"""The state of a campaign: written whole, read back, and refused when it makes no sense."""

import dataclasses
import errno
import json
import os
from collections import Counter

import pytest

from pagefault import state as state_module
from pagefault.campaign import FamilyTally, Found, Plan
from pagefault.finding_record import Rate
from pagefault.specialisations import KernelVariants, Treatment
from pagefault.state import CampaignFolder, Progress, State, folder_for
from pagefault.stream import derived_seed
from pagefault.verdict import Signature

FAMILY = "compute_out_cache_loc"
PLAN = Plan("ours", [FAMILY, "chunking"], "cpu", 60.0, 1000, 7, 2, machine="here")
SIGNATURE = Signature(FAMILY, "value", "out_cache_loc: token")


def full_state():
    """Return a state in which every field holds something."""
    state = State.at_start("run-1", PLAN)
    variant = (Treatment("*i32", "aligned"), Treatment("", "16"))
    variants = {"m.kernel": KernelVariants(("a", "b"), (("aligned",), ()), {variant})}
    tally = FamilyTally(
        3, 1.5, Counter({"edge": 2}), Counter({1: 2, 4: 1}), Counter({"check": 9}), variants
    )
    state.result.tallies[FAMILY].add(tally)
    found = Found(SIGNATURE, "{}\n", (1, 2), "wrong", "minimal: yes", Rate(9, 10))
    state.result.add(found)
    state.result.counts[SIGNATURE] = 4
    state.result.known[2] = 5
    state.result.failures.append("worker 1 died")
    state.result.rechecked["name"] = "passes"
    state.result.num_lost = 3
    state.result.seconds = 12.5
    state.progress[1] = Progress(3, Counter({FAMILY: 2}))
    state.deaths[FAMILY] = 1
    state.settled = {"journal"}
    return state


def test_a_state_reads_as_it_was_written():
    state = full_state()
    assert State.from_json(state.to_json()) == state


def test_a_state_cut_off_at_any_length_is_refused():
    text = full_state().to_json()
    for length in range(len(text.rstrip())):
        with pytest.raises(ValueError):
            State.from_json(text[:length])


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda d: d.update(schema=2), id="schema"),
        pytest.param(lambda d: d["plan"].pop("seed"), id="plan"),
        pytest.param(lambda d: d["workers"].pop(), id="workers"),
        pytest.param(lambda d: d["tallies"].pop("chunking"), id="tallies"),
        pytest.param(lambda d: d["findings"][0].update(case="{"), id="case"),
        pytest.param(lambda d: d.update(counts=3), id="counts"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused(spoil):
    document = json.loads(full_state().to_json())
    spoil(document)
    with pytest.raises(ValueError):
        State.from_json(json.dumps(document))


def test_a_disk_that_is_full_leaves_the_state_that_there_was(tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "RETRY_SECONDS", 0.0)
    folder = CampaignFolder(tmp_path)
    state = full_state()
    (folder.journals / "journal").touch()
    real = os.write

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    folder.save(state, at_once=True)
    assert folder.troubles == [f"state '{tmp_path}' can't be written: No space left on device"]
    # Nothing says yet that the journal is settled.
    assert (folder.journals / "journal").exists()
    assert folder.load() is None
    monkeypatch.setattr(os, "write", real)
    folder.save(state, at_once=True)
    assert folder.troubles == []
    assert folder.load().result == state.result
    assert not (folder.journals / "journal").exists()


def test_targets_devices_and_machines_have_folders_of_their_own(tmp_path):
    plans = [
        PLAN,
        dataclasses.replace(PLAN, device="cuda"),
        dataclasses.replace(PLAN, machine="there"),
        dataclasses.replace(PLAN, target="mine.py"),
        dataclasses.replace(PLAN, target="other/mine.py"),
    ]
    assert len({folder_for(plan, tmp_path) for plan in plans}) == len(plans)
    assert folder_for(dataclasses.replace(PLAN, seed=8), tmp_path) == folder_for(PLAN, tmp_path)


def test_no_two_streams_have_one_seed():
    """Whatever machines are called, a worker's rounds are its own."""
    seeds = [
        derived_seed(*plan.stream(worker, family), round_number)
        for seed in (1, 11)
        for machine in ("", "1", "a", "a/1", "a\\/1", "1/a")
        for plan in [dataclasses.replace(PLAN, seed=seed, machine=machine)]
        for worker in (0, 1, 11)
        for family in ("chunking", "1/chunking")
        for round_number in (0, 1, 10)
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_share_of_a_worker_is_what_it_has_not_run():
    state = full_state()
    assert (state.cases_left(0), state.cases_left(1)) == (500, 497)
