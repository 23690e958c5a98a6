"""Whether it helps to steer drawing towards sets of edges that are rare; no kernel runs.

Each line: after so many cases of a family, drawn evenly and with a third of them mutated from the
bytes behind rare ones, how many sets of edges, pairs of edges and different cases there were, and
how often the rarest edge was reached. What keeping a corpus costs is printed last.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from itertools import combinations
from random import Random

from pagefault.corpus import Corpus
from pagefault.family import Domain, Family, families
from pagefault.strategies.edges import sampler_of

WITHOUT = frozenset(["wide table", "long rows"])
SHARE = 1 / 3
MOST_SEEDS = 24
REFRESH_EVERY = 64


class Steered(Random):
    """Random numbers whose bytes are now and then those behind a rare case, changed a little."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.times: Counter[object] = Counter()
        self._behind: dict[object, bytes] = {}
        self._rare: list[bytes] = []
        self._last = b""

    def randbytes(self, n: int) -> bytes:
        drawn = super().randbytes(n)
        if self._rare and self.random() < SHARE:
            mutated = bytearray(self._rare[self.randrange(len(self._rare))])
            for _ in range(self.randrange(1, 4)):
                mutated[self.randrange(n)] = self.randrange(256)
            drawn = bytes(mutated)
        self._last = drawn
        return drawn

    def note(self, features: object) -> None:
        """Note what the last bytes have led to."""
        self.times[features] += 1
        self._behind.setdefault(features, self._last)
        if self.times.total() % REFRESH_EVERY == 0:
            rare = sorted(self._behind, key=self.times.__getitem__)[:MOST_SEEDS]
            self._rare = [self._behind[features] for features in rare]


def reached(family: Family, num_cases: int, seed: int, by: str) -> tuple[int, int, int, int]:
    """Return how many sets, pairs and cases there were, and the rarest edge's times.

    Args:
        family: The family.
        num_cases: Cases to draw.
        seed: Of the stream.
        by: "" to draw evenly, or what counts as rare: "sets" or "edges".
    """
    sample = sampler_of(family.strategy(Domain(without=WITHOUT)))
    assert sample is not None
    random = Steered(seed) if by else Random(seed)
    cases, sets, pairs = set(), set(), set()
    times: Counter[str] = Counter()
    for _ in range(num_cases):
        case = sample(random)
        if case is None:
            continue
        edges = family.edges(case)
        times.update(edges)
        if isinstance(random, Steered):
            random.note(edges if by == "sets" else min(edges, key=times.__getitem__, default=""))
        cases.add(case)
        sets.add(edges)
        pairs.update(combinations(sorted(edges), 2))
    return len(sets), len(pairs), len(cases), min(times.values())


def corpus_cost(family: Family, num_cases: int) -> float:
    """Return the microseconds a case that it takes to keep a corpus."""
    sample = sampler_of(family.strategy(Domain(without=WITHOUT)))
    assert sample is not None
    random = Random(1)
    drawn = [case for _ in range(num_cases) if (case := sample(random)) is not None]
    edges = [family.edges(case) for case in drawn]
    corpus = Corpus()
    started = time.perf_counter()
    for case, its_edges in zip(drawn, edges):
        corpus.take(family, case, its_edges)
    return 1e6 * (time.perf_counter() - started) / len(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(f"{options.cases} cases, mean of {options.seeds} seeds")
    print(f"{'family':38} {'drawn':>13} {'sets':>7} {'pairs':>7} {'cases':>7} {'rarest':>7}")
    for name, family in families().items():
        for by in ("", "sets", "edges"):
            runs = [reached(family, options.cases, seed, by) for seed in range(options.seeds)]
            means = [sum(column) / len(runs) for column in zip(*runs)]
            drawn = f"by rare {by}" if by else "evenly"
            print(f"{name:38} {drawn:>13}", *(f"{mean:7.0f}" for mean in means))
    print("keeping a corpus, microseconds a case:")
    for name, family in families().items():
        print(f"{name:38} {corpus_cost(family, 4 * options.cases):7.1f}")


if __name__ == "__main__":
    main()
