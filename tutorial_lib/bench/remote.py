"""An `LLM` in a process of its own, which the measuring process asks over pipes.

For engines that change the process they live in (environment, multiprocessing, logging, CUDA) and would disturb their
neighbours' times. One JSON line per question and answer; what the library prints goes to a log. Latencies are taken
inside the child, by the backend itself; the way there and back is in nobody's figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from .. import errors
from ..backends.trtllm.steps import end_group
from ..config import SamplingParams, SimulatedAcceptance
from ..drafter_options import DrafterOptions, decoding_config
from ..errors import BackendUnavailable, WorkbookError
from ..results import Generation, Round
from .load import Load, Outcome, Served
from .load import serve as load_serve

START_LIMIT_S = 1800.0  # weights of a large model from a slow disk, kernels compiled
ANSWER_LIMIT_S = 1800.0
CLOSE_LIMIT_S = 60.0


class RemoteLLM:
    """As `tutorial_lib.LLM`, for `bench.measure`. tokenizer: the target's, since the child hands out ids and text only.

    options: of `LLM`, plain values only; a drafter as `DrafterOptions`, forced acceptance as a number. Raises what the
    child's `LLM` raises, and `BackendUnavailable` with the log's last line where the child ends.
    """

    def __init__(
        self,
        target: str,
        *,
        backend: str,
        tokenizer: Any,
        drafter: DrafterOptions | None = None,
        acceptance_length: float | None = None,
        limit_s: float = START_LIMIT_S,
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self._backend = backend
        self._folder = tempfile.TemporaryDirectory(prefix=f"workbook-{backend}-")
        self._log = Path(self._folder.name) / "log"
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tutorial_lib.bench.remote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        self._answers: Queue[str | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            wanted = {
                "target": target, "backend": backend, "drafter": asdict(drafter) if drafter else None,
                "acceptance_length": acceptance_length, "options": options,
            }  # fmt: skip
            self.info: dict[str, Any] = self._ask(wanted, limit_s)["info"]
        except BaseException:
            self._end()
            raise

    def generate(self, inputs: Any, sampling_params: SamplingParams | None = None) -> Any:
        is_single = isinstance(inputs[0], int)
        prompts = [list(inputs)] if is_single else [list(ids) for ids in inputs]
        question = {"prompts": prompts, "params": asdict(sampling_params or SamplingParams())}
        found = [generation_from(entry) for entry in self._ask(question, ANSWER_LIMIT_S)["generations"]]
        return found[0] if is_single else found

    def serve(self, load: Load) -> Outcome:
        """`load.serve` on the child's engine: requests that join and leave while others run."""
        found = self._ask({"load": asdict(load)}, ANSWER_LIMIT_S)
        served = [Served(r["arrival_s"], r["opened_s"], generation_from(r["generation"])) for r in found["requests"]]
        return Outcome(served, [(s[0], s[1], s[2], s[3]) for s in found["samples"]])

    def time_steps(self, rows: Sequence[int], context: int = 128) -> dict[int, float]:
        raise errors.OptionError(f"backend {self._backend!r} cannot time its steps apart", "backend 'torch'")

    def time_draft(self, max_draft_len: int, context: int = 128) -> float:
        raise errors.OptionError(f"backend {self._backend!r} cannot time its steps apart", "backend 'torch'")

    def close(self) -> None:
        """End the child, its engine first. Calling it again does nothing."""
        if self._process.poll() is None and self._process.stdin is not None:
            try:
                self._process.stdin.close()  # no more questions
                self._process.wait(timeout=CLOSE_LIMIT_S)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self._end()

    def _end(self) -> None:
        end_group(self._process)
        self._folder.cleanup()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _ask(self, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        line: str | None = None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            line = self._answers.get(timeout=limit_s)
        except OSError:
            pass
        except Empty:
            raise BackendUnavailable(f"{self._backend} gave no answer within {limit_s:g} s", "an answer") from None
        if line is None:
            raise BackendUnavailable(f"the process of {self._backend} ended: {self._last_words()}", "an answer")
        answer = json.loads(line)
        if "error" in answer:
            raise _error_from(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it said nothing"


def generation_from(entry: Mapping[str, Any]) -> Generation:
    """A `Generation` out of `Generation.to_dict()` that went through JSON."""
    of_ids = ("drafted", "emitted", "parents", "path")
    rounds = [Round(**{**r, **{n: tuple(r[n]) for n in of_ids if r.get(n) is not None}}) for r in entry["rounds"]]
    logprobs = entry.get("logprobs")
    if logprobs is not None:
        logprobs = [{int(token): value for token, value in row.items()} for row in logprobs]
    return Generation(**{**entry, "rounds": rounds, "logprobs": logprobs})


def _error_from(said: Mapping[str, str]) -> WorkbookError:
    """The child's error as it was raised there; what is no `WorkbookError` counts as a backend that does not work."""
    kinds = {kind.__name__: kind for kind in WorkbookError.__subclasses__()}
    return kinds.get(said["kind"], BackendUnavailable)(said["found"], said["needed"], said["remedy"])


# ---- inside the child -----------------------------------------------------------------------------------------------


def serve(questions: Any, answer: Callable[[Mapping[str, Any]], None]) -> None:
    """The first line makes an `LLM`, every further one is a call of it; at the end of the lines it is closed."""
    from ..api import LLM

    first = questions.readline()
    if not first:
        return
    wanted = json.loads(first)
    try:
        options = dict(wanted["options"])
        if wanted["drafter"] is not None:
            options["speculative_config"] = decoding_config(DrafterOptions(**wanted["drafter"]))
        if wanted["acceptance_length"] is not None:
            options["simulated_acceptance"] = SimulatedAcceptance(acceptance_length=wanted["acceptance_length"])
        llm = LLM(wanted["target"], backend=wanted["backend"], **options)
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
        answer({"error": _told(error)})
        return
    try:
        answer({"info": llm.info})
        for line in questions:
            question = json.loads(line)
            try:
                answer(_answer(llm, question))
            except Exception as error:  # noqa: BLE001 - likewise
                answer({"error": _told(error)})
    finally:
        llm.close()


def _answer(llm: Any, question: Mapping[str, Any]) -> dict[str, Any]:
    if "load" in question:
        asked = question["load"]
        jobs = tuple((tuple(ids), count) for ids, count in asked["jobs"])
        at_s = None if asked["at_s"] is None else tuple(asked["at_s"])
        outcome = load_serve(llm.engine, Load(jobs, asked["concurrency"], at_s))
        requests = [
            {"arrival_s": r.arrival_s, "opened_s": r.opened_s, "generation": r.done.to_dict()} for r in outcome.requests
        ]
        return {"requests": requests, "samples": outcome.samples}
    found = llm.generate(question["prompts"], SamplingParams(**question["params"]))
    return {"generations": [generation.to_dict() for generation in found]}


def _told(error: Exception) -> dict[str, str]:
    if isinstance(error, WorkbookError):
        return {
            "kind": type(error).__name__, "found": error.found, "needed": error.needed, "remedy": error.remedy,
        }  # fmt: skip
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return {"kind": "BackendUnavailable", "found": said, "needed": "", "remedy": ""}


def main() -> None:
    """Keeps the pipe for answers: whatever a library prints goes where errors go."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, lambda content: print(json.dumps(content), file=pipe, flush=True))


if __name__ == "__main__":
    main()
