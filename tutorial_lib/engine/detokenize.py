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
        self._prefix = self._read = 0  # decoding starts at _prefix: the ids up to _read, all in `text`, are context
        self._released = 0  # characters of that decoding which are in `text`
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> bool:
        """Add one token. True if it completes a stop string: `text` is then cut before it and `stopped_by` is set."""
        self._ids.append(token_id)
        grown = self._decode()
        whole = grown.rstrip(REPLACEMENT)
        if len(whole) > self._released:
            self._release(whole)
            if whole == grown:
                self._prefix, self._read = self._read, len(self._ids)
                self._released = len(self._decode())
        return self.stopped_by is not None

    def finish(self) -> str:
        """Release what was held back (an incomplete character decodes to a replacement mark) and return the text."""
        if self.stopped_by is None:
            self._release(self._decode())
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

    def _release(self, decoded: str) -> None:
        before = len(self.text)
        self.text += decoded[self._released :]
        self._released = len(decoded)
        hits = [(self.text.find(s, max(0, before - len(s) + 1)), s) for s in self._stops]
        hits = [(at, s) for at, s in hits if at >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            self.text = self.text[:at]

    def _decode(self) -> str:
        """Text from `_prefix` on, spaces as they are: tidying them up would change what was already shown."""
        ids = self._ids[self._prefix :]
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
