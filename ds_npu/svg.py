"""SVG files as text: a drawing, and the elements in it."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

Style = str | int | float


def drawing(width: int, height: int, body: Iterable[str], **style: Style) -> str:
    """An SVG file of ``width`` x ``height`` pixels with ``body`` on white; all elements inherit ``style``."""
    lines = "\n".join(["", element("rect", width=width, height=height, fill="white"), *body, ""])
    style = {"viewBox": f"0 0 {width} {height}", "font_family": "sans-serif", **style}
    return element("svg", lines, xmlns="http://www.w3.org/2000/svg", width=width, height=height, **style) + "\n"


def element(tag: str, inside: str = "", /, **attributes: Style) -> str:
    """The element ``tag`` around ``inside``, which is SVG text; a _ in the name of an attribute becomes a -.

    Floats are written with one digit behind the point.
    """
    texts = {name: f"{value:.1f}" if isinstance(value, float) else f"{value}" for name, value in attributes.items()}
    written = "".join(f" {name.replace('_', '-')}={quoteattr(text)}" for name, text in texts.items())
    return f"<{tag}{written}>{inside}</{tag}>" if inside else f"<{tag}{written}/>"


def group(body: Iterable[str], **attributes: Style) -> str:
    return element("g", "\n".join(["", *body, ""]), **attributes)


def rect(x: float, y: float, width: float, height: float, **style: Style) -> str:
    return element("rect", x=x, y=y, width=width, height=height, **style)


def text(x: float, y: float, words: str, **style: Style) -> str:
    """Text on the line ``y`` that begins at ``x``; with ``text_anchor`` end or middle it ends or is centred there."""
    return element("text", escape(words), x=x, y=y, **style)


def title(words: str) -> str:
    """The tooltip that a viewer shows for the enclosing element."""
    return element("title", escape(words))
