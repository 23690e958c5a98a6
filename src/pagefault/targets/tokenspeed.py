"""The released kernels of tokenspeed, called as our contracts say.

`make peers` fetches two files of the package; this module loads them without the rest of it. What
differs from the contract by the shape of the arguments is bridged here:

- its page table is ordered by batch position, so the rows of the batch are gathered first;
- its ragged slot kernel has no launcher, so it is launched here, after a cumulative sum;
- its decode step has no slots, so the uniform slot kernel follows it;
- its launcher for one chunk is part of a loop over chunks, so the kernel is launched here;
- its chunk capacity is a setting of the server, which is set for each call.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

# What its own launchers use.
TILE_SIZE = 128

INT32_MAX = 2**31 - 1

_server_args: dict[str, int] = {}


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    return module


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Put small modules in the place of those that the files import from their package."""
    utils = "tokenspeed.runtime.utils"
    modules = [
        _module("tokenspeed"),
        _module("tokenspeed.runtime"),
        _module(utils, get_colorful_logger=logging.getLogger),
        _module(f"{utils}.triton", tl=tl, triton=triton),
        _module(f"{utils}.env", global_server_args_dict=_server_args),
    ]
    before = {module.__name__: sys.modules.get(module.__name__) for module in modules}
    sys.modules.update({module.__name__: module for module in modules})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _load(file: str) -> Any:
    folder = Path(os.environ.get("PAGEFAULT_PEERS", ".peers")) / "tokenspeed"
    path = folder / file
    if not path.is_file():
        raise ImportError(
            f"{path} is missing; `make peers` fetches it (PAGEFAULT_PEERS names another folder)"
        )
    name = f"pagefault_peer_tokenspeed_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _stand_ins():
        spec.loader.exec_module(module)
    return module


_slots = _load("runtime/execution/cache_loc_kernel.py")
_chunks = _load("runtime/layers/attention/chunk.py")

chunking = _chunks.chunking


def _batch_ordered(req_to_page: torch.Tensor, req_pool_indices: torch.Tensor) -> torch.Tensor:
    """Return the rows of the batch, [batch_size, max_pages], contiguous."""
    return req_to_page.index_select(0, req_pool_indices)


def compute_out_cache_loc(
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor,
    input_lengths: torch.Tensor,
    cache_start: torch.Tensor,
    req_to_pages: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of every request's new tokens."""
    _slots.compute_out_cache_loc_kernel[(len(req_pool_indices),)](
        input_lengths,
        cache_start,
        _batch_ordered(req_to_pages, req_pool_indices),
        torch.cumsum(input_lengths, dim=0),
        out_cache_loc,
        0,
        page_size=page_size,
        max_pages=req_to_pages.shape[1],
        BLOCK_SIZE=TILE_SIZE,
    )


def compute_out_cache_loc_uniform(
    out_cache_loc: torch.Tensor,
    req_pool_indices: torch.Tensor,
    uniform_input_length: int,
    cache_start: torch.Tensor,
    req_to_pages: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of every request's new tokens, of which all have as many."""
    _slots.compute_out_cache_loc_uniform(
        out_cache_loc,
        uniform_input_length,
        cache_start,
        _batch_ordered(req_to_pages, req_pool_indices),
        page_size,
    )


def fused_decode_input_prep(
    out_cache_loc: torch.Tensor,
    positions: torch.Tensor,
    seq_lens_out: torch.Tensor,
    req_pool_indices: torch.Tensor,
    valid_cache_lengths: torch.Tensor,
    uniform_input_length: int,
    req_to_pages: torch.Tensor,
    page_size: int,
) -> None:
    """Write positions and lengths with its fused kernel, and slots with its uniform one."""
    _slots.fused_decode_input_prep(
        positions, seq_lens_out, req_pool_indices, valid_cache_lengths, uniform_input_length
    )
    _slots.compute_out_cache_loc_uniform(
        out_cache_loc,
        uniform_input_length,
        valid_cache_lengths.index_select(0, req_pool_indices),
        _batch_ordered(req_to_pages, req_pool_indices),
        page_size,
    )


def create_chunked_cache_kv_indices_paged(
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    chunk_starts: torch.Tensor,
    chunk_seq_lens: torch.Tensor,
    chunk_cum_seq_lens: torch.Tensor,
    chunk_kv_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of one chunk."""
    _chunks.create_chunked_cache_kv_indices_paged[(len(req_pool_indices),)](
        _batch_ordered(req_to_page, req_pool_indices),
        chunk_starts,
        chunk_seq_lens,
        chunk_cum_seq_lens,
        chunk_kv_indices,
        req_to_page.shape[1],
        page_size,
    )


def get_chunks_paged(
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_size: int,
    chunk_capacity: int,
) -> Any:
    """Return the chunks of the prefixes, and their slots."""
    _set_chunk_capacity(chunk_capacity)
    page_table = _batch_ordered(req_to_page, req_pool_indices)
    return _chunks.get_chunks_paged(prefix_lens, prefix_lens_cpu, page_table, page_size)


def build_chunked_prefill_metadata_arrays(
    extend_prefix_lens: torch.Tensor,
    extend_prefix_lens_cpu: torch.Tensor,
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_size: int,
    chunk_capacity: int,
) -> Any:
    """Return what an MLA backend needs to attend to the prefixes chunk by chunk."""
    _set_chunk_capacity(chunk_capacity)
    return _chunks.build_chunked_prefill_metadata_arrays(
        extend_prefix_lens,
        extend_prefix_lens_cpu,
        _batch_ordered(req_to_page, req_pool_indices),
        page_size,
    )


def _set_chunk_capacity(chunk_capacity: int) -> None:
    _server_args.update(chunked_prefill_size=chunk_capacity, mla_chunk_multiplier=1)


# The declaration. Faults and what is left out are told one by one in docs/peers.md.

_SLOT_FUNCTIONS = (
    "compute_out_cache_loc",
    "compute_out_cache_loc_uniform",
    "fused_decode_input_prep",
)
_PREFIX_FUNCTIONS = ("get_chunks_paged", "build_chunked_prefill_metadata_arrays")

_FAR = "32-bit positions wrap past 2**31 - 1, and the page table is read far in front of its start"
_NO_COLUMN = "the page index is clamped to column -1, and what lies before the table is read"
_UNGUARDED = "the chunk kernel has no test for the end of the row, and reads what lies behind it"
_TRUSTS = "its launchers check nothing on the host"
_WRAPS = "page_id * page_size is a 32-bit product even where the slots are int64"
_LENGTH_WRAPS = "start + length is a 32-bit sum even where seq_lens_out is int64"
_END_WRAPS = "start + chunk_len is a 32-bit sum, and the chunk ends below 0 where it wraps"
_COPIES_ROWS = "its functions take rows in the batch's order: whole rows are copied for them"
_EMPTY_BATCH = "an empty batch divides the chunk capacity by 0"


def _without_refusals(*refusals: str) -> dict[str, str]:
    return {f"refused: {refusal}": _TRUSTS for refusal in refusals}


_functions: dict[str, dict[str, Any]] = {
    "chunking": {
        "without": _without_refusals("chunk_len", "batch_size", "num_chunks", "start past int32")
    },
    "create_chunked_cache_kv_indices_paged": {
        "holes": "multiply",
        "without": {
            "overflow: some": _UNGUARDED,
            "overflow: all": _UNGUARDED,
            "position past 2**31 - 1": _FAR,
        },
    },
}
for _name in _SLOT_FUNCTIONS:
    _functions[_name] = {
        "without": {"position past 2**31 - 1": _FAR, "no pages in the table": _NO_COLUMN}
    }
for _name in _PREFIX_FUNCTIONS:
    _functions[_name] = {
        "holes": "multiply",
        "without": {
            **_without_refusals(
                "chunk_capacity",
                "more requests than capacity",
                "negative prefix",
                "prefix past the table",
            ),
        },
    }
for _name, _terms in _functions.items():
    if _name != "chunking":  # It takes no page table.
        _terms["without"]["long rows"] = _COPIES_ROWS


def _is_int64(tensor: str) -> Any:
    return lambda case: case.placement(tensor).dtype == "int64"


def _passes_int32(case: Any) -> bool:
    return any(start > INT32_MAX - 64 for start in case.cache_start)


def _chunk_passes_int32(case: Any) -> bool:
    return bool(case.num_chunks * case.chunk_len > INT32_MAX)


_ONE_REQUEST = {"req_pool_indices": [0], "page_size": 2}
# Page 2**30 of 2 tokens: its first slot is 2**31.
_FAR_PAGE = {"num_rows": 1, "max_pages": 1, "edits": [[0, 0, 2**30]]}
# Pages of 2**30 tokens: the position that wraps to -2**31 is on page index -2, two rows up.
_THREE_REQUESTS = {
    "req_pool_indices": [0, 1, 2],
    "cache_start": [0, 0, INT32_MAX],
    "req_to_pages": {
        "num_rows": 3,
        "max_pages": 1,
        "first": -1,
        "step": 1,
        "edits": [[0, 0, 1]],
    },
    "page_size": 2**30,
}
_NO_PREFIXES = {
    "req_pool_indices": [],
    "prefix_lens": [],
    "req_to_page": [],
    "page_size": 1,
    "chunk_capacity": 1,
}


def _fault(signature: str, reason: str, applies: Any, *fields: dict[str, Any]) -> dict[str, Any]:
    case = {name: value for some in fields for name, value in some.items()}
    return {"signature": signature, "reason": reason, "case": case, "applies": applies}


pagefault_target = {
    "holes": "divert page 0 too",
    "without": {"any bytes": "the release promises nothing for contents outside the domain"},
    "functions": _functions,
    "known_faults": [
        _fault(
            "compute_out_cache_loc: value: out_cache_loc: token",
            _WRAPS,
            _is_int64("out_cache_loc"),
            _ONE_REQUEST,
            {"input_lengths": [1], "cache_start": [0], "req_to_pages": _FAR_PAGE},
            {"layout": {"out_cache_loc": {"dtype": "int64"}}},
        ),
        _fault(
            "compute_out_cache_loc: value: out_cache_loc: overflow token",
            _FAR,
            _passes_int32,
            _THREE_REQUESTS,
            {"input_lengths": [1, 0, 2]},
        ),
        _fault(
            "compute_out_cache_loc_uniform: value: out_cache_loc: token",
            _WRAPS,
            _is_int64("out_cache_loc"),
            _ONE_REQUEST,
            {"uniform_input_length": 1, "cache_start": [0], "req_to_pages": _FAR_PAGE},
            {"layout": {"out_cache_loc": {"dtype": "int64"}}},
        ),
        _fault(
            "compute_out_cache_loc_uniform: value: out_cache_loc: overflow token",
            _FAR,
            _passes_int32,
            _THREE_REQUESTS,
            {"uniform_input_length": 2},
        ),
        _fault(
            "fused_decode_input_prep: value: out_cache_loc: token",
            _WRAPS,
            _is_int64("out_cache_loc"),
            _ONE_REQUEST,
            {"uniform_input_length": 1, "valid_cache_lengths": [0], "req_to_pages": _FAR_PAGE},
            {"layout": {"out_cache_loc": {"dtype": "int64"}}},
        ),
        _fault(
            "fused_decode_input_prep: value: seq_lens_out: length",
            _LENGTH_WRAPS,
            _is_int64("seq_lens_out"),
            {
                "req_pool_indices": [0],
                "valid_cache_lengths": [INT32_MAX],
                "uniform_input_length": 1,
                "req_to_pages": [[3]],
                "page_size": 1,
                "layout": {"positions": {"dtype": "int64"}, "seq_lens_out": {"dtype": "int64"}},
            },
        ),
        _fault(
            "create_chunked_cache_kv_indices_paged: value: chunk_kv_indices: token",
            _WRAPS,
            _is_int64("chunk_kv_indices"),
            _ONE_REQUEST,
            {"chunk_starts": [0], "chunk_seq_lens": [1], "gaps": [0], "tail": 0},
            {"req_to_page": _FAR_PAGE, "layout": {"chunk_kv_indices": {"dtype": "int64"}}},
        ),
        _fault(
            "create_chunked_cache_kv_indices_paged: value: chunk_kv_indices: hole token",
            _WRAPS,
            _is_int64("chunk_kv_indices"),
            _ONE_REQUEST,
            {"chunk_starts": [0], "chunk_seq_lens": [1], "gaps": [0], "tail": 0},
            {"req_to_page": [[-(2**30) - 1]], "layout": {"chunk_kv_indices": {"dtype": "int64"}}},
        ),
        _fault(
            "create_chunked_cache_kv_indices_paged: value: chunk_kv_indices: overflow token",
            _UNGUARDED,
            lambda case: True,
            {"req_pool_indices": [0, 1], "chunk_starts": [2, 0], "chunk_seq_lens": [1, 0]},
            {"gaps": [0, 0], "tail": 0, "req_to_page": [[3], [10]], "page_size": 2},
        ),
        *(
            _fault(
                f"chunking: value: chunks.{name}: {name}",
                _END_WRAPS,
                _chunk_passes_int32,
                {"prefix_lens": [0], "num_chunks": 2, "batch_size": 1, "chunk_len": 2**30},
            )
            for name in ("ends", "len_in_chunk", "cum_seq_lens")
        ),
        *(
            _fault(
                f"{name}: raised: ZeroDivisionError",
                _EMPTY_BATCH,
                lambda case: not case.req_pool_indices,
                _NO_PREFIXES,
            )
            for name in _PREFIX_FUNCTIONS
        ),
    ],
    "skipped": {
        "update_req_to_page": "the two files have no such function",
        "update_block_table": "the two files have no such function",
    },
}
