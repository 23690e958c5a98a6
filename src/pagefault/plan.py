"""A plan: what a campaign is to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# How long one case may take, a first compilation included.
CASE_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What a campaign runs.

    Attributes:
        target: As `load_target` takes it.
        families: Names.
        device: "cpu" or "cuda".
        seconds: How long, from when the workers are ready.
        max_cases: Over all workers, or None.
        seed: Of the campaign; each worker, family and round has one derived from it.
        num_workers: Processes.
        case_seconds: How long one case may take before it counts as a hang.
        memory: Where tensors lie on a GPU, see `Checker`.
        is_soak: Whether garbage and relations have their share, see `soak`.
        strict: Whether needless reads are findings, see `Checker`.
        machine: Name of the machine, which the seeds depend on as well.
    """

    target: str
    families: Sequence[str]
    device: str
    seconds: float
    max_cases: int | None
    seed: int
    num_workers: int
    case_seconds: float = CASE_SECONDS
    memory: str = "mixed"
    is_soak: bool = False
    strict: bool = False
    machine: str = ""

    def stream(self, worker: int, family: str) -> tuple[int, str, int, str]:
        """Return what tells the rounds of a worker and family from all others."""
        return self.seed, self.machine, worker, family
