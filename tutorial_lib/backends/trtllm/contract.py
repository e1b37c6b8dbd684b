"""The recorded facts of TensorRT-LLM's command lines and classes, and the checks of ours against them.

The library cannot be installed on most machines, so `data/trtllm_contract.json` keeps the names, types, choices and
defaults of the releases that were read; its `provenance` says how sure each is. Every command and call that the
workbook plans is checked here: an unknown, misspelt or removed name raises `ContractViolation`, which is a defect of
ours and never the user's mistake.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NoReturn

from .support import Version

DATA = Path(__file__).parents[2] / "data" / "trtllm_contract.json"
LAUNCHERS = ("mpirun", "srun", "trtllm-llmapi-launch")
OTHER_TOOLS = ("git", "hf", "huggingface-cli", "workbook")  # not TensorRT-LLM's: nothing recorded


class ContractViolation(ValueError):
    """A command line or call that the record of that release does not know."""


@dataclass(frozen=True)
class Record:
    """What is recorded for one release. `is_exact`: it was read from that very release."""

    name: str
    is_exact: bool
    tools: Mapping[str, Any]
    classes: Mapping[str, Any]
    decoding_type: Mapping[str, str]
    methods: Mapping[str, Any]
    since: Mapping[str, str]


@cache
def load() -> dict[str, Any]:
    return json.loads(DATA.read_text("utf-8"))


def record_for(version: Version) -> Record:
    """The record that speaks for `version`: its own, else the nearest that shares its flows."""
    if version.release >= (1, 3):
        name = "main"
    elif version.release >= (1, 0):
        name = "1.2.1"
    else:
        name = "0.14.0" if version.release == (0, 14) else "0.15.0"
    records = load()["records"]
    own = records[name]
    base = records[own["base"]] if "base" in own else {}

    def merged(part: str) -> dict[str, Any]:
        return {**base.get(part, {}), **own.get(part, {})}

    tools = dict(own["tools"])  # what main no longer lists was removed
    if (0, 19) <= version.release < (1, 0):  # the folder moved; nothing else is recorded of these releases
        tools["examples/models/core/llama/convert_checkpoint.py"] = tools["examples/llama/convert_checkpoint.py"]
    is_exact = version.text in (name, name.removesuffix(".0"))
    return Record(
        name, is_exact, tools, merged("classes"), own.get("decoding_type", {}), merged("methods"), merged("since")
    )


# ---- command lines --------------------------------------------------------------------------------------------------


def check_argv(record: Record, argv: Sequence[str]) -> argparse.Namespace | None:
    """Parse `argv` as the release would; None for a tool that is not TensorRT-LLM's. Raises `ContractViolation`."""
    tool, rest = split_tool(argv)
    if tool in OTHER_TOOLS:
        return None
    if tool not in record.tools:
        raise ContractViolation(f"{tool} is not recorded for {record.name}")
    table = record.tools[tool]
    if isinstance(table, list):
        return make_parser(tool, table).parse_args(rest)
    command = next((word for word in rest if word in table and word != "global"), None)
    if command is None:
        raise ContractViolation(f"{tool} without one of its commands {sorted(set(table) - {'global'})}")
    at = rest.index(command)
    found = make_parser(tool, table["global"]).parse_args(rest[:at])
    return make_parser(f"{tool} {command}", table[command]).parse_args(rest[at + 1 :], found)


def split_tool(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The tool that `argv` starts, under its recorded name, and its arguments: launchers and `python3` taken off."""
    words = list(argv)
    while words and words[0] in LAUNCHERS:
        words = _after_launcher(words)
    if not words:
        raise ContractViolation("an empty command")
    if words[0] == "python3":
        if words[1:2] == ["-m"]:
            return "workbook", words[2:]
        parts = PurePath(words[1]).parts
        if "examples" not in parts:
            raise ContractViolation(f"{words[1]} is no example of TensorRT-LLM")
        return "/".join(parts[parts.index("examples") :]), words[2:]
    return words[0], words[1:]


def _after_launcher(words: list[str]) -> list[str]:
    launcher, rest = words[0], words[1:]
    if launcher == "trtllm-llmapi-launch":
        return rest
    takes_value = {"mpirun": ("-n", "-np"), "srun": ("-N", "--ntasks", "--ntasks-per-node", "--mpi")}[launcher]
    alone = {"mpirun": ("--allow-run-as-root",), "srun": ()}[launcher]
    while rest and rest[0].startswith("-"):
        flag = rest[0].partition("=")[0]
        if flag not in takes_value + alone:
            raise ContractViolation(f"{launcher} {flag} is not one of {', '.join(takes_value + alone)}")
        rest = rest[1:] if "=" in rest[0] or flag in alone else rest[2:]
    return rest


class _Parser(argparse.ArgumentParser):
    """Refuses abbreviations and raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ContractViolation(f"{self.prog}: {message}")


def make_parser(tool: str, flags: Sequence[Mapping[str, Any]]) -> argparse.ArgumentParser:
    """The argparse parser that a recorded flag table describes."""
    parser = _Parser(prog=tool, add_help=False, allow_abbrev=False)
    for entry in flags:
        options = {key: entry[key] for key in ("default", "nargs", "choices") if key in entry}
        action = entry.get("action", "store")
        if action == "boolean_optional":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["action"] = action
        if action in ("store", "append"):
            options["type"] = {"int": int, "float": float}.get(entry.get("type", "str"), str)
        if "dest" in entry and entry["flags"][0].startswith("-"):
            options["dest"] = entry["dest"]
        if entry.get("required") and entry["flags"][0].startswith("-"):
            options["required"] = True
        parser.add_argument(*entry["flags"], **options)
    return parser


# ---- calls ----------------------------------------------------------------------------------------------------------


def check_call(record: Record, call: Mapping[str, Any]) -> None:
    """`{"class": …, "kwargs": …}` against the record, nested objects too; raises `ContractViolation`."""
    name, kwargs = call["class"], call["kwargs"]
    if name.startswith("tutorial_lib."):
        return
    fields = class_fields(record, name)
    for key, value in kwargs.items():
        field = fields.get(key)
        if field is None:
            raise ContractViolation(f"{name} has no argument {key!r} in {record.name}")
        _check_value(record, f"{name}.{key}", field, value)
    _check_required(record, name, fields, kwargs)
    _check_rules(record, name, kwargs)
    then = call.get("then")
    if then is not None:
        _check_method(record, then)


def class_fields(record: Record, name: str) -> dict[str, Mapping[str, Any]]:
    """Every argument name that class `name` takes, its bases' and aliases included."""
    if name not in record.classes:
        raise ContractViolation(f"class {name} is not recorded for {record.name}")
    entry = record.classes[name]
    fields: dict[str, Mapping[str, Any]] = {}
    for base in entry.get("bases", ()):
        fields.update(class_fields(record, base))
    for key, field in entry["fields"].items():
        fields.update(dict.fromkeys([key, *field.get("aliases", ())], field))
    return fields


def _check_value(record: Record, where: str, field: Mapping[str, Any], value: Any) -> None:
    if isinstance(value, Mapping) and "class" in value:
        check_call(record, value)
        wanted = field.get("class")
        is_drafting = wanted == "speculative_config" and value["class"].endswith("DecodingConfig")
        if wanted not in (None, value["class"]) and not is_drafting:
            raise ContractViolation(f"{where} takes a {wanted}, not a {value['class']}")
        return
    if not fits(value, field["type"]):
        raise ContractViolation(f"{where} is {value!r}, not {field['type']}")
    if "choices" in field and value not in field["choices"]:
        raise ContractViolation(f"{where} is {value!r}, not one of {field['choices']}")
    if value is not None and ("ge" in field and value < field["ge"] or "le" in field and value > field["le"]):
        raise ContractViolation(f"{where} is {value!r}, not between {field['ge']} and {field['le']}")


def _check_required(record: Record, name: str, fields: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
    given = {id(fields[key]) for key, value in kwargs.items() if value is not None}
    entry = record.classes[name]
    required = [key for key, field in fields.items() if field.get("required")] + entry.get("require_nonnull", [])
    for key in required:
        if id(fields[key]) not in given:
            raise ContractViolation(f"{name} needs {key}")


def _check_rules(record: Record, name: str, kwargs: Mapping[str, Any]) -> None:
    """The recorded rules that can be checked without the library."""
    schedule = kwargs.get("draft_len_schedule")
    if schedule is not None and record.name == "1.2.1":
        if schedule.get(1) != kwargs.get("max_draft_len") or max(schedule.values()) > kwargs["max_draft_len"]:
            raise ContractViolation(f"{name}.draft_len_schedule: entry 1 is not max_draft_len, or one is larger")
    if name not in ("LLM", "TrtLLM"):
        return
    backend = "pytorch" if name == "LLM" else "tensorrt"
    drafting = kwargs.get("speculative_config")
    if isinstance(drafting, Mapping) and backend not in record.classes[drafting["class"]]["backends"]:
        raise ContractViolation(f"{drafting['class']} does not support backend {backend}")
    cache_config = kwargs.get("kv_cache_config")
    if name == "TrtLLM" and cache_config and cache_config["kwargs"].get("dtype", "auto") != "auto":
        raise ContractViolation("TrtLLM.kv_cache_config.dtype must be 'auto'")


def _check_method(record: Record, then: Mapping[str, Any]) -> None:
    known = record.methods.get(then["method"])
    if known is None:
        raise ContractViolation(f"LLM.{then['method']} is not recorded")
    for key, value in then["kwargs"].items():
        if key not in known:
            raise ContractViolation(f"LLM.{then['method']} has no argument {key!r}")
        if isinstance(value, Mapping) and "class" in value:
            check_call(record, value)


def check_options(record: Record, class_name: str, options: Mapping[str, Any]) -> None:
    """A YAML document of `--extra_llm_api_options`: arguments of `class_name`, drafting chosen by `decoding_type`."""
    kwargs: dict[str, Any] = {}
    for key, value in options.items():
        if key == "speculative_config":
            drafting = dict(value)
            kind = drafting.pop("decoding_type", None)
            if kind not in record.decoding_type:
                raise ContractViolation(f"decoding_type {kind!r} is not one of {sorted(record.decoding_type)}")
            kwargs[key] = {"class": record.decoding_type[kind], "kwargs": drafting}
        elif isinstance(value, Mapping):
            field = class_fields(record, class_name).get(key)
            if field is None or "class" not in field:
                raise ContractViolation(f"{class_name} has no argument {key!r} that is an object")
            kwargs[key] = {"class": field["class"], "kwargs": value}
        else:
            kwargs[key] = value
    check_call(record, {"class": class_name, "kwargs": {"model": "of the command line", **kwargs}})


# ---- types as they are written in the record ------------------------------------------------------------------------

_NAMES: dict[str, Any] = {
    "str": lambda v: isinstance(v, str),
    "Path": lambda v: isinstance(v, (str, Path)),
    "bool": lambda v: isinstance(v, bool),
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "PositiveInt": lambda v: _NAMES["int"](v) and v > 0,
    "NonNegativeInt": lambda v: _NAMES["int"](v) and v >= 0,
    "NonNegativeFloat": lambda v: _NAMES["float"](v) and v >= 0,
    "dict": lambda v: isinstance(v, dict),
    "NoneType": lambda v: v is None,
    "Any": lambda v: True,
    "QuantAlgo": lambda v: v in ("FP8", "INT8", "NVFP4", "W4A16_AWQ", "W8A16"),
}


def fits(value: Any, written: str) -> bool:
    """Whether `value` has the type `written`, e.g. `Optional[List[int]]`. A class not known here fits nothing."""
    return _fits(value, ast.parse(written, mode="eval").body)


def _fits(value: Any, node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return bool(_NAMES.get(node.id, lambda v: False)(value))
    if isinstance(node, ast.Constant):
        return value == node.value
    if isinstance(node, ast.BinOp):
        return _fits(value, node.left) or _fits(value, node.right)
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        raise ValueError(f"cannot read the recorded type {ast.unparse(node)}")
    inside = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    match node.value.id:
        case "Optional":
            return value is None or _fits(value, inside[0])
        case "Union" | "Literal":
            return any(_fits(value, part) for part in inside)
        case "List" | "list" | "Set" | "Sequence":
            return isinstance(value, (list, tuple, set)) and all(_fits(item, inside[0]) for item in value)
        case "dict" | "Dict":
            return isinstance(value, dict) and all(
                _fits(k, inside[0]) and _fits(v, inside[1]) for k, v in value.items()
            )
    raise ValueError(f"cannot read the recorded type {ast.unparse(node)}")
