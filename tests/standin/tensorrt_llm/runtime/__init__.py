"""STAND-IN for tensorrt_llm.runtime: a runner whose next token is a fixed function of the text so far."""

from __future__ import annotations

import json
import time
from pathlib import Path


class ModelRunnerCpp:
    def __init__(self, engine_dir: str, config: dict) -> None:
        self.is_drafter, self.config = "draft" in Path(engine_dir).name, config
        self.gather_generation_logits = False

    @classmethod
    def from_dir(cls, engine_dir, *, max_batch_size, max_input_len, max_output_len, **options):
        build = json.loads((Path(engine_dir) / "config.json").read_text())["build_config"]
        assert max_batch_size <= build["max_batch_size"], "max_batch_size"
        assert max_input_len <= build["max_input_len"], (max_input_len, build["max_input_len"])
        assert max_input_len + max_output_len <= build["max_seq_len"], "max_seq_len"
        print(f"stand-in: loaded {Path(engine_dir).name}", flush=True)
        return cls(str(engine_dir), build)

    def generate(self, batch_input_ids, *, max_new_tokens, end_id, draft_tokens_list=None, streaming=False, **options):
        ids = [int(token) for token in batch_input_ids[0]]
        begin = len(ids)
        drafted = [int(token) for token in (draft_tokens_list or [[]])[0]]
        if streaming:
            return self._stream(ids, begin, max_new_tokens, end_id)
        count = max_new_tokens
        if draft_tokens_list is not None:  # verify: the draft as far as it is right, and one token more
            right = 0
            for token in drafted:
                if token != self._next(ids + drafted[:right]):
                    break
                right += 1
            count = min(right + 1, max_new_tokens)
        for _ in range(count):
            ids.append(self._next(ids))
            if ids[-1] == end_id:
                break
        time.sleep(0.0005)
        return {"output_ids": [[ids]], "sequence_lengths": [[len(ids)]]}

    def _stream(self, ids, begin, count, end_id):
        for _ in range(count):
            time.sleep(0.0005)
            ids = [*ids, self._next(ids)]
            yield {"output_ids": [[ids]], "sequence_lengths": [[len(ids)]]}
            if ids[-1] == end_id:
                return

    def _next(self, ids) -> int:
        token = (31 * sum(ids[-3:]) + len(ids)) % 60 + 5
        is_wrong = self.is_drafter and len(ids) % 4 == 0
        return token + 1 if is_wrong else token
