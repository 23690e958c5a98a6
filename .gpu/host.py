import sys, time

sys.path[:0] = [".gpu", "benchmarks"]
import torch, bench_kernels as b
from pagefault.kernels import chunked_prefill as c, req_to_page as r


def t(name, f, n=1000):
    for _ in range(50):
        f()
    torch.cuda.synchronize()
    s = time.perf_counter()
    for i in range(n):
        f()
        if i % 100 == 99:
            torch.cuda.synchronize()
    print(f"{name:40s} {(time.perf_counter() - s) / n * 1e6:7.1f} us", flush=True)


mk = b.makers("cuda")
m = mk["chunk metadata, 8 × 131,072 in 8 chunks (wall)"]()
t("metadata", m.ours, 300)
batch = b.Batch.of([131072] * 8, "cuda", cached=0)
pl, plc = batch.tensor(batch.lens), torch.tensor(batch.lens, dtype=torch.int32)
rows = batch.tensor(batch.rows, torch.int64)
table = batch.table
cl = 131072 // 8
t("_check_prefixes", lambda: c._check_prefixes(pl, plc, table, rows, 64, cl * 8))
t("_check_prefix_lens", lambda: c._check_prefix_lens(plc, 2**31 - 1, cl * 8))
t("_chunk_ends", lambda: c._chunk_ends(plc, 8, cl, True))
ce = c._chunk_ends(plc, 8, cl, True)
t("to device", lambda: ce.to("cuda", non_blocking=True))
dev = table.device
t("to device dev", lambda: ce.to(dev, non_blocking=True))
t("torch.empty pinned", lambda: torch.empty(9, dtype=torch.int64, pin_memory=True))
t("torch.empty 1M", lambda: torch.empty(1 << 20, dtype=torch.int32, device=dev))
sizes = [64, 64, 64, 72] + [cl * 8] * 8
flat = torch.empty(sum(sizes), dtype=torch.int32, device=dev)
t("split", lambda: flat.split(sizes))
t("split_with_sizes", lambda: torch.split_with_sizes(flat, sizes))
t("unsafe_split", lambda: flat.unsafe_split_with_sizes(sizes))
t("view", lambda: flat.view(-1, 8))
t("narrow", lambda: flat.narrow(0, 0, 64))
t("slice", lambda: flat[0:64])
t("as_strided", lambda: flat.as_strided((8, 8), (8, 1), 0))
t("get_chunks", lambda: c._get_chunks(pl, plc, table, rows, 64, 8, cl), 300)
from pagefault.kernels.launches import ragged_shape, count_programs

sh = ragged_shape(8, cl * 8)
cd = ce.to(dev)


def launch():
    c.get_chunks_paged_kernel[(8 * (1 + count_programs(8, cl * 8, cl, sh)),)](
        pl,
        flat,
        cd,
        table,
        rows,
        8,
        8,
        cl,
        table.stride(0),
        *table.shape,
        64,
        *sh.constants,
        num_warps=sh.num_warps,
    )


t("launch get_chunks", launch, 300)
print("programs", 8 * (1 + count_programs(8, cl * 8, cl, sh)))
t("empty kernel", b.empty_kernel_call())
t("numpy()", lambda: plc.numpy())
t("tolist", lambda: plc.tolist())
t("on_device_of", lambda: c.on_device_of(table))
for nm, n in ((256, 1), (8, 2048)):
    w = mk[f"block-table update, {nm} × {n:,} page{'s' if n > 1 else ''} (wall)"]()
    t(w.name, w.ours, 300)
    op = None
    for cell in w.ours.__closure__ or ():
        if hasattr(cell.cell_contents, "sizes"):
            op = cell.cell_contents
        if hasattr(cell.cell_contents, "table"):
            tab = cell.cell_contents.table
    step = r._Step.of(op)
    t("  Step.of", lambda: r._Step.of(op))
    t("  _pack pinned", lambda: r._pack(step, True))
    t("  _pack", lambda: r._pack(step, False))
    import marshal

    t("  marshal", lambda: bytearray(marshal.dumps(step[1:], 2)))
    stream = bytearray(marshal.dumps(step[1:], 2))
    tags = stream[::5]
    t("  tags", lambda: (stream[::5], tags.count(b"i"), tags.count(b"["), tags.count(b"(")))
    e = torch.frombuffer(stream, dtype=torch.uint8).numpy().view(r._MARSHALLED_DTYPE)
    t(
        "  frombuffer",
        lambda: torch.frombuffer(stream, dtype=torch.uint8).numpy().view(r._MARSHALLED_DTYPE),
    )
    v, ii = e["value"], e["tag"] == ord("i")
    t("  is_int", lambda: e["tag"] == ord("i"))
    t("  take", lambda: v[ii])
    x = v[ii]
    nb = torch.empty(len(x), dtype=torch.int32, pin_memory=True)

    def cp():
        nb.numpy()[:] = x

    t("  into pinned", cp)
    t("  empty pinned", lambda: torch.empty(len(x), dtype=torch.int32, pin_memory=True))
    p = r._pack(step, True)
    t("  to device", lambda: p.numbers.to(dev, non_blocking=True))
    t("  _update_from_packed", lambda: r._update_from_packed(tab, p.numbers, nm), 300)

    def checks():
        vectors = p.numbers.numpy()[: 3 * nm].reshape(3, -1)
        rows, sizes, begins = vectors
        return (
            vectors.min() < 0 or rows.max() >= 9999,
            (sizes != p.num_page_ids_of_reqs).any(),
            (begins > 9999999 - sizes).any(),
        )

    t("  checks", checks)
