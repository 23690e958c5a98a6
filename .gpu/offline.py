"""Compile every kernel for sm_90 without a GPU."""

import sys, itertools, time
import triton
from triton.compiler import ASTSource, compile as tcompile
from triton.backends.compiler import GPUTarget

sys.path.insert(0, "src")
from pagefault.kernels import out_cache_loc as o, chunked_prefill as c, req_to_page as r
from pagefault.kernels.launches import RAGGED_SHAPES


def go(kernel, types, consts, nw):
    names = kernel.arg_names
    sig = {n: types.get(n, "constexpr" if n in consts else "i32") for n in names}
    src = ASTSource(
        fn=kernel, signature=sig, constexprs={(names.index(k),): v for k, v in consts.items()}
    )
    k = tcompile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": nw})
    import subprocess

    return k


bad = 0
only = sys.argv[1:]
for name, s in RAGGED_SHAPES.items():
    cs = dict(
        page_size=64,
        is_by_request=s.is_by_request,
        looks_first=s.looks_first,
        window_size=s.window_size,
        has_one_window=s.has_one_window,
        group_size=s.group_size,
        short_len=s.short_len,
        tile_size=s.tile_size,
    )
    for kern, types in (
        (
            o.compute_out_cache_loc_kernel,
            dict(
                out_cache_loc_ptr="*i32",
                req_pool_indices_ptr="*i64",
                input_lengths_ptr="*i32",
                cache_start_ptr="*i32",
                req_to_page_ptr="*i32",
            ),
        ),
        (
            c.create_chunked_cache_kv_indices_paged_kernel,
            dict(
                req_to_page_ptr="*i32",
                req_pool_indices_ptr="*i64",
                chunk_starts_ptr="*i32",
                chunk_seq_lens_ptr="*i64",
                chunk_cum_seq_lens_ptr="*i32",
                chunk_kv_indices_ptr="*i64",
            ),
        ),
        (
            c.get_chunks_paged_kernel,
            dict(
                prefix_lens_ptr="*i32",
                out_ptr="*i32",
                chunk_ends_ptr="*i64",
                req_to_page_ptr="*i32",
                req_pool_indices_ptr="*i64",
            ),
        ),
        (
            r.update_req_to_page_kernel,
            dict(
                req_to_page_ptr="*i32",
                req_pool_indices_ptr="*i64",
                new_occupied_pages_ptr="*i32",
                new_occupied_pages_num_ptr="*i32",
                pages_copy_starts_ptr="*i32",
            ),
        ),
    ):
        if kern is r.update_req_to_page_kernel and s.is_by_request:
            continue
        t0 = time.time()
        try:
            k = go(kern, types, {a: v for a, v in cs.items() if a in kern.arg_names}, s.num_warps)
            print(
                name,
                kern.__name__,
                "ok",
                round(time.time() - t0, 1),
                "shared",
                k.metadata.shared,
                flush=True,
            )
        except Exception as e:
            bad += 1
            print(name, kern.__name__, "FAILED", str(e)[-900:], flush=True)
print("bad", bad)
