"""Copies of kernels/ with a change each."""

import shutil
from pathlib import Path

HERE = Path(__file__).parent


def make(name, edits):
    d = HERE / name
    shutil.rmtree(d, ignore_errors=True)
    shutil.copytree("kernels", d)
    for file, old, new in edits:
        p = d / file
        t = p.read_text()
        assert t.count(old) == 1, (name, file, old, t.count(old))
        p.write_text(t.replace(old, new))


S4 = (
    "ragged_batch.py",
    """    sums = tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), axis=0)
    sums_of_a_and_b, sums_of_c_and_d = tl.split(sums)
    sum_of_a, sum_of_b = tl.split(sums_of_a_and_b)
    sum_of_c, sum_of_d = tl.split(sums_of_c_and_d)
    return sum_of_a, sum_of_b, sum_of_c, sum_of_d""",
    """    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(d, 0)""",
)
EARLY = (
    "ragged_slots.py",
    """    if has_one_window:
        walked_end = write_slots_of_window(""",
    """    any_long = 1
    if has_one_window:
        req = tl.arange(0, window_size)
        any_long = tl.max(load_lens(lens_ptr, req, req < batch_size, num_skipped, max_len), 0) > short_len
    if has_one_window:
      if any_long:
        walked_end = write_slots_of_window(""",
)
make("ka", [])
make("kb", [S4])
make("kc", [S4, EARLY])
