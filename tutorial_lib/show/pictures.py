"""The idea of every drafting method as a small drawing, and a real tree of a round beside its attention mask.

Inline SVG and HTML without scripts or addresses, so that batch runs and exports keep them. A method is drawn in the
colour that figures give it (`plots.METHODS`); what the target says itself is gold, what was rejected is dashed. Every
drawing has a text that a screen reader reads. Tokens are model text: escaped.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError
from ..results import Round
from .plots import method_style
from .trace import Decoder, visible

WIDTH = 760
INK, PALE, TEXT_FILL, GOLD = "#222222", "#F2F2F2", "#FFFFFF", "#FFF3C4"
TOKEN_HEIGHT = 26


@dataclass
class Drawing:
    """Boxes, lines and words on a canvas `WIDTH` wide; `svg` closes it."""

    color: str
    parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        text: str = "",
        *,
        height: float = TOKEN_HEIGHT,
        fill: str = TEXT_FILL,
        line: str = INK,
        dash: str = "",
        ink: str = INK,
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{line}"'
            f' stroke-width="1.5"{dashed}/>'
        )
        if text:
            self.words(x + width / 2, y + height / 2 + 4.5, text, anchor="middle", ink=ink)

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        ink: str = INK,
        size: int = 13,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}" font-size="{size}"{weight}>'
            f"{html.escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, bend: float = 0.0, dash: str = "") -> None:
        """From one point to the other; bend lifts its middle."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        middle = f"Q{(x1 + x2) / 2:g} {(y1 + y2) / 2 - bend:g} "
        self.parts.append(
            f'<path d="M{x1:g} {y1:g} {middle}{x2:g} {y2:g}" fill="none" stroke="{self.color}" stroke-width="1.8"'
            f'{dashed} marker-end="url(#{self._head})"/>'
        )

    def tokens(self, x: float, y: float, texts: Sequence[str], *, width: float = 52, **look: Any) -> None:
        for i, text in enumerate(texts):
            self.box(x + i * (width + 6), y, width, text, **look)

    @property
    def _head(self) -> str:
        return f"sd-head-{self.color.lstrip('#')}"

    def svg(self, height: int, title: str) -> str:
        """The drawing, `height` high; `title` is what it shows in words."""
        shown = html.escape(title, quote=True)
        head = (
            f'<defs><marker id="{self._head}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0 0L8 4L0 8z" fill="{self.color}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{shown}" viewBox="0 0 {WIDTH} {height}"'
            f' style="max-width:{WIDTH}px;width:100%;height:auto;background:#fff"'
            f" font-family=\"system-ui, 'DejaVu Sans', sans-serif\"><title>{shown}</title>{head}"
            f"{''.join(self.parts)}</svg>"
        )


def method_picture(method: str) -> str:
    """The drawing of a drafting method, by the name that records give it. Raises `OptionError` for another name."""
    if method not in PICTURES:
        raise OptionError(f"there is no picture of {method!r}", f"one of {', '.join(PICTURES)}")
    return PICTURES[method](Drawing(method_style(method).color))


# ---- one drawing per method ------------------------------------------------------------------------------------------


def _draft_model(d: Drawing) -> str:
    d.tokens(16, 30, ["The", "cat"])
    d.words(16, 20, "the text", size=12)
    for i, token in enumerate(("sat", "on", "the", "bed")):
        x = 160 + i * 92
        d.box(x, 22, 66, "drafter", height=42, fill=d.color, ink="#FFFFFF")
        d.box(x + 7, 84, 52, token, line=d.color)
        d.arrow(x + 33, 64, x + 33, 82)
        d.arrow(x + 59, 90, x + 92, 58) if i < 3 else None
    d.arrow(126, 43, 158, 43)
    d.words(534, 48, "one small pass after another", size=12)
    d.box(160, 140, 342, "target: one pass over all of them", height=34, fill=PALE)
    for i, (token, fill) in enumerate((("sat", TEXT_FILL), ("on", TEXT_FILL), ("the", TEXT_FILL), ("mat", GOLD))):
        d.arrow(193 + i * 92, 110, 193 + i * 92, 138)
        d.box(167 + i * 92, 196, 52, token, fill=fill)
    d.words(534, 152, "says its own choice at each place", size=12)
    d.words(534, 170, "at once: three agree, the fourth", size=12)
    d.words(534, 188, "is corrected for free", size=12)
    return d.svg(236, "A small model drafts four tokens one after another; the target checks all of them in one pass.")


def _ngram(d: Drawing) -> str:
    text = ["the", "old", "oak", "tree", "…", "near", "the", "old"]
    for i, token in enumerate(text):
        marked = i in (0, 1, 6, 7)
        d.box(16 + i * 60, 70, 54, token, line=d.color if marked else INK, fill="#FFF6E5" if marked else TEXT_FILL)
    d.words(16, 114, "the text, prompt and output", size=12)
    d.arrow(460, 66, 76, 66, bend=92)
    d.words(268, 16, "were the last words here before?", anchor="middle", size=12)
    d.tokens(508, 70, ["oak", "tree"], width=54, line=d.color, dash="5 3")
    d.arrow(190, 98, 566, 100, bend=-74)
    d.words(378, 152, "yes: copy what followed them", anchor="middle", size=12)
    d.words(640, 88, "the draft", size=12)
    return d.svg(166, "The last words are looked up earlier in the text, and what followed them there is the draft.")


def _suffix(d: Drawing) -> str:
    rows = [("… of the old oak tree", "tree"), ("… in the old oak tree", "tree"), ("… by the old oak door", "door")]
    for i, (line, last) in enumerate(rows):
        y = 26 + i * 38
        d.box(16, y, 260, line, fill=TEXT_FILL)
        d.arrow(278, y + 13, 330, 64, bend=0)
        d.words(286, y + 8, last, size=11, ink=d.color)
    d.words(16, 18, "places where a long stretch of the text stood before", size=12)
    d.box(334, 46, 196, "after “the old oak”:", height=40, fill=PALE)
    d.words(540, 58, "tree  2 ×", bold=True)
    d.words(540, 80, "door  1 ×")
    d.box(640, 50, 60, "tree", line=d.color, dash="5 3")
    d.arrow(608, 62, 638, 62)
    d.words(
        16,
        164,
        "As many tokens as agree are compared, not three. Where places differ, continuations are counted.",
    )
    return d.svg(176, "A long stretch was seen in several places; what followed it most often is the draft.")


def _lookahead(d: Drawing) -> str:
    d.words(16, 20, "a window of guesses, made better by every pass", size=12)
    for level in range(2):
        for column in range(4):
            is_root = level == column == 0
            label = "last" if is_root else f"g{column + level}"
            d.box(16 + column * 76, 34 + level * 48, 56, label, line=d.color, fill=GOLD if is_root else TEXT_FILL)
            if level == 0:
                d.arrow(44 + column * 76, 60, 44 + column * 76, 80)
                if column < 3:
                    d.arrow(72 + column * 76, 47, 90 + column * 76, 47)
    d.words(330, 52, "level 0")
    d.words(330, 100, "level 1")
    d.words(16, 134, "the target's choices after level 1 complete n-grams (one column each)", size=12)
    d.arrow(388, 72, 446, 72)
    d.box(450, 34, 128, "pool of n-grams", height=76, fill=PALE)
    d.arrow(580, 72, 624, 72)
    d.box(628, 40, 116, "last → g1 → g2", line=d.color, dash="5 3")
    d.box(628, 76, 116, "last → h1 → h2", line=d.color, dash="5 3")
    d.words(744, 122, "verified in the same pass", size=11, anchor="end")
    return d.svg(146, "One pass improves a window of guesses and verifies n-grams that earlier windows produced.")


def _medusa(d: Drawing) -> str:
    d.box(16, 62, 116, "target's last", height=48, fill=PALE)
    d.words(74, 126, "hidden state", anchor="middle", size=12)
    guesses = (("sat", "lay", "ran"), ("on", "in", "at"), ("the", "a", "my"))
    for i, tokens in enumerate(guesses):
        y = 16 + i * 52
        d.box(176, y, 84, f"head {i + 1}", height=34, fill=d.color)
        d.arrow(134, 86, 174, y + 17)
        d.words(176, y + 48, f"{i + 1} further on", size=10)
        d.tokens(278, y + 4, tokens, width=44, line=d.color, dash="5 3")
    d.words(278, 178, "best, second, third", size=11)
    d.arrow(434, 82, 474, 82)
    nodes = {"": (500, 84), "0": (562, 48), "1": (562, 120), "00": (634, 24), "01": (634, 66), "000": (706, 24)}
    texts = {"": "cat", "0": "sat", "1": "lay", "00": "on", "01": "in", "000": "the"}
    for path, (x, y) in nodes.items():
        if path:
            px, py = nodes[path[:-1]]
            d.arrow(px + 18, py, x - 24, y)
    for path, (x, y) in nodes.items():
        d.box(x - 22, y - 12, 44, texts[path], height=24, line=d.color, fill=TEXT_FILL if path else GOLD)
    d.words(540, 160, "all of the tree is verified at once", size=12)
    return d.svg(190, "Heads on the target's last hidden state guess one, two, three tokens further; they form a tree.")


def _eagle(d: Drawing) -> str:
    for i, name in enumerate(("low", "middle", "high")):
        d.box(16, 116 - i * 44, 96, f"{name} layer", height=32, fill=PALE)
        d.arrow(114, 132 - i * 44, 152, 88)
    d.words(16, 168, "hidden states of the target", size=12)
    d.box(156, 68, 46, "fc", height=40, fill=d.color, ink="#FFFFFF")
    d.words(150, 60, "fused", size=11)
    for i, (seen, token) in enumerate((("cat", "sat"), ("sat", "on"), ("on", "the"))):
        x = 250 + i * 166
        d.box(x, 62, 104, "one layer", height=52, fill=d.color, ink="#FFFFFF")
        d.box(x, 16, 52, seen, line=d.color if i else INK, fill=GOLD if not i else TEXT_FILL)
        d.arrow(x + 26, 42, x + 26, 60)
        d.arrow(x - (46 if not i else 60), 88, x - 2, 88)
        d.arrow(x + 78, 116, x + 78, 136)
        d.box(x + 52, 138, 52, token, line=d.color, dash="5 3")
    d.words(360, 82, "state", size=10)
    d.words(526, 82, "state", size=10)
    return d.svg(180, "One layer reads the target's hidden states and the newest token, then its own state and token.")


def _eagle_tree(d: Drawing) -> str:
    nodes = {
        "": (40, 96, "cat", ""), "0": (190, 46, "sat", ".61"), "1": (190, 146, "lay", ".24"),
        "00": (340, 26, "on", ".48"), "01": (340, 76, "in", ".09"), "10": (340, 146, "down", ".19"),
        "000": (490, 26, "the", ".41"), "0000": (640, 26, "mat", ".22"), "0001": (640, 76, "bed", ".12"),
    }  # fmt: skip
    for path, (x, y, _, _) in nodes.items():
        if path:
            px, py, _, _ = nodes[path[:-1]]
            d.arrow(px + 30, py, x - 34, y, dash="5 3" if path == "01" else "")
    for path, (x, y, token, chance) in nodes.items():
        is_left_out = path == "01"
        look = {"line": "#999999", "dash": "4 4"} if is_left_out else {"line": d.color}
        d.box(x - 30, y - 14, 60, token, height=28, fill=GOLD if not path else TEXT_FILL, **look)
        if chance:
            d.words(x, y + 28, chance, anchor="middle", size=11, ink="#777777" if is_left_out else INK)
    d.words(430, 152, "grown where the layer is confident: a number is the", size=12)
    d.words(430, 170, "product along the branch, the least likely are dropped", size=12)
    return d.svg(190, "A tree of drafts grows behind its likeliest nodes; the least likely ones are dropped.")


def _layer_skip(d: Drawing) -> str:
    for i in range(10):
        skipped = i in (3, 5)
        x = 120 + i * 42
        look = {"fill": TEXT_FILL, "line": "#999999", "dash": "4 4"} if skipped else {"fill": d.color}
        d.box(x, 26, 34, str(i) if i < 9 else "…", height=56, ink=INK if skipped else "#FFFFFF", **look)
        d.box(x, 112, 34, str(i) if i < 9 else "…", height=56, fill=PALE)
    d.words(16, 58, "to draft:", bold=True)
    d.words(16, 144, "to verify:", bold=True)
    d.words(556, 50, "the target itself, some layers", size=12)
    d.words(556, 68, "left out, one token at a time", size=12)
    d.words(556, 136, "the whole target,", size=12)
    d.words(556, 154, "all tokens at once", size=12)
    return d.svg(184, "The target drafts for itself with two of its layers left out, and verifies with all of them.")


PICTURES: dict[str, Callable[[Drawing], str]] = {
    "draft_target": _draft_model,
    "ngram": _ngram,
    "suffix": _suffix,
    "lookahead": _lookahead,
    "medusa": _medusa,
    "eagle3": _eagle,
    "eagle3_tree": _eagle_tree,
    "layer_skip": _layer_skip,
}


# ---- training --------------------------------------------------------------------------------------------------------


def training_time_test_picture(steps: int = 3) -> str:
    """How EAGLE-3 is unrolled in training: each step after the first reads the layer's own states of the one before."""
    d = Drawing(method_style("eagle3").color)
    left, width = 150, 82
    texts = ("the", "cat", "sat", "on", "the", "mat")
    d.words(16, 34, "the target's text", size=12)
    d.tokens(left, 16, texts, width=width, fill=PALE)
    # tokens are `width` wide with 6 between them: columns of the picture
    gap = width + 6
    for step in range(1, steps + 1):
        y = 26 + step * 62
        d.words(16, y + 4, f"step {step}", bold=True)
        d.words(16, y + 20, "the target's states" if step == 1 else "own states", size=11)
        for i in range(step - 1, len(texts) - 1):
            x = left + i * gap
            if step == 1:
                d.box(x, y - 12, width, f"f({texts[i]})", height=30, fill=GOLD)
            else:
                d.arrow(x - gap + width / 2, y - 44, x + width / 2 - 6, y - 14)
                d.box(x, y - 12, width, f"g{step - 1}({texts[i]})", height=30, line=d.color)
    y = 26 + steps * 62 + 46
    d.words(left, y, "every box reads the next token too, and must name the one after: a loss in each", size=12)
    return d.svg(
        int(y + 14),
        "Training-time test: step one reads the target's hidden states, each later step the layer's own states of the "
        "step before, one token further on; every step learns the token that the target chose.",
    )


# ---- a real tree -----------------------------------------------------------------------------------------------------


def tree_picture(round_: Round, tokenizer: Decoder, method: str) -> str:
    """The draft of a round as it was verified: its accepted branch filled, the other candidates dashed; columns are
    positions."""
    d = Drawing(method_style(method).color)
    parents = round_.parents if round_.parents is not None else tuple(range(-1, len(round_.drafted) - 1))
    path = tuple(range(round_.accepted)) if round_.path is None else round_.path
    rows = _leaf_rows(parents)
    gap = min(112.0, (WIDTH - 90) / max(1, round_.depth))
    width = gap - 24

    def place(node: int) -> tuple[float, float]:
        return (30.0, 30.0) if node < 0 else (60 + gap * (round_.depths[node] - 1), 30 + 34 * rows[node])

    for node, parent in enumerate(parents):
        (px, py), (x, y) = place(parent), place(node)
        d.arrow(px + (10 if parent < 0 else width), py, x - 2, y)
    d.box(12, 16, 28, "…", height=28, fill=GOLD)
    for node, token in enumerate(round_.drafted):
        x, y = place(node)
        look: dict[str, Any] = {"fill": "#D6E9F8"} if node in path else {"dash": "4 3"}
        d.box(x, y - 13, width, _token_text(tokenizer, token, int(width / 8)), line=d.color, **look)
    said = f"A draft of {len(round_.drafted)} tokens, {round_.depth} deep, of which {round_.accepted} were accepted"
    return d.svg(int(50 + 34 * max(rows, default=0)), said)


def _leaf_rows(parents: Sequence[int]) -> list[int]:
    """A row for every node: its first child stays on it, further branches go below all that is drawn before."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    rows, lowest = [0] * len(parents), 0
    waiting = [(node, i > 0) for i, node in reversed(list(enumerate(children.get(-1, []))))]
    while waiting:
        node, is_branch = waiting.pop()
        if is_branch:
            lowest += 1
        rows[node] = lowest
        waiting += [(child, i > 0) for i, child in reversed(list(enumerate(children.get(node, []))))]
    return rows


def _token_text(tokenizer: Decoder, token_id: int, longest: int) -> str:
    text = "?" if token_id < 0 else tokenizer.decode([token_id])
    text = text.replace(" ", "·").replace("\n", "⏎")
    shown = "".join(char if char.isprintable() else "▯" for char in text)
    return shown if len(shown) <= longest else shown[: max(1, longest - 1)] + "…"


def mask_picture(round_: Round, tokenizer: Decoder) -> str:
    """Who sees whom in the verification of a round: a row for each of its tokens, a mark under the text's last token
    and under every ancestor. All of them see the text before, which is not drawn."""
    parents = round_.parents if round_.parents is not None else tuple(range(-1, len(round_.drafted) - 1))
    names = ["last", *(visible("?" if t < 0 else tokenizer.decode([t])) for t in round_.drafted)]
    sees = [{0}]
    for node, parent in enumerate(parents):
        sees.append(sees[parent + 1] | {node + 1})
    depths = (0, *round_.depths)
    cell = 'style="border:1px solid #ccc;padding:.1em .45em;text-align:center'
    head = "".join(f'<th {cell};font-weight:normal">{name}</th>' for name in names)
    body = ""
    for row, seen in enumerate(sees):
        marks = "".join(
            f'<td {cell};background:{"#d6e9f8" if column in seen else "#fff"}">{"●" if column in seen else ""}</td>'
            for column in range(len(names))
        )
        body += f'<tr><th {cell};font-weight:normal">{names[row]}</th><td {cell}">+{depths[row]}</td>{marks}</tr>'
    return (
        "<table style=\"border-collapse:collapse;font:12px ui-monospace,'DejaVu Sans Mono',monospace;background:#fff;"
        f'color:#222"><thead><tr><th {cell}">row</th><th {cell}">position</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )
