"""Jobs on several processes. A process that dies takes one job with it, which gets a second chance, and no more.

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
from multiprocessing import resource_tracker
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


class Nobody:
    """Does no job: a search ends, as if it were interrupted, where it comes to something that is not known yet."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        if list(jobs):
            raise KeyboardInterrupt
        return iter(())

    def close(self) -> None:
        pass


class _Worker:
    """One process, and our end of its pipe."""

    def __init__(self, search: Search) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, search), daemon=True)
        with _interrupts_wait():
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
        again: set[int] = set()  # whose worker died once: that need not be the job's doing
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
                    if result is not None:
                        yield result
                        continue
                    assert job is not None
                    how = self._bury(worker)
                    if job.number in again:
                        reason = f"its worker died twice: {how}"
                        yield Result(number=job.number, choice=job.choice, status="failed", reason=reason)
                    else:
                        again.add(job.number)
                        left.appendleft(job)
        finally:
            for worker in busy:  # nobody waits for what they are at
                self._workers.remove(worker)
                worker.end()

    def _bury(self, worker: _Worker) -> str:
        """How a worker died; another one takes its place."""
        code = worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._search)
        return f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit code {code}"

    def close(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)
        for worker in self._workers:
            worker.end()
        self._workers.clear()


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes to us afterwards, and never to a process that is started meanwhile, however soon: it would die with a
    traceback before it can say that it does not listen."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which multiprocessing would start first, and let interrupts through afterwards
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, search: Search) -> None:
    """A worker's life. What ends a whole group of processes is for the one that started it; when that is gone, so is the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
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
