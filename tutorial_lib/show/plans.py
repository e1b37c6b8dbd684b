"""Plans of TensorRT-LLM as a notebook shows them: rows for tables, and commands and calls as one would type them.

Pure functions of what `backends.trtllm.plan.plan` returns; nothing is run and nothing imported from the library.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..backends.trtllm.calls import reasons as reasons_of
from ..backends.trtllm.plan import format_call

STAGES = {"fetch": "fetch", "quantize": "quantize", "build": "build engines", "run": "run"}
_STARTERS = ("python3", "mpirun", "srun")

Plan = Mapping[str, Any]
Step = Mapping[str, Any]


def step_named(plan: Plan, name: str) -> Step:
    """The step called `name`; `KeyError` that lists the names otherwise."""
    steps = {step["name"]: step for step in plan["steps"]}
    if name not in steps:
        raise KeyError(f"no step {name!r}; the plan has {', '.join(steps)}")
    return steps[name]


def stage_rows(plans: Mapping[str, Plan]) -> list[dict[str, str]]:
    """Plans side by side, a row for each stage: which program or class does it in which plan, and for what."""
    rows = []
    for kind, title in STAGES.items():
        row = {"stage": title}
        for name, plan in plans.items():
            parts = [f"{tool_of(step)} ({step['name']})" for step in plan["steps"] if step["kind"] == kind]
            row[name] = ", ".join(parts) or "no such step"
        rows.append(row)
    return rows


def flag_rows(plan: Plan, kinds: Sequence[str]) -> list[dict[str, str]]:
    """One row per flag or argument of the steps of `kinds`, with its reason.

    What an earlier step of the table had with the same value and reason is only named, in the row of its step.
    """
    rows: list[dict[str, str]] = []
    told: set[tuple[str, str, str]] = set()
    for step in plan["steps"]:
        if step["kind"] not in kinds or step["is_optional"]:
            continue
        found = [(flag, value, step["why"].get(flag, "")) for flag, value in _arguments(step)]
        again = [flag for flag, value, why in found if (flag, value, why) in told]
        about = step["about"] + (f"; as before: {' '.join(again)}" if again else "")
        rows.append({"step": step["name"], "command or call": tool_of(step), "why": about})
        for flag, value, why in found:
            if (flag, value, why) not in told:
                is_command = "argv" in step
                text = f"{flag} {value}".rstrip() if is_command else f"{flag}={value}"
                rows.append({"step": "", "command or call": text, "why": why})
        told.update(found)
    return rows


def call_rows(named: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Calls side by side: a row per argument, a column per call, a dash where it is left out."""
    found = {name: dict(_keywords(call["kwargs"])) for name, call in named.items()}
    keys = dict.fromkeys(key for values in found.values() for key in values)
    reasons = {key: why for call in named.values() for key, why in reasons_of(dict(call)).items()}
    return [
        {"argument": key, **{name: values.get(key, "–") for name, values in found.items()}, "why": reasons[key]}
        for key in keys
    ]


def tool_of(step: Step) -> str:
    """The program or class of a step: `quantize.py`, `trtllm-build`, `mpirun -n 4 … run.py`, `LLM`."""
    if "call" in step:
        return str(step["call"]["class"])
    argv = step["argv"]
    if argv[0] == "mpirun":
        return f"mpirun -n {argv[2]} … " + _program(argv[argv.index("python3") :])
    return _program(argv)


def _program(argv: Sequence[str]) -> str:
    if argv[0] in _STARTERS and argv[1] != "-m":
        return argv[1].rsplit("/", 1)[-1]
    return " ".join(argv[:3]) if argv[0] in _STARTERS else argv[0]


def _arguments(step: Step) -> Iterator[tuple[str, str]]:
    if "call" in step:
        yield from _keywords(step["call"]["kwargs"])
        yield from _keywords(step["call"].get("then", {}).get("kwargs", {}))
        return
    words = step["argv"]
    for place, word in enumerate(words):
        if word.startswith("--") and "=" not in word:
            values = list(_values(words[place + 1 :]))
            yield word, " ".join(values)


def _values(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("--"):
            return
        yield word


def _keywords(kwargs: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, str]]:
    """`key, value` of a call; an object among the values is named, and its own arguments follow."""
    for key, value in kwargs.items():
        if isinstance(value, Mapping) and "class" in value:
            yield key, f"{value['class']}(…)"
            yield from _keywords(value["kwargs"])
        else:
            yield key, value.strip("{}") if key == "inputs" else repr(value)


def as_typed(step: Step, *, launch: bool = False) -> str:
    """A step's environment and command, one flag per line, or its call as Python. launch: over several nodes."""
    lines = [f"export {key}={shlex.quote(value)}" for key, value in step["env"].items()]
    argv = step["launch"]["argv"] if launch else step.get("argv")
    lines.append(command_text(argv) if argv else format_call(step["call"]))
    return "\n".join(lines)


def command_text(argv: Sequence[str]) -> str:
    """A command line for a shell, one flag with its value per line; placeholders stay as they are."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word if word.startswith("{") else shlex.quote(word))
    return " \\\n    ".join(" ".join(words) for words in lines)
