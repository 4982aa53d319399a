"""Write docs/demo.png, the demo's page in a real browser, and docs/demo-shifts.png, two figures.

python -m docs.make_demo
"""

import tempfile
from pathlib import Path

from matplotlib.figure import Figure
from tests.support.browser import browsing

from caster.io.files import replacing
from caster.report import demo_page, digits_demo

HERE = Path(__file__).parent
INK = "#1b1f24"


def main() -> None:
    """Run the demo once; take its page down to the verdicts, and draw its other figures."""
    results = digits_demo.run()
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        page = Path(folder, "page.html")
        demo_page.write(results, page)
        browser.resize(1100, 900, scale=1.5)
        browser.open(page.as_uri())
        end = browser.evaluate("document.querySelectorAll('h2')[2].offsetTop")
        browser.resize(1100, end, scale=1.5)
        with replacing(HERE / "demo.png") as temporary:
            temporary.write_bytes(browser.screenshot(whole=False))
    image = Figure(figsize=(9.0, 10.2), layout="constrained", facecolor="white")
    top, bottom = image.subfigures(2, 1, height_ratios=(5.2, 5.0), hspace=0.03)
    demo_page.accuracy_by_severity(top, results, INK)
    demo_page.certificate_against_gain(bottom, results, INK)
    with replacing(HERE / "demo-shifts.png") as temporary:
        image.savefig(temporary, format="png", dpi=130)


if __name__ == "__main__":
    main()
