"""Take docs/browser.png: the page of examples/browser after forty batches in a real browser.

    python -m docs.make_browser build/browser

The folder is what `examples/browser/build.py` wrote.
"""

import sys
from pathlib import Path

from tests.support.browser import browsing, serving_folder

from caster.io.files import replacing


def main() -> None:
    """Open the page, wait, and write what it shows."""
    with serving_folder(Path(sys.argv[1])) as address, browsing() as page:
        page.resize(1080, 760, scale=1.5)
        page.open(address + "index.html")
        page.wait_for("Number(document.getElementById('batches').textContent) >= 40")
        with replacing(Path(__file__).with_name("browser.png")) as temporary:
            temporary.write_bytes(page.screenshot(whole=False))


if __name__ == "__main__":
    main()
