"""The badges of the README: pictures without a server."""

from __future__ import annotations

CHAR = 6.6  # pixels of a letter
PAD = 12


def badge(label: str, value: str) -> str:
    """Return a badge as SVG, with the label on gray and the value on blue."""
    left, right = (round(len(text) * CHAR) + PAD for text in (label, value))
    width = left + right
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img"'
        f' aria-label="{label}: {value}">\n'
        f'<rect width="{width}" height="20" rx="3" fill="#555"/>\n'
        f'<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{left}z" fill="#2673a8"/>\n'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,sans-serif" font-size="11">\n'
        f'<text x="{left / 2:g}" y="14">{label}</text>\n'
        f'<text x="{left + right / 2:g}" y="14">{value}</text>\n'
        "</g>\n</svg>\n"
    )
