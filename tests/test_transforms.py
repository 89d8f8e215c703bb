"""Image transforms against formulas of their own, torchvision, scipy and colorsys."""

import colorsys
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter
from torch import Tensor

from fedharmony.data.base import TensorImages
from fedharmony.data.transforms import (
    TRANSFORMS,
    TransformedImages,
    check_transforms,
    hue,
    split_mix,
    transform_images,
)
from fedharmony.errors import ConfigError, DataError

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pictures(count: int = 4, side: int = 24, seed: int = 0) -> Tensor:
    """Smooth colours with black, white, grey and saturated pixels among them."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=side, mode="bilinear")
    images = (smooth * 300 - 20).clamp(0, 255).to(torch.uint8)
    images[:, :, 0, :4] = torch.tensor([[0, 255, 128, 255], [0, 255, 128, 0], [0, 255, 128, 0]])
    return images


def applied(name: str, images: Tensor) -> Tensor:
    return TRANSFORMS[name](images, torch.arange(len(images)))


def worst(a: Tensor, b: Tensor) -> int:
    return int((a.int() - b.int()).abs().max())


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
@pytest.mark.parametrize("device", DEVICES)
def test_every_transform_is_a_fixed_function_of_an_image(name: str, device: str) -> None:
    """Alone, in a batch, under more dimensions and after other calls; the input is not changed."""
    images = pictures().to(device)
    before, index = images.clone(), torch.tensor([7, 0, 3, 7])
    once = TRANSFORMS[name](images, index)
    assert (once.dtype, once.shape, once.device) == (torch.uint8, images.shape, images.device)
    assert torch.equal(images, before)
    assert torch.equal(images, once) == (name == "none")
    stacked = TRANSFORMS[name](images.view(2, 2, 3, 24, 24), index.view(2, 2))
    assert torch.equal(stacked.view_as(once), once)
    for i in range(4):
        assert torch.equal(TRANSFORMS[name](images[i], index[i]), once[i])
    assert worst(once.cpu(), TRANSFORMS[name](images.cpu(), index)) <= (name != "noise")


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 3, 1, 7), (3, 2, 2)])
def test_small_images_are_fine(name: str, shape: tuple[int, ...]) -> None:
    images = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    out = TRANSFORMS[name](images.to(torch.uint8), torch.zeros(shape[:-3], dtype=torch.int64))
    assert out.shape == shape


def test_agreement_with_torchvision() -> None:
    """On values in [0, 1], rounded afterwards: within one level (its grey weights sum to .9999).

    torchvision reflects at the edges where this blur repeats the edge: compared without them.
    """
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    images = pictures()
    reference: dict[str, Callable[[Tensor], Tensor]] = {
        "dark": lambda x: functional.adjust_brightness(x, 0.6),
        "bright": lambda x: functional.adjust_brightness(x, 1.4),
        "low_contrast": lambda x: functional.adjust_contrast(x, 0.5),
        "grey": lambda x: functional.adjust_saturation(x, 0.0),
        "hue": lambda x: functional.adjust_hue(x, 0.1),
        "blur": lambda x: functional.gaussian_blur(x, [11, 11], [1.5, 1.5]),
    }
    for name, function in reference.items():
        expected = (function(images / 255) * 255).round().to(torch.uint8)
        inner = slice(5, -5) if name == "blur" else slice(None)
        found = applied(name, images)[..., inner, inner]
        assert worst(found, expected[..., inner, inner]) <= 1, name


def test_brightness_contrast_and_grey_by_hand() -> None:
    """Two pixels, (10, 200, 30) and (250, 0, 90), of grey levels 123.81 and 85.01.

    Their mean is 104.41; halfway to it are (57.2, 152.2, 67.2) and (177.2, 52.2, 97.2).
    """
    image = torch.tensor([[10, 250], [200, 0], [30, 90]], dtype=torch.uint8).view(1, 3, 1, 2)
    for name, expected in {
        "dark": [[6, 150], [120, 0], [18, 54]],
        "bright": [[14, 255], [255, 0], [42, 126]],
        "low_contrast": [[57, 177], [152, 52], [67, 97]],
        "grey": [[124, 85], [124, 85], [124, 85]],
    }.items():
        assert applied(name, image).view(3, 2).tolist() == expected, name


@example(colour=(100, 101, 101), turn=0.0)  # the smallest spread
@given(
    colour=st.tuples(*[st.integers(0, 255)] * 3), turn=st.sampled_from([0.1, 0.0, 0.5, -0.25, 0.9])
)
def test_hue_is_that_of_the_standard_library(colour: tuple[int, int, int], turn: float) -> None:
    h, s, v = colorsys.rgb_to_hsv(*(x / 255 for x in colour))
    expected = [255 * x for x in colorsys.hsv_to_rgb((h + turn) % 1, s, v)]
    found = hue(torch.tensor(colour, dtype=torch.uint8).view(3, 1, 1), turn).flatten().tolist()
    np.testing.assert_allclose(found, expected, atol=0.501)


def test_blur_is_that_of_scipy() -> None:
    """A radius of 5 is int(truncate · σ + ½); "nearest" repeats the edge."""
    images = pictures(2)
    expected = gaussian_filter(
        images.double().numpy(), sigma=1.5, axes=(-2, -1), mode="nearest", truncate=3.4
    )
    np.testing.assert_allclose(applied("blur", images).double().numpy(), expected, atol=0.51)


def splitmix64(counter: int) -> int:
    """The generator as its authors give it, on Python's integers."""
    word = 2**64 - 1
    z = (counter + 1) * 0x9E3779B97F4A7C15 & word
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & word
    z = (z ^ z >> 27) * 0x94D049BB133111EB & word
    return z ^ z >> 31


def test_the_noise_generator_is_splitmix64() -> None:
    """Its first three published outputs for seed 0, and large counters."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix64(i) for i in range(3)] == first
    counters = [0, 1, 2, 2**31, 2**40 + 17, 10**12]
    found = split_mix(torch.tensor(counters)).tolist()
    assert [x % 2**64 for x in found] == [splitmix64(i) for i in counters]


def test_noise_by_hand() -> None:
    """Image 5 of shape 3 × 2 × 2 uses counters 60 to 71: grey level 128 + round(25.5 z)."""
    image = torch.full((1, 3, 2, 2), 128, dtype=torch.uint8)
    found = TRANSFORMS["noise"](image, torch.tensor([5])).flatten().tolist()
    z = [NormalDist().inv_cdf((splitmix64(60 + i) // 2**48 + 0.5) / 2**16) for i in range(12)]
    assert found == [128 + round(25.5 * x) for x in z]


def test_noise_is_gaussian_and_differs_between_images_and_channels() -> None:
    """122,880 values: the mean within 5 standard errors of 0.074; σ² = 25.5² + 1/12 of rounding."""
    images = torch.full((10, 3, 64, 64), 128, dtype=torch.uint8)
    added = applied("noise", images).double() - 128
    assert float(added.mean()) == pytest.approx(0, abs=0.37)
    assert float(added.std()) == pytest.approx(25.5, rel=0.01)
    inside = float((added.abs() <= 25).double().mean())  # |z| <= 25.5 / 25.5
    assert inside == pytest.approx(0.6827, abs=0.007)
    correlation = torch.corrcoef(added.view(30, -1)) - torch.eye(30)
    assert float(correlation.abs().max()) < 0.08
    edges = applied("noise", torch.tensor([0, 255], dtype=torch.uint8).expand(1, 3, 40, 2))
    assert edges[..., 0].max() < 140  # clipped, not wrapped around
    assert edges[..., 1].min() > 115


# Images with transforms of their own -------------------------------------------------------------


class Elsewhere:
    """Images that are not in memory: only what every source of images can do."""

    def __init__(self, pixels: Tensor) -> None:
        self._inner = TensorImages(pixels)

    def __len__(self) -> int:
        return len(self._inner)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self._inner.shape

    def gather(self, index: Tensor, device: torch.device | str) -> Tensor:
        return self._inner.gather(index, device)


@pytest.mark.parametrize("device", DEVICES)
def test_images_are_the_same_transformed_now_or_when_read(device: str) -> None:
    """More images than are transformed at a time, read in any order, some twice, with padding."""
    pixels = pictures(600, side=8)
    names = sorted(TRANSFORMS)
    of_image = np.random.default_rng(0).integers(len(names), size=600)
    index = torch.tensor([[5, 599, -1], [5, 513, 0]])
    held = transform_images(TensorImages(pixels).to(device), names, of_image)
    read = transform_images(Elsewhere(pixels), names, of_image)
    assert isinstance(held, TensorImages)
    assert isinstance(read, TransformedImages)
    assert (len(held), held.shape) == (len(read), read.shape) == (600, (3, 8, 8))
    rows = [images.gather(index.to(device), device).cpu() for images in (held, read)]
    assert torch.equal(rows[0][index >= 0], rows[1][index >= 0])
    assert rows[0].shape == rows[1].shape == (2, 3, 3, 8, 8)
    for at in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
        image = int(index[at])
        expected = TRANSFORMS[names[of_image[image]]](pixels[image], torch.tensor(image))
        assert worst(rows[0][at], expected) <= (device != "cpu")
    assert torch.equal(pixels, pictures(600, side=8))


def test_what_does_not_fit_is_refused() -> None:
    colour, plain = (TensorImages(torch.zeros(2, c, 4, 4, dtype=torch.uint8)) for c in (3, 1))
    with pytest.raises(DataError, match=r"have the shape \(1, 4, 4\)"):
        TransformedImages(plain, ["none"], np.zeros(2, np.int64))
    with pytest.raises(DataError, match="transforms for 3 images, but 2 images"):
        TransformedImages(colour, ["none"], np.zeros(3, np.int64))
    with pytest.raises(ConfigError, match=r"no transform 'drak'\. Did you mean 'dark'"):
        TransformedImages(colour, ["drak"], np.zeros(2, np.int64))
    with pytest.raises(ConfigError, match="Valid: blur, bright, dark"):
        check_transforms([])
