"""The same classes in four styles: PACS and Office-Home, a split a style."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from caster_bench.data.sets.folders import open_class_folders
from caster_bench.data.sets.layout import DataSet, Layout, Splits
from caster_bench.data.sets.names import class_names

PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
STYLES = {"art": "Art", "clipart": "Clipart", "product": "Product", "real-world": "Real World"}


def _each(sizes: Mapping[str, int]) -> tuple[Splits, ...]:
    return tuple(Splits((name,), images, balanced=False) for name, images in sizes.items())


DOMAINS = {
    "pacs": DataSet(
        "PACS",
        _each({"art_painting": 2_048, "cartoon": 2_344, "photo": 1_670, "sketch": 3_929}),
        7,
        tuple(
            Layout(
                folder,
                lambda split: (f"{split}/",),
                partial(open_class_folders, folders=PACS_CLASSES),
            )
            for folder in ("PACS", "PACS/kfold", "pacs_data")
        ),
        "https://dali-dl.github.io/project_iccv2017.html",
        "none stated",
    ),
    "office-home": DataSet(
        "Office-Home",
        _each({"art": 2_427, "clipart": 4_365, "product": 4_439, "real-world": 4_357}),
        65,
        tuple(
            Layout(
                folder,
                lambda split: (f"{STYLES[split]}/",),
                partial(open_class_folders, folders=class_names("office-home")),
            )
            for folder in ("OfficeHomeDataset_10072016", "office_home")
        ),
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "a notice of fair use: research and education, not commercial",
    ),
}
