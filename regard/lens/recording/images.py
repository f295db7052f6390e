"""Images as inputs of a model: a file is read, preprocessed for the model, and kept to be shown below a map."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import OptionError, RegardError, quote
from regard.hub.safety import MAX_EDGE
from regard.lens.trace.checks import PICTURE
from regard.reading import check_path

# For some other formats (EPS) Pillow starts programs; the rest are rare.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MIDDLE = 0.5  # mean and standard deviation by which channels are normalised for a model without a processor
MAX_RATIO = 20  # largest ratio of an image's longer side to its shorter one
QUALITY = 90  # quality of the JPEG in the trace; the model itself reads the uncompressed pixels


def image_inputs(model: Any, processor: Any, path: str | Path) -> tuple[dict[str, Tensor], str]:
    """Returns the inputs of a model for an image, and the image as the model sees it, as a data: address.

    `processor` is transformers' image processor of the model. Without one, the image is scaled to the size that the
    config names, its colours to −1 … 1, as the first ViT was trained.
    """
    image = read_image(path)
    if processor is None:
        width, height = _config_size(model)
        pixels = torch.from_numpy(np.asarray(image.resize((width, height), resample=2)).astype(np.float32) / 255)
        pixels = ((pixels - MIDDLE) / MIDDLE).permute(2, 0, 1)[None]
        return {"pixel_values": pixels}, as_picture(_colours(pixels[0], None))
    try:
        pixels = processor(images=image, return_tensors="pt")["pixel_values"]
        if pixels.dim() != 4 or not pixels.numel():
            raise OptionError(
                f"{path}: {type(processor).__name__} makes pixel_values of shape {list(pixels.shape)}, expected [1, 3, "
                "height, width]; give regard.record the inputs"
            )
        return {"pixel_values": pixels}, as_picture(_colours(pixels[0], processor))
    except RegardError:
        raise
    except Exception as error:  # of settings that transformers looks at only now, each with an error of its own
        raise OptionError(
            f"{path}: {type(processor).__name__} cannot prepare it ({type(error).__name__}: {quote(error)}); expected "
            "usable settings in the model's preprocessor_config.json"
        ) from error


def read_image(path: str | Path) -> Any:
    """Returns the image of a file in RGB, rotated as its EXIF data says; raises OptionError if it cannot be read."""
    from PIL import Image, ImageOps

    file = check_path(path)
    if not file.is_file():
        raise OptionError(
            f"{path} does not exist; this model reads an image: expected the name of a file, such as a.png"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # so many pixels that memory would run out
            with Image.open(file, formats=FORMATS) as image:
                if max(image.size) > MAX_RATIO * min(image.size):  # a short side that is made longer fills the memory
                    raise ValueError(
                        f"{image.size[0]} × {image.size[1]} pixels: one side is more than {MAX_RATIO} times the other"
                    )
                return ImageOps.exif_transpose(image).convert("RGB")
    # Pillow's readers meet damaged files with errors of many kinds.
    except Exception as error:
        shown = quote(error)
        raise OptionError(f"{path} cannot be read as an image ({shown}); expected {', '.join(FORMATS)}") from None


def as_picture(colours: Float[Tensor, "3 H W"]) -> str:
    """Returns colours from 0 to 1 as the data: address of a JPEG."""
    from PIL import Image

    values = (colours.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(values).save(file, "JPEG", quality=QUALITY)
    return PICTURE + base64.b64encode(file.getvalue()).decode()


def _colours(pixels: Float[Tensor, "C H W"], processor: Any) -> Float[Tensor, "3 H W"]:
    """Returns the colours from 0 to 1 that a model sees: it undoes the normalisation and rescaling of the processor."""
    mean, std = torch.full((2, 3), MIDDLE)
    if processor is not None:
        mean, std = torch.zeros(3), torch.ones(3)
        if getattr(processor, "do_normalize", False):
            mean, std = (torch.tensor(getattr(processor, name), dtype=torch.float32) for name in _SCALES)
    largest = 1
    if processor is not None and not getattr(processor, "do_rescale", False):
        largest = 255
    colours: Tensor = pixels.float() * std[:, None, None] + mean[:, None, None]
    return colours / largest


_SCALES = ("image_mean", "image_std")


def _config_size(model: Any) -> tuple[int, int]:
    """Returns the width and height that a model's config names; raises OptionError if it names none."""
    size = getattr(model.config, "image_size", None)
    if isinstance(size, int):
        size = (size, size)
    if isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and 0 < n <= MAX_EDGE for n in size):
        return size[1], size[0]
    raise OptionError(
        f"the config of {type(model).__name__} names no image_size; put the model's preprocessor_config.json into its "
        "folder, or give regard.record the inputs"
    )
