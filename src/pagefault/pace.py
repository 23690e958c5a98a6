"""Cases a second over the time of a campaign, as samples of bounded number."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MOST_SAMPLES = 256
# What is drawn: so many points at most, each over so long at least.
MOST_POINTS, SECONDS_PER_POINT = 60, 5.0


@dataclass
class Pace:
    """How many cases had run, and when.

    Attributes:
        clock: Returns seconds.
        samples: (seconds since the start, cases by then), never more than `MOST_SAMPLES`.
    """

    clock: Callable[[], float] = time.monotonic
    samples: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    _interval: float = 0.5
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def take(self, cases: int, is_over: bool = False) -> None:
        """Note how many cases have run by now, unless that was noted a moment ago."""
        now = self.clock() - self._started
        if now < self.samples[-1][0] + self._interval and not is_over:
            return
        self.samples.append((now, cases))
        if len(self.samples) > MOST_SAMPLES:
            # A run may be long: every other sample goes, and from now on there are half as many.
            self.samples = [*self.samples[:-1:2], self.samples[-1]]
            self._interval *= 2

    def rates(self) -> list[tuple[float, float]]:
        """Return points of (seconds, cases a second until then)."""
        end = self.samples[-1]
        step = max(SECONDS_PER_POINT, end[0] / MOST_POINTS)
        chosen = [self.samples[0]]
        for sample in self.samples:
            # What is left at the end belongs to the last point: of a moment there is no rate.
            if sample[0] - chosen[-1][0] >= step and end[0] - sample[0] >= step:
                chosen.append(sample)
        if end[0] > chosen[-1][0]:
            chosen.append(end)
        return [
            (now, (cases - before) / (now - then))
            for (then, before), (now, cases) in itertools.pairwise(chosen)
        ]


@dataclass(frozen=True)
class Chart:
    """A line of cases a second over time, in a box of 1000 x 200 units, y downwards.

    Attributes:
        line: The points of a polyline.
        seconds: The right end.
        peak: The top.
        mean: Of the whole time.
    """

    line: str
    seconds: float
    peak: float
    mean: float

    @classmethod
    def of(cls, pace: Pace) -> Chart | None:
        """Return the chart of a pace, or None where there are no two points."""
        rates = pace.rates()
        cases = pace.samples[-1][1] - pace.samples[0][1]
        if len(rates) < 2:
            return None
        seconds, peak = rates[-1][0], max(rate for _, rate in rates)
        points = [(0.0, rates[0][1]), *rates]
        line = " ".join(
            f"{1000 * now / seconds:.1f},{200 - 190 * rate / (peak or 1):.1f}"
            for now, rate in points
        )
        return cls(line, seconds, peak, cases / seconds)
