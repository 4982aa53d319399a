"""Admission: whether a checkpoint may speak for its data, and the moments fitted with it."""

from __future__ import annotations

from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

from caster import state as states
from caster.adapt.adapter import Adapter
from caster.core.arrays import to_numpy
from caster.core.channels import MEASURED
from caster.errors import CasterError
from caster.io.files import file_digest
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import FrozenModel
from caster.state import State
from caster_bench.data.digits import open_data
from caster_bench.engine.backbones import Refused, checkpoint_digest, load
from caster_bench.engine.batches import Labelled, preparing
from caster_bench.engine.run_context import RunContext
from caster_bench.engine.shared_images import Kept, keep
from caster_bench.records.digest import FormatError
from caster_bench.records.reader import read_admission
from caster_bench.records.schema import Admission
from caster_bench.records.writer import write_admission
from caster_bench.sweeps import Data


def admission_of(
    context: RunContext, backbone: str, data: str, traits: dict[str, str]
) -> Admission | None:
    """The admission of an earlier run, if everything that shapes it is as it was; else None.

    `traits` keeps what is found of data, for the next backbone.
    """
    path = context.source(backbone, data, ".json")
    if not path.exists():
        return None
    try:
        found = read_admission(path)
        now = seen(context, backbone, data, traits)
    except FormatError:  # to admit it again would delete what another version made
        raise
    except CasterError:  # damaged, or its data are gone: to admit it again tells which
        return None
    return found if found.constants == context.constants and found.seen == now else None


def admit(context: RunContext, backbone: str, data: str) -> tuple[Admission, float, float]:
    """Load, fit and test a checkpoint on its data, and keep what came of it.

    The admission, and the seconds it took: those of passes, and all.
    """
    held = context.data[data]
    began = perf_counter()
    noted = seen(context, backbone, data, {})
    blank = Admission(
        backbone=backbone,
        data=data,
        checkpoint=noted["checkpoint"],
        moments=None,
        accuracy=None,
        n=0,
        threshold=held.threshold,
        admitted=False,
        reason=noted["refused"],
        constants=context.constants,
        seen=noted,
    )
    context.sources.mkdir(parents=True, exist_ok=True)
    made, passes = _brought(context, blank, held), 0.0
    if made is None:
        made = blank
        context.source(backbone, data, ".caster").unlink(missing_ok=True)  # it no longer holds
        if blank.reason is None:
            try:
                made, passes = _fitted(context, blank, held)
            except Refused as error:
                made = replace(blank, reason=str(error))
    write_admission(context.out, made)
    return made, passes, perf_counter() - began


def _brought(context: RunContext, blank: Admission, data: Data) -> Admission | None:
    """The admission that lies there, if only the times of its data's files are others.

    It came from another machine with its fitted state, to be gone on with. Images and labels must
    be the same, which takes reading them; the model is not asked again.
    """
    path = context.source(blank.backbone, blank.data, ".json")
    try:
        found = read_admission(path)
        state = states.load(context.source(blank.backbone, blank.data, ".caster"))
    except CasterError:  # not there, or damaged
        return None
    now = {**blank.seen, "files": found.seen.get("files")}
    if not found.admitted or found.constants != blank.constants or found.seen != now:
        return None
    assert found.preprocessing is not None  # it was admitted
    fit = Preprocessing(**found.preprocessing)
    source = keep(context, data.source, data.source_limit, fit, shuffle=True)
    target = keep(context, data.target, data.target_limit, fit, shuffle=False)
    same = [(found.source or {}).get("sha256"), (found.target or {}).get("sha256")]
    if [source.sha256, target.sha256] != same or moments_digest(state) != found.moments:
        return None
    return replace(found, seen=blank.seen)


def seen(context: RunContext, backbone: str, data: str, traits: dict[str, str]) -> dict[str, Any]:
    """What an admission rests on, without reading an image or running a model."""
    held = context.backbones[backbone]
    checkpoint, refused = None, None
    try:
        checkpoint = checkpoint_digest(context, held)
    except Refused as error:
        refused = str(error)
    given = context.data[data]
    for part in (given.source, given.target):
        if part not in traits:
            traits[part] = open_data(part, context.data_root).sha256
    layers = {"layers": MEASURED} if (backbone, data) in context.layers else {}
    return {
        "checkpoint": checkpoint,
        "refused": refused,
        "backbone": asdict(held),
        "data": asdict(given),
        "files": {part: traits[part] for part in (given.source, given.target)},
    } | layers  # no word where none are asked for: such admissions stay as they were


def kept_of(context: RunContext, data: Data, model: FrozenModel) -> tuple[Kept, Kept]:
    """Source and target as a model takes them, in files."""
    if model.preprocessing is None:
        raise Refused(f"{model.name} does not say how images become batches")
    source = keep(context, data.source, data.source_limit, model.preprocessing, shuffle=True)
    target = keep(context, data.target, data.target_limit, model.preprocessing, shuffle=False)
    if source.classes != target.classes:
        raise CasterError(
            f"{source.name} has {source.classes} classes and {target.name} {target.classes}: "
            "source and target must have the same"
        )
    return source, target


def _fitted(context: RunContext, blank: Admission, data: Data) -> tuple[Admission, float]:
    model = load(context, context.backbones[blank.backbone])
    source, target = kept_of(context, data, model)
    prepare = preparing(model)
    began = perf_counter()
    accuracy = None
    if data.threshold is not None:
        accuracy = _accuracy(model, Labelled(target.pixels(), target.codes(), prepare), target)
    settings: dict[str, Any] = dict(context.constants)
    batches = Labelled(source.pixels(), source.codes(), prepare)
    use_head = data.threshold is not None
    # Of what is no torch module there are none: the cells that want them say so, and no others.
    layers = (blank.backbone, blank.data) in context.layers and hasattr(model, "module")
    state = Adapter.fit(model, batches, use_head=use_head, layers=layers, **settings).state
    passes = perf_counter() - began
    if len(state.classes) != source.classes:
        raise CasterError(
            f"{len(state.classes)} of the {source.classes} classes of {source.name} are in its "
            f"{source.n} images: raise source_limit"
        )
    path = context.source(blank.backbone, blank.data, ".caster")
    states.save(state, path)
    backbone = context.backbones[blank.backbone]
    low = accuracy is not None and data.threshold is not None and accuracy < data.threshold
    return replace(
        blank,
        checkpoint=blank.checkpoint if backbone.is_file else model.sha256,
        moments=moments_digest(state),
        accuracy=accuracy,
        n=target.n if accuracy is not None else 0,
        admitted=not low,
        reason=_too_low(accuracy, data) if low else None,
        files={path.name: file_digest(path)},
        source={"name": source.name, "sha256": source.sha256, "n": source.n},
        target={"name": target.name, "sha256": target.sha256, "n": target.n},
        classes=source.classes,
        preprocessing=_listed(model.preprocessing),
    ), passes


def moments_digest(state: State) -> str:
    """SHA-256 of all of a state but the version that wrote it, which shapes no answer."""
    return states.digest(replace(state, caster_version=""))


def target_of(context: RunContext, admission: Admission) -> Kept:
    """The target of an admitted backbone, without its model."""
    data = context.data[admission.data]
    assert admission.preprocessing is not None  # it was admitted
    fit = Preprocessing(**admission.preprocessing)
    return keep(context, data.target, data.target_limit, fit, shuffle=False)


def _listed(preprocessing: Preprocessing | None) -> dict[str, Any] | None:
    """As JSON gives it back, so that an admission reads as it was written."""
    if preprocessing is None:
        return None
    values = asdict(preprocessing).items()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def _accuracy(model: FrozenModel, batches: Labelled, target: Kept) -> float:
    """Share of clean target images that the frozen head gets right."""
    right = 0
    for images, codes in batches:
        logits = model(images).logits
        if logits is None or logits.shape[1] != target.classes:
            given = "no" if logits is None else str(logits.shape[1])
            raise Refused(
                f"{model.name} gives {given} logits, and {target.name} has {target.classes} classes"
            )
        right += int((to_numpy(logits).argmax(axis=1) == codes).sum())
    return right / target.n


def _too_low(accuracy: float | None, data: Data) -> str:
    return (
        f"clean accuracy {accuracy:.1%} on {data.target} is below the threshold "
        f"{100 * (data.threshold or 0):g}%"
    )
