"""One safetensors file for everything CASTER retains of a source, checked on the way in.

The file holds what cannot be recomputed: U, class means, packed upper triangles of the class
covariances and class counts. Priors, global and pooled moments and the margin follow from these.
With layers, also the moments of every site of the network, one site after the other, and packed
upper triangles of the covariances of those that have them.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from caster._version import __version__
from caster.config import STATE_DTYPE, Settings
from caster.core.types import SourceMoments
from caster.errors import CasterError, StateError
from caster.io import labels, sealed
from caster.io.layer_arrays import Layers, layer_sizes, listed, pack, read_rows, take
from caster.io.sealed import Arrays, Key
from caster.io.triangles import check_semidefinite, packed, unpacked
from caster.state.schema import check
from caster.state.source_check import SourceCheck

FORMAT, VERSION = "caster-state", "1"
ARRAYS = ("U", "means", "covariances", "counts")
COLUMNS = range(2**31)  # that a model's logits may have
ROUNDING = 4 * float(np.finfo(STATE_DTYPE).eps)  # of a trace, as in `SourceMoments.slack`


@dataclass(frozen=True, eq=False)
class State:
    """Source moments with the labels, constants and digests they belong to."""

    moments: SourceMoments  # NumPy float32
    classes: labels.Labels  # (C,)
    settings: Settings
    model_sha256: str | None = None
    preprocessing_sha256: str | None = None
    head: tuple[int, ...] | None = None  # for every class its column among the model's logits
    caster_version: str = __version__
    layers: Layers | None = None  # of every site; None: not asked for
    input_range: tuple[float, float] | None = None  # of the source's input; None: not measured
    source_check: SourceCheck | None = None  # None: made of moments alone

    def __repr__(self) -> str:
        bound = "no model" if self.model_sha256 is None else f"model {self.model_sha256[:12]}…"
        layers = "no layers" if self.layers is None else f"{len(self.layers)} layer sites"
        return f"State({self.moments!r}, {bound}, {layers})"

    def check_origin(
        self,
        *,
        model_sha256: str | None = None,
        preprocessing_sha256: str | None = None,
    ) -> None:
        """Refuse a model or preprocessing other than the one the moments were made with."""
        if model_sha256 is not None:
            self.check_model(model_sha256)
        if preprocessing_sha256 is not None:
            self.check_preprocessing(preprocessing_sha256)

    def check_model(self, sha256: str | None) -> None:
        """Refuse another model; None is one that cannot be told from another."""
        _check_same("model", self.model_sha256, sha256)

    def check_preprocessing(self, sha256: str | None) -> None:
        """Refuse another preprocessing; None is one that was not stated."""
        _check_same("preprocessing", self.preprocessing_sha256, sha256)


def _check_same(what: str, fitted: str | None, given: str | None) -> None:
    if given != fitted:
        digests = [sha256 and f"{sha256[:12]}…" for sha256 in (fitted, given)]
        raise StateError(
            f"the state was fitted with another {what} (digest {digests[0] or 'none'}, not "
            f"{digests[1] or 'none'}): fit again with this one, or allow it with {{argument}}",
            argument=f"allow_other_{what}",
        )


def save(state: State, path: str | os.PathLike[str], key: Key | None = None) -> None:
    """Write a state file, signed where there is a key; a state that could not be loaded is refused.

    An existing file is replaced whole or not at all.
    """
    arrays, metadata = _content(state)
    try:
        _state_of(arrays, metadata)
    except CasterError as error:
        raise StateError(f"cannot write {path}: {error}") from None
    sealed.write(arrays, metadata, path, key)


def digest(state: State) -> str:
    """SHA-256 of everything in a state: two files with the same one hold the same."""
    return sealed.content_digest(*_content(state))


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
        metadata["layers"] = listed(state.layers)
        arrays |= pack(state.layers)
    if state.input_range is not None:
        metadata["input_range"] = json.dumps(state.input_range)
    return arrays, metadata


def load(path: str | os.PathLike[str], key: Key | None = None) -> State:
    """Read a state file, or refuse it in one line; with a key, it must be signed with that."""
    arrays, metadata = _read(Path(path), key)
    try:
        return _state_of(arrays, metadata)
    except CasterError as error:
        raise StateError(f"{path} is not a usable state file ({error}): fit again") from None


def _state_of(arrays: Arrays, metadata: dict[str, str]) -> State:
    """The state of a file's content, if it is one that a fit can have made."""
    try:
        classes = labels.from_json(metadata["classes"])
        rows = read_rows(metadata["layers"]) if "layers" in metadata else None
        check(arrays, _sizes(arrays, metadata, len(classes)) | layer_sizes(rows))
        state = State(
            moments=_unpack(arrays),
            classes=classes,
            settings=Settings(**json.loads(metadata["settings"])),
            model_sha256=metadata["model_sha256"] or None,
            preprocessing_sha256=metadata["preprocessing_sha256"] or None,
            head=_head(json.loads(metadata["head"]), len(classes)),
            caster_version=metadata["caster"],
            layers=None if rows is None else take(arrays, rows),
            input_range=_range(json.loads(metadata.get("input_range", "null"))),
            source_check=_source_check(json.loads(metadata["source_check"])),
        )
    except KeyError as error:
        raise CasterError(f"it lacks {error}") from None
    except RecursionError:
        raise CasterError("its metadata are nested too deeply") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CasterError(str(error)) from None
    if sum(state.moments.counts.tolist()) != int(metadata["samples"]):
        raise CasterError("its counts do not add up to its samples")
    _check_moments(state.moments)
    return state


def _sizes(arrays: Arrays, metadata: dict[str, str], n_classes: int) -> dict[str, int]:
    """The sizes of the arrays but for those of layers."""
    d, k = int(metadata["features"]), arrays["means"].shape[-1]
    if n_classes < 2 or not 1 <= k <= min(d, n_classes - 1):
        raise CasterError(
            f"its arrays do not fit together: {n_classes} classes, {d} features, {k} directions"
        )
    return {"features": d, "classes": n_classes, "directions": k, "triangle": k * (k + 1) // 2}


def _head(columns: Any, n_classes: int) -> tuple[int, ...] | None:
    if columns is None:
        return None
    whole = isinstance(columns, list) and all(type(c) is int and c in COLUMNS for c in columns)
    if not whole or not len(columns) == len(set(columns)) == n_classes:
        raise CasterError("its head does not have one logit for every class")
    return tuple(columns)


def _source_check(found: Any) -> SourceCheck | None:
    return None if found is None else SourceCheck(**found)


def _check_moments(moments: SourceMoments) -> None:
    """Raise unless these can be moments of labelled features, and the metric exists."""
    if not moments.U.any(axis=0).all():
        raise CasterError("its U has a direction without length")
    check_semidefinite(moments.covariances, ROUNDING, "covariances")
    with np.errstate(over="ignore", invalid="ignore"):
        derived = (moments.within, moments.covariance)
    if not all(np.isfinite(values).all() for values in derived):
        raise CasterError("its moments are too large for float32")
    if not np.isfinite(moments.metric).all():
        raise CasterError("its pooled covariance is singular")


def _range(ends: list[float] | None) -> tuple[float, float] | None:
    if ends is None:
        return None
    if len(ends) != 2 or not -np.inf < ends[0] <= ends[1] < np.inf:
        raise CasterError("its input range is no range")
    return float(ends[0]), float(ends[1])


def array_sizes(state: State) -> list[tuple[str, int]]:
    """Name and bytes of every stored array."""
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

    return sealed.read(path, "a caster state file", "caster fit", check_format, StateError, key)


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
