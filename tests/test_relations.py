"""Relations between answers of the target: properties that need no oracle."""

from types import SimpleNamespace

import pytest
from hypothesis import settings

from pagefault.conformance import NonConformance
from pagefault.family import family_named
from pagefault.relations import RELATIONS, Related, check_relation, missing_for
from pagefault.side_case import any_case_from_json
from pagefault.target import Target, load_target

# One case of a relation takes several calls.
CALLS_PER_CASE = 8


@pytest.fixture(autouse=True)
def _cases_of_findings_in_a_folder_of_their_own(request, tmp_path, monkeypatch):
    if "broken" in request.fixturenames:
        monkeypatch.setattr("pagefault.conformance.session.out", tmp_path)


@pytest.mark.parametrize("name", RELATIONS)
def test_relation_holds(pagefault_target, pagefault_shard, name):
    relation = RELATIONS[name]
    missing = missing_for(relation, pagefault_target)
    if missing:
        pytest.skip(missing)
    num_cases = max(4, settings().max_examples // CALLS_PER_CASE)
    num_held = check_relation(
        pagefault_target, relation, num_cases=num_cases, shard=pagefault_shard
    )
    if not num_held:
        pytest.skip("every case is one that the target leaves out, or has a known fault in")


OURS = load_target("ours").functions


def swapped(function, table_name):
    """Look every request up in the row of the one before it."""

    def broken(*arguments):
        family = family_named(function)
        named = dict(zip(family.parameters, arguments))
        named["req_pool_indices"] = named["req_pool_indices"].roll(1)
        return OURS[function](*named.values())

    return {function: broken}


def first_slot_lost(function):
    """Send the first token of a call to the dummy slot."""

    def broken(out_cache_loc, *arguments):
        OURS[function](out_cache_loc, *arguments)
        out_cache_loc[:1] = 0

    return {function: broken}


def sorted_prefixes(prefix_lens, num_chunks, batch_size, chunk_len):
    return OURS["chunking"](prefix_lens.sort().values, num_chunks, batch_size, chunk_len)


def last_request_left_out(
    req_to_page, req_pool_indices, new_occupied_pages, new_occupied_pages_num, pages_copy_starts
):
    counts = new_occupied_pages_num.clone()
    counts[-1:] = 0
    OURS["update_req_to_page"](
        req_to_page, req_pool_indices, new_occupied_pages, counts, pages_copy_starts
    )


def last_request_of_a_step_left_out(forward_op, device, req_to_page):
    fields = {name: values[:-1] for name, values in vars(forward_op).items()}
    OURS["update_block_table"](SimpleNamespace(**fields), device, req_to_page)


def row_cleared_behind_new_pages(forward_op, device, req_to_page):
    OURS["update_block_table"](forward_op, device, req_to_page)
    for row, begin, size in zip(
        forward_op.request_pool_indices, forward_op.begins, forward_op.sizes
    ):
        req_to_page[row, begin + size :] = 0


def slots_one_too_far(out_cache_loc, *arguments):
    OURS["compute_out_cache_loc_uniform"](out_cache_loc, *arguments)
    out_cache_loc += 1


def fused_slots_forgotten(out_cache_loc, *arguments):
    OURS["fused_decode_input_prep"](out_cache_loc, *arguments)
    out_cache_loc.zero_()


def odd_pages_made_even(req_to_page, req_pool_indices, new_occupied_pages, *arguments):
    OURS["update_req_to_page"](
        req_to_page, req_pool_indices, new_occupied_pages // 2 * 2, *arguments
    )


def offsets_in_page_lost(out_cache_loc, *arguments):
    OURS["compute_out_cache_loc"](out_cache_loc, *arguments)
    out_cache_loc -= out_cache_loc % arguments[-1]


def chunks_reversed(*arguments):
    chunks, kv_indices_list, chunks_cpu = OURS["get_chunks_paged"](*arguments)
    return chunks, [slots.flip(0) for slots in kv_indices_list], chunks_cpu


def first_chunk_repeated(*arguments):
    num_chunks, kv_indices_list, *rest = OURS["build_chunked_prefill_metadata_arrays"](*arguments)
    first = kv_indices_list[0] if kv_indices_list else None
    return num_chunks, [first[: len(slots)] for slots in kv_indices_list], *rest


# By relation: functions that break it, and words of what has to be said.
BROKEN = [
    *(
        (f"permuted {function}", swapped(function, table), "got")
        for function, table in (
            ("compute_out_cache_loc", "req_to_pages"),
            ("compute_out_cache_loc_uniform", "req_to_pages"),
            ("fused_decode_input_prep", "req_to_pages"),
            ("create_chunked_cache_kv_indices_paged", "req_to_page"),
            ("get_chunks_paged", "req_to_page"),
            ("build_chunked_prefill_metadata_arrays", "req_to_page"),
        )
    ),
    ("permuted chunking", {"chunking": sorted_prefixes}, "got"),
    ("permuted update_req_to_page", {"update_req_to_page": last_request_left_out}, "in the order"),
    (
        "permuted update_block_table",
        {"update_block_table": last_request_of_a_step_left_out},
        "in the order",
    ),
    *(
        (f"split {function}", first_slot_lost(function), "of a batch split before request 1")
        for function in (
            "compute_out_cache_loc",
            "compute_out_cache_loc_uniform",
            "fused_decode_input_prep",
        )
    ),
    ("ragged and uniform", {"compute_out_cache_loc_uniform": slots_one_too_far}, "ragged form"),
    ("uniform and fused", {"fused_decode_input_prep": fused_slots_forgotten}, "uniform form"),
    ("pages and slots", {"update_req_to_page": odd_pages_made_even}, "outside page 1"),
    ("pages and slots", {"compute_out_cache_loc": offsets_in_page_lost}, "two tokens lie in"),
    ("chunks of get_chunks_paged", {"get_chunks_paged": chunks_reversed}, "the chunks of capacity"),
    (
        "chunks of build_chunked_prefill_metadata_arrays",
        {"build_chunked_prefill_metadata_arrays": first_chunk_repeated},
        "the chunks of capacity",
    ),
    (
        "steps of update_block_table",
        {"update_block_table": row_cleared_behind_new_pages},
        "the second half of each request's pages, then the first",
    ),
]


@pytest.mark.parametrize(
    ("name", "broken", "words"), BROKEN, ids=[f"{name}: {next(iter(b))}" for name, b, _ in BROKEN]
)
def test_a_broken_function_is_found(name, broken, words):
    target = Target("broken", {**OURS, **broken})
    relation = RELATIONS[name]
    with pytest.raises(NonConformance) as failure:
        check_relation(target, relation, num_cases=60, seed=1)
    message = str(failure.value)
    assert message.startswith(f"{name}: {relation.statement}; but ")
    assert words in message
    assert failure.value.case.num_requests <= 3
    text = failure.value.path.read_text()
    assert text in message
    family, related = any_case_from_json(text)
    assert family.name == relation.functions[0]
    assert related == Related(failure.value.case, name)


def test_every_relation_has_a_function_that_breaks_it():
    assert {name for name, *_ in BROKEN} == set(RELATIONS)


def test_a_function_that_raises_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr("pagefault.conformance.session.out", tmp_path)

    def broken(*arguments):
        raise RuntimeError("no")

    target = Target("broken", {**OURS, "chunking": broken})
    with pytest.raises(NonConformance, match="permuted chunking: raised RuntimeError: no"):
        check_relation(target, RELATIONS["permuted chunking"], num_cases=5, seed=1)


def test_a_relation_says_which_function_is_missing():
    target = Target("partial", {"chunking": OURS["chunking"]}, {"get_chunks_paged": "not yet"})
    assert missing_for(RELATIONS["permuted chunking"], target) == ""
    assert missing_for(RELATIONS["permuted get_chunks_paged"], target) == "not yet"
