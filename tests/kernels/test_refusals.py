"""What every launcher refuses on the host, before it writes anything."""

import numpy as np
import pytest
import torch

from pagefault.kernels.chunked_prefill import (
    build_chunked_prefill_metadata_arrays,
    chunking,
    create_chunked_cache_kv_indices_paged,
    get_chunks_paged,
)
from pagefault.kernels.decode_input_prep import fused_decode_input_prep
from pagefault.kernels.out_cache_loc import (
    compute_out_cache_loc,
    compute_out_cache_loc_uniform,
)
from pagefault.kernels.req_to_page import update_req_to_page


def vector(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def table():
    return torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)


def good_arguments(function):
    """Return arguments on the CPU that the function accepts, by name and in order."""
    index = {"req_pool_indices": vector(1, 2, dtype=torch.int64)}
    if function is update_req_to_page:
        return {
            "req_to_page": table(),
            **index,
            "new_occupied_pages": vector(10, 11, 12),
            "new_occupied_pages_num": vector(1, 2),
            "pages_copy_starts": vector(0, 1),
        }
    if function is compute_out_cache_loc:
        return {
            "out_cache_loc": vector(-1, -1, -1),
            **index,
            "input_lengths": vector(1, 2),
            "cache_start": vector(0, 1),
            "req_to_pages": table(),
            "page_size": 4,
        }
    if function is compute_out_cache_loc_uniform:
        return {
            "out_cache_loc": vector(-1, -1, -1, -1),
            **index,
            "uniform_input_length": 2,
            "cache_start": vector(0, 1),
            "req_to_pages": table(),
            "page_size": 4,
        }
    if function is fused_decode_input_prep:
        return {
            "out_cache_loc": vector(-1, -1, -1, -1),
            "positions": vector(-1, -1, -1, -1),
            "seq_lens_out": vector(-1, -1),
            **index,
            "valid_cache_lengths": vector(0, 1, 2),
            "uniform_input_length": 2,
            "req_to_pages": table(),
            "page_size": 4,
        }
    if function is chunking:
        return {"prefix_lens": vector(3, 4), "num_chunks": 2, "batch_size": 2, "chunk_len": 2}
    if function is create_chunked_cache_kv_indices_paged:
        return {
            "req_to_page": table(),
            **index,
            "chunk_starts": vector(0, 1),
            "chunk_seq_lens": vector(1, 2),
            "chunk_cum_seq_lens": vector(0, 1, 3),
            "chunk_kv_indices": vector(-1, -1, -1),
            "page_size": 4,
        }
    prefix = "prefix_lens" if function is get_chunks_paged else "extend_prefix_lens"
    return {
        prefix: vector(3, 4),
        f"{prefix}_cpu": vector(3, 4),
        "req_to_page": table(),
        **index,
        "page_size": 4,
        "chunk_capacity": 6,
    }


FUNCTIONS = [
    update_req_to_page,
    compute_out_cache_loc,
    compute_out_cache_loc_uniform,
    fused_decode_input_prep,
    chunking,
    create_chunked_cache_kv_indices_paged,
    get_chunks_paged,
    build_chunked_prefill_metadata_arrays,
]
TABLES = {"req_to_page", "req_to_pages"}
OUTPUTS = {"out_cache_loc", "positions", "seq_lens_out", "chunk_kv_indices"}
OF_ANY_LENGTH = {
    (update_req_to_page, "new_occupied_pages"),
    (compute_out_cache_loc, "out_cache_loc"),
    (fused_decode_input_prep, "req_pool_indices"),
    (create_chunked_cache_kv_indices_paged, "chunk_kv_indices"),
}

TABLE_FAULTS = {
    "not_a_tensor": (TypeError, lambda value: value.tolist()),
    "int64": (TypeError, lambda value: value.long()),
    "flat": (ValueError, lambda value: value.flatten()),
    "columns_apart": (ValueError, lambda value: value.repeat_interleave(2, dim=1)[:, ::2]),
    "rows_overlap": (ValueError, lambda value: value[:1].expand(3, -1)),
}
VECTOR_FAULTS = {
    "not_a_tensor": (TypeError, lambda value: value.tolist()),
    "none": (TypeError, lambda value: None),
    "float32": (TypeError, lambda value: value.float()),
    "uint8": (TypeError, lambda value: value.byte()),
    "bool": (TypeError, lambda value: value.bool()),
    "two_dimensions": (ValueError, lambda value: value[None]),
    "elements_apart": (ValueError, lambda value: value.repeat_interleave(2)[::2]),
    "other_device": (ValueError, lambda value: value.to("meta")),
    "shorter": (ValueError, lambda value: value[:-1]),
    "longer": (ValueError, lambda value: torch.cat([value, value])),
}
NUMBER_FAULTS = {
    "bool": (TypeError, True),
    "numpy_bool": (TypeError, np.bool_(True)),
    "float": (TypeError, 2.0),
    "str": (TypeError, "2"),
    "tensor": (TypeError, torch.tensor(2)),
    "negative": (ValueError, -1),
    "numpy_negative": (ValueError, np.int64(-1)),
    "past_31_bits": (ValueError, 2**31),
}


def faults():
    for function in FUNCTIONS:
        for name, value in good_arguments(function).items():
            if isinstance(value, int):
                kinds = dict(NUMBER_FAULTS)
                if name in ("page_size", "chunk_len", "chunk_capacity"):
                    kinds["zero"] = (ValueError, 0)
            elif name in TABLES:
                kinds = TABLE_FAULTS
            else:
                kinds = dict(VECTOR_FAULTS)
                if (function, name) in OF_ANY_LENGTH:
                    del kinds["shorter"]
                if (function, name) in OF_ANY_LENGTH or name in OUTPUTS:
                    del kinds["longer"]
                if name == "new_occupied_pages":
                    kinds["int64"] = (TypeError, lambda value: value.long())
                if function is chunking:
                    # The only tensor of its call, so no device is the wrong one.
                    del kinds["other_device"]
            for kind, (error, fault) in kinds.items():
                yield pytest.param(
                    function, name, error, fault, id=f"{function.__name__}-{name}-{kind}"
                )


@pytest.mark.parametrize(("function", "name", "error", "fault"), list(faults()))
def test_bad_argument_is_refused_by_name_and_nothing_is_written(
    device, function, name, error, fault
):
    arguments = {
        key: value.to(device) if isinstance(value, torch.Tensor) and "_cpu" not in key else value
        for key, value in good_arguments(function).items()
    }
    arguments[name] = fault(arguments[name]) if callable(fault) else fault
    before = [
        value.tolist() if isinstance(value, torch.Tensor) and not value.is_meta else None
        for value in arguments.values()
    ]
    # A number may be refused through the size that follows from it.
    with pytest.raises(error, match=name.removeprefix("extend_") + "|must have"):
        function(*arguments.values())
    after = [
        value.tolist() if isinstance(value, torch.Tensor) and not value.is_meta else None
        for value in arguments.values()
    ]
    assert after == before


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_good_arguments_are_accepted(device, function):
    arguments = [
        value.to(device) if isinstance(value, torch.Tensor) and "_cpu" not in key else value
        for key, value in good_arguments(function).items()
    ]
    function(*arguments)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_numpy_integers_are_numbers(device, function):
    arguments = [
        value.to(device) if isinstance(value, torch.Tensor) and "_cpu" not in key else value
        for key, value in good_arguments(function).items()
    ]
    function(*[np.int16(value) if isinstance(value, int) else value for value in arguments])


def test_checks_come_before_the_return_for_an_empty_batch(device):
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="page_size is 0"):
        compute_out_cache_loc(empty, empty, empty, empty, table().to(device), 0)
    with pytest.raises(TypeError, match="page_size is True"):
        fused_decode_input_prep(
            empty, empty, empty, empty, vector(0, 0, 0).to(device), 1, table().to(device), True
        )
