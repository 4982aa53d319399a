"""Split the images of every class: the last by name is the target, the others are the source.

    python benchmarks/real/split.py IMAGES OUT

IMAGES has one folder per class. Writes OUT-source and OUT-target with the same class folders. The
split is the same on every machine.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def main(images: Path, out: Path) -> None:
    counts = {"source": 0, "target": 0}
    for folder in sorted(path for path in images.iterdir() if path.is_dir()):
        image_set = sorted(path for path in folder.iterdir() if path.is_file())
        if len(image_set) < 3:
            sys.exit(f"{folder} has {len(image_set)} images: two are needed to fit, one to test")
        for path in image_set:
            part = "target" if path == image_set[-1] else "source"
            place = out.with_name(f"{out.name}-{part}") / folder.name
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place / path.name)
            counts[part] += 1
    print(f"{out}-source: {counts['source']:,} images, {out}-target: {counts['target']:,}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
