"""Engines that live on the target's functions, and engines that lose tokens by an order of calls.

`PAGEFAULT_SCHEDULER_STEPS=10000` makes the run over the target's functions longer.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from pagefault.conformance import session
from pagefault.family import families
from pagefault.scheduler import COPY, RETURNS, Engine, OrderFault, check_scheduler, live_again
from pagefault.target import Target

FAULTY = Path(__file__).parent / "faulty_order"

STEPS = int(os.environ.get("PAGEFAULT_SCHEDULER_STEPS", "300"))

# An engine's faults show whoever carries out the functions, and plain Python takes a twentieth of
# the interpreter's time.
PLAIN = Target("plain Python", {})

# What has to happen in lives that are to say something.
MUST_HAPPEN = (
    "drafts rejected",
    "entries of padding",
    "finished with a step under way",
    "prefixes shared",
    "resumed with a prefix",
    "rows reused",
    "slots reused",
    "steps without tokens",
    "tokens past the context length",
    "tokens read by attention",
)


def test_no_token_is_lost(pagefault_target, pagefault_shard):
    counts = check_scheduler(pagefault_target, num_steps=STEPS, shard=pagefault_shard)
    assert counts["steps of the state machine"] > STEPS // 2


def test_lives_have_all_that_an_engine_meets():
    counts = check_scheduler(PLAIN, num_steps=3000, seed=1)
    assert [what for what in MUST_HAPPEN if not counts.get(what)] == []


# What each fault comes to, and how many lines its life may have.
FAULTS = {
    "length_of_the_former_owner": ("a step puts its next one at position", 25),
    "no_pages_for_drafts": ("is written to slot 0, page 0 (the dummy)", 15),
    "overflow_to_the_last_slot": ("past the context length of", 12),
    "padding_has_stale_rows": ("padding entry", 45),
    "padding_has_stale_slots": ("padding entry", 45),
    "page_freed_while_shared": ("needs", 25),
    "partial_page_shared": ("where token", 30),
    "pinned_buffer_reused": ("before the device has come to it", 12),
    "preempted_with_a_step_under_way": ("", 45),
    "prefix_not_referenced": ("needs", 25),
    "prefix_not_yet_computed": ("where nothing lies", 25),
    "prefix_one_page_too_long": ("it was never computed", 25),
    "rejected_drafts_kept": ("a step puts its next one at position", 16),
    "row_of_the_batch": ("", 30),
    "row_reused_before_its_last_step": ("", 30),
    "slots_of_the_capture": ("where token", 16),
    "staging_buffer_reused": ("", 16),
    "stale_row_tail": ("", 40),
    "start_ahead_of_the_device": ("a step puts its next one at position", 25),
    "update_one_step_late": ("is written to slot 0, page 0 (the dummy)", 8),
    "update_skipped_without_tokens": ("is written to slot 0, page 0 (the dummy)", 16),
}


def planted(name):
    """Return the target and the engine of a planted fault."""
    spec = importlib.util.spec_from_file_location(f"faulty_order_{name}", FAULTY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = {name: getattr(module, name) for name in families() if hasattr(module, name)}
    return Target(name, functions), getattr(module, "FaultyEngine", Engine)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_of_order_is_found(name):
    target, engine = planted(name)
    with pytest.raises(OrderFault) as caught:
        check_scheduler(target, engine, num_steps=12_000, seed=1, shrink_seconds=120)
    words, most_lines = FAULTS[name]
    end = caught.value.end
    assert words in end.broken.detail
    assert len(end.log) <= most_lines
    message = str(caught.value)
    assert message.startswith(f"{end.broken.invariant}; but\n  {end.broken.detail}\n    0  start: ")
    assert "seed 1, shard 0" in message


def test_every_planted_fault_is_looked_for():
    assert {path.stem for path in FAULTY.glob("*.py")} == set(FAULTS)


def test_a_report_tells_the_life_that_loses_a_token():
    target, engine = planted("update_skipped_without_tokens")
    with pytest.raises(OrderFault) as caught:
        check_scheduler(target, engine, num_steps=12_000, seed=1, shrink_seconds=120)
    assert str(caught.value).splitlines() == [
        "a token within the context length lies in a page of its request; but",
        "  token 0 of A (row 1) is written to slot 0, page 0 (the dummy) at offset 0",
        "    0  start: pages of 1, 1 to a row, 1 rows, 1 pages, at most 0 steps under way, "
        "table updated by plain Python",
        "    1  admit A to row 1: 1 tokens",
        "    2  give A pages [1]",
        "    3  schedule: a step without tokens",
        "    4  schedule: prefill A[0:1]",
        "    5  run the step of A",
        "  no step can be left out; seed 1, shard 0, 12000 steps, 30 a life",
    ]


def test_a_program_can_be_carried_out_again():
    target, engine = planted("stale_row_tail")
    with pytest.raises(OrderFault) as caught:
        check_scheduler(target, engine, num_steps=12_000, seed=1, shrink_seconds=120)
    end = caught.value.end
    again = live_again(target, engine, end.program)
    assert again is not None
    assert (again.broken.detail, again.log) == (end.broken.detail, end.log)
    assert live_again(PLAIN, Engine, end.program) is None


def test_a_function_that_raises_is_a_finding():
    def update_block_table(forward_op, device, req_to_page):
        raise RuntimeError("no")

    target = Target("raises", {"update_block_table": update_block_table})
    with pytest.raises(OrderFault, match="update_block_table raised RuntimeError: no") as caught:
        check_scheduler(target, seed=1)
    assert caught.value.end.broken.invariant == RETURNS


@pytest.mark.skipif(session.device == "cuda", reason="a child must not have touched CUDA")
def test_a_function_that_ends_the_process_is_a_finding():
    def update_block_table(forward_op, device, req_to_page):
        os._exit(3)

    target = Target("dies", {"update_block_table": update_block_table})
    with pytest.raises(OrderFault, match="exit status 3") as caught:
        check_scheduler(target, seed=1)
    assert caught.value.end.log[0].startswith("start: ")


def test_a_buffer_of_one_copy_at_a_time_is_no_finding():
    """A buffer for each call, as the contract wants it, is never overwritten."""

    def update_block_table(forward_op, device, req_to_page):
        import torch

        for row, begin, page_ids in zip(
            forward_op.request_pool_indices, forward_op.begins, forward_op.new_occupied_pages
        ):
            kept = page_ids[: max(0, req_to_page.shape[1] - begin)]
            on_device = torch.tensor(kept, dtype=torch.int32).to(device, non_blocking=True)
            req_to_page[row, begin : begin + len(kept)] = on_device

    target = Target("right", {"update_block_table": update_block_table})
    assert check_scheduler(target, num_steps=1200, seed=1)["steps"]
    assert COPY not in target.skipped


def test_a_dialect_with_another_overflow_slot_is_lived_in():
    from pagefault.family import Dialect

    target = Target("padding slot", {}, dialect=Dialect(overflow_slot=-1))
    assert check_scheduler(target, num_steps=1200, seed=1)["tokens past the context length"]
