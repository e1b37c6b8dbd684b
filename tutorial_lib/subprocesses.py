"""Ask something in a process of its own that is gone when the time is up, with everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence


def run_bounded(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str] | None:
    """Run `command` in a process group of its own; None, and the whole group gone, if it is not done in time."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
