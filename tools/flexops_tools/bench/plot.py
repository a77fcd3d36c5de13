"""Charts: whether one can be written, writing it, and the ladder as one."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from flexops.bench.text import duration
from flexops.errors import FlexopsError

from .build_ladder import Ladder

_COLOURS = {"torch": "#9aa5b1", "flexops": "#1f6feb"}
_METADATA = {
    ".svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    ".pdf": {"Date": None},
}
"""What matplotlib would write of itself; None: it does not."""

_SVG = "http://www.w3.org/2000/svg"
_FONTS = ["DejaVu Sans", "Verdana"]
"""Each text of an .svg names them all."""


def check(file: Path) -> None:
    """Raises ``FlexopsError`` if no chart could be written there: better said before minutes of
    measuring than after them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise FlexopsError(
            "a chart needs matplotlib",
            found="no matplotlib in this environment",
            fix="pip install matplotlib",
        )
    if file.suffix not in (".png", ".svg", ".pdf") or not file.absolute().parent.is_dir():
        raise _unwritten(str(file))


def save(ladder: Ladder, file: Path) -> None:
    """Draw the measured rungs as bars on a logarithmic axis; the file's suffix chooses the format
    (.png, .svg, .pdf).

    Raises:
        FlexopsError: matplotlib is not installed, or the file cannot be written.
    """
    check(file)
    from matplotlib.figure import Figure

    measured = [
        (item, item.seconds)
        for item in ladder.measurements
        if item.seconds is not None and not item.rung.family
    ]
    figure = Figure(figsize=(10, 0.45 * len(measured) + 1.8), layout="constrained")
    axes = figure.add_subplot()
    positions = range(len(measured))
    bars = axes.barh(
        positions,
        [seconds for _, seconds in measured],
        color=[_COLOURS[item.rung.side] for item, _ in measured],
    )
    axes.bar_label(bars, labels=[duration(seconds) for _, seconds in measured], padding=4)
    axes.set_yticks(positions, [f"{item.rung.side}: {item.rung.label}" for item, _ in measured])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("seconds (logarithmic)")
    axes.set_title(
        f"One CUDA op ({ladder.op}) from source to loaded, architecture {ladder.architecture}",
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    write(figure, str(ladder.machine), file)


def write(figure: Any, note: str, file: Path, columns: int = 150, size: int = 7) -> None:
    """Write a figure with a note below it. The same data give the same file, byte by byte.

    Raises:
        FlexopsError: the file cannot be written.
    """
    import matplotlib

    note = "\n".join(textwrap.wrap(note, columns))
    figure.supxlabel(note, fontsize=size, color="#57606a", x=0.01, ha="left")
    try:
        # text as text: a third of the size
        drawing: dict[str, Any] = {"svg.hashsalt": "flexops", "svg.fonttype": "none"}
        with matplotlib.rc_context(drawing | {"font.sans-serif": _FONTS}):
            figure.savefig(file, dpi=150, metadata=_METADATA.get(file.suffix))
        if file.suffix == ".svg":
            file.write_text(_shortened(file.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unwritten(f"{file}: {error}") from error


def _shortened(picture: str) -> str:
    """The same picture in half the size: hundredths of a point, each style once, as a class, and
    nothing that has no effect."""
    root = ElementTree.fromstring(re.sub(r"(\.\d\d)\d+", r"\1", picture))
    classes: dict[str, str] = {}
    _flatten(root, classes)
    for sheet in root.iter(f"{{{_SVG}}}style"):
        rules = [f".{name}{{{style}}}" for style, name in classes.items()]
        sheet.text = "\n".join([sheet.text or "", *rules])
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _flatten(element: ElementTree.Element, classes: dict[str, str]) -> list[ElementTree.Element]:
    """What takes the element's place: its children, if it is a group without attributes."""
    element[:] = [one for child in element for one in _flatten(child, classes)]
    element.tail = "\n"
    if len(element):
        element.text = "\n"
    attributes = element.attrib
    if style := attributes.pop("style", ""):
        attributes["class"] = classes.setdefault(style, f"s{len(classes)}")
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    if "d" in attributes:
        attributes["d"] = " ".join(attributes["d"].split())
    if element.tag != f"{{{_SVG}}}g":
        return [element]
    attributes.pop("id", None)
    return [element] if attributes else list(element)


def _unwritten(found: str) -> FlexopsError:
    required = "a .png, .svg or .pdf in a writable directory"
    return FlexopsError("the chart cannot be written", found=found, required=required)
