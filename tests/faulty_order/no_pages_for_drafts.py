"""A decode step gets pages for the token that is certain, and none for its drafts."""

from pagefault.scheduler import Engine


class FaultyEngine(Engine):
    def reserve_drafts(self, request, num_tokens):
        return self.reserve(request, request.num_scheduled + 1)
