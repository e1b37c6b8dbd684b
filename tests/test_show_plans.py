"""Plans as a notebook shows them: each flag has its row and its reason, commands can be pasted, stages face others."""

from __future__ import annotations

import shlex

import pytest

from tutorial_lib.backends.trtllm.plan import plan, plan_cli
from tutorial_lib.show import plans


@pytest.mark.parametrize("version", ["0.15.0", "1.2.1"])
def test_every_flag_of_a_step_is_shown_with_its_reason(version):
    made = plan_cli("llama-3.3-70b", version)
    kinds = ("fetch", "quantize", "build", "run")
    rows = plans.flag_rows(made, kinds)
    steps = [step for step in made["steps"] if step["kind"] in kinds]
    assert [row["step"] for row in rows if row["step"]] == [step["name"] for step in steps]
    shown = " ".join(" ".join(row.values()) for row in rows)
    for step in steps:
        flags = [word for word in step.get("argv", []) if word.startswith("--") and "=" not in word]
        for flag in [*flags, *step.get("call", {}).get("kwargs", {})]:
            assert flag in shown, flag
    assert all(row["why"] for row in rows), [row for row in rows if not row["why"]]
    assert len({(row["command or call"], row["why"]) for row in rows if not row["step"]}) == sum(
        not row["step"] for row in rows
    )


def test_values_stay_with_their_flags():
    rows = plans.flag_rows(plan_cli("llama-3.3-70b", "0.15.0"), ["quantize", "build", "run"])
    texts = [row["command or call"] for row in rows]
    assert "--qformat fp8" in texts and "--max_draft_len 10" in texts and "--streaming" in texts
    assert "--draft_target_model_config [10,[0],[0],False]" in texts


def test_stages_face_each_other():
    old, new = plan("llama-3.1-405b", "0.15.0"), plan("llama-3.1-405b", "1.2.1")
    rows = {row["stage"]: row for row in plans.stage_rows({"old": old, "new": new})}
    assert rows["build engines"]["new"] == "no such step" and "trtllm-build" in rows["build engines"]["old"]
    assert "mpirun -n 4 … run.py" in rows["run"]["old"] and rows["run"]["new"].startswith("LLM (run-plain)")


def test_what_is_typed_is_the_command():
    made = plan("llama-3.1-405b", "0.15.0")
    step = plans.step_named(made, "run-draft_target")
    assert shlex.split(plans.as_typed(step).replace("\\\n", "")) == step["argv"]
    assert "\n    --end_id 128009 \\\n" in plans.as_typed(step)
    forced = plan("llama-3.3-70b", "1.2.1", forced_accepted_tokens=3)
    text = plans.as_typed(plans.step_named(forced, "run-draft_target"))
    assert text.startswith("export TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=3\n")
    compile(text.split("\n", 1)[1], "call", "exec")
    two = plan("llama-3.1-405b", "1.2.1", nodes=2)
    assert plans.as_typed(plans.step_named(two, "run-plain"), launch=True).startswith("srun -N 2")
    with pytest.raises(KeyError, match="no step 'x'; the plan has fetch-target"):
        plans.step_named(two, "x")
