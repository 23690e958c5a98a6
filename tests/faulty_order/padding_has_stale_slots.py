"""Slots are computed for a batch that is not padded; those behind it are of the step before."""

from pagefault.scheduler import Engine


class FaultyEngine(Engine):
    def decode_slots(self, way, rows, batch_size, num_tokens):
        _, starts = super().decode_slots(way, rows[:batch_size], batch_size, num_tokens)
        return self.captured_slots[: rows.numel() * num_tokens].tolist(), starts
