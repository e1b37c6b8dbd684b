"""Tables: numbers to the right with their decimals, gaps as dashes, nothing from a cell becomes markup."""

from __future__ import annotations

from tutorial_lib.show.tables import Table

ROWS = [
    {"name": "plain", "tokens": 1234, "seconds": 1.23456, "same": True},
    {"name": "<b>x</b>", "tokens": None, "seconds": 10.0, "extra": "only here"},
]


def test_text_form_is_aligned():
    assert repr(Table(ROWS, digits=3)).splitlines() == [
        "name      tokens  seconds  same  extra",
        "plain      1,234    1.235  True  –",
        "<b>x</b>       –   10.000  –     only here",
    ]


def test_html_form_is_escaped_and_aligned():
    page = Table(ROWS)._repr_html_()
    assert "<b>" not in page and "&lt;b&gt;x&lt;/b&gt;" in page
    assert 'text-align:right">1,234' in page and 'text-align:right">1.23' in page and 'text-align:left">True' in page
    assert page.count("<tr>") == 3 and page.count("–") == 3


def test_an_empty_table_is_empty():
    assert "<tbody></tbody>" in Table([])._repr_html_() and repr(Table([])) == ""
