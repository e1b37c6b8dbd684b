"""A parallel engine: one process per rank, started, told what to do, watched and ended from here.

The surface of `engine.engine.Engine`, as far as `LLM` uses it, with ranks behind it (`torch_rank`). Processes are
started anew, not forked and not by `multiprocessing`, so this works in a notebook, in a script without a main guard
and beside running threads. They meet through a file and talk over the loopback interface.

Every command goes to all ranks and every rank answers. A rank whose socket ends is dead: whoever waits for an answer,
or asks next, gets one `BackendUnavailable` that says which it was, and the others are ended. One that hangs makes the
others' collectives time out, which is the same. Ctrl-C never reaches the ranks (their session is their own): they
finish the turn, and its answer is dropped.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..config import DecodingBaseConfig, KvCacheConfig, SamplingParams
from ..engine_dir import EngineInfo
from ..errors import BackendUnavailable
from ..results import Generation
from .rank_messages import PEER_LOST, grown, known, pack_config, unpack_error

COLLECTIVE_TIMEOUT_S = 60.0  # how long a rank waits for another one that lives but does not come
PATIENCE_S = 3.0  # how long ranks may take to end when they are asked to


def threads_per_rank(size: int) -> int:
    """Threads of one rank's products: this process's own, divided."""
    return max(1, torch.get_num_threads() // size)


class RankProcesses:
    """`size` running ranks. `ask` is not thread-safe; `close` ends them, as do the end of this object and of Python."""

    def __init__(self, size: int, job: dict[str, Any]) -> None:
        self.size, self.collectives_s = size, 0.0
        self.processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._folder = Path(tempfile.mkdtemp(prefix="workbook-ranks-"))
        self._unread = [b""] * size
        self._number, self._end_reason = 0, ""
        self._end = weakref.finalize(self, _end, self.processes, self._sockets, self._folder)
        threads = threads_per_rank(size)
        shared = {
            "size": size,
            "threads": threads,
            "timeout_s": COLLECTIVE_TIMEOUT_S,
            "store": str(self._folder / "meet"),
        }
        try:
            for rank in range(size):
                self._start(rank, threads)
                self._sockets[rank].sendall((json.dumps({**job, **shared, "rank": rank}) + "\n").encode())
            self._answers(0)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, threads: int) -> None:
        package_root = Path(__file__).resolve().parents[2]
        path = os.pathsep.join(p for p in (str(package_root), os.environ.get("PYTHONPATH", "")) if p)
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        with theirs, (self._folder / f"rank{rank}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tutorial_lib.backends.torch_rank", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=package_root,
                    env={
                        **os.environ,
                        "PYTHONPATH": path,
                        "GLOO_SOCKET_IFNAME": loopback,
                        "OMP_NUM_THREADS": str(threads),
                        "TRANSFORMERS_VERBOSITY": "error",
                    },
                    start_new_session=True,
                )
            )

    def ask(self, do: str, *, dropped: Sequence[int] = (), **arguments: Any) -> list[Any]:
        """All ranks' results, by rank. Raises the `WorkbookError` that all of them raised."""
        if self._end_reason:
            raise self._ended()
        self._number += 1
        line = json.dumps({"number": self._number, "do": do, "dropped": list(dropped), **arguments}) + "\n"
        with undisturbed():  # to all or to none
            for channel in self._sockets:
                try:
                    channel.sendall(line.encode())
                except OSError:
                    pass  # its end is seen below
        return self._answers(self._number)

    @property
    def is_open(self) -> bool:
        return not self._end_reason

    def close(self) -> None:
        self._end_reason = self._end_reason or "this LLM was closed"
        self._end()

    def _answers(self, number: int) -> list[Any]:
        answers: dict[int, dict[str, Any]] = {}
        deadline = math.inf  # while none has answered, the ranks' own time limits watch them
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._sockets):
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(answers) < self.size:
                answers |= {rank: found for rank in range(self.size) for found in self._read(rank, number)}
                if answers:
                    deadline = min(deadline, time.monotonic() + COLLECTIVE_TIMEOUT_S)
                missing = [rank for rank in range(self.size) if rank not in answers]
                for key, _ in selector.select(1.0) if missing else ():
                    self._receive(key.data)
                if missing and time.monotonic() > deadline:
                    raise self.give_up(f"rank {missing[0]} of {self.size} did not answer in time")
        errors = [answer.get("error") for answer in answers.values()]
        if any(errors):
            if errors != errors[:1] * self.size:
                raise self.give_up(f"the ranks disagree: {errors}")
            raise unpack_error(errors[0] or [])
        self.collectives_s = answers[0]["collectives_s"]
        return [answers[rank]["result"] for rank in range(self.size)]

    def _receive(self, rank: int) -> None:
        with undisturbed():
            try:
                data = self._sockets[rank].recv(1 << 16)
            except OSError:
                data = b""
            self._unread[rank] += data
        if not data:
            raise self.give_up(self._what_happened())

    def _read(self, rank: int, number: int) -> list[dict[str, Any]]:
        """The answer to `number` if it is here; older ones belonged to what was interrupted."""
        *lines, self._unread[rank] = self._unread[rank].split(b"\n")
        return [answer for answer in map(json.loads, lines) if answer["number"] == number]

    # ------------------------------------------------------------------------------------------------- when one is dead

    def _what_happened(self) -> str:
        """One rank is gone. The others go too, with PEER_LOST; whose exit is another, or missing, was the first."""
        deadline = time.monotonic() + 1.0
        while any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        codes = [process.poll() for process in self.processes]
        first = next((rank for rank, code in enumerate(codes) if code not in (None, 0, PEER_LOST)), None)
        if first is None:
            silent = [rank for rank, code in enumerate(codes) if code is None]
            who = f"rank {silent[0]} of {self.size}" if silent else "a rank"
            return f"{who} did not answer in time"
        code = codes[first] or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {first} of {self.size} {how}{self._last_words(first)}"

    def _last_words(self, rank: int) -> str:
        text = (self._folder / f"rank{rank}.log").read_text("utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f" ({lines[-1][:200]})" if lines else ""

    def give_up(self, reason: str) -> BackendUnavailable:
        """End all ranks; the error that says why, now and to whoever asks later."""
        self._end_reason = reason
        self.close()
        return self._ended()

    def _ended(self) -> BackendUnavailable:
        return BackendUnavailable(self._end_reason, "all ranks of an open LLM", "make a new LLM")


def _end(processes: list[subprocess.Popen[bytes]], sockets: list[socket.socket], folder: Path) -> None:
    """A rank whose socket ends, ends; one that is still there after `PATIENCE_S` is killed."""
    for channel in sockets:
        channel.close()
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C takes effect after the block. Only the main thread can be interrupted; elsewhere this does nothing."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    caught: list[Any] = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: caught.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught and callable(handler):
            handler(*caught[0])


# ----------------------------------------------------------------------------------------------------------- the engine


class ParallelEngine:
    """Several ranks as one engine. See `engine.engine.Engine` for what the methods do."""

    def __init__(
        self,
        target: EngineInfo,
        drafter: EngineInfo | None,
        speculative_config: DecodingBaseConfig | None,
        kv_cache_config: KvCacheConfig | None,
        tensor_parallel_size: int,
        say: Callable[[str], None],
    ) -> None:
        say(f"starting {tensor_parallel_size} processes, each with its slice of {target.checkpoint}")
        job = {
            "target": str(target.path),
            "drafter": None if drafter is None else str(drafter.path),
            "arch": target.arch,
            "speculative_config": pack_config(speculative_config),
            "kv_cache_config": pack_config(kv_cache_config),
        }
        self.ranks = RankProcesses(tensor_parallel_size, job)
        self.abandoned: list[int] = []  # streams that nobody reads any more: told with the next command
        self._opened = 0

    @property
    def collectives_s(self) -> float:
        """Seconds that rank 0 has spent in sums and gathers so far, waiting for the others included."""
        return self.ranks.collectives_s

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        return [stream.result() for stream in self.open(prompts, params)]

    def open(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[RankStream]:
        """Put the prompts in line on every rank. A request without seed gets one here: all ranks need the same."""
        seeded = [p if p.seed is not None else replace(p, seed=secrets.randbits(63)) for p in params]
        first, self._opened = self._opened, self._opened + len(prompts)
        self.ask("open", first=first, prompts=[list(p) for p in prompts], params=[pack_config(p) for p in seeded])
        return [RankStream(self, first + i, prompt) for i, prompt in enumerate(prompts)]

    def time_steps(self, rows: Sequence[int], context: int) -> dict[int, float]:
        return dict(self.ask("time_steps", rows=list(rows), context=context)[0])

    def time_draft(self, max_draft_len: int, context: int) -> float:
        return self.ask("time_draft", max_draft_len=max_draft_len, context=context)[0]

    def time_sums(self, rows: Sequence[int]) -> dict[int, float]:
        """Bytes -> median seconds of one sum over the ranks, of so many rows of hidden states each."""
        return dict(self.ask("time_sums", rows=list(rows))[0])

    def ask(self, do: str, **arguments: Any) -> list[Any]:
        dropped = [self.abandoned.pop() for _ in range(len(self.abandoned))]
        return self.ranks.ask(do, dropped=dropped, **arguments)

    def close(self) -> None:
        self.ranks.close()


class RankStream:
    """A request that runs on all ranks, read as `engine.engine.RequestStream` is."""

    def __init__(self, engine: ParallelEngine, number: int, prompt: Sequence[int]) -> None:
        self._engine, self._number, self._is_over = engine, number, False
        self._so_far = Generation(list(prompt), [], "", "")

    def __iter__(self) -> Iterator[Generation | None]:
        return self

    def __next__(self) -> Generation | None:
        if self._is_over:
            raise StopIteration
        answers = self._engine.ask("turn", stream=self._number, have=known(self._so_far))
        odd = next((rank for rank, found in enumerate(answers) if found["tokens"] != answers[0]["tokens"]), None)
        if odd is not None:
            raise self._engine.ranks.give_up(
                f"rank {odd} decided for tokens {answers[odd]['tokens']} and rank 0 for {answers[0]['tokens']}"
            )
        if not answers[0]["tokens"]:
            return None
        self._so_far = grown(self._so_far, answers[0]["news"])
        if self._so_far.finish_reason:
            self.abandon()
        return self._so_far

    def result(self) -> Generation:
        for _ in self:
            pass
        return self._so_far

    def close(self) -> None:
        """End the request on every rank, now."""
        self.abandon()
        if self._number in self._engine.abandoned and self._engine.ranks.is_open:
            self._engine.ask("nothing")

    def abandon(self) -> None:
        """Nobody reads on: the ranks learn of it with the next command."""
        if not self._is_over:
            self._is_over = True
            self._engine.abandoned.append(self._number)

    __del__ = abandon
