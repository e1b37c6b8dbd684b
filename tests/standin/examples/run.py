"""STAND-IN for TensorRT-LLM's examples/run.py: the recorded flags, and a draft loop of the same shape."""

from __future__ import annotations

import ast
import csv
from pathlib import Path

import standin_tools
from tensorrt_llm.runtime import ModelRunnerCpp


def parse_arguments(args=None):
    return standin_tools.parse("examples/run.py", args)


def main(args) -> None:
    with open(args.input_file) as file:
        prompt = [int(word) for word in next(csv.reader(file))][-args.max_input_length :]
    lookup = getattr(args, "ngram_config", None) or getattr(args, "prompt_lookup_config", None)
    if args.draft_target_model_config or lookup:
        assert args.kv_cache_enable_block_reuse and args.num_beams == 1
        ids = _draft_loop(args, prompt, lookup)
    else:
        runner = _load(args, args.engine_dir, len(prompt))
        for output in runner.generate([prompt], max_new_tokens=args.max_output_len, end_id=args.end_id, streaming=True):
            ids = output["output_ids"][0][0]
    Path(args.output_csv).write_text(",".join(map(str, ids)) + "\n")


def _load(args, engine_dir: str, input_len: int):
    return ModelRunnerCpp.from_dir(
        engine_dir=engine_dir, max_batch_size=1, max_input_len=input_len, max_output_len=args.max_output_len
    )


def _draft_loop(args, prompt, lookup):
    ids, limit = list(prompt), len(prompt) + args.max_output_len
    target = _load(args, args.engine_dir, limit)
    drafter = _load(args, args.draft_engine_dir, limit) if args.draft_target_model_config else None
    length = ast.literal_eval(args.draft_target_model_config or lookup)[0]
    while len(ids) < limit and (len(ids) == len(prompt) or ids[-1] != args.end_id):
        if drafter is not None:
            out = drafter.generate(batch_input_ids=[ids], max_new_tokens=length, end_id=args.end_id)
            draft = out["output_ids"][0][0][len(ids) :]
        else:
            draft = [args.end_id]
        out = target.generate(
            batch_input_ids=[ids], max_new_tokens=length + 1, end_id=args.end_id, draft_tokens_list=[draft]
        )
        ids = out["output_ids"][0][0][: out["sequence_lengths"][0][0]][:limit]
    return ids


if __name__ == "__main__":
    main(parse_arguments())
