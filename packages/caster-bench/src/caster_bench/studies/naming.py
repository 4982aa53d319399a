"""What tables call data: CIFAR-10-C* is CIFAR-10 under corruptions of our making."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from caster_bench.studies.section import Section
from caster_bench.studies.tables import Table
from caster_bench.sweeps.spec import Backbone, Data, Spec, Sweep

SETS = {  # published sets, as `caster data` names them; a test holds them together
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "digits": "digits",
    "fashion-mnist": "Fashion-MNIST",
    "imagenet": "ImageNet",
    "pets": "Oxford-IIIT Pets",
    "tiny-imagenet": "Tiny-ImageNet",
    "dtd": "DTD",
    "flowers102": "Flowers-102",
    "food101": "Food-101",
}
STAR = "-C*"
EXPLAINED = (
    "* Not the published -C files: pictures of the set named, corrupted by caster at the published "
    "constants and seeded by picture."
)


def set_of(data: Data) -> str:
    """The published set that data are of: what the target names, or else their own name.

    >>> set_of(Data("c10-few", "cifar10:train", "cifar10:test")), set_of(Data("mine", "a", "b"))
    ('cifar10', 'mine')
    """
    named = data.target.partition(":")[0]
    return named if named in SETS else data.name


def titles(sweep: Sweep) -> dict[str, str]:
    """A title for every name of data; of several of one set, that of the set's own name has it."""
    sets = {name: set_of(data) for name, data in sweep.data.items()}
    found = {}
    for name, own in sets.items():
        alone = name == own or list(sets.values()).count(own) == 1
        title = SETS.get(own, name)
        found[name] = title if alone else f"{title} ({name})"
    return found


def places(specs: Iterable[Spec], sweep: Sweep) -> dict[Spec, str]:
    """What tables call the data of a cell: with its stream only if the study has several kinds."""
    kinds, called = {spec: _kind(spec) for spec in specs}, titles(sweep)
    several = len(set(kinds.values())) > 1
    found = {}
    for spec, kind in kinds.items():
        title = called[spec.data] + (STAR if spec.conditions else "")
        found[spec] = f"{title}, {kind}" if several else title
    return found


def _kind(spec: Spec) -> str:
    """A stream in words, but for its pictures and their seed."""
    return f"{order_of(spec)}, batches of {spec.batch_size}"


def order_of(spec: Spec) -> str:
    """The order of a stream in words.

    >>> order_of(Spec("r", "d", "tent", order="dirichlet", order_settings=(("slots", 5),)))
    'dirichlet, slots 5'
    """
    words = [spec.order, *(f"{name} {value}" for name, value in spec.order_settings)]
    words += [] if spec.schedule == "each" else [spec.schedule]
    words += [] if spec.last == "keep" else [f"last batch: {spec.last}"]
    return ", ".join(words)


def is_like_the_papers(spec: Spec) -> bool:
    """Whether a stream is shuffled, in batches of 64, of one corruption at a time.

    >>> is_like_the_papers(Spec("r", "d", "caster", batch_size=16))
    False
    """
    return spec.batch_size == 64 and spec.order == "shuffled" and spec.schedule == "each"


def beside(spec: Spec, sweep: Sweep) -> str | None:
    """What the paper calls the data of a cell; None beside a stream that is not like its own."""
    title = SETS.get(set_of(sweep.data[spec.data]))
    if not is_like_the_papers(spec) or title is None:
        return None
    return f"{title}-C" if spec.conditions else title


def beside_resnet50(spec: Spec, sweep: Sweep) -> str | None:
    """The same, of figures that the paper has of a ResNet-50 alone."""
    return beside(spec, sweep) if is_resnet50(sweep.backbones[spec.backbone]) else None


def is_resnet50(backbone: Backbone) -> bool:
    """Whether it is the network that the paper's gate, Table 2 and Table 3 are of.

    >>> is_resnet50(Backbone("a", "batch", "timm:resnet50"))
    True
    """
    told = (backbone.name, backbone.group, backbone.architecture, backbone.checkpoint)
    return any("resnet50" in re.sub("[-_]", "", str(words)).lower() for words in told)


def explained(section: Section) -> Section:
    """The same, with a word on the star below every table that has it, and every picture."""
    starred = [_has_star(table) for table in section.tables]
    return replace(
        section,
        tables=tuple(
            replace(table, caption=f"{table.caption} {EXPLAINED}") if star else table
            for table, star in zip(section.tables, starred, strict=True)
        ),
        pictures=tuple(
            replace(each, caption=f"{each.caption} {EXPLAINED}") if any(starred) else each
            for each in section.pictures
        ),
    )


def _has_star(table: Table) -> bool:
    texts = [table.caption, *(text for row in table.texts() for text in row)]
    return any(STAR in text for text in texts)
