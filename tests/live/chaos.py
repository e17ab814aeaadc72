"""Runs at random of real replicas in one process, with a tiny model: whatever comes, goes or breaks down, no token changes.

    python -m tests.live.chaos [--runs N] [--first-seed N] [--smollm2] [--home lent|unlent]

A run is told by its seed alone: fleet, links, requests, wishes, who breaks down and when. Each request's tokens are compared with
what one replica says that nobody disturbs; a greedy one may differ where the two best logarithms of probabilities lie within
1e-4, which is counted. The event log has to lead to the same actions again. With --smollm2 the model is the embedded one, links
are as much faster as it is larger, and what happens takes longer. With --home, weights and KV lie where a GPU's would. Knows no
machine's insides.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from msgspec import Struct

from squall.core.events import HandedOver, KvSent, ReplicaLost
from squall.core.types import ROUTER, Role
from squall.eventlog import read
from squall.live.engine.interface import Sampling, TokenOut
from squall.live.head import Head
from squall.live.models import find
from squall.live.transport.segment import HostCopies
from squall.twin.observe import observe
from tests.live.as_devices import HOMES, put_on
from tests.live.checkpoints import VOCABULARY, write_checkpoint
from tests.live.in_process import idle, in_process
from tests.live.test_head import Here, all_of

SHAPE = ("replica.num_blocks=160", "replica.block_size=8", "replica.max_model_len=512", "cluster.gpus_per_node=4",
         "fleet.down_window_s=600", "fleet.idle_ttl_s=0.05", "queue.max_retries=20")  # fmt: skip
LOADS = ("{kind='chain', live=true}", "{kind='p2p', live=true}", "{kind='p2p'}", "{kind='disk'}")
NEAR = 1e-4
"""Two best tokens are as good as each other where their logarithms differ by less."""
PATIENCE_S = 60.0
POOL = 48


class Subject(Struct, frozen=True):
    """Whom we try.

    Attributes:
        model: its checkpoint.
        vocabulary: tokens that prompts are made of.
        stop: what some answers stop at.
        links: so many times as fast as for the tiny model.
        pace: so many times as long as with the tiny model everything takes.
    """

    model: Path
    vocabulary: int = VOCABULARY - 1
    stop: str = "w7"
    links: float = 1.0
    pace: float = 1.0

    @classmethod
    def smollm2(cls) -> Subject:
        """The embedded model. Raises ModelError where it was not pulled."""
        return cls(find("smollm2"), vocabulary=49_000, stop=" a", links=60.0, pace=10.0)


class Asked(Struct, frozen=True):
    """A prompt and how it is to be answered."""

    prompt: tuple[int, ...]
    sampling: Sampling


class Said(Struct, frozen=True):
    """An answer; `gaps`: of a greedy one, between the two best logarithms at each token."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...] = ()


class Case(Struct, frozen=True):
    """A run.

    Attributes:
        settings: of the fleet.
        wishes: how many replicas of which role are wanted, and after how many seconds.
        breaks: when which replica breaks down, if it is there.
        asked: places in the pool of requests.
    """

    settings: tuple[str, ...]
    wishes: tuple[tuple[float, Role, int], ...]
    breaks: tuple[tuple[float, int], ...]
    asked: tuple[int, ...]


def pool(subject: Subject, count: int = POOL) -> list[Asked]:
    """Requests of all kinds, the same at every call."""
    dice = Random(1)
    found = []
    for at in range(count):
        prompt = tuple(dice.randrange(subject.vocabulary) for _ in range(dice.choice([3, 17, 40, 75, 130])))
        stop = (subject.stop,) if at % 5 == 0 else ()
        sampling = Sampling(max_tokens=dice.randint(1, 40), temperature=0.0, logprobs=2, ignore_eos=at % 3 > 0, stop=stop)
        if at % 2:
            sampling = Sampling(dice.randint(1, 40), 1.0, seed=at, top_p=0.9 if at % 4 == 1 else 1.0, stop=stop,
                                frequency_penalty=0.5 if at % 7 == 0 else 0.0)  # fmt: skip
        found.append(Asked(prompt, sampling))
    return found


def case(seed: int, links: float = 1.0) -> Case:
    """Colocated fleets, some of which move what they decode, and disaggregated ones."""
    dice = Random(seed)
    settings = [f"batching.max_num_batched_tokens={dice.choice([24, 48, 96, 512])}",
                f"batching.max_num_seqs={dice.choice([4, 12, 24])}",
                f"batching.prefix_cache={dice.choice(['true', 'false'])}",
                f"serve.link_gbps={links * dice.choice([0.05, 0.2, 1.0]):g}",
                f"load={dice.choice(LOADS)}", f"fleet.drain={dice.choice(['wait', 'move'])}"]  # fmt: skip
    roles = [Role.BOTH] if dice.random() < 0.6 else [Role.PREFILL, Role.DECODE]
    settings += (
        ["fleet.replicas={min=1, max=3}"]
        if len(roles) == 1
        else ["fleet.mode=disaggregated", "fleet.prefill={min=1, max=2}", "fleet.decode={min=1, max=2}"]
    )
    most = 3 if len(roles) == 1 else 2
    wishes = sorted((dice.uniform(0, 0.8), dice.choice(roles), dice.randint(1, most)) for _ in range(dice.randint(1, 4)))
    breaks = [(dice.uniform(0.05, 1.0), dice.randrange(4)) for _ in range(dice.choice([0, 0, 1, 1, 2]))]
    return Case(tuple(settings), tuple(wishes), tuple(sorted(breaks)), tuple(dice.choices(range(POOL), k=dice.randint(6, 24))))


def serving(subject: Subject, log: Path, settings: Sequence[str]) -> AbstractAsyncContextManager[tuple[Head, Here]]:
    return in_process(log, f"model.name={subject.model}", *SHAPE, *settings)


def said(outs: Sequence[TokenOut]) -> Said:
    best = [sorted((candidate.logprob for candidate in out.top), reverse=True) for out in outs if out.top]
    return Said(tuple(out.token for out in outs), tuple(first - second for first, second, *_ in best))


async def undisturbed(subject: Subject, folder: Path, asked: Sequence[Asked]) -> list[Said]:
    """What one replica says."""
    async with serving(subject, folder / "alone.jsonl.zst", ("fleet.replicas=1",)) as (head, _):
        return [said(await all_of(head.submit(each.prompt, each.sampling))) for each in asked]


def difference(found: Said, right: Said) -> str | None:
    """None where they are the same, "near" where the first difference is between two tokens as good as each other."""
    if found.tokens == right.tokens:
        return None
    pairs = zip(found.tokens, right.tokens, strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(found.tokens), len(right.tokens)))
    if at < len(right.gaps) and right.gaps[at] < NEAR:
        return "near"
    return f"token {at} of {len(right.tokens)} differs: {found.tokens[at : at + 3]} instead of {right.tokens[at : at + 3]}"


async def disturb(head: Head, here: Here, case: Case, pace: float) -> int:
    """All that is to happen, at its time. Returns how many workers broke down."""
    broken = 0
    began = asyncio.get_running_loop().time()
    wishes: list[tuple[float, Role | None, int]] = [*case.wishes]
    breaks: list[tuple[float, Role | None, int]] = [(after, None, replica) for after, replica in case.breaks]
    for after, role, number in sorted(wishes + breaks, key=lambda item: item[0]):
        await asyncio.sleep(max(0.0, began + after * pace - asyncio.get_running_loop().time()))
        if role is not None:
            head.want(role, number)
        elif number in here.workers:
            here.break_down(number)
            broken += 1
    return broken


async def play(
    case: Case, subject: Subject, log: Path, asked: Sequence[Asked], right: Sequence[Said]
) -> tuple[Counter[str], list[str]]:
    """What happened, and what was wrong."""
    dice = Random(len(case.asked))
    async with serving(subject, log, case.settings) as (head, here):
        disturbing = asyncio.create_task(disturb(head, here, case, subject.pace))
        streams = []
        for number in case.asked:
            streams.append(head.submit(asked[number].prompt, asked[number].sampling))
            if dice.random() < 0.3:
                await asyncio.sleep(dice.uniform(0, 0.1) * subject.pace)
        answers = await asyncio.gather(*map(all_of, streams))
        broken = await disturbing
        await idle(head)
    differences = [difference(said(answer), right[number]) for answer, number in zip(answers, case.asked, strict=True)]
    wrong = [f"request {at}: {found}" for at, found in enumerate(differences) if found not in (None, "near")]
    seen = observe(read(log))
    wrong += [f"{len(seen.mismatches)} events led to other actions again"] if seen.mismatches else []
    events = Counter(type(record.event) for record in read(log) if record.machine != ROUTER)
    lost = events[ReplicaLost]
    wrong += [f"{lost} replicas lost of which {broken} broke down"] if lost > broken else []
    counted = {"requests": len(answers), "near": differences.count("near"), "batches handed over": events[HandedOver],
               "sendings of KV": events[KvSent], "replicas lost": lost}  # fmt: skip
    return Counter(counted), wrong


async def tally(runs: int, first_seed: int, subject: Subject | None = None) -> tuple[Counter[str], list[str]]:
    """So many runs, of the tiny model by default; what happened in all of them, and what was wrong, with the seed."""
    total: Counter[str] = Counter()
    broken: list[str] = []
    with TemporaryDirectory() as folder:
        subject = subject or Subject(write_checkpoint(Path(folder) / "tiny"))
        asked = pool(subject)
        right = await undisturbed(subject, Path(folder), asked)
        for seed in range(first_seed, first_seed + runs):
            log = Path(folder) / f"{seed}.jsonl.zst"
            try:
                async with asyncio.timeout(PATIENCE_S * subject.pace):
                    counted, wrong = await play(case(seed, subject.links), subject, log, asked, right)
                total += counted
            except Exception as error:
                wrong = [f"{type(error).__name__}: {error}"]
            log.unlink()
            broken += [f"seed {seed}: {each}" for each in wrong]
    HostCopies().sweep(unused=True)  # as a head does at its end, and the workers are here
    return total, broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--smollm2", action="store_true", help="the embedded model instead of a tiny one")
    parser.add_argument("--home", choices=HOMES, default="memory", help="where weights and KV lie: devices lend theirs, or not")
    asked = parser.parse_args()
    put_on(asked.home)
    began = time.perf_counter()
    total, broken = asyncio.run(tally(asked.runs, asked.first_seed, Subject.smollm2() if asked.smollm2 else None))
    told = ", ".join(f"{count:,} {what}" for what, count in total.items())
    sys.stdout.write(f"{asked.runs:,} runs: {told}; {len(broken)} wrong; {time.perf_counter() - began:.0f} s\n")
    sys.stdout.write("".join(f"{line}\n" for line in broken))


if __name__ == "__main__":
    main()
