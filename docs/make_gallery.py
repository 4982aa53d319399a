"""Draw docs/gallery-*.png, the figures of three examples that the pages show."""

import sys
from pathlib import Path
from runpy import run_path

import matplotlib
from matplotlib import pyplot

from caster.io.files import replacing

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples" / "gallery"
FIGURES = {
    "plot_1_fog": "gallery-fog.png",
    "plot_2_class_order": "gallery-class-order.png",
    "plot_3_verdict": "gallery-verdict.png",
}


def main() -> None:
    """Run each example and store the one figure that it draws."""
    matplotlib.use("agg")
    sys.path.insert(0, str(EXAMPLES))  # of the module that they share
    for example, image in FIGURES.items():
        figure = run_path(str(EXAMPLES / f"{example}.py"))["figure"]
        with replacing(HERE / image) as temporary:
            figure.savefig(temporary, format="png", dpi=130)
        pyplot.close("all")


if __name__ == "__main__":
    main()
