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

import numpy as np

from caster import labels, sealed
from caster._version import __version__
from caster.config import STATE_DTYPE, Settings
from caster.core.types import SourceMoments
from caster.errors import CasterError, StateError
from caster.sealed import Arrays
from caster.state.layers import Layers, has_added_tokens, listed, pack, take
from caster.state.triangles import packed, unpacked

FORMAT, VERSION = "caster-state", "2"
WITH_LAYERS = "3"  # the version of a file with layers: an older caster refuses what it cannot use
WITH_TOKENS = "4"  # and of one with sites of a part of the tokens
ARRAYS = ("U", "means", "covariances", "counts")


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
            f"{digests[1] or 'none'}): fit again with this one, or allow it by name"
        )


def save(state: State, path: str | os.PathLike[str]) -> None:
    """Write a state file; an existing one is replaced whole or not at all."""
    sealed.write(*_content(state), path)


def version_of(state: State) -> str:
    """The format version a state is written in."""
    if state.layers is None:
        return VERSION
    return WITH_TOKENS if has_added_tokens(state.layers) else WITH_LAYERS


def digest(state: State) -> str:
    """SHA-256 of everything in a state: two files with the same one hold the same."""
    return sealed.content_digest(*_content(state))


def _content(state: State) -> tuple[Arrays, dict[str, str]]:
    metadata = {
        "format": FORMAT,
        "version": version_of(state),
        "caster": state.caster_version,
        "settings": json.dumps(asdict(state.settings)),
        "classes": labels.to_json(state.classes),
        "ridge": repr(state.moments.ridge),
        "features": str(state.moments.U.shape[0]),
        "samples": str(int(state.moments.counts.sum())),
        "model_sha256": state.model_sha256 or "",
        "preprocessing_sha256": state.preprocessing_sha256 or "",
        "head": json.dumps(state.head),
    }
    arrays = _pack(state.moments)
    if state.layers is not None:
        metadata["layers"] = listed(state.layers)
        arrays |= pack(state.layers)
    return arrays, metadata


def load(path: str | os.PathLike[str]) -> State:
    """Read a state file, or refuse it in one line."""
    arrays, metadata = _read(Path(path))
    try:
        layers = take(arrays, metadata["layers"]) if "layers" in metadata else None
        state = State(
            moments=_unpack(arrays, float(metadata["ridge"])),
            classes=labels.from_json(metadata["classes"]),
            settings=Settings(**json.loads(metadata["settings"])),
            model_sha256=metadata["model_sha256"] or None,
            preprocessing_sha256=metadata["preprocessing_sha256"] or None,
            head=_head(json.loads(metadata["head"])),
            caster_version=metadata["caster"],
            layers=layers,
        )
        _check_consistent(state, metadata)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path} is not a usable state file ({error}): fit again") from None
    return state


def _head(columns: list[int] | None) -> tuple[int, ...] | None:
    return None if columns is None else tuple(columns)


def array_sizes(state: State) -> list[tuple[str, int]]:
    """Name and bytes of every stored array."""
    return [(name, array.nbytes) for name, array in _content(state)[0].items()]


def _read(path: Path) -> tuple[Arrays, dict[str, str]]:
    def check(metadata: dict[str, str]) -> None:
        if metadata.get("format") != FORMAT:
            raise StateError(f"{path} is a safetensors file, but not a caster state file")
        if metadata.get("version") not in (VERSION, WITH_LAYERS, WITH_TOKENS):
            raise StateError(
                f"{path} has state format {metadata.get('version')}, not {VERSION} to "
                f"{WITH_TOKENS}: use the caster that wrote it ({metadata.get('caster')}) or "
                "fit again"
            )

    return sealed.read(path, "a caster state file", "caster fit", check, StateError)


def _check_consistent(state: State, metadata: dict[str, str]) -> None:
    if metadata["version"] != version_of(state):
        raise CasterError("its format is not that of the layers it has")
    moments = state.moments
    n_classes, k = moments.means.shape
    shapes_agree = (
        moments.U.shape == (int(metadata["features"]), k)
        and moments.counts.shape == state.classes.shape == (n_classes,)
        and int(moments.counts.sum()) == int(metadata["samples"])
    )
    if not shapes_agree or n_classes < 2 or k < 1 or moments.counts.min() < 1:
        raise CasterError("its arrays do not fit together")
    if state.head is not None and (len(state.head) != n_classes or min(state.head) < 0):
        raise CasterError("its head does not fit its classes")
    numbers = (moments.U, moments.means, moments.covariances, moments.ridge)
    if not all(np.isfinite(values).all() for values in numbers):
        raise CasterError("it holds NaN or infinity")


def _pack(moments: SourceMoments) -> Arrays:
    return {
        "U": np.ascontiguousarray(moments.U, dtype=STATE_DTYPE),
        "means": np.ascontiguousarray(moments.means, dtype=STATE_DTYPE),
        "covariances": np.ascontiguousarray(packed(moments.covariances), dtype=STATE_DTYPE),
        "counts": np.ascontiguousarray(moments.counts, dtype=np.int64),
    }


def _unpack(arrays: Arrays, ridge: float) -> SourceMoments:
    if sorted(arrays) != sorted(ARRAYS):
        raise CasterError(f"it holds {', '.join(sorted(arrays))} instead of {', '.join(ARRAYS)}")
    means, triangles = arrays["means"], arrays["covariances"]
    n_classes, k = means.shape
    if triangles.ndim != 2 or len(triangles) != n_classes:
        raise CasterError("its arrays do not fit together")
    return SourceMoments(arrays["U"], means, unpacked(triangles, k), arrays["counts"], ridge)
