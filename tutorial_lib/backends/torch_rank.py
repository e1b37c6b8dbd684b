"""One rank of a parallel engine: a process with its slice of the target, a whole drafter, and the decode loop.

`python -m tutorial_lib.backends.torch_rank FD`, started by `torch_parallel`, which sends the job and then commands
over the socket FD, the same to every rank. Every rank runs the same loop on the same requests: the scheduler is
deterministic, randomness is counted per request, and what tokens are chosen from is the same on all. So all decide
alike without a message about it; the answers carry the tokens, and the other side compares them.

Why the drafter is whole on every rank: it is small, a slice of it would wait for two all-reduces per layer and draft
token, and drafting on one rank alone would have to send its drafts to the others, who idle meanwhile. It costs its
memory once per rank.

The process ends when its socket does, and with PEER_LOST when another rank is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import SamplingParams
from ..engine.engine import Engine, RequestStream
from ..engine.parallel import PeerLost, Ranks
from ..engine_dir import open_engine
from ..errors import WorkbookError
from ..models import load_tokenizer
from ..results import Generation
from .rank_messages import PEER_LOST, news, pack_error, unpack_config
from .torch_backend import as_checkpoint, assemble
from .torch_drafters import resolve_head

TIMED_REPEATS = 30


class RankTokenizer:
    """Rank 0 writes the text. Another rank needs a tokenizer, a second or more of its start, only where a stop string
    can end a request."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self._real = load, None

    def load(self) -> None:
        self._real = self._real or self._load()

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "" if self._real is None else self._real.decode(ids, **options)


class Rank:
    """The commands. Each runs on all ranks at once; what it returns goes into the answer."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self.engine, self.ranks = engine, ranks
        self.streams: dict[int, RequestStream] = {}
        self.latest: dict[int, Generation] = {}
        self.commands: dict[str, Callable[..., Any]] = {
            "open": self.open,
            "turn": self.turn,
            "nothing": lambda: None,
            "time_steps": lambda rows, context: list(engine.time_steps(rows, context).items()),
            "time_draft": engine.time_draft,
            "time_sums": self.time_sums,
        }

    def open(self, first: int, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]]) -> None:
        asked: list[SamplingParams] = [unpack_config(p) for p in params]
        if any(p.stop_strings for p in asked):
            self.engine.tokenizer.load()
        opened = self.engine.open(prompts, asked)
        self.streams |= dict(enumerate(opened, start=first))

    def turn(self, stream: int, have: dict[str, int]) -> dict[str, Any]:
        """Go on until this stream has grown, at most one turn. The other side says what it has: it may have been
        interrupted before it read an answer."""
        item = next(self.streams[stream], None)
        if item is not None:
            self.latest[stream] = item
        latest = self.latest.get(stream)
        if latest is None:
            return {"tokens": [], "news": None}
        fresh = news(latest, have)
        return {"tokens": fresh["token_ids"], "news": fresh if self.ranks.rank == 0 else None}

    def drop(self, streams: Sequence[int]) -> None:
        for number in streams:
            self.latest.pop(number, None)
            if number in self.streams:
                self.streams.pop(number).close()

    def time_sums(self, rows: Sequence[int]) -> list[tuple[int, float]]:
        """(bytes, median seconds) of one sum over the ranks of so many rows of hidden states."""
        found = []
        for count in rows:
            x = torch.zeros(count, self.engine.target.config.hidden_size, dtype=self.engine.target.dtype)
            samples = []
            for _ in range(TIMED_REPEATS):
                start = time.perf_counter()
                self.ranks.sum(x)
                samples.append(time.perf_counter() - start)
            found.append((x.numel() * x.element_size(), statistics.median(samples)))
        return found


def load(job: dict[str, Any]) -> Rank:
    """Join the other ranks and make this one's engine."""
    ranks = Ranks.join(job["rank"], job["size"], Path(job["store"]), timeout_s=job["timeout_s"])
    config = unpack_config(job["speculative_config"])
    target, drafter = (
        None if path is None else open_engine(path, backend="torch", arch=job["arch"], check_hashes=False)
        for path in (job["target"], job["drafter"])
    )
    if target is None:
        raise ValueError("a job without a target")
    tokenizer = RankTokenizer(partial(load_tokenizer, as_checkpoint(target)))
    if ranks.rank == 0:
        tokenizer.load()
    engine = assemble(
        target,
        drafter,
        resolve_head(config, lambda line: None),
        config,
        tokenizer,
        unpack_config(job["kv_cache_config"]),
        ranks=ranks,
    )
    return Rank(engine, ranks)


def serve(channel: socket.socket) -> None:
    """Answer every line with one line, until there are no more."""
    lines = channel.makefile("r", encoding="utf-8")
    job = json.loads(next(lines))
    torch.set_num_threads(job["threads"])
    rank: Rank | None = None

    def answer(number: int, work: Callable[[], Any]) -> Any:
        reply: dict[str, Any] = {"number": number}
        value = None
        try:
            value = work()
            reply["result"] = None if isinstance(value, Rank) else value
        except WorkbookError as error:
            reply["error"] = pack_error(error)
        reply["collectives_s"] = rank.ranks.seconds if rank else 0.0
        channel.sendall((json.dumps(reply) + "\n").encode())
        return value

    rank = answer(0, lambda: load(job))
    for line in lines:
        if rank is None:  # it could not load, and has said why
            break
        asked = json.loads(line)
        command, number = rank.commands[asked.pop("do")], asked.pop("number")
        rank.drop(asked.pop("dropped"))
        answer(number, partial(command, **asked))
    if job["rank"] == 0:  # in case the other side was killed and could not
        shutil.rmtree(Path(job["store"]).parent, ignore_errors=True)


def main() -> None:
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
    except (PeerLost, ConnectionError) as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(PEER_LOST)
    os._exit(0)  # the other ranks may be gone already: nothing is left to tell them


if __name__ == "__main__":
    main()
