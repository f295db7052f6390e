"""Images as what a model reads: prepared as the model was trained, kept in the trace, refused where they are none."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import FAMILIES, stirred
from typer.testing import CliRunner

from regard.cli.app import app
from regard.errors import HubError, OptionError
from regard.lens import TraceError
from regard.lens.models import open_recordable
from regard.lens.recording.images import image_inputs, read_image
from regard.lens.trace.format import decode, encode, to_bytes

SETTINGS = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 32, "width": 32},
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A red left half and a blue right half, wider than high, with a stripe of noise."""
    values = np.zeros((40, 80, 3), "u1")
    values[:, :40, 0] = 220
    values[:, 40:, 2] = 200
    values[30:] = np.random.default_rng(0).integers(0, 255, (10, 80, 3))
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(values).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind, config, sizes = FAMILIES["vit"]
    stirred(getattr(transformers, kind)(getattr(transformers, config)(**sizes)), 0.2).save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return tmp_path / "vit"


def seen(picture):
    """The colours of a picture in a trace, from 0 to 1, [H,W,3]."""
    start, letters = picture.split(",")
    assert start == "data:image/jpeg;base64"
    return torch.from_numpy(np.array(Image.open(io.BytesIO(base64.b64decode(letters))))).float() / 255


def test_an_image_is_prepared_as_the_folder_says_and_kept_as_the_model_sees_it(folder, photo, tmp_path):
    subject = open_recordable(folder)
    trace = subject.record(str(photo))
    # By hand: scaled to 32 × 32 between pixels, then each channel by its mean and deviation.
    small = read_image(photo).resize((32, 32), Image.Resampling.BILINEAR)
    small = torch.from_numpy(np.asarray(small).astype("f4")) / 255
    pixels = ((small - torch.tensor(SETTINGS["image_mean"])) / torch.tensor(SETTINGS["image_std"])).permute(2, 0, 1)
    subject.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = subject.model(pixel_values=pixels[None], output_attentions=True).attentions[1][0]
    assert (torch.stack([trace.weights(1, h) for h in range(4)]) - weights).abs().max() < 1e-5
    trace.save(tmp_path / "x.trace")
    tokens = decode((tmp_path / "x.trace").read_bytes()).recordings[0].sequences[0]
    assert tokens.grid == [4, 4] and tokens.tokens[:2] == ["[CLS]", "0,0"]
    picture = seen(tokens.picture)
    assert picture.shape == (32, 32, 3) and (picture[:20] - small[:20]).abs().mean() < 0.03  # above the noise


@pytest.mark.parametrize(
    "settings, low, high", [(None, -1, 1), ({"do_normalize": False}, 0, 1), ({"do_rescale": False}, -0.6, 510)]
)
def test_pictures_have_their_colours_whatever_the_processor_scales(folder, photo, settings, low, high):
    """Without settings colours are scaled to −1 … 1, as the first ViT was trained."""
    file = folder / "preprocessor_config.json"
    if settings is None:
        file.unlink()
    else:
        file.write_text(json.dumps(SETTINGS | settings))
    subject = open_recordable(folder)
    inputs, picture = image_inputs(subject.model, subject.images, photo)
    pixels = inputs["pixel_values"]
    assert pixels.shape == (1, 3, 32, 32) and low <= float(pixels.min()) and float(pixels.max()) <= high
    assert float(pixels.max()) > high / 2
    left, right = (seen(picture)[4:18, part].mean((0, 1)) for part in (slice(2, 14), slice(18, 30)))
    assert torch.allclose(left, torch.tensor([220 / 255, 0, 0]), atol=0.05)
    assert torch.allclose(right, torch.tensor([0, 0, 200 / 255]), atol=0.05)


def test_view_needs_neither_weights_nor_labels_for_an_image(photo, tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["view", "random:vit@tiny", str(photo), str(photo), "--out", str(out)])
    assert result.exception is None, result.exception
    assert out.read_text("utf-8").count('"picture":"data:image/jpeg;base64,') == 2


def test_an_image_is_turned_as_the_camera_was(tmp_path):
    made = Image.new("RGB", (4, 2))
    exif = made.getexif()
    exif[0x0112] = 6  # a quarter turn
    made.save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").size == (2, 4)


def test_what_is_no_image_is_told(tmp_path, folder, monkeypatch):
    subject = open_recordable(folder)
    with pytest.raises(OptionError, match=r"The dog ran does not exist; this model reads an image.*a\.png"):
        subject.record("The dog ran")
    for name, content in (("a.png", b"no image"), ("a.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OptionError, match="cannot be read as an image"):
            subject.record(str(tmp_path / name))
    Image.new("RGB", (20, 20)).save(tmp_path / "b.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    with pytest.raises(OptionError, match="decompression bomb"):
        subject.record(str(tmp_path / "b.png"))


def test_a_model_whose_size_is_not_known_asks_for_its_settings(photo):
    class Model:
        config = object()

    with pytest.raises(OptionError, match=r"names no image_size; put the model's preprocessor_config\.json"):
        image_inputs(Model(), None, photo)


@pytest.mark.parametrize("key", ["image_processor_type", "feature_extractor_type"])
@pytest.mark.parametrize("name", ["PreTrainedModel", "pipeline", 3])
def test_only_image_processors_are_called_by_name(folder, key, name):
    """transformers looks up any name among all that it exports."""
    (folder / "preprocessor_config.json").write_text(json.dumps({key: name}))
    with pytest.raises(HubError, match=r"names .* which is no image processor of transformers"):
        open_recordable(folder)


def test_damaged_settings_name_their_file(folder):
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | {"size": "large"}))
    with pytest.raises(HubError, match=r"preprocessor_config\.json cannot be read"):
        open_recordable(folder)


@pytest.mark.parametrize(
    "settings",
    [{"size": {"height": 10**5, "width": 32}}, {"size": [10**5, 32]}, {"crop_size": float("inf")}, {"pad_size": -1}],
)
def test_settings_that_would_fill_the_memory_are_refused(folder, settings):
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | settings))
    with pytest.raises(HubError, match=r"preprocessor_config\.json: \w+ = .*: expected pixels from 1 to 2,048"):
        open_recordable(folder)


@pytest.mark.parametrize("settings", [{"image_mean": "a"}, {"image_std": ["1", 1, 1]}, {"rescale_factor": "x"}])
def test_settings_that_are_first_used_for_an_image_are_told(folder, photo, settings):
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS | settings))
    with pytest.raises(OptionError, match=r"photo\.png: ViTImageProcessor\w* cannot prepare it"):
        open_recordable(folder).record(str(photo))


@pytest.mark.parametrize("size", [(80_000, 1), (1, 80_000)])
def test_a_long_thin_image_is_refused_before_it_is_read(tmp_path, size):
    Image.new("1", size).save(tmp_path / "a.png")
    with pytest.raises(OptionError, match=r"cannot be read as an image .* more than 20 times the other"):
        read_image(tmp_path / "a.png")


@pytest.mark.parametrize(
    "address", ["https://example.org/a.jpg", "data:image/svg+xml;base64,AAAA", 'data:image/jpeg;base64,AA"onload', 3]
)
def test_a_trace_shows_no_picture_but_the_one_it_holds(folder, photo, address):
    trace = open_recordable(folder).record(str(photo))
    trace.recordings[0].sequences[0].picture = address
    with pytest.raises(TraceError, match="picture"):
        decode(to_bytes(encode(trace)))
