"""The entries that pad a captured batch keep the rows of the step before."""

from pagefault.scheduler import Engine


class FaultyEngine(Engine):
    def pad(self, rows, size):
        self.captured_rows[: rows.numel()] = rows
        return self.captured_rows[:size]
