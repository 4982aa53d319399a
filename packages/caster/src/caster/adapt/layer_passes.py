"""The interface of a network with aligned layers, and what every runtime shares of it.

`adapt.alignment` aligns a torch module with hooks, and `adapt.onnx_alignment` an ONNX graph that
was rewritten. Both take a batch and a `Pass`, and remember a stream's target in `TargetMoments`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from operator import add
from typing import Any, Literal, Protocol, Self

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from caster.config import LAYER_EVERY, LAYER_WINDOW
from caster.core.arrays import to_numpy
from caster.core.channels import ChannelMoments, Site, divergence
from caster.core.linalg import Array
from caster.errors import CasterError
from caster.models.protocol import FrozenModel, Outputs

PARTS = ("mean", "variance", "covariance")  # arrays of `ChannelMoments`
EPS = 1e-5  # of a site's mean variance, added to every variance: a dead channel stays dead
FEW = 8.0  # weight of the pooled moments in those of a class, in samples
ENOUGH = 256  # fewest source samples behind a full map
CHANGE_WINDOW = 64  # samples that are compared with the past to notice another shift
CHANGE_SITES = 0.25  # share of the sites compared: the first ones, which depend least on classes

Moments = dict[Site, ChannelMoments]
Answer = Callable[[Array, Array], tuple[Array, ...]]  # of features and logits
Range = tuple[Any, Any]  # lowest and highest input values: scalars, or one per channel


@dataclass(frozen=True)
class LayerSettings:
    """The constants of layer transport, chosen on the four spare corruptions.

    >>> LayerSettings(depth=2.0)
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: depth is a share of the sites, above 0 and at most 1, not 2.0
    """

    prior: float = 16.0  # weight of the source's moments, in samples
    memory: int = 2048  # samples behind the target's moments, earlier ones if a batch has fewer
    depth: float = 1.0  # share of the sites that are aligned, from the first on
    sites: tuple[str, ...] | None = None  # patterns of site names instead
    maps: Literal["diagonal", "full"] = "full"  # full where a site has few channels
    mixture: bool = True  # align with the batch's mixture of classes, else with the source's
    tau: float = 1.0  # largest accepted ratio
    window: int = LAYER_WINDOW  # samples behind the certificate
    every: int = LAYER_EVERY  # compare one window in this many while the verdict is stable

    def __post_init__(self) -> None:
        if not 0 <= self.prior < math.inf:
            raise CasterError(f"prior is a number of samples from 0 up, not {self.prior!r}")
        if not isinstance(self.memory, int) or self.memory < 0:
            raise CasterError(f"memory is a number of samples from 0 up, not {self.memory!r}")
        if not 0 < self.depth <= 1:
            raise CasterError(
                f"depth is a share of the sites, above 0 and at most 1, not {self.depth!r}"
            )
        if self.maps not in ("diagonal", "full"):
            raise CasterError(f"maps are 'diagonal' or 'full', not {self.maps!r}")
        if not 0 < self.tau < math.inf:
            raise CasterError(f"tau must be a number above 0, not {self.tau!r}")
        for name in ("window", "every"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise CasterError(f"{name} must be 1 or more, not {count!r}")


# One pass per batch and no classes: for states without moments of classes.
PLAIN = LayerSettings(memory=64, depth=0.5, maps="diagonal", mixture=False)


@dataclass(frozen=True, eq=False)
class Pass:
    """How to align one pass; by default at every site, with the source's mixture of classes."""

    depth: int | None = None  # number of sites, from the first on
    full: bool = False  # use full maps where enough samples support them
    mixture: NDArray[np.float64] | None = None  # (C,), of the samples behind the target's moments
    past_only: bool = False  # moments from before this batch
    fresh: bool = False  # moments of this batch alone, as if there were no past
    in_parts: bool = False  # by past moments alone: a large batch may pass in parts, to save memory


WHOLE = Pass(full=True)


class ImplausibleSamples(Exception):  # noqa: N818 - no error: the others of the batch are answered
    """Samples that no image could have produced; the batch has not changed the stream."""

    def __init__(self, kept: Array) -> None:
        super().__init__()
        self.kept = kept  # (n,), which samples are plausible


class LayeredModel(FrozenModel, Protocol):
    """A frozen model whose layers can be aligned."""

    def placed(self, batch: Any) -> Array:
        """Check a batch and convert it to the model's input."""


class AlignedNetwork(Protocol):
    """A frozen network in which the channels of every site get the source's mean and variance.

    The target's moments come from the batch and, if it has fewer samples than the memory, from the
    batches before it; `prior` samples shrink them towards the source's. The source's are those of
    the mixture of classes that the `Pass` names. A batch with samples that are implausible at the
    first site raises `ImplausibleSamples`.
    """

    sites: list[Site]  # that are aligned, shallow ones first
    target: TargetMoments

    def __call__(self, batch: Any, how: Pass = WHOLE) -> Outputs:
        """Features and logits with aligned layers; `accept` then adds the batch to the past."""

    def accept(self) -> None:
        """Add the last batch to the past."""

    def fold(self, batch: Any, how: Pass, batches: int) -> bool:
        """Make the maps of a pass from the past constant, for about so many batches.

        False if they do not reproduce a pass, or if this batch does not allow that check.
        """

    def folded(self, batch: Any, answer: Answer) -> tuple[Array, ...]:
        """Answer by the features and logits with the constant maps; nothing is measured."""

    def unfold(self) -> None:
        """Free what only batches with the constant maps need."""

    def reset(self) -> None:
        """Forget the past."""

    def resume(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a `state` of the target."""

    def new_stream(self) -> Self:
        """A copy without a past; weights and source moments are shared."""

    @property
    def left_alone(self) -> frozenset[Site]:
        """Sites that cannot be aligned; known after the first batch."""

    @property
    def full_maps(self) -> int:
        """Number of sites with a full map."""

    @property
    def source_bytes(self) -> int:
        """Size of the source's moments."""


class TargetMoments:
    """Moments of a stream's target at every site: its past, and a batch that may join it.

    >>> site = Site("norm", "in", -1)
    >>> target = TargetMoments(memory=8, sites=[site])
    >>> batch = ChannelMoments(4.0, np.array([1.0]), np.array([2.0]))
    >>> [target.add(site, batch, fresh=False).count, target.samples]
    [4.0, 0.0]
    >>> target.accept(fresh=False)
    >>> target.samples
    4.0
    """

    def __init__(
        self,
        memory: int,  # samples; 0: nothing is remembered
        sites: Sequence[Site],  # shallow ones first
        merge: Callable[[ChannelMoments, ChannelMoments], ChannelMoments] = add,
    ) -> None:
        self.memory = memory
        self._watched = frozenset(sites[: math.ceil(CHANGE_SITES * len(sites))])
        self._merge = merge
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.past: Moments = {}
        self.recent: Moments = {}  # of the last samples, at the first sites
        self.begin()

    def begin(self) -> None:
        """Forget a batch that was not accepted."""
        self.pending: Moments = {}  # the past with the batch
        self.newest: Moments = {}  # `recent` with the batch

    @property
    def samples(self) -> float:
        """Samples behind the past, fractional if older ones are discounted."""
        return next((moments.count for moments in self.past.values()), 0.0)

    def is_full(self, samples: int) -> bool:
        """Whether this many more samples would fill the memory."""
        return 0 < self.memory <= self.samples + samples

    def add(self, site: Site, batch: ChannelMoments, fresh: bool) -> ChannelMoments:
        """Merge a batch with the past at a site, pending `accept`; return the merged moments.

        A `fresh` start ignores the past.
        """
        if not self.memory:
            return batch
        past, recent = (None, None) if fresh else (self.past.get(site), self.recent.get(site))
        self.pending[site] = found = self._added(past, batch, self.memory)
        if site in self._watched:
            slim = replace(batch, covariance=None)
            self.newest[site] = self._added(recent, slim, CHANGE_WINDOW)
        return found

    def _added(
        self, past: ChannelMoments | None, batch: ChannelMoments, memory: int
    ) -> ChannelMoments:
        missing = memory - batch.count
        if past is None or missing <= 0:
            return batch
        return self._merge(past.at_most(missing), batch)

    def change(self) -> float:
        """How far the last samples, with the batch, are from the past: mean divergence.

        0 while the past consists of these samples only.
        """
        pairs = [
            (found, self.past[site]) for site, found in self.newest.items() if site in self.past
        ]
        found = [divergence(new, past) for new, past in pairs if new.count < past.count]
        if not found:
            return 0.0
        xp = array_namespace(found[0])
        return float(xp.mean(xp.stack([xp.mean(each) for each in found])))

    def accept(self, fresh: bool) -> None:
        """Add the last batch to the past, or start the past with it."""
        if fresh:
            self.past, self.recent = {}, {}
        self.past |= self.pending
        self.recent |= self.newest
        self.begin()

    def state(self) -> dict[str, NDArray[Any]]:
        """Past and recent moments, as named arrays."""
        return {
            f"{which}.{site}.{name}": np.asarray(to_numpy(value))
            for which, kept in (("past", self.past), ("recent", self.recent))
            for site, moments in kept.items()
            for name, value in (("count", np.float64(moments.count)), *parts_of(moments).items())
        }

    def resume(
        self,
        state: Mapping[str, NDArray[Any]],
        sources: Mapping[Site, ChannelMoments],  # of the same shapes
        place: Callable[[NDArray[Any]], Array] = np.asarray,
        optional: Collection[Site] = (),  # sites that may lack a past
    ) -> None:
        """Continue from a `state`; ValueError if it is invalid or lacks a site's past."""
        self.reset()
        sites = {str(site): site for site in sources}
        for name in [name.removesuffix(".count") for name in state if name.endswith(".count")]:
            which, _, site = name.partition(".")
            if which not in ("past", "recent"):
                continue  # another part of the stream's state
            if site not in sites:
                raise ValueError("moments of other sites")
            shapes = {part: held.shape for part, held in parts_of(sources[sites[site]]).items()}
            if which == "recent":
                shapes.pop("covariance", None)
            count = float(state[f"{name}.count"])
            parts = {part: np.asarray(state[f"{name}.{part}"]) for part in shapes}
            sound = 0 < count < math.inf and (parts["variance"] >= 0).all()
            if not sound or not all(
                value.shape == tuple(shapes[part]) and np.isfinite(value).all()
                for part, value in parts.items()
            ):
                raise ValueError(site)
            kept = self.past if which == "past" else self.recent
            kept[sites[site]] = ChannelMoments(count, *map(place, parts.values()))
        missing = (sources.keys() - self.past.keys()).difference(optional) if self.past else ()
        if missing or self.recent.keys() != self._watched & self.past.keys():
            raise ValueError("moments of some sites only")

    @property
    def nbytes(self) -> int:
        """Size of the moments."""
        return sum(nbytes(held) for kept in (self.past, self.recent) for held in kept.values())


def parts_of(moments: ChannelMoments) -> dict[str, Array]:
    """The arrays of moments, by their names."""
    return {name: part for name in PARTS if (part := getattr(moments, name)) is not None}


def nbytes(moments: ChannelMoments) -> int:
    """Size of moments, with those of classes."""
    parts = [*parts_of(moments).values()]
    if moments.classes is not None:
        parts += [moments.classes.means, moments.classes.variances]
    return sum(int(part.nbytes) for part in parts)


def selected(sites: list[Site], patterns: Any, name: str) -> list[Site]:
    """Sites whose names match one of several shell patterns.

    >>> sites = [Site("blocks.0", "out", -1), Site("blocks.1", "out", -1), Site("head", "in", -1)]
    >>> [str(site) for site in selected(sites, ("blocks.*",), "layer-transport")]
    ['blocks.0:out', 'blocks.1:out']
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise CasterError(f"sites of {name} are a list of patterns, not {patterns!r}")
    for pattern in patterns:
        if not any(fnmatchcase(str(site), pattern) for site in sites):
            known = ", ".join(map(str, sites)) or "none"
            raise CasterError(f"{name} has no site {pattern!r}: there are {known}")
    return [site for site in sites if any(fnmatchcase(str(site), p) for p in patterns)]


def chosen_sites(found: list[Site], settings: LayerSettings) -> list[Site]:
    """The sites to align: the first ones in the order of the network, or those named."""
    if settings.sites is not None:
        return selected(found, settings.sites, "layer transport")
    return found[: math.ceil(settings.depth * len(found))]


def has_full_map(source: ChannelMoments, settings: LayerSettings) -> bool:
    """Whether the source's moments at a site support a full map."""
    enough = settings.maps == "full" and source.count >= ENOUGH
    return enough and source.covariance is not None


def source_moments(layers: Mapping[Site, ChannelMoments], settings: LayerSettings) -> Moments:
    """The moments of a state that these settings use, classes of few samples shrunk.

    A state stores class moments rounded; they are centred so that the source's own mixture of them
    has exactly its pooled moments.
    """
    used = {}
    for site, found in layers.items():
        full = has_full_map(found, settings)
        classes = found.classes if settings.mixture else None
        used[site] = replace(
            found,
            covariance=found.covariance if full else None,
            classes=classes and classes.shrunk(FEW).centred_on(found),
        )
    return used
