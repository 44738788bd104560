"""What all pictures have in common: one color per role, names at the ends of lines, a light background.

A picture shows the median of the seeds as a thick line and every seed as a thin one. Its message is its title.
"""

import statistics

# One color per role, in all pictures. They differ in lightness, too, and for readers who are color-blind.
METHOD = "#008a5e"  # what the script is about
VARIANT = "#7cc4a4"  # the method with a part removed
RIVAL = "#e07b00"  # the simplest rival
SECOND_RIVAL = "#b8433a"  # another rival
PLAIN = "#2468b2"  # plain training
OTHER = "#8a8f98"  # the rest
SIZE = dict(dpi=90, facecolor="white")  # an opaque background: GitHub's dark mode shows it, too
WIDTH = (
    10  # inches of a picture, so that text of 13 points is read where the picture has 700 pixels
)


def show_lines(axis, arms, middle=statistics.median):
    """arms: {name: (color, one list of (x, y) per seed)}, y None where there is nothing. -> where the lines end"""
    ends = []
    for name, (color, seeds) in arms.items():
        steps, heights = [], []
        for points in zip(*seeds, strict=False):  # the same evaluation of all seeds
            found = [y for _, y in points if y is not None]
            if found:
                steps.append(statistics.mean(x for x, _ in points))
                heights.append(middle(found))
        for points in seeds:
            points = [(x, y) for x, y in points if y is not None]
            axis.plot(*zip(*points, strict=True), color=color, lw=0.8, alpha=0.35)
        axis.plot(steps, heights, color=color, lw=3)
        ends.append((heights[-1], steps[-1], name, color))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return ends


def name_lines(axis, ends, size=12):
    """The names stand to the right of the axis and keep a distance. Call it after the limits are set."""
    bottom, top = axis.get_ylim()
    gap = 0.085 * (top - bottom)
    ends = sorted(ends)
    heights = [end[0] for end in ends]
    for _ in range(200):
        heights[-1] = min(heights[-1], top)
        heights[0] = max(heights[0], bottom)
        for i in range(len(heights) - 1):
            overlap = gap - (heights[i + 1] - heights[i])
            if overlap > 0:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
    for height, (_, x, name, color) in zip(heights, ends, strict=True):
        axis.text(x, height, "  " + name, color=color, fontsize=size, weight="bold", va="center")
