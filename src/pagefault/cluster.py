"""A Ray cluster, on whose machines a campaign's processes run.

Ray is asked for here alone: nothing imports this module unless a campaign is to run on a cluster.
Each process has an actor, which Ray places: it starts the process on its own machine, as a campaign
does that has no cluster, and hands on what the process says. So a kernel that ends its process ends
no actor, and where an actor is lost, its machine was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from .device import WORKERS_PER_GPU
from .plan import Plan
from .processes import GONE, End, LocalProcesses

# How long the cluster may take to answer.
CONNECT_SECONDS = 20.0

# How long Ray looks for a place for a worker before nobody waits for it.
PLACE_SECONDS = 60.0

# How long an actor waits for its process to say something before it answers that there is nothing.
ANSWER_SECONDS = 0.5

# Workers leave room on each GPU for processes that make cases smaller, and for no more workers.
WORKER_SHARE_OF_GPU = 0.96 / WORKERS_PER_GPU
OTHER_SHARE_OF_GPU = 0.04 / WORKERS_PER_GPU

# Time that actors get to end their processes.
CLOSE_SECONDS = 5.0

_CONNECT = """
import sys, ray
try:
    ray.init(sys.argv[1], log_to_driver=False)
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""


class ClusterError(Exception):
    """A cluster that can't be used; the message is one line that says why."""


class Cluster:
    """The Ray cluster of an address; this process belongs to it until it ends.

    Args:
        address: As Ray takes it.
        device: "cpu" or "cuda", which the workers are to have.

    Attributes:
        num_workers: A sensible number of workers: cores, or a few for each GPU.

    Raises:
        ClusterError: Nobody answers there, or the cluster has no such device.
    """

    def __init__(self, address: str, device: str) -> None:
        _try_to_connect(address)
        ray.init(address, log_to_driver=False, logging_level="ERROR")
        resources = ray.cluster_resources()
        self.num_workers = int(resources.get("CPU", 0))
        if device == "cuda":
            num_gpus = int(resources.get("GPU", 0))
            self.num_workers = min(self.num_workers, WORKERS_PER_GPU * num_gpus)
        if not self.num_workers:
            raise ClusterError(f"no machine of the cluster has a place for {device!r} workers")

    def processes(self, plan: Plan) -> RayProcesses:
        """Return where the processes of a campaign run."""
        return RayProcesses(plan)


def _try_to_connect(address: str) -> None:
    """Connect from another process: Ray goes on trying for minutes, and can't be interrupted."""
    command = [sys.executable, "-c", _CONNECT, address]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=CONNECT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"nobody has answered in {CONNECT_SECONDS:g} s") from error
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
        raise ClusterError(said[-1])


class ProcessActor:
    """Runs one process on the machine where Ray has placed it."""

    def __init__(self, folder: str, case_seconds: float) -> None:
        # The target may be a path from there.
        os.chdir(folder)
        self._journals = tempfile.TemporaryDirectory(prefix="pagefault-")
        journal_path = Path(self._journals.name).joinpath
        # Ray has threads in this process, whose locks a fork would copy.
        self._processes = LocalProcesses(journal_path, case_seconds, "spawn")

    def start(self, number: int, main: Callable[..., None], arguments: Any, journal: str) -> None:
        self._processes.start(number, main, *arguments, journal=journal)

    def listen(self) -> list[tuple[int, str, Any]]:
        """Return what the process has said, all of it that is there."""
        said = heard = list(self._processes.listen(ANSWER_SECONDS))
        while heard and heard[-1][1] != GONE:
            heard = list(self._processes.listen(0.0))
            said += heard
        if said and said[-1][1] == GONE:
            self._journals.cleanup()
        return said

    def go(self, seconds: float) -> None:
        self._processes.go(seconds)

    def stop(self) -> None:
        self._processes.stop()

    def close(self) -> None:
        self._processes.close()
        self._journals.cleanup()


@dataclass
class _Placement:
    """An actor that has not ended.

    Attributes:
        actor: Ray's handle of it.
        since: When it was asked for.
        is_worker: Whether it is of no use when the time is over.
        is_placed: Whether it has started its process.
    """

    actor: Any
    since: float
    is_worker: bool
    is_placed: bool = False


class RayProcesses:
    """Processes on the machines of a cluster, see `Processes`; Ray chooses which.

    Args:
        plan: The campaign's.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._actor = ray.remote(ProcessActor)
        self._placements: dict[int, _Placement] = {}
        # What each actor has been asked last; the answer is pending.
        self._asked: dict[Any, int] = {}
        self._heard: deque[tuple[int, str, Any]] = deque()
        self._deadline = float("inf")
        self._is_stopping = False

    def start(
        self, number: int, main: Callable[..., None], *arguments: Any, journal: str = ""
    ) -> None:
        is_worker = bool(journal)
        actor = self._actor.options(**self._share(is_worker)).remote(
            os.getcwd(), self._plan.case_seconds
        )
        self._placements[number] = _Placement(actor, time.monotonic(), is_worker)
        self._asked[actor.start.remote(number, main, arguments, journal)] = number

    def listen(self, seconds: float) -> Iterator[tuple[int, str, Any]]:
        asked = list(self._asked)
        if not asked:
            time.sleep(seconds)
        elif ray.wait(asked, timeout=seconds)[0]:
            for ref in ray.wait(asked, num_returns=len(asked), timeout=0)[0]:
                self._take_answer(ref)
        self._give_up_the_late()
        while self._heard:
            yield self._heard.popleft()

    def is_late(self, number: int) -> bool:
        placement = self._placements.get(number)
        if placement is None or placement.is_placed:
            return False
        return time.monotonic() > placement.since + PLACE_SECONDS

    def go(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        for placement in self._placements.values():
            if placement.is_placed:
                placement.actor.go.remote(seconds)

    def stop(self) -> None:
        self._is_stopping = True
        for number, placement in list(self._placements.items()):
            if placement.is_placed:
                placement.actor.stop.remote()
            else:
                self._give_up(number)

    def close(self) -> None:
        placed = [placement for placement in self._placements.values() if placement.is_placed]
        closing = [placement.actor.close.remote() for placement in placed]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for number in list(self._placements):
            self._end(number)

    def _share(self, is_worker: bool) -> dict[str, float]:
        """Return what an actor takes of its machine."""
        if self._plan.device == "cuda":
            share = WORKER_SHARE_OF_GPU if is_worker else OTHER_SHARE_OF_GPU
            return {"num_cpus": 0, "num_gpus": share}
        # What makes cases smaller runs beside the workers, as it does on one machine.
        return {"num_cpus": int(is_worker)}

    def _take_answer(self, ref: Any) -> None:
        """Take what an actor has answered, and ask it for more."""
        number = self._asked.pop(ref)
        placement = self._placements.get(number)
        if placement is None:
            return
        try:
            said = ray.get(ref)
        except RayError as error:
            self._end(number)
            self._heard.extend(_end_of_actor(number, error))
            return
        if not placement.is_placed:
            placement.is_placed = True
            if self._is_stopping:
                placement.actor.stop.remote()
            elif self._deadline < float("inf"):
                placement.actor.go.remote(self._deadline - time.monotonic())
        self._heard.extend(said or [])
        if said and said[-1][1] == GONE:
            self._end(number)
        else:
            self._asked[placement.actor.listen.remote()] = number

    def _give_up_the_late(self) -> None:
        """Give up what has found no place and would now be of no use."""
        for number, placement in list(self._placements.items()):
            is_over = time.monotonic() > self._deadline or not placement.is_worker
            if is_over and self.is_late(number):
                self._give_up(number)

    def _give_up(self, number: int) -> None:
        self._end(number)
        self._heard.append((number, "ended", None))

    def _end(self, number: int) -> None:
        """End an actor, which frees its place; its process ends with it."""
        ray.kill(self._placements.pop(number).actor)


def _end_of_actor(number: int, error: RayError) -> list[tuple[int, str, Any]]:
    """Return what is to be said of a process whose actor does not answer."""
    is_raised = isinstance(error, RayTaskError)
    if is_raised or (isinstance(error, RayActorError) and error.actor_init_failed):
        return [(number, "failed", f"Ray: {error}"), (number, "ended", None)]
    return [(number, GONE, End(None, is_lost=True))]
