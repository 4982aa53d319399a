"""The fit command."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caster.cli.console import errors, progress_bar, say, size
from caster.cli.inspect import describe_layers
from caster.cli.options import (
    CacheFolder,
    DataRoot,
    MaxOption,
    RayOption,
    SkipUnreadable,
    Workers,
    features_path,
    image_option,
    limit_option,
    limits_of,
    opened,
    ray_pool,
    say_skipped,
    with_model,
)
from caster.config import IMAGES_AT_ONCE, Settings
from caster.errors import CasterError, counted
from caster.io.files import read_regular

if TYPE_CHECKING:
    from caster.cli.options import MakeModel
    from caster.models.protocol import FrozenModel


@with_model(output="state")
def fit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="With --model, images: a folder per class, an .npz with `images` and `labels`, or "
            "a published dataset such as cifar10:train. Without, features: an .npz or .parquet "
            "with `features` and `labels`.",
        ),
    ],
    state: Annotated[Path, typer.Option("--output", "-o", metavar="STATE", help="File to write.")],
    model: FrozenModel | None,
    make_model: MakeModel | None,
    k_max: Annotated[int, typer.Option(help="Maximum number of directions.")] = Settings.k_max,
    lam: Annotated[float, typer.Option(help="Shrinkage of the map (λ).")] = Settings.lam,
    beta: Annotated[float, typer.Option(help="Ridge of class covariances (β).")] = Settings.beta,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sign the state with this key.")
    ] = None,
    classes: Annotated[
        Path | None,
        image_option(
            "Text file with the model's classes, one per line in the order of its outputs; needed "
            "if they are not exactly the data's classes in sorted order.",
            metavar="TXT",
        ),
    ] = None,
    no_head: Annotated[
        bool,
        image_option(
            "Use the model's features only: its outputs are not the data's classes.", "--no-head"
        ),
    ] = False,
    layers: Annotated[
        bool | None,
        image_option(
            "Measure the model's layers, so that they can be aligned. [default: if the model "
            "exposes them]",
            "--layers/--no-layers",
        ),
    ] = None,
    images_at_once: Annotated[
        int | None,
        image_option(
            f"Images per forward pass. [default: {IMAGES_AT_ONCE}]", "--batch-size", min=1
        ),
    ] = None,
    skip_unreadable: SkipUnreadable = False,
    data_root: DataRoot = None,
    store: CacheFolder = None,
    no_sketch: Annotated[
        bool,
        typer.Option(
            "--no-sketch",
            help="Store no source samples in the state; `caster monitor` then shows no drift, risk "
            "or estimated accuracy.",
        ),
    ] = False,
    limit: Annotated[int | None, limit_option("spread evenly over the classes")] = None,
    larger: MaxOption = None,
    ray: RayOption = None,
    workers: Workers = None,
) -> None:
    """Measure the statistics of labelled source data, and write them to one small state file.

    The model runs on every image once, and its features are cached: an interrupted fit resumes, and
    a second one reads no images. Feature files are read in chunks and may be larger than memory.
    With --ray the work is spread over a cluster, for image files or a folder of .parquet files.
    """
    from caster.adapt.fitting import fit_file, fit_images

    settings, limits = Settings(k_max=k_max, lam=lam, beta=beta), limits_of(larger)
    skipped: list[str] = []
    measured = None
    if workers is not None and ray is None:
        raise CasterError("--workers requires --ray")
    if no_head and classes is not None:
        raise CasterError("--classes names the model's outputs, which --no-head ignores: omit one")
    cluster = nullcontext() if ray is None else ray_pool(ray, workers, make_model, model)
    with cluster as pool, progress_bar() as progress:
        if model is None:
            clf = fit_file(
                features_path(source) if pool is None else Path(source),
                state,
                settings,
                progress,
                key,
                limits,
                limit,
                sketch=not no_sketch,
                pool=pool,
            )
        else:
            from caster.io.feature_cache import default_store

            clf, skipped, measured = fit_images(
                model,
                opened(source, data_root, limits),
                state,
                settings,
                store=store or default_store(),
                batch_size=images_at_once or IMAGES_AT_ONCE,
                named_classes=None if classes is None else _lines(classes),
                use_head=not no_head,
                layers="auto" if layers is None else layers,
                skip_unreadable=skip_unreadable,
                progress=progress,
                key=key,
                limit=limit,
                sketch=not no_sketch,
                pool=pool,
            )
    say_skipped(skipped)
    moments = clf.moments_
    say(
        f"{int(moments.counts.sum()):,} samples of {moments.n_classes:,} classes, "
        f"{moments.U.shape[0]:,} features -> {counted(moments.rank, 'direction')}, "
        f"margin {moments.margin:.3g}: {state} ({size(state.stat().st_size)})"
    )
    if measured is not None:
        say(f"Layers, aligned by default: {describe_layers(measured)}.")
    for sentence in () if clf.source_check_ is None else clf.source_check_.sentences():
        say(sentence)
    fewest = int(moments.counts.min())
    if fewest < moments.rank:
        say(
            f"caster: the smallest class has {counted(fewest, 'sample')} for "
            f"{counted(moments.rank, 'direction')}, too few for its covariance: add samples, or "
            "lower --k-max",
            errors,
        )


def _lines(path: Path) -> list[str]:
    try:
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise CasterError(f"cannot read the class names in {path}: {reason}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]
