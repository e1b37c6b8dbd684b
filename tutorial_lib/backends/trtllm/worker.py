"""run.py kept alive: engines are loaded once, and every `generate()` call is timed on its own.

`examples/run.py` loads its engines, answers and ends; loading 70 GB for every prompt would hide what is measured. The
worker imports that very script, answers one request after another with it, keeps the engines between requests and
notes when each call began and ended and which tokens it brought. With several GPUs every rank runs it (mpirun);
rank 0 writes. Requests and answers are files in a folder, since only one rank could read a pipe.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import BackendUnavailable
from .outputs import Arrival, EngineCall
from .steps import StepError, child_env, end_group

POLL_S = 0.005
Clock = Callable[[], float]


class EngineWorker:
    """The workbook's side: starts the worker, sends run.py's arguments, gets the calls that answered them."""

    def __init__(
        self,
        script: str | Path,
        *,
        launcher: Sequence[str],
        draft_engine_dir: str | None,
        max_input_len: int,
        max_output_len: int,
        log: Path,
        start_timeout_s: float = 1800.0,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workbook-engine-")
        self._number, self._log, self._start_timeout_s = 0, log, start_timeout_s
        self.argv = [
            *launcher, "python3", "-m", "tutorial_lib.backends.trtllm.worker", "--script", str(script),
            "--folder", self._folder.name, "--parent", str(os.getpid()), "--max-input-len", str(max_input_len),
            "--max-output-len", str(max_output_len),
            *(["--draft-engine-dir", draft_engine_dir] if draft_engine_dir else []),
        ]  # fmt: skip
        words = [sys.executable if word == "python3" else word for word in self.argv]
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as stream:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                env=child_env({"PYTHONPATH": path}), start_new_session=True,
            )  # fmt: skip

    def ask(self, arguments: Sequence[str], timeout_s: float = 3600.0) -> list[EngineCall]:
        """The calls that run.py made for `arguments`. Raises `StepError` if it failed or its process ended."""
        self._number += 1
        _write(Path(self._folder.name) / f"request-{self._number}.json", {"arguments": list(arguments)})
        answer = Path(self._folder.name) / f"answer-{self._number}.json"
        limit = time.monotonic() + timeout_s + (self._start_timeout_s if self._number == 1 else 0)
        while not answer.exists():
            code = self._process.poll()
            if code is not None:
                raise StepError(f"run.py ended with code {code}", "an answer", f"read {self._log}")
            if time.monotonic() > limit:
                raise StepError(f"run.py gave no answer within {timeout_s:g} s", "an answer", f"read {self._log}")
            time.sleep(POLL_S)
        found = json.loads(answer.read_text("utf-8"))
        if "error" in found:
            raise StepError(f"run.py failed: {found['error']}", "an answer", f"read {self._log}")
        return [call_from_json(entry) for entry in found["calls"]]

    def close(self) -> None:
        end_group(self._process)
        self._folder.cleanup()


def call_from_json(entry: Mapping[str, Any]) -> EngineCall:
    return EngineCall(
        entry["is_drafter"],
        entry["start"],
        entry["end"],
        tuple(entry["drafted"]),
        tuple(entry["tokens"]),
        tuple(Arrival(*pair) for pair in entry["arrivals"]),
    )


# ---- inside the worker ----------------------------------------------------------------------------------------------


class Recorder:
    """The calls of one request, filled in by the wrapped runner."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.calls: list[dict[str, Any]] = []


def wrap_runner(
    runner_class: Any, recorder: Recorder, *, draft_engine_dir: str | None, max_input_len: int, max_output_len: int
) -> None:
    """Make `ModelRunnerCpp` keep its engines and note its calls. Nothing else about it changes."""
    load, decode = runner_class.from_dir, runner_class.generate
    kept: dict[str, Any] = {}

    def from_dir(engine_dir: str, **options: Any) -> Any:
        name = str(engine_dir)
        if name not in kept:
            for key, limit in (("max_input_len", max_input_len), ("max_output_len", max_output_len)):
                if key in options:
                    options[key] = limit  # of the engine, so that the next prompt may be longer
            kept[name] = load(engine_dir=engine_dir, **options)
            kept[name].workbook_is_drafter = draft_engine_dir is not None and name == draft_engine_dir
        return kept[name]

    def generate(runner: Any, batch_input_ids: Any, *args: Any, **options: Any) -> Any:
        call = {
            "is_drafter": getattr(runner, "workbook_is_drafter", False),
            "start": recorder.clock(),
            "end": 0.0,
            "drafted": [int(token) for token in (options.get("draft_tokens_list") or [[]])[0]],
            "tokens": [],
            "arrivals": [],
        }
        recorder.calls.append(call)
        begin = len(batch_input_ids[0])
        outputs = decode(runner, batch_input_ids, *args, **options)
        if options.get("streaming"):
            return _watched(outputs, call, begin, recorder.clock)
        _note(outputs, call, begin, recorder.clock())
        return outputs

    runner_class.from_dir = staticmethod(from_dir)
    runner_class.generate = generate


def _watched(outputs: Iterator[Any], call: dict[str, Any], begin: int, clock: Clock) -> Iterator[Any]:
    for output in outputs:
        now = clock()
        _note(output, call, begin, now)
        call["arrivals"].append([now - call["start"], len(call["tokens"])])
        yield output


def _note(output: Any, call: dict[str, Any], begin: int, now: float) -> None:
    end = int(output["sequence_lengths"][0][0])
    call["tokens"] = [int(token) for token in output["output_ids"][0][0][begin:end]]
    call["end"] = now


def serve(script: Path, folder: Path, recorder: Recorder, run: Any, *, is_first: bool, parent: int) -> None:
    """Answer requests until the parent is gone."""
    number = 1
    while True:
        request = folder / f"request-{number}.json"
        while not request.exists():
            if not _is_alive(parent):
                return
            time.sleep(POLL_S)
        arguments = json.loads(request.read_text("utf-8"))["arguments"]
        recorder.calls.clear()
        answer: dict[str, Any]
        try:
            run.main(run.parse_arguments(arguments))
            answer = {"calls": list(recorder.calls)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the parent, which raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        if is_first:
            _write(folder / f"answer-{number}.json", answer)
        number += 1


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write(file: Path, content: Mapping[str, Any]) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content), "utf-8")
    partial.replace(file)


def load_script(script: Path) -> Any:
    """run.py as a module; the folder it lies in comes first on the path, as if it had been started."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location("tensorrt_llm_run", script)
    if spec is None or spec.loader is None or not script.is_file():
        raise BackendUnavailable(f"{script} is not there", "examples/run.py of the release", "run the fetch step")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="worker", description=__doc__)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--max-input-len", type=int, required=True)
    parser.add_argument("--max-output-len", type=int, required=True)
    parser.add_argument("--draft-engine-dir")
    options = parser.parse_args(argv)
    run, recorder = load_script(options.script), Recorder()
    wrap_runner(
        run.ModelRunnerCpp,
        recorder,
        draft_engine_dir=options.draft_engine_dir,
        max_input_len=options.max_input_len,
        max_output_len=options.max_output_len,
    )
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK") or "0"
    serve(options.script, options.folder, recorder, run, is_first=rank == "0", parent=options.parent)


if __name__ == "__main__":
    main()
