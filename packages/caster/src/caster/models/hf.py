"""Image classifiers of transformers from a local folder: config.json and model.safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from caster.errors import CasterError
from caster.models.preprocessing import Preprocessing

PREPROCESSOR = "preprocessor_config.json"
RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # as Pillow counts
LOCAL = {"local_files_only": True, "trust_remote_code": False}
WARPED_FROM = 384  # ConvNextImageProcessor crops below this size
EXACT = 1e-4  # of a normalised pixel: float32 sums in another order


def create(folder: Path) -> Any:
    """A transformers module with every weight that its config.json asks for."""
    called = f"hf:{folder}"
    if not (folder / "config.json").is_file():
        raise CasterError(f"{called}: {folder} is no folder with a config.json")
    with _transformers(called) as transformers:
        module, found = transformers.AutoModelForImageClassification.from_pretrained(
            folder,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # found below, and named
            output_loading_info=True,
            **LOCAL,
        )
    # transformers fills what is missing with random numbers.
    absent = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if absent:
        some = ", ".join(absent[:3]) + (" ..." if len(absent) > 3 else "")
        raise CasterError(f"{called}: its weights lack {some}, or have them in another shape")
    for part in module.modules():
        if hasattr(part, "name_or_path"):  # the folder's, and the digest must not depend on it
            part.name_or_path = ""
    return module


def preprocessing(folder: Path) -> Preprocessing | None:
    """What a folder's preprocessor_config.json says, if it says so exactly; None without one."""
    if not (folder / PREPROCESSOR).is_file():
        return None
    with _transformers(f"hf:{folder}") as transformers:
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **LOCAL)
        try:
            stated = _stated(processor)
            same = _agree(stated, processor)
        except (AttributeError, IndexError, TypeError, ValueError):
            same = False
    if not same:
        raise CasterError(
            f"hf:{folder}: {PREPROCESSOR} asks {type(processor).__name__} for more than a resize, "
            "a crop and a normalisation: state it in a TOML file with {argument}",
            argument="preprocessing",
        )
    return stated


def _stated(processor: Any) -> Preprocessing:
    """A processor's attributes as a preprocessing, which may still leave something out."""

    def does(step: str) -> bool:
        return bool(getattr(processor, f"do_{step}", False))

    resize: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    if does("resize"):
        resize, short = (processor.size.height, processor.size.width), processor.size.shortest_edge
        share = getattr(processor, "crop_pct", None)
        if short and share and short >= WARPED_FROM:
            resize = (short, short)
        elif short and share:
            resize, crop = int(short / share), (short, short)
        elif short:
            resize = short
    if does("center_crop"):
        crop = (processor.crop_size.height, processor.crop_size.width)
    normalised = does("normalize")
    return Preprocessing(
        range=1.0 if does("rescale") else 255.0,
        mean=tuple(processor.image_mean) if normalised else (0.0,) * 3,
        std=tuple(processor.image_std) if normalised else (1.0,) * 3,
        layout="NCHW",
        resize=resize,
        interpolation=None if resize is None else RESAMPLING[int(processor.resample)],
        crop=crop,
        channels="BGR" if does("flip_channel_order") else "RGB",
    )


def _agree(stated: Preprocessing, processor: Any) -> bool:
    """Whether both make the same of an image of noise, twice as high as wide."""
    sides = [stated.resize] if isinstance(stated.resize, int) else [*(stated.resize or ())]
    width = 2 * max([32, *sides, *(stated.crop or ())])
    image = np.random.default_rng(0).integers(256, size=(2 * width, width, 3), dtype=np.uint8)
    expected = np.asarray(processor(images=image, return_tensors="np")["pixel_values"])
    made = stated.batch([stated.fitted(image)])
    return made.shape == expected.shape and bool(np.allclose(made, expected, 0, EXACT))


@contextmanager
def _transformers(called: str) -> Iterator[Any]:
    """The library, without its reports and progress bars; what it raises becomes one line."""
    try:
        transformers = import_module("transformers")
    except ModuleNotFoundError:
        raise CasterError(f"{called} needs transformers: pip install 'caster-tta[hf]'") from None
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield transformers
    except CasterError:
        raise
    # ImportError: its parts are imported when they are asked for
    except (OSError, ValueError, RuntimeError, LookupError, ImportError, SafetensorError) as error:
        line = " ".join(str(error).split())
        raise CasterError(f"{called} cannot be made: {line[:300]}") from None
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
