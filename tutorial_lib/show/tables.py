"""Small tables: rows of plain values in, HTML in a notebook and aligned text elsewhere out. Cells are escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

_CELL = "border-bottom:1px solid #ddd;padding:.2em .8em;vertical-align:top"


class Table:
    """Rows with the same keys, shown in their order. Floats get `digits` decimals, whole numbers thousands separators,
    None a dash; numbers are aligned right."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], digits: int = 2) -> None:
        self.rows, self.digits = [dict(row) for row in rows], digits
        self.columns = list(dict.fromkeys(key for row in self.rows for key in row))

    def _text(self, value: Any) -> str:
        if value is None:
            return "–"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return str(value)
        return f"{value:,.{self.digits}f}" if isinstance(value, float) else f"{value:,}"

    def _is_number(self, column: str) -> bool:
        values = [row[column] for row in self.rows if row.get(column) is not None]
        return bool(values) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)

    def _repr_html_(self) -> str:
        sides = {column: "right" if self._is_number(column) else "left" for column in self.columns}

        def line(tag: str, texts: Mapping[str, str]) -> str:
            wrap = ";white-space:nowrap" if tag == "th" else ""
            cells = (
                f'<{tag} style="{_CELL}{wrap};text-align:{side}">{html.escape(texts[c])}</{tag}>'
                for c, side in sides.items()
            )
            return f"<tr>{''.join(cells)}</tr>"

        body = "".join(line("td", {c: self._text(row.get(c)) for c in self.columns}) for row in self.rows)
        head = line("th", {c: c for c in self.columns})
        return f'<table style="border-collapse:collapse"><thead>{head}</thead><tbody>{body}</tbody></table>'

    def __repr__(self) -> str:
        lines = [
            {c: c for c in self.columns},
            *({c: self._text(row.get(c)) for c in self.columns} for row in self.rows),
        ]
        widths = {c: max(len(line[c]) for line in lines) for c in self.columns}
        return "\n".join(
            "  ".join(line[c].rjust(w) if self._is_number(c) else line[c].ljust(w) for c, w in widths.items()).rstrip()
            for line in lines
        )
