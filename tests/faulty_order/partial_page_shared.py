"""The last page of a prefix is shared too if it is not full, and both owners write behind it."""

from pagefault.scheduler import Engine


class FaultyEngine(Engine):
    def cached_pages(self, source, num_pages):
        if source not in self.requests:
            return super().cached_pages(source, num_pages)
        request = self.requests[source]
        num_pages = min(num_pages, self.shape.max_pages)
        return request.pages[: min(num_pages, -(-request.num_computed // self.shape.page_size))]

    def cached_len(self, source, pages):
        num_tokens = super().cached_len(source, pages)
        if source not in self.requests:
            return num_tokens
        return min(num_tokens, self.requests[source].num_computed)
