"""Options that several commands share, and the work they have in common."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from caster.cli.console import errors, say
from caster.config import LAYER_EVERY, LAYER_WINDOW, Limits
from caster.errors import CasterError, counted, option_of
from caster.io.files import check_writable

if TYPE_CHECKING:
    from caster.adapt.adapter import Adapter
    from caster.adapt.ray_pool import Pool
    from caster.io.images import Images
    from caster.models.protocol import FrozenModel

    MakeModel = partial[FrozenModel]

MODELS = "MODEL.onnx, timm:NAME, hf:FOLDER or FILE.py:FACTORY"
NAMED = 5  # unreadable images that are named one by one


def panel(name: str) -> Callable[..., Any]:
    """Make options of one panel of --help, each from its help text, names and other settings."""

    def option(help: str, *names: str, **extra: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=name, **extra)

    return option


model_option, image_option, sample_option, cluster_option = map(
    panel, ("Model", "Images", "Samples", "Ray cluster")
)
SkipUnreadable = Annotated[
    bool,
    image_option(
        "Skip images that cannot be decoded, instead of stopping at the first one.",
        "--skip-unreadable",
    ),
]
DataRoot = Annotated[
    Path | None,
    image_option("Folder with published datasets, instead of $CASTER_DATA.", metavar="FOLDER"),
]
CacheFolder = Annotated[
    Path | None,
    image_option(
        "Folder for cached features, instead of caster in the user's cache folder.",
        "--cache",
        metavar="FOLDER",
    ),
]
LIMITS = tuple(field.name for field in fields(Limits))
MaxOption = Annotated[
    list[str] | None,
    typer.Option(
        "--max",
        metavar="NAME=NUMBER",
        help=f"Change a limit on the inputs; repeatable. Limits: {', '.join(LIMITS)}.",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per batch.")]
OtherModel = Annotated[
    bool, model_option("Accept a state that was fitted with another model.", "--allow-other-model")
]
OtherPreprocessing = Annotated[
    bool,
    model_option(
        "Accept a state that was fitted with other preprocessing.", "--allow-other-preprocessing"
    ),
]
Tau = Annotated[
    float | None,
    typer.Option(help="Largest accepted ratio. [default: the state's; 1 for layers]"),
]
Every = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="For aligned layers: while the verdict is stable, compare with the frozen model in at "
        f"least one of N windows of {LAYER_WINDOW} images; 1 compares in every batch. "
        f"[default: {LAYER_EVERY}]",
    ),
]
NoSafeguards = Annotated[
    bool,
    typer.Option(
        "--no-safeguards",
        help="Disable the safeguards of feature transport, as in the paper: it then also "
        "adapts with small sources and to batches sorted by class, where it does harm.",
    ),
]
MechanismOption = Annotated[
    Literal["auto", "layers", "features"],
    typer.Option(
        "--mechanism",
        help="Align the layers inside the network (mixture transport), or transport its last "
        "features (the paper's method). auto uses layers if the state has them and the model "
        "exposes them.",
    ),
]
RayOption = Annotated[
    str | None,
    cluster_option(
        "HOST:PORT of a Ray cluster, or `local` to start Ray on this machine. All nodes must see "
        "the files at the same paths.",
        "--ray",
        metavar="ADDRESS",
    ),
]
Workers = Annotated[
    int | None,
    cluster_option(
        "Maximum number of workers, each with a copy of the model; if there are more than GPUs, "
        "they share them. [default: one per GPU, or per core]",
        min=1,
    ),
]
PreprocessingOption = Annotated[
    str | None,
    model_option(
        "TOML file with the preprocessing, or `in-graph`; timm and most hf models bring their own.",
        metavar="TOML",
    ),
]
HeadOption = Annotated[
    str | None,
    model_option("Name of the classifier layer, if it is not found automatically.", metavar="NAME"),
]


def limit_option(which: str) -> Any:
    """Make the option --limit; `which` says how the samples are chosen."""
    return sample_option(f"Use only N samples: {which}.", "--limit", metavar="N", min=1)


def limits_of(given: list[str] | None) -> Limits:
    """Parse the values of --max.

    >>> limits_of(["pixels=200000000"]).pixels
    200000000
    """
    changed = {}
    for text in given or ():
        name, _, number = text.partition("=")
        if name not in LIMITS or not number.isascii() or not number.isdigit():
            names = ", ".join(LIMITS)
            raise CasterError(f"--max {text}: use NAME=NUMBER, where NAME is one of {names}")
        changed[name] = int(number)
    return Limits(**changed)


def features_path(source: str) -> Path:
    """The feature file of a command without --model; raise if it holds images."""
    from caster.io.image_files import formats

    path = Path(source)
    images = path.is_dir() or (path.exists() and path.suffix.lower() in (".txt", *formats()))
    if images or (":" in source and not path.exists()):
        raise CasterError(
            f"{source} is not a feature file: for images, name the model with --model"
        )
    if path.suffix == ".npz" and path.is_file():
        from caster.io.feature_files import NpzFile

        names = NpzFile(path).names
        if "images" in names and "features" not in names:
            raise CasterError(f"{source} holds images: name the model with --model")
    return path


def opened(
    source: str | Path | Sequence[Path], root: Path | None, limits: Limits, labelled: bool = True
) -> Images:
    """Open images, and warn about files in the folder that are not images."""
    from caster.io.image_files import describe_skipped
    from caster.io.images import open_images

    images = open_images(source, root, labelled, limits)
    if images.skipped:
        say(f"caster: {describe_skipped(images.skipped)}", errors)
    return images


def say_skipped(unreadable: list[str]) -> None:
    """Print the images that were skipped."""
    if not unreadable:
        return
    say(f"caster: skipped {counted(len(unreadable), 'unreadable image')}:", errors)
    for line in unreadable[:NAMED]:
        say(f"  {line}", errors)
    if len(unreadable) > NAMED:
        say(f"  and {len(unreadable) - NAMED:,} more", errors)


@dataclass(frozen=True)
class AdapterOptions:
    """How a command adapts, and which states it accepts."""

    mechanism: MechanismOption = "auto"
    tau: Tau = None
    no_safeguards: NoSafeguards = False
    allow_other_model: OtherModel = False
    allow_other_preprocessing: OtherPreprocessing = False

    def arguments(self, every: int | None) -> dict[str, Any]:
        """Keyword arguments of an `Adapter`; `every=None` is the default."""
        from caster.adapt.layer_passes import LayerSettings

        own = {name: value for name, value in vars(self).items() if name != "no_safeguards"}
        every = LayerSettings.every if every is None else every
        return {**own, "every": every, "safeguards": not self.no_safeguards}


def load_adapter(
    model: FrozenModel, state: Path, key: Path | None, options: AdapterOptions, every: int | None
) -> Adapter:
    """Combine the model with its state, for `predict` and `evaluate` on images."""
    from caster.adapt.adapter import Adapter
    from caster.adapt.image_batches import require_preprocessing
    from caster.state import load

    require_preprocessing(model)  # a clearer error than a digest that differs
    return Adapter(model, load(state, key), **options.arguments(every))


@dataclass(frozen=True)
class ModelOptions:
    """The model of a command, and how it runs."""

    model: Annotated[str | None, model_option(f"Model for images: {MODELS}.", metavar="M")] = None
    preprocessing: PreprocessingOption = None
    checkpoint: Annotated[
        Path | None,
        model_option("Weights of timm:NAME or FILE.py:FACTORY (.safetensors).", metavar="FILE"),
    ] = None
    head: HeadOption = None
    provider: Annotated[
        list[str] | None,
        model_option(
            "ONNX Runtime execution provider; repeat in order of preference.", metavar="NAME"
        ),
    ] = None
    device: Annotated[
        str | None, model_option("torch device: cpu, cuda, cuda:1, ...", metavar="NAME")
    ] = None
    bf16: Annotated[bool, model_option("Run a torch model in bfloat16 autocast.", "--bf16")] = False
    channels_last: Annotated[
        bool, model_option("Run a torch model in channels-last memory format.", "--channels-last")
    ] = False


FOR_IMAGES = (  # arguments whose options require --model
    "skip_unreadable",
    "data_root",
    "store",
    "every",
    "shuffle",
    "classes",
    "no_head",
    "layers",
    "images_at_once",
    "allow_other_model",
    "allow_other_preprocessing",
)

Command = Callable[..., None]
Group = TypeVar("Group")


def with_model(output: str | None, beside: str | None = None) -> Callable[[Command], Command]:
    """Add the model's options to a command, which receives the wrapped model, or None, as `model`.

    A command with a parameter `make_model` also receives a function that wraps the model in another
    process. A parameter whose type is a dataclass becomes one option per field. `output` names the
    parameter for the file that the command writes, if any, and `beside` is the suffix of a second
    one: neither may be a file that the command reads.
    """

    def decorate(command: Command) -> Command:
        # These types exist for mypy only: importing them would slow down every --help.
        own = inspect.signature(
            command, eval_str=True, locals={"FrozenModel": object, "MakeModel": object}
        )
        groups: dict[str, Any] = {
            p.name: p.annotation for p in own.parameters.values() if is_dataclass(p.annotation)
        }

        @wraps(command)
        def run(**given: Any) -> None:
            inputs = list(_files(value for name, value in given.items() if name != output))
            written = [] if output is None else [given[output]]
            for path in [*written, *(path.with_suffix(beside) for path in written if beside)]:
                if not (path.is_dir() and given.get("ray")):  # it gets a table per stream
                    check_writable(path, *inputs)
            make = _model_factory(_group(ModelOptions, given), given)
            model = None if make is None else make()
            if "make_model" in own.parameters:
                given["make_model"] = make
            given |= {name: _group(kind, given) for name, kind in groups.items()}
            command(model=model, **given)

        parameters = _parameters(ModelOptions)
        for p in own.parameters.values():
            if p.name in groups:
                parameters += _parameters(p.annotation)
            elif p.name not in ("model", "make_model"):
                parameters.append(p.replace(kind=p.KEYWORD_ONLY))
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameters(group: Any) -> list[inspect.Parameter]:
    """One option per field of a dataclass."""
    kinds = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, annotation=kinds[field.name], default=field.default)
        for field in fields(group)
    ]


def _group(kind: type[Group], given: dict[str, Any]) -> Group:
    """Move the fields of a dataclass out of the given options."""
    return kind(**{field.name: given.pop(field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _files(values: Any) -> Iterator[str | Path]:
    """Yield the values that name existing files."""
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str | Path):
                path = str(one).rpartition(".py:")[0] + ".py" if ".py:" in str(one) else one
                yield from [path] if os.path.isfile(path) else []


def _model_factory(chosen: ModelOptions, others: dict[str, Any]) -> MakeModel | None:
    """Make a function that wraps the chosen model; None without --model."""
    options = dict(vars(chosen))
    model, options["providers"] = options.pop("model"), options.pop("provider") or None
    if model is None:
        needy = options | {name: others.get(name) for name in FOR_IMAGES}
        for name, value in needy.items():
            if value is not None and value is not False:
                raise CasterError(f"{option_of(name)} requires --model")
        return None
    named = model.endswith(".onnx") or model.startswith(("timm:", "hf:")) or ".py:" in model
    if not named:
        raise CasterError(f"{model} is not a model: pass {MODELS}")
    return partial(_wrap_frozen, model, **options)


def _wrap_frozen(model: str, **options: Any) -> FrozenModel:
    from caster.adapt.adapter import check_frozen
    from caster.models.wrap import wrap

    wrapped = wrap(model, **options)
    check_frozen(wrapped)
    return wrapped


@contextmanager
def on_cluster(
    address: str, make: MakeModel | None, model: FrozenModel | None
) -> Iterator[tuple[MakeModel | None, bool]]:
    """Connect to a cluster; yield how its processes make the model, and whether each needs a GPU.

    Each does if the cluster has GPUs and the model can use them.
    """
    from caster.adapt.ray_pool import connected, has_gpus, on_gpu
    from caster.models.protocol import is_torch

    with connected(address):
        chosen = {} if make is None else make.keywords
        gpus = any("CPU" not in name for name in chosen.get("providers") or ())
        if make is not None and is_torch(model) and chosen.get("device") != "cpu":
            gpus = has_gpus()
            make = partial(on_gpu, make) if gpus else make
        yield make, gpus


@contextmanager
def ray_pool(
    address: str, workers: int | None, make: MakeModel | None, model: FrozenModel | None
) -> Iterator[Pool[Any]]:
    """Start workers on a cluster."""
    from caster.adapt.ray_pool import Pool, no_model

    with (
        on_cluster(address, make, model) as (make_there, gpus),
        Pool[Any](make_there or no_model, workers, gpus) as pool,
    ):
        yield pool
