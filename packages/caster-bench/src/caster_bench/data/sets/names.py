"""Names of classes that the published files do not hold, in the order of their numbers.

CIFAR-C, Flowers-102 and Fashion-MNIST number their classes, ImageNet-V2 names its folders 0 to 999,
and where class folders are all there is, a missing one would give every later class another number.
The lists are those of CIFAR's own `batches.meta` and `meta`, of torchvision's Flowers102 (after the
publisher's page), of the sorted WordNet identifiers of ILSVRC 2012 and of Tiny-ImageNet's
`wnids.txt`, of timm's `imagenet_r_synsets` and `imagenet_a_synsets`, of Office-Home's folders and
of Fashion-MNIST's README.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

GROUPS = {  # of corruptions, by the archive of ImageNet-C that holds them
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "digital": ("contrast", "elastic_transform", "jpeg_compression", "pixelate"),
    "extra": ("gaussian_blur", "saturate", "spatter", "speckle_noise"),
    "noise": ("gaussian_noise", "impulse_noise", "shot_noise"),
    "weather": ("brightness", "fog", "frost", "snow"),
}
SEVERITIES = range(1, 6)


@cache
def class_names(of: str) -> tuple[str, ...]:
    """The names of one list.

    >>> class_names("cifar10")[:3], len(class_names("imagenet"))
    (('airplane', 'automobile', 'bird'), 1000)
    """
    text = (files(__package__) / "classes" / f"{of}.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())


def corrupted(*groups: str) -> tuple[str, ...]:
    """Every corruption of some groups, or of all, at every severity.

    >>> corrupted("blur")[:2], len(corrupted())
    (('defocus_blur-1', 'defocus_blur-2'), 95)
    """
    names = sorted(name for group in groups or GROUPS for name in GROUPS[group])
    return tuple(f"{name}-{severity}" for name in names for severity in SEVERITIES)


def corruption(split: str) -> tuple[str, int]:
    """A split's corruption and severity.

    >>> corruption("fog-3")
    ('fog', 3)
    """
    name, _, severity = split.rpartition("-")
    return name, int(severity)


def severity_folder(split: str) -> tuple[str]:
    """Where ImageNet-C keeps a split.

    >>> severity_folder("fog-3")
    ('fog/3/',)
    """
    name, severity = corruption(split)
    return (f"{name}/{severity}/",)
