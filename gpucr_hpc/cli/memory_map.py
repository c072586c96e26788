"""A picture of a checkpoint's memory: in the terminal, or as an SVG file."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any

from rich.text import Text

from gpucr_hpc.units import format_bytes

#: Way in which memory is kept: mark and colour in the terminal, colour in a file.
STYLES = {
    "zero": ("·", "bright_black", "#d9d9d9"),
    "referenced": ("=", "cyan", "#80b1d3"),
    "repeated": ("-", "blue", "#bebada"),
    "compressed": ("+", "green", "#8dd3a7"),
    "raw": ("#", "red", "#fb8072"),
}
_WIDTH, _ROW, _LABEL = 1000, 26, 230


def in_image(region: dict[str, Any]) -> int:
    """Bytes of a mapping that the image holds, zeros too."""
    return int(sum(region["image_bytes"].values()))


def by_kind(memory: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Bytes by kind of mapping (anonymous, shared, file) and by the way in which they are kept; "mapped" among them."""
    total: dict[str, Counter[str]] = {}
    for region in memory:
        counts = total.setdefault(region["kind"], Counter())
        counts["mapped"] += region["end"] - region["start"]
        counts.update(region["image_bytes"])
    return total


def strip(memory: list[dict[str, Any]], width: int) -> Text:
    """One line: what the image holds of a process, by address, a mark for each equal part."""
    total = sum(map(in_image, memory))
    text = Text()
    if not total:
        return text
    ways = [(way, size) for region in memory for way, size in region["image_bytes"].items()]
    at, cells = 0, [Counter[str]() for _ in range(width)]
    for way, size in ways:
        for number in range(at * width // total, -(-(at + size) * width // total)):
            begin, end = number * total / width, (number + 1) * total / width
            cells[number][way] += int((min(end, at + size) - max(begin, at)) * 1000) + 1
        at += size
    for cell in cells:
        mark, colour, _ = STYLES[cell.most_common(1)[0][0]]
        text.append(mark, style=colour)
    return text


def svg(title: str, processes: list[tuple[str, list[dict[str, Any]]]]) -> str:
    """A file with one strip for each process, as wide as what the image holds of the largest; every mapping says what
    it is when it is pointed at. processes: label and memory."""
    largest = max((sum(map(in_image, memory)) for _, memory in processes), default=0) or 1
    height = (len(processes) + 3) * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LABEL + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18" font-weight="bold">{escape(title)}</text>',
    ]
    x = 10.0
    for way, (_, _, colour) in STYLES.items():
        parts.append(f'<rect x="{x:.0f}" y="{_ROW + 4}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{_ROW + 14}">{way}</text>')
        x += 110
    for row, (label, memory) in enumerate(processes, 2):
        y = row * _ROW
        parts.append(f'<text x="10" y="{y + 15}">{escape(label[:34])}</text>')
        x = float(_LABEL)
        for region in memory:
            for way, size in region["image_bytes"].items():
                width = size * _WIDTH / largest
                tip = f"{region['start']:x}-{region['end']:x} {region['permissions']} {region['path']}"
                tip += f"\n{format_bytes(size)} {way} of {format_bytes(region['end'] - region['start'])} mapped"
                parts.append(
                    f'<rect x="{x:.2f}" y="{y + 3}" width="{width:.2f}" height="{_ROW - 8}" fill="{STYLES[way][2]}" '
                    f'stroke="white" stroke-width="0.3"><title>{escape(tip)}</title></rect>'
                )
                x += width
        size = format_bytes(sum(map(in_image, memory)))
        parts.append(f'<text x="{x + 4:.0f}" y="{y + 15}" fill="#555">{size}</text>')
    return "\n".join([*parts, "</svg>", ""])
