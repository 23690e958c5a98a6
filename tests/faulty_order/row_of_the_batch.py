"""Requests are looked up by their place in the batch, and not by their row of the pool."""

from pagefault.scheduler import Engine


class FaultyEngine(Engine):
    def stage(self, name, values):
        if name == "rows":
            values = range(1, len(values) + 1)
        return super().stage(name, list(values))
