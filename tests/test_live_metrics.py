"""Prometheus metrics of an open LLM: what is counted, who may ask, and that the port comes back."""

from __future__ import annotations

import re
import socket
import sys
import urllib.error
import urllib.request

import pytest

from tutorial_lib.api import LLM
from tutorial_lib.config import DraftTargetDecodingConfig, KvCacheConfig, SamplingParams
from tutorial_lib.errors import OptionError
from tutorial_lib.live_metrics import HOST, LiveMetrics
from tutorial_lib.results import Generation, Round

TARGET, DRAFTER = "dummy:tiny-llama?seed=5", "dummy:tiny-llama?seed=5&layers=1"
OF_VLLM = {  # as vLLM 0.24 names them, with its prefix
    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count", "vllm:time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_sum", "vllm:time_per_output_token_seconds_count", "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
}  # fmt: skip


def scrape(url: str) -> dict[str, float]:
    """name{labels but the model's} -> value."""
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    lines = [re.sub(r'model_name="[^"]*",?', "", line) for line in text.splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0].replace("{}", ""): float(line.rsplit(" ", 1)[1]) for line in lines}


def of(values: dict[str, float], name: str) -> float:
    return values[f"workbook:{name}"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model_dir=DRAFTER)
        kv = KvCacheConfig(max_tokens=320)
        options = {"speculative_config": config, "kv_cache_config": kv, "max_batch_size": 2, "device": "cpu"}
        with LLM(TARGET, metrics_port=0, **options) as opened:
            yield opened


def test_counts_are_those_of_the_generations(llm):
    before = scrape(llm.metrics_url)
    done = llm.generate([[1, 2], [3], [4, 5, 6]], [SamplingParams(max_tokens=n) for n in (30, 1, 17)])
    streamed = list(llm.generate_async([7, 8], SamplingParams(max_tokens=20), streaming=True))
    done.append(streamed[-1])
    after = scrape(llm.metrics_url)
    rounds = [r for g in done for r in g.rounds if r.drafted]

    def grown(name):
        return of(after, name) - before.get(f"workbook:{name}", 0.0)

    assert grown("spec_decode_num_drafts_total") == len(rounds) > 10
    assert grown("spec_decode_num_draft_tokens_total") == sum(len(r.drafted) for r in rounds)
    assert grown("spec_decode_num_accepted_tokens_total") == sum(r.accepted for r in rounds) > 0
    for position in range(3):
        name = f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
        assert grown(name) == sum(r.accepted > position for r in rounds)
    assert grown("generation_tokens_total") == 30 + 1 + 17 + 20
    assert grown("time_to_first_token_seconds_count") == 4 and grown("time_per_output_token_seconds_count") == 3
    assert grown("time_to_first_token_seconds_sum") == pytest.approx(sum(g.ttft_s for g in done))
    tpot = sum((g.latency_s - g.ttft_s) / (len(g.token_ids) - 1) for g in done if len(g.token_ids) > 1)
    assert grown("time_per_output_token_seconds_sum") == pytest.approx(tpot)
    names = {re.sub(r"\{.*", "", name).replace("workbook:", "vllm:") for name in after if "_created" not in name}
    assert names == OF_VLLM


def test_gauges_are_of_the_moment_of_asking(llm):
    streams = [llm.generate_async([i] * 20, SamplingParams(max_tokens=60), streaming=True) for i in range(3)]
    next(iter_of := iter(streams[0]))
    values = scrape(llm.metrics_url)
    assert (of(values, "num_requests_running"), of(values, "num_requests_waiting")) == (2, 1)
    assert of(values, "kv_cache_usage_perc") == 2 / 10  # each holds one block of 32, of ten
    iter_of.close()
    for stream in streams:
        stream.abort()
    values = scrape(llm.metrics_url)
    assert [of(values, n) for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")] == [0, 0, 0]


def test_a_request_is_counted_as_it_goes_and_never_twice():
    metrics = LiveMetrics(0, "m")
    try:
        one = Round((7, 7, 7), 2, (7, 7, 8), 0.0, 0.0, 0.0)
        parts = [
            Generation([1], [5], "", "", ttft_s=0.25, latency_s=0.25),
            Generation([1], [5, 7, 7, 8], "", "", [one], ttft_s=0.25, latency_s=0.5, preemptions=1),
            Generation(
                [1], [5, 7, 7, 8, 9], "", "length", [one, Round((), 0, (9,), 0, 0, 0)], 0.25, 1.25, preemptions=1
            ),
        ]
        for before, now in zip([None, *parts], [*parts, parts[-1]], strict=True):
            metrics.observe(now, before)
        found = scrape(metrics.url)
    finally:
        metrics.close()
    wanted = {
        "spec_decode_num_drafts_total": 1, "spec_decode_num_draft_tokens_total": 3, "generation_tokens_total": 5,
        "spec_decode_num_accepted_tokens_total": 2, "num_preemptions_total": 1, "time_to_first_token_seconds_sum": 0.25,
        "time_to_first_token_seconds_count": 1, "time_per_output_token_seconds_sum": 0.25,
    }  # fmt: skip
    assert {name: of(found, name) for name in wanted} == wanted


def test_only_this_machine_may_ask(llm):
    port = int(llm.metrics_url.split(":")[2].split("/")[0])
    assert llm.metrics_url == f"http://127.0.0.1:{port}/metrics" and HOST == "127.0.0.1"
    if not (own := own_address()):
        pytest.skip("this machine has no address but loopback")
    with socket.socket() as caller, pytest.raises(OSError):
        caller.settimeout(3)
        caller.connect((own, port))


def own_address() -> str:
    """An address of this machine that is not loopback; "" if there is none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        own = probe.getsockname()[0]
        return "" if own.startswith("127.") else own


def test_it_is_off_by_default_and_the_port_comes_back(cache):
    with LLM(TARGET, device="cpu") as silent:
        assert silent.metrics_url is None
    for _ in range(2):
        opened = LLM(TARGET, device="cpu", metrics_port=(port := free_port()))
        url = opened.metrics_url
        with pytest.raises(OptionError, match=f"metrics_port {port} on 127.0.0.1 is taken; needed: a free port"):
            LLM("no such model", device="cpu", metrics_port=port)  # told before the model is looked for
        opened.close()
        opened.close()
        with pytest.raises(urllib.error.URLError):
            scrape(url)
        LiveMetrics(port, "m").close()
    with pytest.raises(OptionError):
        LLM("dummy:no-such-shape", device="cpu", tensor_parallel_size=0, metrics_port=port)
    LiveMetrics(port, "m").close()  # what could not be opened keeps no port


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("port", [-1, 70000, "9400", True])
def test_what_is_no_port(port):
    with pytest.raises(OptionError, match="metrics_port is"):
        LiveMetrics(port, "m")


def test_the_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OptionError, match="prometheus-client is missing.*extra `metrics`"):
        LiveMetrics(0, "m")
