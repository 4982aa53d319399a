"""Interface of a network with aligned layers, and the parts that all runtimes share.

`adapt.alignment` aligns a torch module with hooks, and `adapt.onnx_alignment` a rewritten ONNX
graph. Both take a batch and a `Pass`, and keep running statistics of the stream in `TargetMoments`.
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
EPS = 1e-5  # added to variances, relative to a site's mean variance: a dead channel stays dead
CLASS_PRIOR_SAMPLES = 8.0  # weight of the pooled moments in those of a class, in samples
MIN_SAMPLES_FULL_MAP = 256  # fewest source samples for a full map
CHANGE_WINDOW = 64  # recent samples that are compared with the past to detect a new shift
CHANGE_SITES = 0.25  # fraction of the sites compared: the first ones, which depend least on classes

Moments = dict[Site, ChannelMoments]
Answer = Callable[[Array, Array], tuple[Array, ...]]  # from features and logits
Range = tuple[Any, Any]  # lowest and highest input values: scalars, or one per channel


@dataclass(frozen=True)
class LayerSettings:
    """Constants of layer transport, chosen on the four spare corruptions.

    >>> LayerSettings(depth=2.0)
    Traceback (most recent call last):
        ...
    caster.errors.CasterError: depth is a fraction of the sites, above 0 and at most 1, not 2.0
    """

    prior: float = 16.0  # weight of the source's moments, in samples
    memory: int = 2048  # samples in the target's moments; a smaller batch is topped up by the past
    depth: float = 1.0  # fraction of the sites to align, from the first on
    sites: tuple[str, ...] | None = None  # or patterns of their names
    maps: Literal["diagonal", "full"] = "full"  # full only at sites with few channels
    mixture: bool = True  # align with the class mixture of the batch, else with the source's
    tau: float = 1.0  # largest accepted ratio
    window: int = LAYER_WINDOW  # samples in the certificate
    every: int = LAYER_EVERY  # compare at least one of this many windows while stable

    def __post_init__(self) -> None:
        if not 0 <= self.prior < math.inf:
            raise CasterError(f"prior is a number of samples from 0 up, not {self.prior!r}")
        if not isinstance(self.memory, int) or self.memory < 0:
            raise CasterError(f"memory is a number of samples from 0 up, not {self.memory!r}")
        if not 0 < self.depth <= 1:
            raise CasterError(
                f"depth is a fraction of the sites, above 0 and at most 1, not {self.depth!r}"
            )
        if self.maps not in ("diagonal", "full"):
            raise CasterError(f"maps are 'diagonal' or 'full', not {self.maps!r}")
        if not 0 < self.tau < math.inf:
            raise CasterError(f"tau must be a number above 0, not {self.tau!r}")
        for name in ("window", "every"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise CasterError(f"{name} must be 1 or more, not {count!r}")


# One pass per batch, without classes: for states without class moments.
PLAIN = LayerSettings(memory=64, depth=0.5, maps="diagonal", mixture=False)


@dataclass(frozen=True, eq=False)
class Pass:
    """How to align one pass; by default every site, with the source's class mixture."""

    depth: int | None = None  # number of sites to align, from the first on; None: all
    full: bool = False  # use full maps where there are enough samples
    mixture: NDArray[np.float64] | None = None  # (C,), of the samples in the target's moments
    past_only: bool = False  # align with the moments of past batches alone
    fresh: bool = False  # align with the moments of this batch alone
    in_parts: bool = False  # with `past_only`: split a large batch, to save memory


WHOLE = Pass(full=True)


class ImplausibleSamples(Exception):  # noqa: N818 - no error: the other samples are answered
    """Raised for samples with activations beyond those of any image; the stream is unchanged."""

    def __init__(self, kept: Array) -> None:
        super().__init__()
        self.kept = kept  # (n,), mask of plausible samples


class LayeredModel(FrozenModel, Protocol):
    """A frozen model whose layers can be aligned."""

    def placed(self, batch: Any) -> Array:
        """Check a batch and convert it to the model's input."""


class AlignedNetwork(Protocol):
    """A frozen network that maps the channels of every site to the source's mean and variance.

    The target's moments cover the batch and, if it is smaller than the memory, past batches. They
    are shrunk towards the source's moments, which count as `prior` samples. The source's moments
    are those of the class mixture in the `Pass`. A batch with samples that are implausible at the
    first site raises `ImplausibleSamples`.
    """

    sites: list[Site]  # to align, shallow ones first
    target: TargetMoments

    def __call__(self, batch: Any, how: Pass = WHOLE) -> Outputs:
        """Compute features and logits with aligned layers; `commit` adds the batch to the past."""

    def commit(self) -> None:
        """Add the last batch to the past."""

    def fold(self, batch: Any, how: Pass, batches: int) -> bool:
        """Freeze the maps of a `past_only` pass and fold them in, for about this many batches.

        False if the folded network does not reproduce the pass, or the batch is unfit for a check.
        """

    def folded(self, batch: Any, answer: Answer) -> tuple[Array, ...]:
        """Run a placed batch with the folded maps; apply `answer` to its features and logits."""

    def unfold(self) -> None:
        """Free the folded network."""

    def reset(self) -> None:
        """Forget the past."""

    def resume(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state of `target`."""

    def new_stream(self) -> Self:
        """Copy the network without its past; weights and source moments are shared."""

    @property
    def unaligned(self) -> frozenset[Site]:
        """Sites that cannot be aligned, known after the first batch."""

    @property
    def full_maps(self) -> int:
        """Number of sites with a full map."""

    @property
    def source_bytes(self) -> int:
        """Size of the source's moments."""


class TargetMoments:
    """Running moments of a stream at every site, and those of a batch that is not committed yet.

    >>> site = Site("norm", "in", -1)
    >>> target = TargetMoments(memory=8, sites=[site])
    >>> batch = ChannelMoments(4.0, np.array([1.0]), np.array([2.0]))
    >>> [target.add(site, batch, fresh=False).count, target.samples]
    [4.0, 0.0]
    >>> target.commit(fresh=False)
    >>> target.samples
    4.0
    """

    def __init__(
        self,
        memory: int,  # samples; 0: no past
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
        self.recent: Moments = {}  # of the last `CHANGE_WINDOW` samples, at the first sites
        self.begin()

    def begin(self) -> None:
        """Discard a batch that was not committed."""
        self.pending: Moments = {}  # `past` merged with the batch
        self.newest: Moments = {}  # `recent` merged with the batch

    @property
    def samples(self) -> float:
        """Number of past samples, fractional if older ones are discounted."""
        return next((moments.count for moments in self.past.values()), 0.0)

    def is_full(self, samples: int) -> bool:
        """Whether this many more samples would fill the memory."""
        return 0 < self.memory <= self.samples + samples

    def add(self, site: Site, batch: ChannelMoments, fresh: bool) -> ChannelMoments:
        """Merge a batch with the past at a site, pending `commit`, and return the result.

        With `fresh`, ignore the past.
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
        """Mean divergence of the most recent samples, including the batch, from the past.

        0 while the past has no other samples.
        """
        pairs = [
            (found, self.past[site]) for site, found in self.newest.items() if site in self.past
        ]
        found = [divergence(new, past) for new, past in pairs if new.count < past.count]
        if not found:
            return 0.0
        xp = array_namespace(found[0])
        return float(xp.mean(xp.stack([xp.mean(each) for each in found])))

    def commit(self, fresh: bool) -> None:
        """Add the last batch to the past or, with `fresh`, replace the past by it."""
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
        sources: Mapping[Site, ChannelMoments],  # the shapes to expect
        place: Callable[[NDArray[Any]], Array] = np.asarray,
        optional: Collection[Site] = (),  # sites that may lack a past
    ) -> None:
        """Continue from a `state`; raise ValueError if it is invalid or incomplete."""
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
        """Size of past and recent moments."""
        return sum(nbytes(held) for kept in (self.past, self.recent) for held in kept.values())


def parts_of(moments: ChannelMoments) -> dict[str, Array]:
    """Arrays of the moments, by name."""
    return {name: part for name in PARTS if (part := getattr(moments, name)) is not None}


def nbytes(moments: ChannelMoments) -> int:
    """Size of the moments, including class moments."""
    parts = [*parts_of(moments).values()]
    if moments.classes is not None:
        parts += [moments.classes.means, moments.classes.variances]
    return sum(int(part.nbytes) for part in parts)


def selected(sites: list[Site], patterns: Any, name: str) -> list[Site]:
    """Select sites whose names match any of several shell patterns.

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
    """Select the sites to align: those named, or the first ones in network order."""
    if settings.sites is not None:
        return selected(found, settings.sites, "layer transport")
    return found[: math.ceil(settings.depth * len(found))]


def has_full_map(source: ChannelMoments, settings: LayerSettings) -> bool:
    """Whether a site has a covariance from enough source samples for a full map."""
    enough = settings.maps == "full" and source.count >= MIN_SAMPLES_FULL_MAP
    return enough and source.covariance is not None


def source_moments(layers: Mapping[Site, ChannelMoments], settings: LayerSettings) -> Moments:
    """Select the moments that these settings need, and shrink classes of few samples.

    Stored class moments are rounded. They are centred, so that their mixture in the source's
    proportions has exactly the pooled moments.
    """
    used = {}
    for site, found in layers.items():
        full = has_full_map(found, settings)
        classes = found.classes if settings.mixture else None
        used[site] = replace(
            found,
            covariance=found.covariance if full else None,
            classes=classes and classes.shrunk(CLASS_PRIOR_SAMPLES).centred_on(found),
        )
    return used
