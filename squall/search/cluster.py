"""Jobs on a Ray cluster: one task a job, as many at once as the cluster has CPUs. Needs the extra `ray`. Knows no result."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from squall.errors import ConfigError, SquallError
from squall.extras import install
from squall.search.evaluate import evaluate
from squall.search.result import Job, Result
from squall.search.setting import Workshop
from squall.search.spec import Search


class Desk:
    """Lives in a process of the cluster; keeps what its jobs share."""

    def __init__(self, search: Search) -> None:
        self._workshop = Workshop(search)

    def do(self, job: Job) -> Result:
        return evaluate(self._workshop, job)


class Cluster:
    """Does jobs on the cluster at `address` ("auto": the one this machine belongs to; "local": this machine alone).

    Raises:
        ConfigError: Ray is not installed.
        SquallError: there is no cluster there.
    """

    def __init__(self, search: Search, address: str) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError:
            raise ConfigError(f"--cluster needs Ray, which is not installed: {install('ray')}") from None
        try:
            self._ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise SquallError(f"--cluster {address}: {str(error).splitlines()[0]}") from None
        count = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._actor = self._ray.remote(num_cpus=1)(Desk)
        self._search = search
        self._desks = [self._actor.remote(search) for _ in range(count)]

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """The results, as they come; a desk that dies takes one job with it."""
        left = list(jobs)[::-1]
        idle = list(range(len(self._desks)))
        busy: dict[Any, tuple[int, Job]] = {}
        while left or busy:
            while left and idle:
                desk, job = idle.pop(), left.pop()
                busy[self._desks[desk].do.remote(job)] = (desk, job)
            for reference in self._ray.wait(list(busy))[0]:
                desk, job = busy.pop(reference)
                try:
                    yield self._ray.get(reference)
                except self._ray.exceptions.RayError as error:
                    self._desks[desk] = self._actor.remote(self._search)
                    why = f"its worker died: {type(error).__name__}"
                    yield Result(number=job.number, choice=job.choice, status="failed", reason=why)
                idle.append(desk)

    def close(self) -> None:
        self._ray.shutdown()
