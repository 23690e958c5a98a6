"""A width, batch or length not seen before compiles nothing new, and the check would see it.

`faulty_variants/` are the canaries: right kernels, each compiled anew for something that it should
take at run time.
"""

from pathlib import Path

import pytest

from pagefault.compilations import TooManyVariants, assert_no_new_variants
from pagefault.family import family_named
from pagefault.target import load_target

FAULTY = Path(__file__).parent / "faulty_variants"

OURS = load_target("ours").functions

MANY = 1100  # Requests, more than any batch that is drawn.
LONG = 2**19  # Tokens, in outputs that no drawn case has.

ROWS = [1] * MANY
TABLE = {"num_rows": 3, "max_pages": LONG // 16}


def prefixes(lens, chunk_capacity):
    return {
        "req_pool_indices": ROWS[: len(lens)],
        "prefix_lens": lens,
        "req_to_page": TABLE,
        "page_size": 16,
        "chunk_capacity": chunk_capacity,
    }


def chunks(num_chunks, chunk_len):
    return {
        "prefix_lens": [5] * MANY,
        "num_chunks": num_chunks,
        "batch_size": MANY,
        "chunk_len": chunk_len,
    }


def tokens(**lens):
    return {
        "req_pool_indices": ROWS,
        **lens,
        "cache_start": [0] * MANY,
        "req_to_pages": TABLE,
        "page_size": 16,
    }


def pages(num_requests, num_each):
    """Return new pages for each of some requests."""
    return {
        "req_pool_indices": [*range(num_requests)],
        "begins": [0] * num_requests,
        "new_occupied_pages": [[7] * num_each] * num_requests,
        "req_to_page": {"num_rows": num_requests, "max_pages": num_each},
    }


BY_CHUNKS = [prefixes([LONG], LONG), prefixes([LONG], LONG // 16), prefixes([5] * MANY, MANY)]

# Sizes beyond those that strategies draw: long outputs, large batches, 16 chunks.
LARGE = {
    "update_req_to_page": [pages(MANY, 1), pages(1, LONG)],
    "update_block_table": [
        {**pages(MANY, 1), "sizes": [1] * MANY},
        {**pages(1, LONG), "sizes": [LONG]},
    ],
    "compute_out_cache_loc": [
        tokens(input_lengths=[1] * MANY),
        tokens(input_lengths=[LONG] + [0] * (MANY - 1)),
    ],
    "compute_out_cache_loc_uniform": [
        tokens(uniform_input_length=1),
        tokens(uniform_input_length=LONG // MANY),
    ],
    "fused_decode_input_prep": [
        {
            "req_pool_indices": ROWS,
            "valid_cache_lengths": [0, 5, 9],
            "uniform_input_length": length,
            "req_to_pages": TABLE,
            "page_size": 16,
        }
        for length in (1, LONG // MANY)
    ],
    "chunking": [chunks(16, 16), chunks(17, 1)],
    "create_chunked_cache_kv_indices_paged": [
        {
            "req_pool_indices": ROWS,
            "chunk_starts": [0] * MANY,
            "chunk_seq_lens": [length] + [1] * (MANY - 1),
            "gaps": [0] * MANY,
            "tail": 0,
            "req_to_page": TABLE,
            "page_size": 16,
        }
        for length in (1, LONG)
    ],
    "get_chunks_paged": BY_CHUNKS,
    "build_chunked_prefill_metadata_arrays": BY_CHUNKS,
}


@pytest.mark.parametrize("function", OURS)
def test_sizes_not_seen_before_compile_nothing_new(function):
    family = family_named(function)
    cases = [family.case_type.from_fields(fields) for fields in LARGE[function]]
    variants = assert_no_new_variants(OURS[function], cases=cases, most=8)
    assert variants


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("batch_size_compiled_in", "batch_size "),
        ("width_compiled_in", "max_pages "),
        ("all_specialised", "1 of 1 pairings of dtypes"),
    ],
)
def test_a_kernel_that_is_compiled_anew_for_sizes_is_found(fault, words):
    function = load_target(str(FAULTY / f"{fault}.py")).functions["compute_out_cache_loc"]
    with pytest.raises(TooManyVariants) as failure:
        assert_no_new_variants(function)
    first, second = str(failure.value).splitlines()
    assert first.startswith("slots_of_request_kernel: ")
    assert first.endswith("but should be at most 8")
    assert words in second


def test_a_sweep_of_one_size_says_nothing():
    with pytest.raises(AssertionError, match=r"the sweep says nothing, \w+ was never 1"):
        assert_no_new_variants(OURS["compute_out_cache_loc"], num_cases=2)
