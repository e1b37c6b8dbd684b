"""The check that is run first on a GPU, on a CPU: it finds what is wrong and where, and goes on past what fails."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch
from gpu_models import PLAIN
from stream_stand_ins import PlainSteps

from tutorial_lib.engine.gpu_model import Ops
from tutorial_lib.engine.stream import check, host
from tutorial_lib.engine.stream.check import Row

SMALL = ("dummy:tiny-llama?seed=5", False, False)


class Wrong(PlainSteps):
    """A kernel that is wrong in one way."""

    how = ""

    def step(self, tokens, table, lengths, slots, rows, *, choices, damage, logits, tree) -> None:
        position = int(lengths[0])
        if self.how == "mask":
            tree = None
        super().step(tokens, table, lengths, slots, rows, choices=choices, damage=damage, logits=logits, tree=tree)
        at = table[0, position // 64].long(), position % 64
        if self.how == "keys":
            self.model.cache[1, at[0], 0, 1, at[1]] += 1.0
        if self.how == "elsewhere":
            self.model.cache[1, at[0], 0, 0, at[1] - 1] += 1.0
        if self.how == "rows" and rows > 1 and logits is not None:
            logits[0, 0] += 1e-6
        if self.how == "argmax":
            choices[0] += 1
        if self.how == "nan" and logits is not None:
            logits[-1, 3] = float("nan")
        if self.how == "now and then" and self.launches % 50 == 0 and logits is not None:
            logits[0, 0] += 1e-6

    def chain(self, pair, table, lengths, slots, out, *, ids, vocab_size) -> None:
        super().chain(pair, table, lengths, slots, out, ids=ids, vocab_size=vocab_size)
        if self.how == "chain":
            out[:, 2] += 1


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(check, "DEVICE", "cpu")
    monkeypatch.setattr(check, "MODELS", {"small": SMALL})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Ops, "make", lambda **_: PLAIN)
    monkeypatch.setattr(host, "open_steps", lambda model, **_: Wrong(model))


def rows_of(part: str = "small") -> list[Row]:
    with torch.inference_mode():
        return list(check.check_model(part))


def wrong(monkeypatch, how: str) -> list[Row]:
    monkeypatch.setattr(Wrong, "how", how)
    return [row for row in rows_of() if row.is_fine is False]


def test_a_right_kernel_has_every_row_right(on_cpu, monkeypatch):
    from gpu_engines import Exact

    with Exact():
        assert wrong(monkeypatch, "") == []
    assert len(rows_of()) > 15


@pytest.mark.parametrize(
    ("how", "what", "words"),
    [
        ("keys", "1 rows: cache", "layer 1 keys row 0 head 1"),
        ("elsewhere", "1 rows: cache", "layers [1] have other positions rewritten"),
        ("argmax", "5 rows: tokens", "4 of 5"),
        ("nan", "2 rows: logits", "inf% off"),
        ("mask", "a tree of 7 rows: logits", "% off"),
        ("rows", "16 rows: row 0 alike", "not"),
        ("chain", "a draft", "at once"),
        ("now and then", "200 times the same step", "with another result"),
    ],
)
def test_a_kernel_that_is_wrong_is_found_out_and_told_where(on_cpu, monkeypatch, how, what, words):
    found = {row.what: row.value for row in wrong(monkeypatch, how)}
    assert words in found[what]


def test_the_small_kernel_of_the_launch_part_compiles():
    from test_stream_compile import compiler

    from tutorial_lib.engine.stream.compile import compile_cubin, problems

    made = compile_cubin(check.MEETING, {"BLOCK": 640}, compiler=compiler())
    assert list(made.report["kernels"]) == ["meeting"] and problems(made.report, registers=96) == []


CHILD = """
import json, os, sys, time
parts = sys.argv[sys.argv.index("--parts") + 1].split(",")
for part in parts:
    print(json.dumps([part, "it", "runs", True]), flush=True)
    if part == "dies":
        print("Segmentation fault", file=sys.stderr)
        os._exit(139)
    if part == "hangs":
        time.sleep(60)
    print("a line of a library", flush=True)
    print(json.dumps({"ended": part, "why": "ValueError: no" if part == "fails" else None, "seconds": 1.0}), flush=True)
    if part == "loses its context":
        os._exit(3)
"""


def test_what_fails_dies_or_hangs_is_noted_and_the_rest_goes_on(monkeypatch, tmp_path):
    (tmp_path / "pretended_check.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(check, "MODULE", "pretended_check")
    shown, start = [], time.monotonic()
    parts = ["good", "fails", "dies", "loses its context", "hangs", "last"]
    found = check.run(parts, shown.append, limit_s=3.0)
    assert shown == found and time.monotonic() - start < 20
    assert [row.part for row in found if row.what == "it"] == parts
    ends = {row.part: (row.is_fine, row.value) for row in found if row.what != "it"}
    assert ends["good"] == ends["last"] == ends["loses its context"] == (True, "1.0 s")
    assert ends["fails"] == (False, "ValueError: no")
    assert ends["dies"] == (False, "ended with 139: Segmentation fault")
    assert ends["hangs"][0] is False and "took longer than 3 s" in ends["hangs"][1]


def test_a_part_that_raises_says_what_and_where(monkeypatch, capsys):
    def part(name):
        yield Row(name, "first", "fine", True)
        host.heed(None)

    monkeypatch.setattr(check, "PARTS", {"one": part})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    check.run_here(["one"])
    row, end = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert row == ["one", "first", "fine", True]
    assert end["why"].startswith("AttributeError at host.py:")


def test_the_command_counts_what_is_wrong_and_writes_the_rows(monkeypatch, capsys, tmp_path):
    rows = [Row("card", "GPU", "some", None), Row("1B fp8", "a draft", "at once [1]", False)]
    monkeypatch.setattr(check, "run", lambda parts, show: [show(row) or row for row in rows])
    monkeypatch.setattr(check, "_capability", lambda: (9, 0))
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["check", "--parts", "card,1B fp8", "--json", str(file)])
    assert check.main() == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("      card") and out[1].startswith("WRONG 1B fp8") and "2 rows, 1 wrong" in out[2]
    assert json.loads(file.read_text())[1] == {
        "part": "1B fp8",
        "what": "a draft",
        "value": "at once [1]",
        "is_fine": False,
    }
    monkeypatch.setattr(sys, "argv", ["check", "--parts", "card,unknown"])
    with pytest.raises(SystemExit):
        check.main()


@pytest.mark.parametrize(("capability", "words"), [((0, 0), "torch sees no GPU"), ((8, 0), "compute capability 8.0")])
def test_a_machine_without_a_hopper_is_told_in_one_line(monkeypatch, capsys, capability, words):
    monkeypatch.setattr(check, "_capability", lambda: capability)
    monkeypatch.setattr(sys, "argv", ["check"])
    with pytest.raises(SystemExit):
        check.main()
    said = capsys.readouterr().err
    assert words in said and "needed: 9.0 (H100" in said
