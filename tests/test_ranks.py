"""Ranks as processes: that they serve like one engine, what a dead, hanging or left one does, how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tutorial_lib.api import LLM
from tutorial_lib.backends import torch_backend, torch_parallel
from tutorial_lib.config import EagleDecodingConfig, NGramDecodingConfig, SamplingParams
from tutorial_lib.errors import BackendUnavailable, ModelError, OptionError, PromptError

pytestmark = pytest.mark.timeout(120)
THREE = "dummy:tiny-llama?seed=5&heads=6&kv_heads=3&intermediate=96"
SMALL = {"max_seq_len": 256, "max_batch_size": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("SPECDEC_WORKBOOK_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def ranks(cache_folder):
    config = NGramDecodingConfig(max_draft_len=3, draft_len_schedule={1: 3, 2: 1})
    with LLM(THREE, speculative_config=config, tensor_parallel_size=3, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def single(cache_folder):
    config = NGramDecodingConfig(max_draft_len=3, draft_len_schedule={1: 3, 2: 1})
    with LLM(THREE, speculative_config=config, **SMALL) as llm:
        yield llm


def are_gone(pids, within_s=5.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "Z" not in state(pid)]:
            return True
        time.sleep(0.05)
    return False


def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def pids_of(llm):
    return [process.pid for process in llm._backend.engine.ranks.processes]


def test_a_mixed_batch_is_served_as_by_one_process(ranks, single):
    """Three requests in two slots: greedy, sampled, with a stop string and log-probabilities; all fields but times."""
    first = single.generate([3, 9], SamplingParams(max_tokens=30)).text
    params = [
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=1.0, seed=5, top_p=0.9, logprobs=1),
        SamplingParams(max_tokens=30, stop=first[10:13]),
    ]
    prompts = [[3, 9, 27], [3, 9] * 5, [3, 9]]
    for ours, theirs in zip(ranks.generate(prompts, params), single.generate(prompts, params), strict=True):
        for name in ("prompt_token_ids", "token_ids", "text", "finish_reason", "stop_reason", "cached_tokens"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert [(r.drafted, r.accepted, r.emitted) for r in ours.rounds] == [
            (r.drafted, r.accepted, r.emitted) for r in theirs.rounds
        ]
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for a, b in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert a == pytest.approx(b, abs=1e-4)
        assert 0 < ours.ttft_s <= ours.latency_s
    assert ours.stop_reason == first[10:13]


def test_sampling_without_a_seed_draws_anew_and_alike_on_every_rank(ranks):
    texts = {tuple(ranks.generate([3, 9], SamplingParams(max_tokens=20, temperature=2.0)).token_ids) for _ in range(3)}
    assert len(texts) == 3


def test_streams_grow_a_mistake_is_a_mistake_and_timing_works(ranks, single):
    stream = ranks.generate_async([3, 9], SamplingParams(max_tokens=12), streaming=True)
    lengths = [len(item.token_ids) for item in stream]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 12 and len(lengths) > 3
    for _ in ranks.generate_async([3, 9], SamplingParams(max_tokens=12), streaming=True):
        break  # left: its slot comes back
    with pytest.raises(PromptError, match="holds id 320"):
        ranks.generate([320])
    with pytest.raises(PromptError, match="together at most 256"):
        ranks.generate([1], SamplingParams(max_tokens=300))
    assert set(ranks.time_steps([1, 4], context=8)) == {1, 4}
    assert ranks.time_draft(3, context=8) > 0
    sums = ranks._backend.engine.time_sums([1, 8])
    assert list(sums) == [64 * 4, 8 * 64 * 4] and min(sums.values()) > 0
    assert ranks._backend.engine.collectives_s > 0
    with pytest.raises(OptionError, match="timing this takes 601 positions"):
        ranks.time_steps([1], context=600)


def test_an_interrupt_leaves_the_ranks_usable(ranks, single):
    expected = single.generate([3, 9], SamplingParams(max_tokens=40)).token_ids
    before = ranks._backend.engine.ranks._number
    timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            ranks.generate([3, 9], SamplingParams(max_tokens=200))
    assert ranks._backend.engine.ranks._number > before
    assert ranks.generate([3, 9], SamplingParams(max_tokens=40)).token_ids == expected


def test_a_killed_rank_ends_all_with_one_message(ranks):
    """The last test of these ranks."""
    pids = pids_of(ranks)
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"^rank 1 of 3 was ended by SIGKILL; .*make a new LLM$"):
        for _ in range(1000):
            ranks.generate([3, 9], SamplingParams(max_tokens=200))
    assert time.monotonic() - start < 10
    assert are_gone(pids)
    with pytest.raises(BackendUnavailable, match="rank 1 of 3"):
        ranks.generate([3, 9])


def test_a_rank_that_hangs_ends_all_and_a_left_llm_leaves_no_process(cache_folder, monkeypatch):
    llm = LLM("dummy:tiny-llama", tensor_parallel_size=2, **SMALL)
    pids = pids_of(llm)
    monkeypatch.setattr(torch_parallel, "COLLECTIVE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(torch_parallel, "PATIENCE_S", 0.2)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(BackendUnavailable, match="rank 1 of 2 did not answer in time"):
        llm.generate([3, 9], SamplingParams(max_tokens=5))
    assert are_gone(pids)


def test_ranks_end_with_a_process_that_is_killed(cache_folder):
    script = (
        "from tutorial_lib import LLM\n"
        "import json, sys, time\n"
        f"llm = LLM('dummy:tiny-llama', tensor_parallel_size=2, **{SMALL!r})\n"
        "print(json.dumps([p.pid for p in llm._backend.engine.ranks.processes]), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        pids = json.loads(process.stdout.readline())
        assert len(pids) == 2 and not are_gone(pids, within_s=0.2)
        process.kill()
    assert are_gone(pids)


def test_what_a_rank_cannot_load_is_the_users_mistake_and_not_a_dead_rank(cache_folder):
    config = EagleDecodingConfig(speculative_model_dir="embedded:eagle3")
    with pytest.raises(ModelError, match=r"embedded:eagle3 was made for a target with hidden size 576; needed: 64;"):
        LLM("dummy:tiny-llama", speculative_config=config, tensor_parallel_size=2, **SMALL)


def test_bad_sizes_and_a_gpu_are_refused_before_anything_starts(cache_folder, monkeypatch):
    monkeypatch.setattr(torch_parallel, "subprocess", None)
    for size, words in ((0, "0; needed: a whole number >= 1"), (True, "True; needed: a whole number"), (5, ": 1, 2;")):
        with pytest.raises(OptionError, match=words):
            LLM("dummy:tiny-llama", tensor_parallel_size=size, **SMALL)
    with pytest.raises(OptionError, match="on a GPU; .* use device='cpu', or backend='tensorrt_llm'"):
        torch_backend._refuse_unsupported(None, None, 2, "cuda")
