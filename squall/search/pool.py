"""Jobs on several processes. A process that dies takes one job with it, and no more.

Workers are spawned and not forked: a fork would copy the locks of threads that numpy and polars have started here, and hang for
ever on one that was held. Each worker has one job at a time, so that it is always known which job killed it. Knows no result.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Protocol

from squall.search.evaluate import evaluate
from squall.search.result import Job, Result
from squall.search.setting import Workshop
from squall.search.spec import Search


class Workers(Protocol):
    """Whoever does jobs."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """The results, as they come."""
        ...

    def close(self) -> None:
        """No jobs any more."""
        ...


class Inline:
    """Does the jobs itself, one after the other. Nothing protects it from one that kills its process."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        for job in jobs:
            yield evaluate(self._workshop, job)

    def close(self) -> None:
        pass


class _Worker:
    """One process, and our end of its pipe."""

    def __init__(self, search: Search) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, search), daemon=True)
        self.process.start()
        theirs.close()
        self.job: Job | None = None

    def give(self, job: Job) -> None:
        self.job = job
        with contextlib.suppress(OSError):  # it has died already: seen when its answer is read
            self.pipe.send(job)

    def take(self) -> Result | None:
        """Its answer; None where it died over the job."""
        try:
            result: Result = self.pipe.recv()
        except (EOFError, OSError):
            return None
        self.job = None
        return result

    def end(self) -> int | None:
        """Whatever it is doing. Returns how it ended, where it had by itself."""
        self.process.join(0.2)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        self.process.join()
        self.pipe.close()
        self.process.close()
        return code


class Processes:
    """Does jobs on `count` processes, which start when they are needed."""

    def __init__(self, search: Search, count: int) -> None:
        self._search = search
        self._count = count
        self._workers: list[_Worker] = []

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        left = deque(jobs)
        while len(self._workers) < min(self._count, len(left)):
            self._workers.append(_Worker(self._search))
        busy: list[_Worker] = []
        try:
            while left or busy:
                idle = [worker for worker in self._workers if worker not in busy]
                while left and idle:
                    worker = idle.pop()
                    worker.give(left.popleft())
                    busy.append(worker)
                ready = wait([worker.pipe for worker in busy])
                for worker in [worker for worker in busy if worker.pipe in ready]:
                    busy.remove(worker)
                    job = worker.job
                    result = worker.take()
                    yield result if result is not None else self._buried(worker, job)
        finally:
            for worker in busy:  # nobody waits for what they are at
                self._workers.remove(worker)
                worker.end()

    def _buried(self, worker: _Worker, job: Job | None) -> Result:
        """What is said of a job whose worker died; another worker takes the place."""
        assert job is not None
        code = worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._search)
        how = f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit code {code}"
        return Result(number=job.number, choice=job.choice, status="failed", reason=f"its worker died: {how}")

    def close(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        for worker in self._workers:
            worker.end()
        self._workers.clear()


def _work(pipe: Connection, search: Search) -> None:
    """A worker's life. Ctrl-C is for the process that started it; when that is gone, so is the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)  # what is odd about the workload has been said once
    workshop = Workshop(search)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        result = evaluate(workshop, job)
        try:
            pipe.send(result)
        except OSError:
            return
