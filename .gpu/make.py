from pathlib import Path

src = Path("tests/faulty/compute_out_cache_loc/correct.py").read_text()
load = "        page_id = tl.load("
assert src.count(load) == 1
past = "        tl.load(req_to_pages_ptr + cell + 1, mask=is_token & has_page, volatile=True)\n"
Path(".gpu/past.py").write_text(src.replace(load, past + load))
hang = (
    "    stuck = length\n    while stuck >= 3:\n"
    "        stuck = tl.load(input_lengths_ptr + req_idx, volatile=True).to(tl.int64)\n"
)
loop = "    for tile_start in range"
Path(".gpu/hang.py").write_text(src.replace(loop, hang + loop))
