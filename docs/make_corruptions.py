"""Draw docs/corruptions.png: the nineteen corruptions at five severities on real photographs.

The photographs come with scikit-learn, Creative Commons BY 2.0: a pagoda by danielbuechele and a
flower by vultilion, alternating.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from caster.io.files import replacing
from caster_bench.data.corruptions import CORRUPTIONS, corrupt

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "parity"))
from measures import samples

TILE, GAP = 112, 4  # pixels
LEFT, TOP = 150, 26  # for names and severities
INK = "#1b1f24"


def main() -> None:
    """Draw a row per corruption: the clean image, then severities 1 to 5."""
    images = samples(224)  # as ImageNet-C's
    step = TILE + GAP
    size = LEFT + 6 * step, TOP + len(CORRUPTIONS) * step
    page = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(15)
    for column, title in enumerate(("clean", *(f"severity {s}" for s in range(1, 6)))):
        middle = LEFT + column * step + TILE / 2
        pen.text((middle, TOP / 2), title, fill=INK, font=font, anchor="mm")
    for row, name in enumerate(CORRUPTIONS):
        top = TOP + row * step
        label = name.replace("_", " ")
        pen.text((LEFT - 10, top + TILE / 2), label, fill=INK, font=font, anchor="rm")
        clean = images[row % 2][np.newaxis]
        versions = [clean, *(corrupt(clean, name, severity) for severity in range(1, 6))]
        for column, (image,) in enumerate(versions):
            small = Image.fromarray(image).resize((TILE, TILE), Image.Resampling.BOX)
            page.paste(small, (LEFT + column * step, top))
    palette = page.quantize(256, kmeans=2)
    page = page.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG)  # a third of the size
    with replacing(Path(__file__).with_name("corruptions.png")) as temporary:
        page.save(temporary, format="png", optimize=True)


if __name__ == "__main__":
    main()
