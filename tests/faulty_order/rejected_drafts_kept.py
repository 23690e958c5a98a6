"""Lengths grow by all tokens of a decode step, those that were rejected included."""

from pagefault.scheduler import Engine


class FaultyEngine(Engine):
    def length_after_decode(self, num_accepted, num_tokens):
        return num_tokens
