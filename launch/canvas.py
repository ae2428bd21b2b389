"""matplotlib's figure without a window, where it is installed; it is no dependency of the project."""

from __future__ import annotations

try:
    from matplotlib.figure import Figure as Canvas  # pyright: ignore[reportMissingImports]
except ImportError:
    Canvas = None


def check_matplotlib() -> None:
    """ValueError where there is none."""
    if Canvas is None:
        raise ValueError("a picture needs matplotlib, which is not installed; install it, or leave the picture out.")


def canvas(width: float, height: float) -> Canvas:  # pyright: ignore[reportInvalidTypeForm]
    """An empty picture of so many inches."""
    check_matplotlib()
    assert Canvas is not None, "check_matplotlib says so"
    return Canvas(figsize=(width, height), dpi=120, layout="constrained")
