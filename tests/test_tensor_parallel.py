"""The embedded target on three processes: the tokens of one, plain, with a chain and with a tree.

Slices and sums are tested in one process (tests/engine/test_parallel.py), processes in test_ranks.py.
"""

from __future__ import annotations

import pytest
import torch

from tutorial_lib import cli
from tutorial_lib.api import LLM
from tutorial_lib.bench.prompts import load_prompts, render
from tutorial_lib.config import DraftTargetDecodingConfig, EagleDecodingConfig, SamplingParams

pytestmark = pytest.mark.timeout(120)


def one_thread(work):
    """`work()` with one thread in this process, as the ranks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return work()
    finally:
        torch.set_num_threads(threads)


METHODS = {
    "plain": None,
    "chain": DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir="embedded:draft"),
    "tree": EagleDecodingConfig(
        speculative_model_dir="embedded:eagle3", eagle_choices=[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
    ),
}
REAL = SamplingParams(max_tokens=14, logprobs=2)


@pytest.fixture(scope="module")
def alone():
    """Two real prompts and what one process makes of them without a drafter."""
    with LLM("embedded:target", device="cpu") as llm:
        chosen = {prompt.category: prompt for prompt in load_prompts()}
        prompts = [render(chosen[category], llm.tokenizer) for category in ("code", "writing")]
        return prompts, one_thread(lambda: llm.generate(prompts, REAL))


@pytest.mark.parametrize("method", METHODS)
def test_three_ranks_choose_the_tokens_of_one_process(method, alone):
    """Sums over ranks round differently, which could turn a tie. None is near: the second best token of every
    position is a hundred times further away than the largest difference that rounding made."""
    prompts, expected = alone
    with LLM("embedded:target", device="cpu", speculative_config=METHODS[method], tensor_parallel_size=3) as llm:
        assert llm.info["tensor_parallel_size"] == 3
        found = llm.generate(prompts, REAL)
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    assert [g.text for g in found] == [g.text for g in expected]
    if METHODS[method]:
        assert sum(r.accepted for g in found for r in g.rounds) > 3
        assert any(r.parents for g in found for r in g.rounds) == (method == "tree")
    pairs = [(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)]
    noise = max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())
    gap = min(abs(x - y) for x, y in (list(b.values())[:2] for _, b in pairs))
    assert 0 < noise < gap / 100, (noise, gap)


def test_two_ranks_are_refused_by_the_command_with_the_sizes_that_do(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "--device", "cpu", "--prompt", "Hello", "--tensor-parallel-size", "2"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert "tensor_parallel_size is 2" in line and "9 heads, 3 KV heads" in line and "divides them all: 1, 3;" in line
