"""Draws docs/architecture.svg, the way of the data through the rooms of csrc.

Run it without arguments. Its output is the same everywhere, so that a test can tell whether the
committed picture is current.
"""

from __future__ import annotations

import pathlib
from html import escape

WIDTH, HEIGHT = 960, 620
INK, SOFT, PAPER = "#1f2933", "#616e7c", "#ffffff"
FORWARD, BACKWARD, STATE = "#2b6cb0", "#c05621", "#2f855a"

Box = tuple[float, float, float, float, str, str]

# x, y, width, height, title, what it holds
BOXES: dict[str, Box] = {
    "data": (30, 70, 150, 64, "data", "tokens, targets, count"),
    "model": (240, 70, 220, 64, "model/", "Llama forward and backward"),
    "device": (240, 190, 220, 64, "device/", "gemm, norms, attention"),
    "unit": (540, 70, 170, 64, "unit", "w to read, slot to fill"),
    "slots": (540, 190, 170, 64, "slots", "gradients as produced"),
    "sum": (540, 310, 170, 64, "drain", "sum in rank order, norm"),
    "step": (540, 430, 170, 64, "step", "settle, agree, update"),
    "shards": (780, 250, 150, 64, "shards", "what a rank owns"),
    "comm": (240, 370, 220, 64, "comm/", "wait, meet, show"),
    "io": (780, 430, 150, 64, "io/", "pieces, blocks, commit"),
    "disk": (780, 540, 150, 50, "checkpoint", "safetensors + index"),
    "base": (30, 540, 680, 50, "base/", "status, arena and ledger, threads, dtype, math"),
    "binding": (30, 250, 150, 64, "binding/", "Python objects, GIL"),
}

# from, to, colour, label, path (points), label place
ARROWS: list[tuple[str, str, list[tuple[float, float]], tuple[float, float]]] = [
    (FORWARD, "a micro-batch", [(180, 102), (240, 102)], (176, 60)),
    (FORWARD, "", [(330, 134), (330, 190)], (0, 0)),
    (BACKWARD, "", [(380, 190), (380, 134)], (0, 0)),
    (FORWARD, "gather", [(540, 92), (460, 92)], (478, 84)),
    (BACKWARD, "publish", [(460, 112), (500, 112), (500, 222), (540, 222)], (508, 176)),
    (BACKWARD, "all ranks' slots", [(625, 254), (625, 310)], (634, 287)),
    (BACKWARD, "sums", [(710, 342), (738, 342), (738, 284), (780, 284)], (744, 276)),
    (STATE, "one verdict", [(625, 374), (625, 430)], (634, 407)),
    (STATE, "update", [(710, 450), (760, 450), (760, 302), (780, 302)], (713, 444)),
    (FORWARD, "publish", [(855, 250), (855, 102), (710, 102)], (770, 94)),
    (STATE, "save", [(855, 314), (855, 430)], (824, 372)),
    (STATE, "load", [(890, 430), (890, 314)], (897, 372)),
    (STATE, "", [(855, 494), (855, 540)], (0, 0)),
    (SOFT, "fences", [(460, 392), (500, 392), (500, 342), (540, 342)], (456, 356)),
    (SOFT, "", [(460, 412), (500, 412), (500, 462), (540, 462)], (0, 0)),
    (SOFT, "one call", [(180, 282), (210, 282), (210, 118), (240, 118)], (150, 238)),
]


def box(name: str) -> str:
    x, y, width, height, title, inside = BOXES[name]
    fill = "#f5f7fa" if name not in ("base", "binding", "comm") else "#edf2f7"
    middle = x + width / 2
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{fill}" stroke="{INK}"/>\n'
        f'<text x="{middle:g}" y="{y + height / 2 - 4:g}" class="title">{escape(title)}</text>\n'
        f'<text x="{middle:g}" y="{y + height / 2 + 15:g}" class="inside">{escape(inside)}</text>'
    )


def arrow(
    colour: str, label: str, points: list[tuple[float, float]], place: tuple[float, float]
) -> str:
    path = " L ".join(f"{x:g} {y:g}" for x, y in points)
    name = colour.lstrip("#")
    text = f'<path d="M {path}" stroke="{colour}" marker-end="url(#{name})" class="arrow"/>'
    if label:
        at = f'x="{place[0]:g}" y="{place[1]:g}"'
        text += f'\n<text {at} fill="{colour}" class="label">{label}</text>'
    return text


def marker(colour: str) -> str:
    return (
        f'<marker id="{colour.lstrip("#")}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="{colour}"/></marker>'
    )


def legend() -> str:
    rows = [
        (FORWARD, "weights"),
        (BACKWARD, "gradients"),
        (STATE, "state"),
        (SOFT, "calls, fences"),
    ]
    parts = []
    for number, (colour, text) in enumerate(rows):
        x = 30 + 150 * number
        parts.append(f'<path d="M {x} 30 L {x + 28} 30" stroke="{colour}" class="arrow"/>')
        parts.append(f'<text x="{x + 36}" y="34" fill="{colour}" class="label">{text}</text>')
    return "\n".join(parts)


def draw() -> str:
    colours = (FORWARD, BACKWARD, STATE, SOFT)
    style = (
        "text { font-family: Helvetica, Arial, sans-serif; } "
        f".title {{ font-size: 15px; font-weight: bold; text-anchor: middle; fill: {INK}; }} "
        f".inside {{ font-size: 11.5px; text-anchor: middle; fill: {SOFT}; }} "
        ".label { font-size: 12px; } .arrow { fill: none; stroke-width: 1.8; }"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}">',
            "<title>The way of the data through flatshard</title>",
            f"<style>{style}</style>",
            "<defs>" + "".join(marker(colour) for colour in colours) + "</defs>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
            legend(),
            *(box(name) for name in BOXES),
            *(arrow(*row) for row in ARROWS),
            "</svg>",
            "",
        ]
    )


def main() -> None:
    path = pathlib.Path(__file__).with_name("architecture.svg")
    path.write_text(draw(), encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
