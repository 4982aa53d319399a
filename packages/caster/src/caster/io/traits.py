"""What can be told of images without reading one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from caster.errors import CasterError
from caster.io.labels import Labels


def digest(files: Iterable[tuple[str, Path]], *also: Any) -> str:
    """SHA-256 of the names, sizes and times of change of files, and of other plain values.

    The files stay closed: a second fit on the same million images must not read them to find out
    that they are the same. Of both times a file has, that of its last change of any kind cannot be
    set by hand: an archive that gives all its files one date does not make them one. Names are
    those the caller gives, so that a folder that was renamed keeps its digest; a copy does not.

    >>> here = Path(__file__)
    >>> digest([("a", here)]) == digest([("b", here)])
    False
    """
    sha256 = hashlib.sha256(json.dumps(also).encode())
    for name, path in files:
        try:
            stat = path.stat()
        except OSError as error:
            raise CasterError(f"cannot read {path}: {error.strerror}") from None
        sha256.update(json.dumps([name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]).encode())
    return sha256.hexdigest()


def is_by_class(labels: Labels | None) -> bool:
    """Whether equal labels stand together, so that a batch in this order holds few classes.

    They do where the label changes at most half as often as it would in random order: a list that
    goes through the classes twice, as that of pets:trainval does, is no better than one that does
    once.

    >>> is_by_class(np.array(["cat", "cat", "dog"])), is_by_class(np.array(["cat", "dog", "cat"]))
    (True, False)
    """
    if labels is None:
        return False
    counts = np.unique(labels, return_counts=True)[1].astype(np.float64)
    changes = np.count_nonzero(labels[1:] != labels[:-1])
    in_random_order = len(labels) - np.sum(counts**2) / len(labels)
    few = max(len(counts) - 1, in_random_order / 2)
    return len(counts) < len(labels) and bool(changes <= few)
