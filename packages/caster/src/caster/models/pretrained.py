"""Load pretrained image classifiers: timm models by name, transformers models from a folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing
from caster.models.protocol import error_line

# --- timm ----------------------------------------------------------------------------------------


def load_timm(name: str, checkpoint: Path | None) -> Any:
    """Build a timm module with pretrained weights, or with those of a checkpoint.

    The checkpoint may have any number of classes.
    """
    timm = import_timm("timm", f"timm:{name}")
    # Silence the download's retries; the error below reports the outcome.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    from caster.models.torch import load_weights, read_weights

    weights = None if checkpoint is None else read_weights(checkpoint)
    try:
        if weights is None:
            return timm.create_model(name, pretrained=True)
        classifier = getattr(timm.get_pretrained_cfg(name), "classifier", None)
        module = timm.create_model(name, **_number_of_classes(weights, classifier))
        load_weights(module, weights)
        return module
    except OSError:
        raise CasterError(
            f"cannot download the pretrained weights of timm:{name}: without a network, name a "
            "local .safetensors file with {argument}",
            argument="checkpoint",
        ) from None
    except (RuntimeError, ValueError) as error:
        raise CasterError(f"cannot load timm:{name}: {error_line(error)}") from None


def timm_preprocessing(module: Any) -> Preprocessing:
    """Return the preprocessing that timm specifies for a module."""
    from timm.data import resolve_model_data_config

    return Preprocessing.from_timm(resolve_model_data_config(module))


def import_timm(
    module: str,
    user: str,  # who needs it, for the message
) -> Any:
    """Import a module of timm, or raise an error that tells the user what to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise CasterError(f"{user} needs timm: pip install 'caster-tta[timm]'") from None
    # timm imports torchvision, whose compiled operators require a matching build of torch.
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise CasterError(
            f"{user} needs timm, which cannot be imported ({error_line(error, 200)}): torchvision "
            f"does not match torch {version('torch')}; install it from the same index as torch "
            "(pip install --force-reinstall --no-deps torchvision --index-url INDEX)"
        ) from None


def _number_of_classes(
    weights: dict[str, Any],
    classifier: str | tuple[str, ...] | None,  # a distilled model has several
) -> dict[str, int]:
    names = (classifier,) if isinstance(classifier, str) else classifier or ()
    heads = [weights[f"{name}.weight"] for name in names if f"{name}.weight" in weights]
    if heads and (heads[0].ndim < 2 or heads[0].numel() == 0):
        raise ValueError(f"the weight of its classifier has the shape {tuple(heads[0].shape)}")
    return {"num_classes": heads[0].shape[0]} if heads else {}


# --- transformers --------------------------------------------------------------------------------

PREPROCESSOR = "preprocessor_config.json"
RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's code
LOCAL = {"local_files_only": True, "trust_remote_code": False}
SQUASH_FROM = 384  # ConvNextImageProcessor crops below this size and squashes from it on
TOLERANCE = 1e-4  # of normalised pixels, since float32 operations run in another order


def load_transformers(folder: Path) -> Any:
    """Load a transformers image classifier; raise if its files lack any weight."""
    name = f"hf:{folder}"
    if not (folder / "config.json").is_file():
        raise CasterError(f"{name}: {folder} has no config.json")
    with _transformers(name) as transformers:
        module, found = transformers.AutoModelForImageClassification.from_pretrained(
            folder,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
            **LOCAL,
        )
    # transformers initialises missing weights at random.
    absent = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if absent:
        some = ", ".join(absent[:3]) + (" ..." if len(absent) > 3 else "")
        raise CasterError(f"{name}: its weights lack {some}, or have them in another shape")
    for part in module.modules():
        if hasattr(part, "name_or_path"):  # the digest must not depend on the folder
            part.name_or_path = ""
    return module


def transformers_preprocessing(folder: Path) -> Preprocessing | None:
    """Convert a folder's preprocessor_config.json; None if there is no such file."""
    if not (folder / PREPROCESSOR).is_file():
        return None
    with _transformers(f"hf:{folder}") as transformers:
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **LOCAL)
        try:
            preprocessing = _converted(processor)
            same = _agree(preprocessing, processor)
        except (AttributeError, IndexError, TypeError, ValueError):
            same = False
    if not same:
        raise CasterError(
            f"hf:{folder}: {PREPROCESSOR} asks {type(processor).__name__} for more than a resize, "
            "a crop and a normalisation: state the preprocessing in a TOML file with {argument}",
            argument="preprocessing",
        )
    return preprocessing


def _converted(processor: Any) -> Preprocessing:
    """Convert the attributes of a processor; `_agree` checks that no step is missing."""

    def does(step: str) -> bool:
        return bool(getattr(processor, f"do_{step}", False))

    resize: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    if does("resize"):
        resize, short = (processor.size.height, processor.size.width), processor.size.shortest_edge
        share = getattr(processor, "crop_pct", None)
        if short and share and short >= SQUASH_FROM:
            resize = (short, short)
        elif short and share:
            resize, crop = int(short / share), (short, short)
        elif short:
            resize = short
    if does("center_crop"):
        crop = (processor.crop_size.height, processor.crop_size.width)
    normalises = does("normalize")
    return Preprocessing(
        range=1.0 if does("rescale") else 255.0,
        mean=tuple(processor.image_mean) if normalises else (0.0,) * 3,
        std=tuple(processor.image_std) if normalises else (1.0,) * 3,
        layout="NCHW",
        resize=resize,
        interpolation=None if resize is None else RESAMPLING[int(processor.resample)],
        crop=crop,
        channels="BGR" if does("flip_channel_order") else "RGB",
    )


def _agree(preprocessing: Preprocessing, processor: Any) -> bool:
    """Whether both give the same result for a random image, twice as high as wide."""
    resize = preprocessing.resize
    sides = [resize] if isinstance(resize, int) else [*(resize or ())]
    width = 2 * max([32, *sides, *(preprocessing.crop or ())])
    image = np.random.default_rng(0).integers(256, size=(2 * width, width, 3), dtype=np.uint8)
    expected = np.asarray(processor(images=image, return_tensors="np")["pixel_values"])
    batch = preprocessing.batch([preprocessing.resize_and_crop(image)])
    return batch.shape == expected.shape and bool(np.allclose(batch, expected, 0, TOLERANCE))


@contextmanager
def _transformers(user: str) -> Iterator[Any]:
    """Import transformers, silence it, and turn its errors into a `CasterError`."""
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError:
        raise CasterError(f"{user} needs transformers: pip install 'caster-tta[hf]'") from None
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield transformers
    except CasterError:
        raise
    # ImportError: transformers imports its submodules on first use.
    except (OSError, ValueError, RuntimeError, LookupError, ImportError, SafetensorError) as error:
        raise CasterError(f"cannot load {user}: {error_line(error)}") from None
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
