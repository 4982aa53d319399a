"""Store source statistics in one safetensors file, validated on loading and saving.

The file stores what cannot be recomputed: U, class means, packed upper triangles of the class
covariances, and class counts. Priors, global and pooled moments and the margin follow from these.
With layers, it also stores the concatenated moments of all sites, packed upper triangles of the
measured covariances, and class moments in float16. A sketch of the source, for the monitor, is
optional.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from caster._version import __version__
from caster.config import STATE_DTYPE, Settings
from caster.core.notebook import html_table
from caster.core.types import SourceMoments
from caster.errors import CasterError, StateError
from caster.io import labels, signed_tensors
from caster.io.layer_arrays import (
    Layers,
    check_semidefinite,
    layer_sizes,
    pack_layers,
    packed,
    read_site_table,
    site_table,
    unpack_layers,
    unpacked,
)
from caster.io.signed_tensors import Arrays, Key
from caster.state.sketch import PREFIX, Sketch, unpack_sketch
from caster.state.source_check import SourceCheck

FORMAT, VERSION = "caster-state", "1"
ARRAYS = ("U", "means", "covariances", "counts")
COLUMNS = range(2**31)  # valid columns of a model's logits
ROUNDING = 4 * float(np.finfo(STATE_DTYPE).eps)  # relative to a trace, as in `SourceMoments.slack`


@dataclass(frozen=True, eq=False)
class State:
    """Source moments with their class labels, constants and digests."""

    moments: SourceMoments  # NumPy float32
    classes: labels.Labels  # (C,)
    settings: Settings
    model_sha256: str | None = None
    preprocessing_sha256: str | None = None
    head: tuple[int, ...] | None = None  # column of the model's logits per class
    caster_version: str = __version__
    layers: Layers | None = None  # moments per site; None: not requested
    input_range: tuple[float, float] | None = None  # of the source images; None: not measured
    source_check: SourceCheck | None = None  # None: built from moments alone
    sketch: Sketch | None = None  # source samples for the monitor; None: left out

    def __repr__(self) -> str:
        bound = "no model" if self.model_sha256 is None else f"model {self.model_sha256[:12]}…"
        layers = "no layers" if self.layers is None else f"{len(self.layers)} layer sites"
        return f"State({self.moments!r}, {bound}, {layers})"

    def _repr_html_(self) -> str:
        return html_table("State", self.summary())

    def summary(self) -> dict[str, str]:
        """Source, sizes and the digests that the state is bound to, as text."""
        features, directions = self.moments.U.shape
        digests = (self.model_sha256, self.preprocessing_sha256)
        model, preprocessing = (found and f"{found[:12]}…" for found in digests)
        return {
            "source": f"{int(self.moments.counts.sum()):,} samples of {len(self.classes)} classes",
            "features": f"{features}, of which {directions} directions are stored",
            "layer sites": "none" if self.layers is None else str(len(self.layers)),
            "bound to model": model or "not bound",
            "preprocessing": preprocessing or "not stated",
            "sketch for the monitor": "none" if self.sketch is None else "stored",
        }

    @property
    def supports_transport(self) -> bool:
        """Whether transport passed the source check, if there was one."""
        return self.source_check is None or self.source_check.supported

    @property
    def has_class_moments(self) -> bool:
        """Whether layers were measured per class, as mixture transport needs."""
        return any(found.classes for found in (self.layers or {}).values())

    def check_model(self, sha256: str | None) -> None:
        """Raise for another model; None stands for a model without a digest."""
        _check_same("model", self.model_sha256, sha256)

    def check_preprocessing(self, sha256: str | None) -> None:
        """Raise for another preprocessing; None stands for no stated preprocessing."""
        if self.preprocessing_sha256 is None and sha256 is not None:
            raise StateError(
                "the state was fitted on batches prepared outside caster, so it records no "
                "preprocessing: fit again with caster.wrap(..., preprocessing=FILE), or, if these "
                "images are prepared in the same way, pass {argument}",
                argument="allow_other_preprocessing",
            )
        _check_same("preprocessing", self.preprocessing_sha256, sha256)


def _check_same(what: str, fitted: str | None, given: str | None) -> None:
    if given == fitted:
        return
    if fitted is None:
        problem = (
            f"the state names no {what}, because it was fitted on features or with a function "
            "without a version: fit it again with this one"
        )
    elif given is None:
        problem = f"the state was fitted with a {what}, but none is given: state the same one"
    else:
        digests = f"(digest {fitted[:12]}…, not {given[:12]}…)"
        problem = f"the state was fitted with another {what} {digests}: fit again with this one"
    raise StateError(f"{problem}, or allow it with {{argument}}", argument=f"allow_other_{what}")


def save(state: State, path: str | os.PathLike[str], key: Key | None = None) -> None:
    """Write a state file atomically, signed if there is a key.

    Raise if the state could not be loaded again.
    """
    try:
        arrays, metadata = _content(state)
        _parse(arrays, metadata)
    except CasterError as error:
        raise StateError(f"cannot write {path}: {error}") from None
    signed_tensors.write(arrays, metadata, path, key)


def digest(state: State) -> str:
    """SHA-256 of the content, which is equal for two files with the same content."""
    return signed_tensors.content_digest(*_content(state))


def _content(state: State) -> tuple[Arrays, dict[str, str]]:
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "caster": state.caster_version,
        "settings": json.dumps(asdict(state.settings)),
        "classes": labels.to_json(state.classes),
        "features": str(state.moments.U.shape[0]),
        "samples": str(int(state.moments.counts.sum())),
        "model_sha256": state.model_sha256 or "",
        "preprocessing_sha256": state.preprocessing_sha256 or "",
        "head": json.dumps(state.head),
        "source_check": json.dumps(state.source_check and asdict(state.source_check)),
    }
    arrays = _pack(state.moments)
    if state.layers is not None:
        metadata["layers"] = site_table(state.layers)
        arrays |= pack_layers(state.layers, state.moments.counts)
    if state.sketch is not None:
        arrays |= state.sketch.arrays()
    if state.input_range is not None:
        metadata["input_range"] = json.dumps(state.input_range)
    return arrays, metadata


@dataclass(frozen=True)
class ArraySchema:
    """Type, shape and smallest value of a stored array."""

    dtype: str
    shape: tuple[str, ...]  # named sizes; the array is expected if all of them are known
    minimum: float = -math.inf


SCHEMA = {
    "U": ArraySchema("float32", ("features", "directions")),
    "means": ArraySchema("float32", ("classes", "directions")),
    "covariances": ArraySchema("float32", ("classes", "triangle")),
    "counts": ArraySchema("int64", ("classes",), minimum=1),
    "layer_means": ArraySchema("float32", ("channels",)),
    "layer_variances": ArraySchema("float32", ("channels",), minimum=0),
    "layer_covariances": ArraySchema("float32", ("layer triangles",)),
    "layer_class_means": ArraySchema("float16", ("classes", "class channels")),
    "layer_class_deviations": ArraySchema("float16", ("classes", "class channels"), minimum=0),
    "sketch_features": ArraySchema("float32", ("sketch", "directions")),
    "sketch_probabilities": ArraySchema("float16", ("sketch", "classes"), minimum=0),
    "sketch_labels": ArraySchema("int64", ("sketch",), minimum=0),
    "sketch_uncertainty": ArraySchema("float32", ("sketch", "answers"), minimum=0),
    "sketch_wrong": ArraySchema("uint8", ("sketch", "answers"), minimum=0),
}


def check_arrays(arrays: Arrays, sizes: Mapping[str, int]) -> None:
    """Raise unless these are exactly the arrays of `SCHEMA` for these sizes, and finite.

    >>> check_arrays({"counts": np.array([3, 0])}, {"classes": 2})
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: its counts hold 0, less than 1
    """
    expected = {name: each for name, each in SCHEMA.items() if sizes.keys() >= set(each.shape)}
    if arrays.keys() != expected.keys():
        stored, wanted = (", ".join(sorted(names)) for names in (arrays, expected))
        raise CasterError(f"it holds {shorten(stored, 200)} instead of {wanted}")
    for name, schema in expected.items():
        array, shape = arrays[name], tuple(sizes[size] for size in schema.shape)
        if array.dtype != schema.dtype or array.shape != shape:
            raise CasterError(
                f"its arrays do not fit together: {name} is {array.dtype} {array.shape}, not "
                f"{schema.dtype} {shape}"
            )
        if not np.isfinite(array).all():
            raise CasterError(f"its {name} hold NaN or infinity")
        if array.size and array.min() < schema.minimum:
            raise CasterError(f"its {name} hold {array.min():g}, less than {schema.minimum:g}")


def load(path: str | os.PathLike[str], key: Key | None = None) -> State:
    """Read and validate a state file; with a key, check its signature."""
    arrays, metadata = _read(Path(path), key)
    try:
        return _parse(arrays, metadata)
    except CasterError as error:
        raise StateError(f"{path} is not a usable state file ({error}): fit again") from None


def _parse(arrays: Arrays, metadata: dict[str, str]) -> State:
    """Build the state from a file's content; raise unless a fit could have produced it."""
    try:
        check = json.loads(metadata["source_check"])
        classes = labels.from_json(metadata["classes"])
        rows = read_site_table(metadata["layers"]) if "layers" in metadata else None
        check_arrays(arrays, _sizes(arrays, metadata, len(classes)) | layer_sizes(rows))
        state = State(
            moments=_unpack(arrays),
            classes=classes,
            settings=Settings(**json.loads(metadata["settings"])),
            model_sha256=metadata["model_sha256"] or None,
            preprocessing_sha256=metadata["preprocessing_sha256"] or None,
            head=_parse_head(json.loads(metadata["head"]), len(classes)),
            caster_version=metadata["caster"],
            layers=None if rows is None else unpack_layers(arrays, rows),
            input_range=_parse_range(json.loads(metadata.get("input_range", "null"))),
            source_check=None if check is None else SourceCheck(**check),
            sketch=unpack_sketch(arrays, len(classes)),
        )
    except KeyError as error:
        raise CasterError(f"it lacks {error}") from None
    except RecursionError:
        raise CasterError("its metadata is nested too deeply") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CasterError(str(error)) from None
    if sum(state.moments.counts.tolist()) != int(metadata["samples"]):
        raise CasterError("its counts do not add up to its samples")
    _check_moments(state.moments)
    return state


def _sizes(arrays: Arrays, metadata: dict[str, str], n_classes: int) -> dict[str, int]:
    """Sizes of all arrays except those of layers."""
    d, k = int(metadata["features"]), arrays["means"].shape[-1]
    if n_classes < 2 or not 1 <= k <= min(d, n_classes - 1):
        raise CasterError(
            f"its arrays do not fit together: {n_classes} classes, {d} features, {k} directions"
        )
    sizes = {"features": d, "classes": n_classes, "directions": k, "triangle": k * (k + 1) // 2}
    if f"{PREFIX}labels" in arrays:
        sizes |= {"sketch": len(arrays[f"{PREFIX}labels"]), "answers": 2}
    return sizes


def _parse_head(columns: Any, n_classes: int) -> tuple[int, ...] | None:
    if columns is None:
        return None
    whole = isinstance(columns, list) and all(type(c) is int and c in COLUMNS for c in columns)
    if not whole or not len(columns) == len(set(columns)) == n_classes:
        raise CasterError("its head does not have one logit per class")
    return tuple(columns)


def _check_moments(moments: SourceMoments) -> None:
    """Raise unless these are valid moments with a nonsingular metric."""
    if not moments.U.any(axis=0).all():
        raise CasterError("its U has a direction of length 0")
    check_semidefinite(moments.covariances, ROUNDING, "covariances")
    with np.errstate(over="ignore", invalid="ignore"):
        derived = (moments.within, moments.covariance)
    if not all(np.isfinite(values).all() for values in derived):
        raise CasterError("its moments are too large for float32")
    if not np.isfinite(moments.metric).all():
        raise CasterError("its pooled covariance is singular")


def _parse_range(ends: list[float] | None) -> tuple[float, float] | None:
    if ends is None:
        return None
    if len(ends) != 2 or not -np.inf < ends[0] <= ends[1] < np.inf:
        raise CasterError("its input range is invalid")
    return float(ends[0]), float(ends[1])


def array_sizes(state: State) -> list[tuple[str, int]]:
    """Name and size in bytes of every stored array."""
    return [(name, array.nbytes) for name, array in _content(state)[0].items()]


def _read(path: Path, key: Key | None) -> tuple[Arrays, dict[str, str]]:
    def check_format(metadata: dict[str, str]) -> None:
        if metadata.get("format") != FORMAT:
            raise StateError(f"{path} is a safetensors file, but not a caster state file")
        if metadata.get("version") != VERSION:
            raise StateError(
                f"{path} has state format {metadata.get('version')}, not {VERSION}: use the caster "
                f"that wrote it ({metadata.get('caster')}) or fit again"
            )

    return signed_tensors.read(
        path, "a caster state file", "caster fit", check_format, StateError, key
    )


def _pack(moments: SourceMoments) -> Arrays:
    return {
        "U": np.ascontiguousarray(moments.U, dtype=STATE_DTYPE),
        "means": np.ascontiguousarray(moments.means, dtype=STATE_DTYPE),
        "covariances": np.ascontiguousarray(packed(moments.covariances), dtype=STATE_DTYPE),
        "counts": np.ascontiguousarray(moments.counts, dtype=np.int64),
    }


def _unpack(arrays: Arrays) -> SourceMoments:
    means = arrays["means"]
    covariances = unpacked(arrays["covariances"], means.shape[1])
    return SourceMoments(arrays["U"], means, covariances, arrays["counts"])
