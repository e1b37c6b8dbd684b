"""Where checkpoints come from, and whether two of them make a pair.

A checkpoint is a Hugging Face folder, a Hub id, `embedded:target`, `embedded:draft` (see `embedded.py`) or
`dummy:<shape>` (see `shapes.py`). `resolve` finds or fetches it and checks it without loading a weight: supported
architecture, safetensors only, no file missing or cut short, every tensor present in its right shape. What comes
out behaves the same wherever it came from.

Medusa and EAGLE-3 heads (`embedded:medusa`, `embedded:eagle3`, folders, Hub ids) are checkpoints too; their layouts
differ from project to project and are checked where they are read, against the target (`drafters.checkpoints`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import embedded
from .embedded import Say, cache_dir
from .errors import NOT_JSON, ModelError
from .shapes import (
    ARCHITECTURES,
    COUNTS,
    LazyTensors,
    check_config,
    dummy_config,
    is_tied,
    parameter_bytes,
    parameter_count,
    random_tensors,
    tensor_shapes,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "Checkpoint",
    "PairReport",
    "cache_dir",
    "check_pair",
    "head_kind",
    "load_tokenizer",
    "parameter_bytes",
    "parameter_count",
    "resolve",
    "tensor_shapes",
]


EMBEDDED_HEADS = {  # name -> folder of the package's data
    "embedded:medusa": Path(__file__).parent / "data" / "embedded_medusa",
    "embedded:eagle3": Path(__file__).parent / "data" / "embedded_eagle3",
}
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"  # what the Medusa project calls its file
_SIDE_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Checkpoint:
    """A model as found: `name` as asked for, its Hugging Face `folder` (None for a dummy) and its config.json."""

    name: str
    folder: Path | None
    config: dict[str, Any]
    is_dummy: bool = False
    seed: int = 0

    @property
    def head_kind(self) -> str:
        """ "medusa" or "eagle3" for a head that drafts for a target, "" for a model."""
        return head_kind(self.config)

    def weight_files(self) -> list[Path]:
        """The safetensors files that hold the weights; none for a dummy."""
        return [] if self.folder is None else _weight_files(self.name, self.folder)

    def tensors(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> LazyTensors:
        """Hugging Face name -> tensor on `device`, read (or, for a dummy, made) one by one when asked for.

        `dtype` None keeps what is stored. A tied model has no lm_head.weight, even where its file has a copy.
        """
        if self.folder is None:
            return random_tensors(self.config, self.seed, device, dtype)
        return _stored_tensors(self.folder, self.config, str(device), dtype)

    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end a text: generation_config.json decides, else config.json, else the tokenizer."""
        for source in (self._side_file("generation_config.json"), self.config):
            listed = source.get("eos_token_id")
            if listed is not None:
                return frozenset(listed if isinstance(listed, list) else [listed])
        token = load_tokenizer(self).eos_token_id
        return frozenset() if token is None else frozenset([token])

    def draft_vocab(self) -> torch.Tensor | None:
        """The target ids that a drafter's shortlist head covers, int64 [V_d] ascending; None: all of them."""
        if self.folder is None or not (self.folder / "draft_vocab.safetensors").is_file():
            return None
        from safetensors.torch import load_file

        return load_file(str(self.folder / "draft_vocab.safetensors"))["draft_vocab"].long()

    def fingerprint(self) -> str:
        """SHA-256 that changes when the config, the weights, the tokenizer or the list of EOS ids do.

        Of a weight file the header, the size and 64 blocks spread over it are hashed: that takes milliseconds for any
        size and notices every fine-tune, though not a change of a few single weights.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        if self.folder is None:
            digest.update(f"dummy {self.name} seed {self.seed}".encode())
        else:
            for path in sorted(self.folder.glob("*.safetensors")):
                digest.update(f"{path.name} {path.stat().st_size}".encode())
                for block in _sample(path):
                    digest.update(block)
            for path in (self.folder / name for name in _SIDE_FILES):
                if path.is_file():
                    digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def _side_file(self, name: str) -> dict[str, Any]:
        return {} if self.folder is None or not (self.folder / name).is_file() else _read_json(self.folder / name)


def resolve(name: str | Path, *, say: Say = print) -> Checkpoint:
    """The checkpoint called `name`: a folder, `embedded:target`, `embedded:draft`, `embedded:medusa`,
    `embedded:eagle3`, `dummy:<shape>` or a Hub id.

    `say` gets a line with the size before anything is downloaded. Raises `ModelError`.
    """
    text = str(name)
    if text.startswith("dummy:"):
        config, seed = dummy_config(text)
        return Checkpoint(text, None, config, is_dummy=True, seed=seed)
    if text == "embedded:target":
        return _from_folder(text, embedded.target_folder(say))
    if text == "embedded:draft":
        return _from_folder(text, embedded.draft_folder(say))
    if text in EMBEDDED_HEADS:
        return _from_folder(text, _shipped_head(text))
    folder = Path(text).expanduser()
    if folder.is_dir():
        return _from_folder(text, folder.absolute())
    if _looks_like_hub_id(text):
        return _from_folder(text, _hub_folder(text, say))
    raise ModelError(
        f"model {text!r} is not a folder",
        "a folder with config.json and safetensors, a Hub id (owner/name), embedded:target, embedded:draft, "
        "embedded:medusa, embedded:eagle3 or dummy:<shape>",
        "check the spelling",
    )


def _shipped_head(name: str) -> Path:
    folder = EMBEDDED_HEADS[name]
    missing = [file for file in ("config.json", "model.safetensors") if not (folder / file).is_file()]
    if missing:
        raise ModelError(
            f"{name} is not here: no such head has been trained and shipped with this copy of the workbook",
            f"{' and '.join(missing)} in {folder}",
            "train one with notebook 04, or draft with embedded:draft",
        )
    return folder


def head_kind(config: Mapping[str, Any]) -> str:
    """Which kind of head a config.json describes, "medusa" or "eagle3"; "" for a whole model. Knows the configs of
    SpecForge, the speculators library, vLLM, the EAGLE and the Medusa project."""
    kind = (config.get("architectures") or [""])[0]
    if "medusa_num_heads" in config or config.get("model_type") == "medusa" or "Medusa" in kind:
        return "medusa"
    # The EAGLE project names its heads as it does models; only they have a vocabulary of their own.
    is_eagle = "speculators_model_type" in config or "eagle" in kind.lower() or "draft_vocab_size" in config
    return "eagle3" if is_eagle else ""


def _looks_like_hub_id(text: str) -> bool:
    owner, _, model = text.partition("/")
    return bool(owner and model) and "/" not in model and owner[0] not in ".~" and not set(text) & set(" \\:?")


def _from_folder(name: str, folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json", "a Hugging Face model folder", "point to the folder that holds config.json"
        )
    config = _read_json(folder / "config.json")
    check_config(name, config)
    if head_kind(config):
        _stored_shapes(name, folder)
        return Checkpoint(name, folder, config)
    kinds = config.get("architectures") or ["none named"]
    if kinds[0] not in ARCHITECTURES:
        raise ModelError(
            f"{name} is a {kinds[0]}", f"one of {', '.join(ARCHITECTURES)}", "choose a model of these architectures"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{name} is already quantized ({method})",
            "a checkpoint in float32, bfloat16 or float16",
            "take the original checkpoint; build() quantizes it",
        )
    _check_tensors(name, config, _stored_shapes(name, folder))
    return Checkpoint(name, folder, config)


def _check_tensors(name: str, config: dict[str, Any], stored: dict[str, tuple[int, ...]]) -> None:
    if missing := [key for key in COUNTS if config.get(key) is None]:
        raise ModelError(f"config.json of {name} has no {missing[0]}", "a complete config.json")
    for tensor, shape in tensor_shapes(config).items():
        if tensor not in stored:
            hint = " (tie_word_embeddings is false)" if tensor == "lm_head.weight" else ""
            raise ModelError(f"{name} has no tensor {tensor}{hint}", "every weight of the model", "fetch it again")
        if stored[tensor] != shape:
            raise ModelError(
                f"{tensor} of {name} is {list(stored[tensor])}", f"{list(shape)}, as config.json says", "fetch it again"
            )


def _weight_files(name: str, folder: Path) -> list[Path]:
    """The safetensors files that hold the model: those the index names, or the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ModelError(f"{index} has no weight_map of tensors and files", "one", "fetch the model again")
        files = [folder / file for file in sorted(set(places.values()))]
    elif (folder / MEDUSA_WEIGHTS).is_file():
        files = [folder / MEDUSA_WEIGHTS]
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if files and not missing:
        return files
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles and not list(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name} has its weights only as pickle ({pickles[0]}), which can run any code when it is opened",
            "safetensors",
            "take a revision with safetensors, or convert it where you trust it: save_pretrained() writes safetensors "
            "for a model, safetensors.torch.save_file for a head's tensors",
        )
    raise ModelError(f"{name} lacks {', '.join(missing) or 'weight files'}", "all its safetensors", "fetch it again")


def _stored_shapes(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(name, folder):
        shapes |= _header(file)
    return shapes


_STORED = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"}


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file, from its first kilobytes; `ModelError` if it is cut short."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))
        raw = stream.read(length) if length <= min(size, 100_000_000) else b""
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        if wrong := {str(entry["dtype"]) for entry in entries.values()} - _STORED:
            raise ModelError(f"{file} holds {sorted(wrong)[0]} numbers", f"one of {', '.join(sorted(_STORED))}")
    except ModelError:
        raise
    except (KeyError, TypeError, AttributeError, *NOT_JSON) as error:
        raise ModelError(
            f"{file} is not a safetensors file", "real weights, not a Git LFS pointer", "fetch it again"
        ) from error
    if end != size:
        raise ModelError(f"{file} has {size} bytes", f"{end} bytes, as its header says", "fetch it again")
    return shapes


def _stored_tensors(folder: Path, config: dict[str, Any], device: str, dtype: torch.dtype | None) -> LazyTensors:
    from safetensors import safe_open

    def reader(file: Any, name: str) -> Any:
        return lambda: file.get_tensor(name) if dtype is None else file.get_tensor(name).to(dtype)

    makers = {}
    for path in _weight_files(str(folder), folder):
        file = safe_open(str(path), framework="pt", device=device)
        for name in file.keys():
            if not (name == "lm_head.weight" and is_tied(config)):
                makers[name] = reader(file, name)
    return LazyTensors(makers)


def _sample(path: Path, blocks: int = 64, length: int = 65_536) -> list[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= blocks * length:
            return [file.read()]
        found = []
        for index in range(blocks):
            file.seek(index * (size - length) // (blocks - 1))
            found.append(file.read(length))
        return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *NOT_JSON) as error:
        raise ModelError(f"{path} cannot be read ({error})", "a JSON file", "fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}", "a JSON object", "fetch the model again")
    return content


_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_HUB_LEAVE = ["*/*", "consolidated*"]


def _hub_folder(name: str, say: Say) -> Path:
    """Folder of a Hub model in the Hub's own cache: the latest revision, or without a network what is cached."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return _cached_hub_folder(name, "HF_HUB_OFFLINE is set", say)
    # The HTTP library differs between releases of huggingface_hub; its common error is the base of their own.
    network_errors: Any = (OSError, HfHubHTTPError.__bases__[0])
    try:
        info = HfApi().model_info(name, files_metadata=True, timeout=20)
        wanted = {f.rfilename: f.size or 0 for f in info.siblings or [] if _is_wanted(f.rfilename)}
        missing = sum(size for file, size in wanted.items() if not _is_cached(name, file, info.sha))
        if missing:
            total = embedded.in_mb(sum(wanted.values()))
            say(f"fetching {name} from the Hub: {embedded.in_mb(missing)} of {total} into {constants.HF_HUB_CACHE}")
            embedded.need_space(Path(constants.HF_HUB_CACHE), missing)
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_LEAVE))
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated and this account has no access to it",
            "its licence accepted by the account that is logged in",
            "accept it on the model's page, log in with `hf auth login`, then try again",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is neither a folder here nor a model on the Hub that this account can see",
            "the id of a public model, or a login that may read it",
            "check the spelling, or log in with `hf auth login`",
        ) from error
    except network_errors as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"the Hub answered with status {status}" if status else "the Hub cannot be reached"
        return _cached_hub_folder(name, reason, say)


def _is_wanted(file: str) -> bool:
    return any(fnmatch(file, p) for p in _HUB_FILES) and not any(fnmatch(file, p) for p in _HUB_LEAVE)


def _is_cached(name: str, file: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file, revision=revision), str)


def _cached_hub_folder(name: str, reason: str, say: Say) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_LEAVE, local_files_only=True)
        )
    except OSError as error:
        raise ModelError(
            f"{name} is neither a folder here nor complete in the Hub's cache, and {reason}",
            "all its files in one of them, or a network",
            "connect and try again, or give a folder; embedded:target needs no Hub",
        ) from error
    say(f"{reason}: using the copy of {name} in the Hub's cache")
    return folder


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    """The checkpoint's tokenizer. A dummy gets one token per byte, plus the special ids its config names."""
    if checkpoint.folder is None:
        return _byte_tokenizer(checkpoint)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.folder), local_files_only=True)
    except Exception as error:  # a wrong file makes the library stumble anywhere: it checks little of what it reads
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{checkpoint.name} has no tokenizer that can be loaded ({why})",
            "tokenizer.json and tokenizer_config.json",
            "copy them from the original model",
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"{checkpoint.name} has only a slow tokenizer", "tokenizer.json", "copy it from the model")
    return tokenizer


def _byte_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    stops, bos = sorted(checkpoint.eos_token_ids()), checkpoint.config["bos_token_id"]
    special = {"<|end|>" if i == 0 else f"<|end_{i}|>": stop for i, stop in enumerate(stops)}
    special |= {} if bos is None else {"<|begin|>": bos}
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab={**letters, **special}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if bos is not None:
        core.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", bos)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=None if bos is None else "<|begin|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        model_max_length=checkpoint.config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (
        ("" if bos is None else "{{ bos_token }}")
        + "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
        + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return tokenizer


@dataclass(frozen=True)
class PairReport:
    """What a target and a drafter share. `notes`: differences that are allowed, in words.

    common_vocab_size: ids below it exist in both models' heads. max_seq_len: the shorter of the two contexts.
    """

    common_vocab_size: int
    max_seq_len: int
    notes: tuple[str, ...] = ()


def check_pair(target: Checkpoint, drafter: Checkpoint) -> PairReport:
    """Can `drafter` draft for `target`? Compares tokenizers id by id; `ModelError` names the first id that differs.

    Allowed, and noted: special tokens that one of them has beyond the other's last id, vocabularies padded to
    different sizes, different context lengths, different EOS lists (the target's counts).
    """
    notes = _compare_tokenizers(target, drafter)
    sizes = [c.config["vocab_size"] for c in (target, drafter)]
    if sizes[0] != sizes[1]:
        notes.append(
            f"vocabularies are padded to {sizes[0]} (target) and {sizes[1]} (drafter): ids below both are used"
        )
    contexts = [c.config["max_position_embeddings"] for c in (target, drafter)]
    if contexts[1] < contexts[0]:
        notes.append(f"the drafter's context is {contexts[1]} tokens, the target's {contexts[0]}: it helps up to there")
    stops = [sorted(c.eos_token_ids()) for c in (target, drafter)]
    if stops[0] != stops[1]:
        notes.append(f"EOS ids are {stops[0]} (target) and {stops[1]} (drafter): the target's count")
    return PairReport(min(sizes), min(contexts), tuple(notes))


def _compare_tokenizers(target: Checkpoint, drafter: Checkpoint) -> list[str]:
    if _same_tokenizer_file(target, drafter):
        return []
    tokenizers = [load_tokenizer(target), load_tokenizer(drafter)]
    tables = [{i: text for text, i in tokenizer.get_vocab().items()} for tokenizer in tokenizers]
    shared_end = min(max(table) for table in tables)
    for index in sorted(set(tables[0]) | set(tables[1])):
        ours, theirs = (table.get(index) for table in tables)
        if ours == theirs:
            continue
        owner = 0 if theirs is None else 1
        if index > shared_end and index in tokenizers[owner].added_tokens_decoder:
            continue
        raise ModelError(
            f"{drafter.name} cannot draft for {target.name}: id {index} is {_shown(ours)} in the target's tokenizer "
            f"and {_shown(theirs)} in the drafter's",
            "the same tokenizer",
            "choose a drafter of the target's family",
        )
    extra = [sum(index > shared_end for index in table) for table in tables]
    return [
        f"the {who}'s tokenizer has {count} more special token(s) at its end, from id {shared_end + 1} on"
        for who, count in zip(("target", "drafter"), extra, strict=True)
        if count
    ]


def _same_tokenizer_file(target: Checkpoint, drafter: Checkpoint) -> bool:
    if target.folder is None or drafter.folder is None:
        return False
    files = [c.folder / "tokenizer.json" for c in (target, drafter) if c.folder is not None]
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def _shown(text: str | None) -> str:
    return "not used" if text is None else repr(text)
