"""Layer transport of pictures whose features are kept: one more pass, through aligned layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import cast

from caster.adapter import Adapter
from caster.arrays import to_numpy
from caster.core.types import Judgement, Reason
from caster.data import Pictures
from caster.errors import CasterError
from caster.evaluation.mechanism import Mechanism, layer_transport
from caster.evaluation.run import Tried
from caster.frozen.protocol import FrozenModel, Outputs
from caster.jobs.deployed import Batch, batches, order_of
from caster.jobs.extract import stated_preprocessing
from caster.jobs.features import PictureFeatures
from caster.jobs.progress import Progress
from caster.jobs.reading import PictureBatch, read_batches
from caster.jobs.running import naming
from caster.methods import Source, find
from caster.state import State

NAME = "layer-transport"
OTHERWISE = "--no-layers answers by transport of the last features instead"


def wants_layers(state: State, asked: bool | None) -> bool:
    """Whether layer transport answers: where the state has layers, unless told otherwise."""
    if asked and state.layers is None:
        raise CasterError("the state has no layers: fit again with --layers")
    return state.layers is not None if asked is None else asked


def refuse_layers_of_features(state: State, asked: bool | None) -> None:
    """Features have passed all layers: say so, before another mechanism answers unasked."""
    if wants_layers(state, asked):
        raise CasterError(
            "the state was fitted with --layers, and features have passed all layers: give "
            f"pictures and --model; {OTHERWISE}"
        )


class LayerStream:
    """Pictures met batch by batch, each answered by layer transport whatever its certificate says.

    The frozen model's features and logits are kept already, so one more pass will do.
    """

    def __init__(self, adapter: Adapter, tau: float | None) -> None:
        self.adapter = adapter
        check_layers(adapter.model, adapter.state)
        from caster.methods.layer_transport import LayerTransport  # with torch, as the model is

        # The frozen answer of every batch is at hand, so every batch is compared with it.
        options = find(NAME).options() | {"every": 1} | ({} if tau is None else {"tau": tau})
        # The adapter has seen to it that the state is the model's, or is allowed not to be.
        source = Source(state=adapter.state, allow_other_model=True)
        self.mechanism: Mechanism = layer_transport(options)
        self._method = LayerTransport(adapter.model, source, name=NAME, **options)
        if self._method.inert:
            raise CasterError(f"{adapter.model.name} has no site of the state's: {OTHERWISE}")

    @property
    def sites(self) -> int:
        """How many sites are aligned, BatchNorms' included."""
        return len(self._method.sites)

    def tried(
        self,
        pictures: Pictures,
        features: PictureFeatures,
        batch_size: int,
        seed: int | None,  # of the order; None: the pictures' own
        progress: Progress,
    ) -> Iterator[tuple[Batch, Tried]]:
        """Every batch of features, and what layer transport makes of its pictures."""
        rows = features.places[order_of(features, seed)].tolist()
        reading = read_batches(
            pictures,
            stated_preprocessing(self.adapter.model),
            rows,
            batch_size,
            skip_unreadable=False,  # those that cannot be read have no features either
        )
        with closing(reading):
            stream = batches(features, batch_size, seed, progress)
            for batch, read in zip(stream, reading, strict=True):
                yield batch, self._tried(batch, read, pictures)

    def _tried(self, batch: Batch, read: PictureBatch, pictures: Pictures) -> Tried:
        first = pictures.names[read.rows[0]]
        if len(read.groups) > 1:
            raise CasterError(
                f"pictures of several sizes cannot be aligned together (from {first} on): state a "
                f"resize; {OTHERWISE}"
            )
        with naming(first, len(read.rows)):
            before = Outputs(batch.features, batch.logits)
            scores, answer = self._method.both(read.groups[0].prepared, before)
        assert answer.ratio is not None
        reason, ratio = cast(Reason, answer.reason), answer.ratio
        return Tried(to_numpy(scores), Judgement(answer.accepted, reason, ratio))


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
