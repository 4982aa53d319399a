"""Draw docs/architecture.svg, the layers of both packages, and docs/batch.svg, the way of a batch.

Both are drawn here instead of by a script in the reader's browser: the site loads nothing from
elsewhere.
"""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from caster.io.files import replacing

HERE = Path(__file__).parent
INK, BLUE, GREEN, GREY = "#1b1f24", "#d6e9f5", "#d5efe6", "#eceff2"

CASTER = (  # from the top: a layer imports only from those below it
    (("cli", "parse, one call, print"),),
    (("serve", "Open Inference Protocol, a stream per client"),),
    (
        ("monitor", "logs, drift, risk, pages"),
        ("report", "evaluation, doctor, demo"),
        ("export", "adaptation as ONNX"),
    ),
    (("adapt", "fit, Caster, layer transport, Adapter and its streams"),),
    (("state", "source statistics in one file"),),
    (("models", "a frozen model in, features and logits out"),),
    (("io", "images, feature files, tables, the feature cache"),),
    (("core", "the mathematics, on any array namespace"),),
)
BENCH = (
    (("cli", "bench, corrupt, data, methods"),),
    (("engine", "sweeps, training, executors"),),
    (("methods", "rivals, and their checks"), ("studies", "tables, figures, claims")),
    (("data", "published sets, corruptions, streams"),),
    (("records", "raw logs"),),
    (("sweeps", "which cells a TOML file names"),),
)


def box(axes: Axes, x: float, y: float, width: float, title: str, words: str, fill: str) -> None:
    """Draw a box around a title and what it stands for; (x, y) is its lower left corner."""
    shape = FancyBboxPatch((x, y), width, 0.78, "round,pad=0,rounding_size=0.08", fc=fill, ec=INK)
    shape.set_linewidth(0.8)
    axes.add_patch(shape)
    middle = x + width / 2
    axes.text(middle, y + 0.52, title, ha="center", va="center", weight="bold", size=9, color=INK)
    axes.text(middle, y + 0.22, words, ha="center", va="center", size=7.5, color=INK)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], words: str = ""
) -> None:
    """Draw an arrow with words above its middle."""
    style = {"arrowstyle": "->", "color": INK, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    axes.annotate(
        words, middle, (-2, 4), textcoords="offset points", ha="center", va="bottom", size=7
    )


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty drawing in units of a box's height, without axes."""
    figure = Figure(figsize=(0.62 * width, 0.62 * height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def architecture() -> Figure:
    """Both packages as stacks of layers."""
    figure, axes = canvas(16, 9)
    for x, width, layers, heading, fill in (
        (0.2, 8.6, CASTER, "packages/caster: what a deployer installs", BLUE),
        (9.8, 6.0, BENCH, "packages/caster-bench: what a researcher installs", GREEN),
    ):
        axes.text(x, 8.65, heading, size=9, va="center", color=INK)
        for row, layer in enumerate(layers):
            part = (width - 0.15 * (len(layer) - 1)) / len(layer)
            for column, (title, words) in enumerate(layer):
                left = x + column * (part + 0.15)
                box(axes, left, 7.4 - 1.0 * row, part, title, words, fill)
    arrow(axes, (9.8, 7.79), (8.8, 7.79), "plugs in")
    arrow(axes, (9.8, 5.6), (8.8, 5.0), "uses")
    box(
        axes, 9.8, 0.4, 6.0, "reproduction", "sweeps, records, claims, report: data, not code", GREY
    )
    return figure


def batch() -> Figure:
    """One batch from its images to a row of the table."""
    figure, axes = canvas(16, 3.4)
    fill, middle = BLUE, 1.3
    steps = (
        (0.2, 2.5, "image_batches.py", "decode, resize, batch"),
        (3.4, 2.5, "torch.py, onnx/", "features and logits"),
        (6.6, 2.0, "adapter.py", "Adapter, Stream"),
        (13.1, 2.7, "prediction.py", "Adaptation to a row"),
    )
    for x, width, title, words in steps:
        box(axes, x, middle, width, title, words, fill)
    box(axes, 9.5, 2.3, 2.9, "layer_transport.py", "align layers, compare", GREEN)
    box(axes, 9.5, 0.3, 2.9, "feature_transport.py", "map features, verdict", GREEN)
    level = middle + 0.39
    arrow(axes, (2.7, level), (3.4, level))
    arrow(axes, (5.9, level), (6.6, level))
    arrow(axes, (8.6, level), (9.5, 2.69))
    arrow(axes, (8.6, level), (9.5, 0.69))
    arrow(axes, (12.4, 2.69), (13.1, level))
    arrow(axes, (12.4, 0.69), (13.1, level))
    return figure


def main() -> None:
    """Write both drawings; the same code gives the same bytes."""
    with rc_context({"svg.hashsalt": "caster", "font.family": "DejaVu Sans"}):
        for name, figure in (("architecture.svg", architecture()), ("batch.svg", batch())):
            with replacing(HERE / name) as temporary:
                figure.savefig(temporary, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
