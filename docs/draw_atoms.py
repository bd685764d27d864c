"""Draws ``_static/atoms.svg``: one draw of ``L1(4)``, by the library's own functions.

python docs/draw_atoms.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sketchprop import L1
from sketchprop.core.importance import l1
from sketchprop.core.probabilities import optimal_probabilities
from sketchprop.core.sampling import sample_fixed
from sketchprop.core.vjp import Vjp

B, N, RANK, U = 6, 12, 4, 0.55
LEFT, CELL, ROW, WIDTH = 128, 38, 18, 600
RIGHT = LEFT + N * CELL
INK, SOFT, LINE = "#1f2933", "#5b6770", "#c9d0d6"
KEPT, SURE, IDLE = "#1565c0", "#0b3d75", "#b8c2cc"


def main() -> None:
    torch.manual_seed(7)
    scale = torch.tensor([2.9, 0.5, 0.25, 1.1, 0.2, 0.7, 0.15, 2.2, 0.4, 0.9, 0.3, 0.6])
    G = torch.randn(B, N) * scale
    p = optimal_probabilities(l1(G), RANK)
    kept = sample_fixed(p, torch.tensor(U), RANK)
    dense = L1(RANK)(Vjp(G), lambda p, shape: p.new_tensor(U)).dense()
    assert dense.abs().sum(0).nonzero().flatten().tolist() == kept.tolist()
    parts = [*_matrix(G), *_bars(p, kept), *_line(p, kept), *_compact(G, p, kept)]
    Path(__file__).with_name("_static").joinpath("atoms.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 560" width="{WIDTH}" '
        'height="560" font-family="system-ui, -apple-system, Segoe UI, sans-serif" '
        f'font-size="15" fill="{INK}">\n<rect width="{WIDTH}" height="560" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n",
        encoding="utf-8",
    )


def _matrix(G: Tensor) -> list[str]:
    top = 34
    out = [_text(8, 22, "1", "bold"), _text(26, 22, "G is the sum of its atoms, here its columns")]
    for b in range(B):
        for i in range(N):
            out.append(_cell(LEFT + i * CELL, top + b * ROW, CELL, float(G[b, i])))
    out += [_text(8, top + 48, "G"), _text(8, top + 66, "one row a", size=12, fill=SOFT)]
    return [*out, _text(8, top + 81, "sample or token", size=12, fill=SOFT)]


def _bars(p: Tensor, kept: Tensor) -> list[str]:
    base, height = 262, 70
    out = [
        _text(8, 172, "2", "bold"),
        _text(26, 172, f"p in proportion to the column’s norm, at most 1, sum {RANK}"),
        f'<line x1="{LEFT}" x2="{RIGHT}" y1="{base - height}" y2="{base - height}" '
        f'stroke="{LINE}" stroke-dasharray="3 3"/>',
        f'<line x1="{LEFT}" x2="{RIGHT}" y1="{base}" y2="{base}" stroke="{SOFT}"/>',
        _text(LEFT - 10, base - height + 5, "1", size=12, fill=SOFT, anchor="end"),
        _text(LEFT - 10, base + 4, "0", size=12, fill=SOFT, anchor="end"),
    ]
    for i in range(N):
        h = float(p[i]) * height
        out.append(
            f'<rect x="{LEFT + i * CELL + 8}" y="{base - h:.1f}" width="{CELL - 16}" '
            f'height="{h:.1f}" fill="{_colour(i, p, kept)}"/>'
        )
        middle = LEFT + (i + 0.5) * CELL
        label = f"{float(p[i]):.2f}".removesuffix(".00")
        out.append(_text(middle, base + 16, label, size=11, fill=SOFT, anchor="middle"))
    return out


def _line(p: Tensor, kept: Tensor) -> list[str]:
    y, unit = 352, (RIGHT - LEFT) / RANK
    out = [
        _text(8, 312, "3", "bold"),
        _text(
            26, 312, f"one uniform u: the points u, u+1, … u+{RANK - 1} hit exactly {RANK} atoms"
        ),
    ]
    start = 0.0
    for i in range(N):
        x, width = LEFT + start * unit, float(p[i]) * unit
        out.append(
            f'<rect x="{x:.1f}" y="{y - 9}" width="{max(width - 1.5, 0.5):.1f}" height="18" '
            f'fill="{_colour(i, p, kept)}"/>'
        )
        start += float(p[i])
    for k in range(RANK):
        x = LEFT + (U + k) * unit
        out += [
            f'<path d="M{x:.1f} {y - 11} l-5 -9 h10 z" fill="{INK}"/>',
            _text(x, y + 26, "u" if k == 0 else f"u+{k}", size=12, fill=SOFT, anchor="middle"),
        ]
    return out


def _compact(G: Tensor, p: Tensor, kept: Tensor) -> list[str]:
    top, gap = 432, CELL + 10
    out = [
        _text(8, 412, "4", "bold"),
        _text(26, 412, "only those are multiplied, each divided by its p: the mean is G"),
    ]
    for k, i in enumerate(kept.tolist()):
        for b in range(B):
            out.append(_cell(LEFT + k * gap, top + b * ROW, CELL, float(G[b, i])))
        over = f"÷{float(p[i]):.2f}".removesuffix(".00")
        middle = LEFT + k * gap + CELL / 2
        out.append(_text(middle, top + B * ROW + 16, over, size=12, fill=SOFT, anchor="middle"))
    x = LEFT + RANK * gap + 16
    lines = ("dX = Ĝ · W", "  4 rows of W", "dW = Ĝᵀ · X", "  4 rows of dW, others 0")
    for j, line in enumerate(lines):
        soft = line.startswith(" ")
        style = {"size": 13, "fill": SOFT} if soft else {}
        out.append(_text(x + 14 * soft, top + 20 + 24 * j, line.strip(), **style))
    return [*out, _text(8, top + 60, "Ĝ, compact")]


def _colour(i: int, p: Tensor, kept: Tensor) -> str:
    if i not in kept.tolist():
        return IDLE
    return SURE if float(p[i]) >= 1 else KEPT


def _cell(x: float, y: float, width: float, value: float) -> str:
    """Blue for positive, orange for negative, white at zero."""
    share = min(1.0, abs(value) / 3.5) ** 0.6
    strong = (21, 101, 192) if value > 0 else (216, 104, 20)
    red, green, blue = (round(255 + (c - 255) * share) for c in strong)
    return (
        f'<rect x="{x}" y="{y}" width="{width - 1.5}" height="{ROW - 1.5}" '
        f'fill="#{red:02x}{green:02x}{blue:02x}" stroke="{LINE}" stroke-width="0.5"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    weight: str = "normal",
    size: int = 15,
    fill: str = INK,
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'fill="{fill}" text-anchor="{anchor}">{text}</text>'
    )


if __name__ == "__main__":
    main()
