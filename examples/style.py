"""What the notebooks of the course share: how pictures look, and how a small check is told."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb

from regard.report.palette import CARD, INK, MUTED, RULE, SERIES

BLUE, ORANGE, GREEN, VIOLET, OLIVE, SLATE = (shade.light for shade in SERIES)
SETTINGS = {
    "figure.dpi": 110,
    "figure.labelsize": 9,
    "figure.constrained_layout.use": True,
    "figure.facecolor": CARD.light,  # also on a dark page: the pictures are PNG
    "axes.facecolor": CARD.light,
    "axes.edgecolor": MUTED.light,
    "axes.labelcolor": MUTED.light,
    "axes.titlecolor": INK.light,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": plt.cycler(color=[BLUE, ORANGE, GREEN, VIOLET, OLIVE, SLATE]),
    "grid.color": RULE.light,
    "grid.linewidth": 0.7,
    "text.color": INK.light,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "font.size": 9,
    "legend.frameon": False,
}
plt.rcParams.update(SETTINGS)


def heat(ax, weights, rows=(), columns=(), title="", numbers=False):
    """A matrix, a row a query and a column a key: the stronger the colour the larger; orange is negative."""
    weights = np.asarray(weights, dtype=float)
    pixels = np.empty((*weights.shape, 4))
    pixels[..., :3] = np.where((weights < 0)[..., None], to_rgb(ORANGE), to_rgb(BLUE))
    pixels[..., 3] = np.abs(weights) / max(np.abs(weights).max(), 1e-30)
    ax.imshow(pixels, interpolation="none", aspect="equal")
    ax.grid(False)
    ax.spines[:].set_visible(True)
    ax.set_xticks(range(len(columns)), columns, rotation=90 if any(len(str(c)) > 2 for c in columns) else 0)
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(length=0)
    ax.set_title(title)
    for i, j in np.argwhere(weights != 0) if numbers else ():
        colour = CARD.light if pixels[i, j, 3] > 0.7 else INK.light
        ax.text(j, i, f"{weights[i, j]:.2f}", ha="center", va="center", color=colour)


def judge(name, claim, got, want, limit=1e-6):
    """Prints whether two arrays of numbers agree: the verdict on an answer that no law of attention fits."""
    got, want = np.asarray(got, dtype=float), np.asarray(want, dtype=float)
    fits = got.shape == want.shape
    gap = np.abs(got - want).max() if fits else np.inf
    how = f"largest difference {gap:.1e}, allowed {limit:.1e}" if fits else f"shape {got.shape}, expected {want.shape}"
    print(f"✓ {name}: {claim} ({how})" if gap <= limit else f"✗ {name}: expected that {claim}\n  {how}")
