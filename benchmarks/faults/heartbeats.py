"""Heartbeats of 6,144 ranks through torch's real store, on one machine: results/heartbeats.json.

    python benchmarks/faults/heartbeats.py  # 5 minutes of beats, after a minute of starting
    python benchmarks/faults/heartbeats.py --minutes 1 --ranks 1024

96 processes speak for 64 ranks each, over a connection of their own for each process. All send the beats that
`ranks/heartbeat.py` sends, of a job with tensor 8 x pipeline 8 x data 96, when they are due. Ranks 0 and
3,072 are real `Heartbeat`s, which look at the beats of all, with the limits that a run has. It fails if a
beat is larger than 1 KB, if a look takes longer than a second, or if a rank is taken for frozen.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kielo.ranks import heartbeat as module
from kielo.ranks.hang_watch import STEPS, Beat, HangWatch, Progress, beat_seconds, group_key, silent_seconds
from kielo.ranks.local_ranks import free_port
from kielo.ranks.world import World

RESULT = Path(__file__).parents[1] / "results" / "heartbeats.json"
TENSOR, PIPELINE = 8, 8
RANKS_OF_A_PROCESS = 64
MOST_BYTES, MOST_SECONDS = 1000, 1.0
HANG_SECONDS = 20.0  # train.hang_seconds


def groups_of(rank: int, ranks: int) -> list[range]:
    """Returns the groups in which a rank begins collectives: the world, data and tensor ranks."""
    inside = TENSOR * PIPELINE
    tensor = rank // TENSOR * TENSOR
    return [range(ranks), range(rank % inside, ranks, inside), range(tensor, tensor + TENSOR)]


def connect(port: int, is_master: bool, ranks: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, None, is_master, timedelta(seconds=300), wait_for_workers=False)


def speak(number: int, port: int, ranks: int, until: Any) -> None:
    """Sends the beats of this process's ranks until the time; `until` is a shared number of seconds."""
    store = dist.PrefixStore("beats", connect(port, False, ranks))
    watchers = (0, ranks // 2)
    own = range(number * RANKS_OF_A_PROCESS, (number + 1) * RANKS_OF_A_PROCESS)
    entered = {rank: [group_key(group) for group in groups_of(rank, ranks)] for rank in own}
    beat, started = 0, time.monotonic()
    while not until.value or time.monotonic() < until.value:
        beat += 1
        for rank in own:
            if rank not in watchers:
                store.set(f"beat/{rank}", beat_of(beat, entered[rank]).text())
        due = started + beat * beat_seconds(ranks)
        time.sleep(max(0.0, due - time.monotonic()))
    for rank in own:
        if rank not in watchers:
            store.set(f"beat/{rank}", Beat.last(beat + 1).text())


def beat_of(number: int, keys: Sequence[str]) -> Beat:
    return Beat(
        number=number, step=number, doing=STEPS, moves=1000 * number,
        entered=dict.fromkeys(keys, 100 * number),
        at="kielo/train/forward_backward.py:123 in forward_backward_of_the_step", is_inside=True,
        still_seconds=HANG_SECONDS + 3.0, silent_seconds=0.0, stall_seconds=9.0, p99_seconds=3.0,
    )  # fmt: skip


class TimedStore:
    """A store that notes when the beats of all are asked for, and how many bytes they are."""

    def __init__(self, store: dist.Store):
        self._store = store
        self.asked, self.num_bytes = 0.0, 0

    def clone(self) -> "TimedStore":
        return self

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked = time.monotonic()
        found = self._store.multi_get(keys)
        self.num_bytes = max(self.num_bytes, sum(map(len, found)))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def watch(rank: int, port: int, ranks: int, until: Any, answer: Any) -> None:
    """Runs the real heartbeat of a rank that looks at all beats, and sends what its looks took."""
    store = TimedStore(dist.PrefixStore("beats", connect(port, False, ranks)))
    rounds: list[float] = []

    class TimedWatch(HangWatch):
        def stall(self, beats: Sequence[Beat]) -> Any:
            found = super().stall(beats)
            rounds.append(time.monotonic() - store.asked)
            return found

    module.HangWatch = TimedWatch

    def note(message: str, _: bool) -> None:
        answer.send({"rank": rank, "hang": message})

    silent = silent_seconds(HANG_SECONDS, ranks)
    progress = Progress(HANG_SECONDS, silent, 1800.0, 600.0)
    progress.begin(STEPS)
    world = World(rank, ranks, 0, torch.device("cpu"), 600.0, store, "gloo")
    with tempfile.TemporaryDirectory() as folder:
        with module.Heartbeat(world, progress, Path(folder), note):
            step = 0
            while not until.value or time.monotonic() < until.value:
                time.sleep(1.0)
                progress.step_done(step := step + 1)
        told = {"rank": rank, "looks": len(rounds), "bytes_of_a_look": store.num_bytes}
        answer.send(told | {"slowest_look_seconds": round(max(rounds), 3), "hang": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--ranks", type=int, default=6144, help=f"a multiple of {2 * RANKS_OF_A_PROCESS}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks, port = options.ranks, free_port()
    context = multiprocessing.get_context("fork")
    until = context.Value("d", 0.0)
    ear, mouth = context.Pipe(duplex=False)
    clients = [
        context.Process(target=speak, args=(number, port, ranks, until), daemon=True)
        for number in range(ranks // RANKS_OF_A_PROCESS)
    ]
    watchers = [
        context.Process(target=watch, args=(rank, port, ranks, until, mouth)) for rank in (0, ranks // 2)
    ]
    for process in [*clients, *watchers]:
        process.start()
    server = connect(port, True, ranks)  # in this process, after the forks, which copy no thread
    seen, deadline = dist.PrefixStore("beats", server), time.monotonic() + 120
    while not seen.check([f"beat/{rank}" for rank in range(ranks)]):
        if time.monotonic() > deadline:
            for process in watchers:
                process.kill()
            sys.exit("not all ranks have sent a beat within 2 minutes")
        time.sleep(1.0)
    until.value = time.monotonic() + 60 * options.minutes
    answers = []
    while len(answers) < len(watchers) and any(process.is_alive() for process in watchers):
        if ear.poll(1.0):
            answers.append(ear.recv())
    for process in [*watchers, *clients]:  # before the store ends with this process
        process.join()
    size = len(beat_of(10**6, [group_key(group) for group in groups_of(0, ranks)]).text().encode())
    found = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "ranks": ranks,
        "processes": len(clients) + len(watchers),
        "minutes": options.minutes,
        "beat_bytes": size,
        "beat_seconds": beat_seconds(ranks),
        "watchers": answers,
    }
    print(json.dumps(found, indent=1))
    whole = len(answers) == len(watchers) and all(one["hang"] is None for one in answers)
    holds = (
        whole and size <= MOST_BYTES and all(one["slowest_look_seconds"] <= MOST_SECONDS for one in answers)
    )
    if not holds:
        sys.exit("the bars do not hold: a beat of 1 KB, a look of 1 s, and no rank taken for frozen")
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
