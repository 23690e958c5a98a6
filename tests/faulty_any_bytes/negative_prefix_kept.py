"""chunking whose ends follow a negative prefix below 0."""

from types import SimpleNamespace

import torch


def chunking(prefix_lens, num_chunks, batch_size, chunk_len):
    if num_chunks < 0 or chunk_len < 1 or batch_size != len(prefix_lens):
        raise ValueError("chunking")
    if batch_size and (num_chunks - 1) * chunk_len >= 2**31:
        raise ValueError("chunk_len")
    chunk_idx = torch.arange(num_chunks, device=prefix_lens.device)[:, None]
    starts = (chunk_idx * chunk_len).expand(num_chunks, batch_size)
    ends = torch.minimum(prefix_lens.long(), starts + chunk_len)
    lens = (ends - starts).clamp(min=0)
    sums = torch.nn.functional.pad(lens.cumsum(1), (1, 0))
    return SimpleNamespace(
        starts=starts.int(), ends=ends.int(), len_in_chunk=lens.int(), cum_seq_lens=sums.int()
    )
