"""Draws the charts of a measurement into one PNG file.

Owns the use of matplotlib, which is an optional extra. Never computes a figure.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.api.cli.bench.page import Bars, Lines
from graftwork.api.cli.console.failures import require_modules
from graftwork.api.sdk.transport.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

_WIDTH_IN, _CHART_IN, _BAR_IN = 9.0, 3.2, 0.28


def require_plots() -> None:
    """Checks that charts can be drawn, before a measurement begins. Raises ConfigurationError with what to install."""
    try:
        require_modules("matplotlib")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "--png needs matplotlib: pip install 'graftwork[plot]'. --html needs nothing more."
        ) from error


def write_png(path: Path, title: str, charts: "Sequence[Bars | Lines]") -> None:
    """Writes all charts below one another. Raises ConfigurationError if matplotlib is missing."""
    require_plots()
    from matplotlib.figure import Figure

    heights = [_height(chart) for chart in charts]
    figure = Figure(figsize=(_WIDTH_IN, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(title)
    for chart, axes in zip(charts, figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights), strict=True):
        _draw(axes[0], chart)
    figure.savefig(path, format="png", dpi=120)


def _height(chart: Bars | Lines) -> float:
    return _CHART_IN if isinstance(chart, Lines) else 1.0 + _BAR_IN * len(chart.values)


def _draw(axes: "Axes", chart: Bars | Lines) -> None:
    axes.set_title(f"{chart.title} ({chart.unit})", fontsize=10, loc="left")
    if isinstance(chart, Bars):
        bars = axes.barh([label for label, _ in chart.values], [value or 0.0 for _, value in chart.values])
        axes.bar_label(bars, ["–" if value is None else f"{value:.3g}" for _, value in chart.values], padding=3)
        axes.invert_yaxis()
        return
    for name, points in chart.series:
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, marker=".")
    axes.set_xlabel(chart.x)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
