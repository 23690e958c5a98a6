"""The host counts the columns of a row that are written, and counts on for the next owner."""

from pagefault.scheduler import Engine


class FaultyEngine(Engine):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.num_written_of_row = {}

    def first_column(self, request):
        num_written = max(request.num_written, self.num_written_of_row.get(request.row, 0))
        num_written = min(num_written, len(request.pages))
        self.num_written_of_row[request.row] = max(num_written, len(request.pages))
        return num_written
