"""A setting that `workbook tune` chose, as a file: which drafter with which options, for which target, and why.

`workbook generate --settings FILE` and `workbook bench --settings FILE` take it in place of the drafter's options, and
refuse it for another target: acceptance and times of one model say nothing of the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..drafter_options import DrafterOptions
from ..errors import NOT_JSON, ModelError, OptionError
from ..results import without_folders, write_record

KIND, FORMAT = "settings", 1
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {  # of the options that are no text
    "max_draft_len": (int, "a whole number"),
    "ngram_size": (int, "a whole number"),
    "confidence_threshold": ((int, float), "a number"),
}


@dataclass(frozen=True)
class Settings:
    """options: as on the command line; its drafter None means that plain decoding was fastest. target: its name without
    folders. shape_sha256: of what its configuration says of its shape. found: what the tuner wrote beside it."""

    options: DrafterOptions
    target: str
    shape_sha256: str
    found: Mapping[str, Any]


def write_settings(
    file: str | Path, options: DrafterOptions, target: str, config: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    given = {name: value for name, value in asdict(options).items() if value is not None}
    document = {
        "kind": KIND, "format": FORMAT, "target": without_folders([target]), "shape_sha256": shape_sha256(config),
        "options": given, **found,
    }  # fmt: skip
    write_record(file, document, append=False)


def read_settings(file: str | Path, target: str, config: Mapping[str, Any] | None = None) -> Settings:
    """The settings in `file`. config: the target's, if it is at hand. Raises `OptionError` for a file that is none,
    and for one of another target."""
    document = _document(Path(file))
    name = without_folders([target])
    if document["target"] != name:
        raise OptionError(
            f"{file} was tuned for target {document['target']}", f"one for {name}", "run workbook tune for this target"
        )
    own = shape_sha256(config_of_target(target) if config is None else config)
    if document["shape_sha256"] != own:
        raise OptionError(
            f"{file} was tuned for another {name} (its shape differs)", "one for this model", "run workbook tune again"
        )
    return Settings(DrafterOptions(**document["options"]), name, own, document)


def _document(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text("utf-8"))
    except (OSError, *NOT_JSON) as error:
        raise OptionError(f"settings {file} cannot be read ({error})", "a file that workbook tune wrote") from error
    known = {f.name for f in fields(DrafterOptions)}
    is_ours = isinstance(document, dict) and (document.get("kind"), document.get("format")) == (KIND, FORMAT)
    if not is_ours or not isinstance(document.get("options"), dict) or not set(document["options"]) <= known:
        raise OptionError(f"{file} holds no settings of this version", "a file that workbook tune --out wrote")
    for name, value in document["options"].items():
        kind, words = _KINDS.get(name, (str, "text"))
        if isinstance(value, bool) or not isinstance(value, kind):
            raise OptionError(f"{file} has {name} {value!r}"[:300], words, "run workbook tune again")
    if not {"target", "shape_sha256"} <= set(document):
        raise OptionError(f"{file} does not say for which target it is", "a file that workbook tune --out wrote")
    return document


def shape_sha256(config: Mapping[str, Any]) -> str:
    """Of the numbers that make a model's shape: an engine directory and its checkpoint agree."""
    names = (
        "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads",
    )  # fmt: skip
    text = json.dumps([config.get(name) for name in names], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def config_of_target(target: str) -> Mapping[str, Any]:
    """The configuration of a checkpoint by any of its names, or of an engine directory."""
    from ..models import resolve
    from ..plan import config_of

    try:
        return config_of(target)
    except ModelError:  # a name of the Hub: whoever opens the target fetches it anyway
        return resolve(target).config
