"""The one exception family that users of the workbook see.

A `WorkbookError` is a user's mistake or a missing thing, never a bug: its message is one line that says what was
found, what was needed and what to do. The command line prints it without a traceback and exits with 2; notebooks
show it as it is. Anything else that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations


class WorkbookError(ValueError):
    """A problem the user can solve. `str(error)` is one line: found, needed, what to do."""

    def __init__(self, found: str, needed: str = "", remedy: str = "") -> None:
        self.found, self.needed, self.remedy = found, needed, remedy
        parts = [found.rstrip(".")]
        if needed:
            parts.append(f"needed: {needed.rstrip('.')}")
        if remedy:
            parts.append(f"do this: {remedy.rstrip('.')}")
        super().__init__("; ".join(parts).replace("\n", " "))


class ModelError(WorkbookError):
    """A checkpoint that cannot be found, fetched, read or paired."""


class EngineDirError(WorkbookError):
    """An engine directory that is stale, foreign, truncated, half-built, or too small for what is asked."""


class OptionError(WorkbookError):
    """An option out of range, unknown, or one that the chosen backend cannot honour."""


class PromptError(WorkbookError):
    """A prompt that is empty or does not fit."""


class BackendUnavailable(WorkbookError):
    """A backend whose library or hardware is not here."""


NOT_JSON = (ValueError, RecursionError)  # what json.loads raises; the second for brackets nested too deep
DAMAGED_LOGITS = "the target's logits hold NaN or infinity: the weights or the cache are damaged"
