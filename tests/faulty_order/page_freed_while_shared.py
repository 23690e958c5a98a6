"""Whoever gives a page back frees it, whether others have it or not."""

from pagefault.scheduler import Engine, PagePool


class Pool(PagePool):
    def release(self, page_id):
        if page_id not in self._free:
            self._free.append(page_id)


class FaultyEngine(Engine):
    pool_type = Pool
