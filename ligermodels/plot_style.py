"""The look of all pictures: colours, and the style of axes for matplotlib."""

from typing import Any

INK, GREY, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, PURPLE, TEAL = "#2f6fde", "#e8590c", "#2b8a3e", "#7048e8", "#0b7285"
OCHRE, PINK, RED = "#a17800", "#d6336c", "#c92a2a"
PLOT_STYLE: Any = {
    "font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": GREY, "axes.titlecolor": INK, "axes.titlesize": 10,
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "xtick.color": GREY,
    "ytick.color": GREY, "xtick.major.size": 0, "ytick.major.size": 0, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.grid": True, "axes.axisbelow": True, "legend.frameon": False, "legend.labelcolor": INK, "text.color": INK,
}  # fmt: skip
