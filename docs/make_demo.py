"""Draw docs/demo.png from a fresh run of the demo."""

from pathlib import Path

from matplotlib.figure import Figure

from caster.io.files import replacing
from caster.report import demo_page, digits_demo

INK = "#1b1f24"


def main() -> None:
    """Both figures of the demo's page, side by side."""
    results = digits_demo.run()
    image = Figure(figsize=(13.6, 5.4), layout="constrained", facecolor="white")
    left, right = image.subfigures(1, 2, width_ratios=(7.6, 6.0), wspace=0.03)
    demo_page.accuracy_by_severity(left, results, INK)
    demo_page.certificate_against_gain(right, results, INK)
    with replacing(Path(__file__).with_name("demo.png")) as temporary:
        image.savefig(temporary, format="png", dpi=130)


if __name__ == "__main__":
    main()
