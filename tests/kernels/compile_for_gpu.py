"""Compile our kernels over ragged batches for a GPU of compute capability 9.0, without one.

    python compile_for_gpu.py [KERNEL …]

where TRITON_INTERPRET is not set. Prints what was compiled, a line each.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagefault.kernels.chunked_prefill import (
    create_chunked_cache_kv_indices_paged_kernel,
    get_chunks_paged_kernel,
)
from pagefault.kernels.launches import RAGGED_SHAPES, RaggedShape
from pagefault.kernels.out_cache_loc import compute_out_cache_loc_kernel
from pagefault.kernels.req_to_page import update_from_packed_kernel, update_req_to_page_kernel

PAGE_SIZE = 64
HOPPER = GPUTarget("cuda", 90, 32)
IS_INT64 = frozenset(["req_pool_indices_ptr", "chunk_ends_ptr", "chunk_kv_indices_ptr"])
KERNELS: tuple[Any, ...] = (
    compute_out_cache_loc_kernel,
    create_chunked_cache_kv_indices_paged_kernel,
    get_chunks_paged_kernel,
    update_req_to_page_kernel,
    update_from_packed_kernel,
)


def compile_in(kernel: Any, shape: RaggedShape) -> int:
    """Return the bytes of machine code of a kernel in a shape."""
    values = {"page_size": PAGE_SIZE, **shape._asdict()}
    signature, constants = {}, {}
    for number, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(number,)] = values[parameter.name]
        elif parameter.name.endswith("_ptr"):
            signature[parameter.name] = "*i64" if parameter.name in IS_INT64 else "*i32"
        else:
            signature[parameter.name] = "i32"
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": shape.num_warps})
    return len(compiled.asm["cubin"])


def main() -> None:
    """Compile them all."""
    chosen = [kernel for kernel in KERNELS if kernel.__name__ in (sys.argv[1:] or kernel.__name__)]
    for name, shape in RAGGED_SHAPES.items():
        for kernel in chosen:
            if not (shape.is_by_request and "update" in kernel.__name__):
                print(f"{kernel.__name__}, {name}: {compile_in(kernel, shape)} bytes", flush=True)


if __name__ == "__main__":
    main()
