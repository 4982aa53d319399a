"""Write docs/demo.png, the demo's page in a real browser.

python -m docs.make_demo
"""

import tempfile
from pathlib import Path

from tests.support.browser import browsing

from caster.io.files import replacing
from caster.report import digits_demo

HERE = Path(__file__).parent


def main() -> None:
    """Run the demo once, and take its page down to the verdicts."""
    results = digits_demo.run()
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        page = Path(folder, "page.html")
        digits_demo.write_page(results, page)
        browser.resize(1100, 900, scale=1.5)
        browser.open(page.as_uri())
        end = browser.evaluate("document.querySelectorAll('h2')[2].offsetTop")
        browser.resize(1100, end, scale=1.5)
        with replacing(HERE / "demo.png") as temporary:
            temporary.write_bytes(browser.screenshot(whole=False))


if __name__ == "__main__":
    main()
