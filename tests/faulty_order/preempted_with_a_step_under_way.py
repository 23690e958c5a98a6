"""A request is preempted without waiting for the step that it is in."""

from pagefault.scheduler import Engine


class FaultyEngine(Engine):
    def preempt(self, request, num_kept=0):
        self.release(request, num_kept)
