"""Layer transport of images whose features are kept: one more pass, through aligned layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from inspect import signature
from typing import cast

import numpy as np

from caster.adapt.adapter import Adapter
from caster.adapt.deployed import Batch, batches, order_of
from caster.adapt.extract import stated_preprocessing
from caster.adapt.features import ImageArrayFeatures
from caster.adapt.reading import ImageArrayBatch, read_batches
from caster.adapt.running import naming
from caster.adapt.source import Source
from caster.core.arrays import to_numpy
from caster.core.types import Judgement, Reason
from caster.errors import CasterError
from caster.io.images import Images
from caster.io.progress import Progress
from caster.models.protocol import FrozenModel, Outputs
from caster.report.evaluation import Tried
from caster.report.mechanism import Mechanism, layer_transport
from caster.state import State, has_full

NAME = "layer-transport"
OTHERWISE = "--no-layers answers by transport of the last features instead"
ANEW = (
    "no output was written; the frozen model's answers are kept, and the same command aligns all "
    "images anew"
)
LOOK = 32  # images that are looked at before the work, whether they are of one size


def wants_layers(state: State, asked: bool | None) -> bool:
    """Whether layer transport answers: where the state has layers, unless told otherwise."""
    if asked and state.layers is None:
        raise CasterError("the state has no layers: fit again, without --no-layers")
    return state.layers is not None if asked is None else asked


def refuse_layers_of_features(state: State, asked: bool | None) -> None:
    """Features have passed all layers: say so, before another mechanism answers unasked."""
    if wants_layers(state, asked):
        raise CasterError(
            "the state has layers, and features have passed all layers: give "
            f"images and --model; {OTHERWISE}"
        )


@contextmanager
def telling_what_is_lost(aligned: LayerStream | None) -> Iterator[None]:
    """Ctrl-C in a second pass, if there is one, says that it will start anew."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*([] if aligned is None else [ANEW])) from None


class LayerStream:
    """Images met batch by batch, each answered by layer transport whatever its certificate says.

    The frozen model's features and logits are kept already, so one more pass will do.
    """

    def __init__(self, adapter: Adapter, tau: float | None) -> None:
        self.adapter = adapter
        check_layers(adapter.model, adapter.state)
        from caster.adapt.layer_transport import LayerTransport  # with torch, as the model is

        # The frozen answer of every batch is at hand, so that nothing is saved by a rest.
        own = {"every": 1, "maps": "full" if has_full(adapter.state.layers) else "diagonal"}
        defaults = {n: p.default for n, p in signature(LayerTransport).parameters.items()}
        del defaults["model"], defaults["source"], defaults["name"]
        options = defaults | own | ({} if tau is None else {"tau": tau})
        # The adapter has seen to it that the state is the model's, or is allowed not to be.
        source = Source(state=adapter.state, allow_other_model=True)
        self.mechanism: Mechanism = layer_transport(options)
        self._method = LayerTransport(adapter.model, source, name=NAME, **options)
        if self._method.inert:
            raise CasterError(f"{adapter.model.name} has no site of the state's: {OTHERWISE}")

    @property
    def sites(self) -> int:
        """How many sites are aligned, BatchNorms' included; known once a batch came."""
        return len(self._method.aligned)

    @property
    def full_maps(self) -> int:
        """How many of them have full maps, where a batch supports them."""
        layers = self.adapter.state.layers or {}
        aligned = self._method.aligned
        return sum(layers[site].covariance is not None for site in aligned if site in layers)

    def check_sizes(self, images: Images) -> None:
        """Refuse images of several sizes before the work, as far as a look at some shows them."""
        preprocessing = stated_preprocessing(self.adapter.model)
        if preprocessing.crop is not None or isinstance(preprocessing.resize, tuple):
            return  # any image comes out of that in one size
        rows = np.linspace(0, len(images) - 1, min(LOOK, len(images))).astype(int).tolist()
        with closing(
            read_batches(images, preprocessing, rows, LOOK, skip_unreadable=True)
        ) as reading:
            for read in reading:
                _check_one_size(read, images)

    def tried(
        self,
        images: Images,
        features: ImageArrayFeatures,
        batch_size: int,
        seed: int | None,  # of the order; None: the images' own
        progress: Progress,
    ) -> Iterator[tuple[Batch, Tried]]:
        """Every batch of features, and what layer transport makes of its images."""
        rows = features.places[order_of(features, seed)].tolist()
        reading = read_batches(
            images,
            stated_preprocessing(self.adapter.model),
            rows,
            batch_size,
            skip_unreadable=True,  # to be told below: features were made of every one of them
        )
        with closing(reading):
            stream = batches(features, batch_size, seed, progress)
            for batch, read in zip(stream, reading, strict=True):
                yield batch, self._tried(batch, read, images)

    def _tried(self, batch: Batch, read: ImageArrayBatch, images: Images) -> Tried:
        for why in read.unreadable.values():
            raise CasterError(
                f"{why}: it could be read when its features were made; make it readable again, or "
                "take it out of the images, and run again"
            )
        _check_one_size(read, images)
        first = images.names[read.rows[0]]
        with naming(first, len(read.rows)):
            before = Outputs(batch.features, batch.logits)
            scores, answer = self._method.both(read.groups[0].prepared, before)
        assert answer.ratio is not None
        reason, ratio = cast(Reason, answer.reason), answer.ratio
        return Tried(to_numpy(scores), Judgement(answer.accepted, reason, ratio))


def _check_one_size(read: ImageArrayBatch, images: Images) -> None:
    if len(read.groups) > 1:
        one, other = (images.names[read.rows[group.places[0]]] for group in read.groups[:2])
        raise CasterError(
            f"images of several sizes cannot be aligned together (as {one} and {other}): state a "
            f"resize; {OTHERWISE}"
        )


def check_layers(model: FrozenModel, state: State) -> None:
    """Refuse a model whose layers cannot be aligned, or whose answer would be of other classes."""
    if not hasattr(model, "twin"):
        raise CasterError(
            f"layer transport aligns the layers of a torch module, and {model.name} is none: "
            f"{OTHERWISE}"
        )
    if state.head is None:
        raise CasterError(
            "layer transport answers with the model's own classes, and the state's are others: "
            f"{OTHERWISE}"
        )
