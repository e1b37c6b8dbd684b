"""Token ids to text while they arrive: several at a time, no broken characters, stop strings found in mid-block.

A token may hold part of a multi-byte character, so text is released only once it decodes cleanly; and text that could
be the beginning of a stop string is held back until that is settled.
"""

from __future__ import annotations

from collections.abc import Sequence

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one request. `push(id)` after every token; `text` is all of it, `streamable` what is safe to show."""

    def __init__(self, tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stop_strings)
        self._ids: list[int] = []
        self._prefix = self._read = 0  # ids before _read are in `text`; decoding from _prefix gives them context
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> bool:
        """Add one token. True if it completes a stop string: `text` is then cut before it and `stopped_by` is set."""
        self._ids.append(token_id)
        known = self._decode(self._prefix, self._read)
        grown = self._decode(self._prefix, len(self._ids))
        if len(grown) > len(known) and not grown.endswith(REPLACEMENT):
            self._release(grown[len(known) :])
            self._prefix, self._read = self._read, len(self._ids)
        return self.stopped_by is not None

    def finish(self) -> str:
        """Release what was held back (an incomplete character decodes to a replacement mark) and return the text."""
        if self.stopped_by is None and self._read < len(self._ids):
            known = self._decode(self._prefix, self._read)
            self._release(self._decode(self._prefix, len(self._ids))[len(known) :])
            self._read = len(self._ids)
        return self.text

    @property
    def streamable(self) -> str:
        """The text without a tail that might still turn into a stop string."""
        if self.stopped_by is not None or not self._stops:
            return self.text
        longest = max(len(s) for s in self._stops) - 1
        for held in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-held:]) for s in self._stops):
                return self.text[:-held]
        return self.text

    def _release(self, piece: str) -> None:
        before = len(self.text)
        self.text += piece
        hits = [(self.text.find(s, max(0, before - len(s) + 1)), s) for s in self._stops]
        hits = [(at, s) for at, s in hits if at >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            self.text = self.text[:at]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True)
