"""Admission: load a backbone, check its accuracy on clean images, and fit its source state."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import caster
from caster import state as states
from caster.core.arrays import to_numpy
from caster.core.channels import MEASURED
from caster.errors import CasterError
from caster.io.files import file_digest
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import FrozenModel
from caster.state import State
from caster_bench.data import open_data
from caster_bench.engine.batches import LabelledBatches, preprocessor
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.shared_images import StoredImages, source_images, target_images
from caster_bench.records.digest import FormatError
from caster_bench.records.schema import Admission
from caster_bench.records.store import read_admission, sources_of, write_admission
from caster_bench.sweeps import Backbone, Data
from caster_bench.sweeps.spec import PUBLISHED_NETWORKS


class CheckpointRejected(CasterError):  # noqa: N818 it is a decision, not a fault
    """Why a checkpoint may not take part. Its message is stored in records and their keys."""


# --- backbones -------------------------------------------------------------------------------


def checkpoint_path(context: RunContext, backbone: Backbone) -> Path:
    """Path of a backbone's file."""
    return context.root / backbone.checkpoint


def checkpoint_digest(context: RunContext, backbone: Backbone) -> str | None:
    """Return the SHA-256 of a checkpoint file; None for a model given by name."""
    if not backbone.is_file:
        return None
    path = checkpoint_path(context, backbone)
    if not path.is_file():
        published = backbone.architecture in PUBLISHED_NETWORKS
        how = "make it with benchmarks/real/published.py" if published else "train it"
        raise CheckpointRejected(
            f"there is no checkpoint {backbone.checkpoint}: {how}, or fix its path"
        )
    sha256 = file_digest(path)
    if backbone.sha256 not in (None, sha256):
        raise CheckpointRejected(
            f"the checkpoint {backbone.checkpoint} has the digest {sha256[:12]}…, and the sweep "
            f"wants {str(backbone.sha256)[:12]}…"
        )
    return sha256


def load(context: RunContext, backbone: Backbone) -> FrozenModel:
    """Load a backbone on the device of this process."""
    if not backbone.is_file:
        model = caster.wrap(backbone.checkpoint, device=context.device)
        if backbone.sha256 not in (None, model.sha256):
            raise CheckpointRejected(
                f"{backbone.checkpoint} does not have the digest that the sweep pins"
            )
        return model
    path = checkpoint_path(context, backbone)
    if path.suffix == ".onnx":
        return caster.wrap(path, preprocessing=path.with_suffix(".toml"))
    from caster_bench.engine.train import checkpoint

    try:
        found = checkpoint.inspect(path).architecture
    except CasterError as error:  # the file is at fault; a missing library is raised later
        raise CheckpointRejected(str(error).replace(str(path), backbone.checkpoint)) from None
    wanted = backbone.architecture
    if wanted not in (None, found):
        raise CheckpointRejected(f"{backbone.checkpoint} is a {found}, and not a {wanted}")
    return checkpoint.model_of(path, context.device)


def source_and_target(
    context: RunContext, data: Data, model: FrozenModel
) -> tuple[StoredImages, StoredImages]:
    """Store source and target images, preprocessed for a model."""
    if model.preprocessing is None:
        raise CheckpointRejected(f"{model.name} does not say how images become batches")
    source = source_images(context, data, model.preprocessing)
    target = target_images(context, data, model.preprocessing)
    if source.classes != target.classes:
        raise CasterError(
            f"{source.name} has {source.classes} classes and {target.name} {target.classes}: "
            "source and target must have the same"
        )
    return source, target


def moments_digest(state: State) -> str:
    """SHA-256 of a state, except the caster version that wrote it, which changes no answer."""
    return states.digest(replace(state, caster_version=""))


# --- admissions ------------------------------------------------------------------------------


def current_admission(
    context: RunContext,
    backbone: str,
    data: str,
    digests: dict[str, str],  # of data sets; filled here, for the next backbone
) -> Admission | None:
    """Return the admission of an earlier run if all of its inputs are unchanged, else None."""
    path = context.admission_path(backbone, data)
    if not path.exists():
        return None
    try:
        found = read_admission(path)
        now = admission_inputs(context, backbone, data, digests)
    except FormatError:  # admitting again would delete the work of another version
        raise
    except CasterError:  # damaged, or its data are gone: admitting again reports which
        return None
    return found if found.constants == context.constants and found.seen == now else None


def admission_inputs(
    context: RunContext, backbone: str, data: str, digests: dict[str, str]
) -> dict[str, Any]:
    """Describe everything an admission depends on, without reading an image or running a model."""
    checkpoint, rejected = None, None
    try:
        checkpoint = checkpoint_digest(context, context.backbones[backbone])
    except CheckpointRejected as error:
        rejected = str(error)
    sets = context.data[data]
    for part in (sets.source, sets.target):
        if part not in digests:
            digests[part] = open_data(part, context.data_root).sha256
    layers = {"layers": MEASURED} if (backbone, data) in context.layers else {}
    return {
        "checkpoint": checkpoint,
        "refused": rejected,
        "backbone": asdict(context.backbones[backbone]),
        "data": asdict(sets),
        "files": {part: digests[part] for part in (sets.source, sets.target)},
    } | layers  # absent unless wanted, so that admissions without layers stay valid


def admit(context: RunContext, backbone: str, data: str) -> tuple[Admission, float, float]:
    """Load, fit and test a backbone on its data, and write the admission.

    Return the admission, the seconds spent in model passes, and all seconds.
    """
    began = perf_counter()
    inputs = admission_inputs(context, backbone, data, {})
    blank = Admission(
        backbone=backbone,
        data=data,
        checkpoint=inputs["checkpoint"],
        moments=None,
        accuracy=None,
        n=0,
        threshold=context.data[data].threshold,
        admitted=False,
        reason=inputs["refused"],
        constants=context.constants,
        seen=inputs,
    )
    sources_of(context.out).mkdir(parents=True, exist_ok=True)
    admission, passes = _transferred(context, blank), 0.0
    if admission is None:
        admission = blank
        context.state_path(backbone, data).unlink(missing_ok=True)  # it is out of date
        if blank.reason is None:
            try:
                admission, passes = _fitted(context, blank)
            except CheckpointRejected as error:
                admission = replace(blank, reason=str(error))
    write_admission(context.out, admission)
    return admission, passes, perf_counter() - began


def _transferred(context: RunContext, blank: Admission) -> Admission | None:
    """Return an admission copied from another machine if only the files' times differ.

    Images and labels must be the same, so they are read; the model does not run again.
    """
    path = context.admission_path(blank.backbone, blank.data)
    try:
        found = read_admission(path)
        state = states.load(context.state_path(blank.backbone, blank.data))
    except CasterError:  # absent or damaged
        return None
    inputs = {**blank.seen, "files": found.seen.get("files")}
    if not found.admitted or found.constants != blank.constants or found.seen != inputs:
        return None
    assert found.preprocessing is not None  # it was admitted
    preprocessing, data = Preprocessing(**found.preprocessing), context.data[blank.data]
    source = source_images(context, data, preprocessing)
    target = target_images(context, data, preprocessing)
    same = [(found.source or {}).get("sha256"), (found.target or {}).get("sha256")]
    if [source.sha256, target.sha256] != same or moments_digest(state) != found.moments:
        return None
    return replace(found, seen=blank.seen)


def _fitted(context: RunContext, blank: Admission) -> tuple[Admission, float]:
    """Fit and test a backbone; return its admission and the seconds in model passes."""
    backbone, data = context.backbones[blank.backbone], context.data[blank.data]
    model = load(context, backbone)
    source, target = source_and_target(context, data, model)
    began = perf_counter()
    accuracy = None if data.threshold is None else _accuracy(model, target)
    state = _fit_state(context, blank, model, source)
    passes = perf_counter() - began
    if len(state.classes) != source.classes:
        raise CasterError(
            f"{len(state.classes)} of the {source.classes} classes of {source.name} are in its "
            f"{source.n} images: raise source_limit"
        )
    path = context.state_path(blank.backbone, blank.data)
    states.save(state, path)
    reason = _too_low(accuracy, data)
    return replace(
        blank,
        checkpoint=blank.checkpoint if backbone.is_file else model.sha256,
        moments=moments_digest(state),
        accuracy=accuracy,
        n=target.n if accuracy is not None else 0,
        admitted=reason is None,
        reason=reason,
        files={path.name: file_digest(path)},
        source={"name": source.name, "sha256": source.sha256, "n": source.n},
        target={"name": target.name, "sha256": target.sha256, "n": target.n},
        classes=source.classes,
        preprocessing=_listed(model.preprocessing),
    ), passes


def _fit_state(
    context: RunContext, blank: Admission, model: FrozenModel, source: StoredImages
) -> State:
    settings: dict[str, Any] = dict(context.constants)
    batches = LabelledBatches(source.pixels(), source.labels(), preprocessor(model))
    # Only torch modules have layers; cells that need them fail by themselves on other models.
    layers = (blank.backbone, blank.data) in context.layers and hasattr(model, "module")
    use_head = blank.threshold is not None
    # Nobody watches a sweep, and a sketch would change the digest that its records name.
    options: dict[str, Any] = {"use_head": use_head, "layers": layers, "sketch": False}
    return caster.fit(model, batches, **options, **settings).state


def _accuracy(model: FrozenModel, target: StoredImages) -> float:
    """Return the accuracy of the frozen head on clean target images."""
    correct = 0
    for images, labels in LabelledBatches(target.pixels(), target.labels(), preprocessor(model)):
        logits = model(images).logits
        if logits is None or logits.shape[1] != target.classes:
            found = "no" if logits is None else str(logits.shape[1])
            raise CheckpointRejected(
                f"{model.name} gives {found} logits, and {target.name} has {target.classes} classes"
            )
        correct += int((to_numpy(logits).argmax(axis=1) == labels).sum())
    return correct / target.n


def _too_low(accuracy: float | None, data: Data) -> str | None:
    if accuracy is None or data.threshold is None or accuracy >= data.threshold:
        return None
    return (
        f"clean accuracy {accuracy:.2%} on {data.target} is below the threshold "
        f"{100 * data.threshold:g}%"
    )


def _listed(preprocessing: Preprocessing | None) -> dict[str, Any] | None:
    """Convert to JSON types, so that an admission compares equal after it is read back."""
    if preprocessing is None:
        return None
    values = asdict(preprocessing).items()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}
