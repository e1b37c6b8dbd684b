"""The frame of both reports: what becomes of a figure in it, and how it looks in a real browser."""

from __future__ import annotations

import asyncio
import copy
import json
import re

import headless
import nbformat
import plotly.graph_objects as go
import pytest
from nbformat import v4
from plotly.subplots import make_subplots

from tutorial_lib.offline_page import figure_html, html_page
from tutorial_lib.report import write_report


def panels() -> go.Figure:
    figure = make_subplots(rows=1, cols=2, subplot_titles=["left", "right"])
    for column in (1, 2):
        figure.add_scatter(x=[1, 2], y=[1, 2], mode="lines+markers", row=1, col=column)
    figure.add_annotation(text="a <b>remark</b>", xref="paper", yref="paper", x=0, y=-0.2, showarrow=False)
    return figure.update_layout(title={"text": "Two<br>panels", "subtitle": {"text": "measured"}}, height=420)


def bars(count: int = 9) -> go.Figure:
    figure = go.Figure(go.Bar(x=[f"method {i}, K = {i}" for i in range(count)], y=list(range(1, count + 1))))
    figure.data[0].marker.color = "rgba(0, 114, 178, 0.40)"
    return figure.update_layout(title_text="Nine </script> bars", font_color="#222222", height=420)


def test_a_figures_words_are_text_beside_it_and_the_figure_itself_stays_as_it_was():
    spec = json.loads(panels().to_json())
    before = copy.deepcopy(spec)
    page = figure_html(spec, "one")
    assert spec == before
    assert "<b>Two panels</b>" in page and ">measured</span>" in page and ">a remark</p>" in page
    drawn = json.loads(re.search(r'data-for="one">(.*?)</script>', page)[1])
    assert {note["text"] for note in drawn["layout"]["annotations"]} == {"left", "right"}
    assert "title" not in drawn["layout"] and drawn["layout"]["height"] < 420
    evil = figure_html(json.loads(bars().to_json()), "two")
    assert evil.count("</script>") == 1 and "Nine &lt;/script&gt; bars" in evil
    assert json.loads(re.search(r'data-for="two">(.*?)</script>', evil)[1])["data"][0]["x"][3] == "method 3<br>K = 3"


LOOK = """(() => {
  const box = element => element && element.getBoundingClientRect();
  const [left, right] = ["xy", "x2y2"].map(name => box(document.querySelector(`#p .${name}`)));
  const css = (where, what) => { const e = document.querySelector(where); return e && getComputedStyle(e)[what]; };
  return {
    drawn: [...document.querySelectorAll(".plot")].filter(p => p.querySelector(".points path, .point path")).length,
    page: document.documentElement.scrollWidth, screen: innerWidth, stands: left && right.top >= left.bottom - 1,
    sheet: css("main", "backgroundColor"), bar: css(".bars .point path", "fill"),
    code: css(".highlight", "backgroundColor"), ink: css(".highlight", "color"),
    names: [...document.querySelectorAll("#b .xtick text")].map(t => t.textContent),
  };
})()"""
LOOKS = ((1000, False), (1000, True), (400, False), (400, True))
in_a_browser = pytest.mark.skipif(headless.find() is None, reason=headless.WHY_NOT)


def seen(page, folder) -> dict:
    async def look():
        found = {}
        async with headless.browser(folder / "profile") as new_page:
            for width, is_dark in LOOKS:
                tab = await new_page()
                await tab.open(page, width=width, is_dark=is_dark)
                found[width, is_dark] = await tab.evaluate(LOOK)
                assert tab.requests == [] and tab.problems == [], (tab.requests, tab.problems)
        return found

    return asyncio.run(look())


def light(color: str) -> int:
    return sum(int(x) for x in re.findall(r"[\d.]+", color)[:3])


@in_a_browser
def test_panels_stand_below_each_other_on_a_phone_and_colours_follow_the_page(tmp_path):
    page = tmp_path / "page.html"
    body = figure_html(json.loads(panels().to_json()), "p") + figure_html(json.loads(bars().to_json()), "b")
    page.write_text(html_page("t", body, style="", has_figures=True), encoding="utf-8")
    for (width, is_dark), found in seen(page, tmp_path).items():
        assert found["drawn"] == 2 and found["page"] <= found["screen"] == width, found
        assert found["stands"] == (width == 400), found
        assert found["names"][3].startswith("method 3") and "," not in found["names"][3]
        assert found["bar"] == ("rgb(74, 168, 224)" if is_dark else "rgb(0, 114, 178)"), found  # as faded as it was
        assert light(found["sheet"]) < 200 if is_dark else light(found["sheet"]) > 700


@in_a_browser
def test_an_executed_notebook_is_readable_in_the_dark_and_on_a_phone(tmp_path):
    notebook = v4.new_notebook()
    code = v4.new_code_cell("a_long_line = " + " + ".join(["something"] * 40))
    for data in (
        {"application/vnd.plotly.v1+json": json.loads(panels().to_json()), "text/plain": "figure"},
        {"text/html": "<table>" + "<tr>" + "<td>a_wide_cell_of_a_table</td>" * 20 + "</tr></table>"},
        {"text/plain": "x" * 300},
    ):
        code.outputs.append(v4.new_output("display_data", data=data))
    notebook.cells = [v4.new_markdown_cell("# Title with_a_very_long_word_" + "x" * 60), code]
    nbformat.write(notebook, tmp_path / "0_one.ipynb")
    for (width, is_dark), found in seen(write_report(tmp_path), tmp_path).items():
        assert found["drawn"] == 1 and found["page"] <= found["screen"] == width, found
        paper, ink = light(found["code"]), light(found["ink"])
        assert (paper < 200 and ink > 500) if is_dark else (paper > 700 and ink < 200), found
