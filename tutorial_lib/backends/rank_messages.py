"""What goes over the wire between a parallel engine and its ranks: JSON lines, no code, nothing pickled.

Configurations travel as their class's name and fields. A generation travels as what is new in it: `news` picks that
out on a rank, `grown` puts it behind what the other side has. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .. import config as configs
from .. import errors
from ..results import Generation, Round

PEER_LOST = 75  # exit code of a rank that ends because another one has
GROWING = ("token_ids", "rounds", "logprobs")  # lists of a generation that only ever get longer


def pack_config(config: Any) -> dict[str, Any] | None:
    """A dataclass of `tutorial_lib.config` as its name and fields; paths that exist become absolute."""
    if config is None:
        return None
    packed = {f.name: _plain(getattr(config, f.name)) for f in fields(config)}
    if packed.get("speculative_model") is not None:
        del packed["speculative_model"]  # the other name of speculative_model_dir, which holds the same
    return {"kind": type(config).__name__, **packed}


def _plain(value: Any) -> Any:
    if isinstance(value, (str, Path)):
        return str(Path(value).resolve()) if isinstance(value, Path) or Path(value).is_dir() else value
    if isinstance(value, Mapping):
        return {"pairs": [[_plain(key), _plain(item)] for key, item in value.items()]}  # keys need not be strings
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def unpack_config(packed: Mapping[str, Any] | None) -> Any:
    if packed is None:
        return None
    given = {name: _from_plain(value) for name, value in packed.items() if name != "kind"}
    return getattr(configs, packed["kind"])(**given)


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_from_plain(key): _from_plain(item) for key, item in value["pairs"]}
    return tuple(_from_plain(item) for item in value) if isinstance(value, list) else value


def pack_error(error: errors.WorkbookError) -> list[str]:
    return [type(error).__name__, error.found, error.needed, error.remedy]


def unpack_error(packed: list[str]) -> errors.WorkbookError:
    kind, *words = packed
    return getattr(errors, kind)(*words)


def known(generation: Generation) -> dict[str, int]:
    """How much of the growing lists this side has."""
    return {name: len(getattr(generation, name) or ()) for name in GROWING}


def news(generation: Generation, have: Mapping[str, int]) -> dict[str, Any]:
    """All of `generation` but its prompt and what the other side has."""
    found = {f.name: getattr(generation, f.name) for f in fields(generation)}
    del found["prompt_token_ids"]
    for name in GROWING:
        found[name] = None if found[name] is None else found[name][have[name] :]
    found["rounds"] = [asdict(entry) for entry in found["rounds"]]
    if found["logprobs"] is not None:
        found["logprobs"] = [list(entry.items()) for entry in found["logprobs"]]
    return found


def grown(generation: Generation, fresh: Mapping[str, Any]) -> Generation:
    """`generation` with what `news` found."""
    found: dict[str, Any] = {**fresh, "token_ids": generation.token_ids + fresh["token_ids"]}
    found["rounds"] = generation.rounds + [_round(entry) for entry in fresh["rounds"]]
    if fresh["logprobs"] is not None:
        found["logprobs"] = (generation.logprobs or []) + [dict(map(tuple, entry)) for entry in fresh["logprobs"]]
    return Generation(prompt_token_ids=generation.prompt_token_ids, **found)


def _round(entry: Mapping[str, Any]) -> Round:
    found: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in entry.items()}
    return Round(**found)
