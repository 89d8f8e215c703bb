"""Random changes of training images, against hand-made cases and torchvision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedharmony.data.augment import (
    AugmentSettings,
    augment,
    crop,
    draw_changes,
)
from fedharmony.data.colour import grey_level, turn_hue

ALL = AugmentSettings(flip=True, crop=0.3, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)


def images(*leading: int, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(256, (*leading, 3, size, size), generator=generator, dtype=torch.uint8)


def changes(settings: AugmentSettings, count: int, seed: int = 0) -> dict[str, Tensor]:
    return draw_changes(settings, torch.Generator().manual_seed(seed), count)


def test_nothing_asked_for_is_nothing_done() -> None:
    settings = AugmentSettings()
    assert not settings.active
    assert all(AugmentSettings(**{k: 0.1}).active for k in ("crop", "brightness", "hue"))
    pictures = images(4)
    assert augment(settings, pictures, changes(settings, 4)) is pictures


def test_flips_mirror_half_of_the_images_and_keep_uint8() -> None:
    settings = AugmentSettings(flip=True)
    drawn = changes(settings, 4000)
    assert 1900 < int(drawn["flip"].sum()) < 2100
    pictures = images(2)
    flipped = augment(settings, pictures, {"flip": torch.tensor([True, False])})
    assert flipped.dtype == torch.uint8
    assert torch.equal(flipped[0], pictures[0].flip(-1))
    assert torch.equal(flipped[1], pictures[1])


def test_a_crop_of_the_upper_left_quarter_by_hand() -> None:
    """Box (0, 0, ½, ½) of a 4 × 4 ramp x: new centres (i + ½)/4 · ½ = ⅛, ⅜, ⅝ … of half the width.

    In pixels that is 4 · (i + ½)/8 − ½ = −0.25, 0.25, 0.75, 1.25; the border is repeated.
    """
    ramp = torch.arange(4.0).expand(1, 3, 4, 4)
    box = {"top": 0.0, "left": 0.0, "height": 0.5, "width": 0.5}
    cut = crop(ramp, {name: torch.tensor([value]) for name, value in box.items()})
    torch.testing.assert_close(cut[0, 0, 0], torch.tensor([0.0, 0.25, 0.75, 1.25]))
    torch.testing.assert_close(cut[0, 0, 3], cut[0, 0, 0])


def test_a_whole_crop_changes_nothing() -> None:
    box = {"top": 0.0, "left": 0.0, "height": 1.0, "width": 1.0}
    pictures = images(3)
    whole = crop(pictures, {name: torch.full((3,), value) for name, value in box.items()})
    torch.testing.assert_close(whole, pictures.float(), atol=1e-3, rtol=0)


def test_crops_lie_inside_and_have_the_asked_area_and_ratio() -> None:
    settings = AugmentSettings(crop=0.25, crop_ratio=1.5)
    drawn = changes(settings, 5000)
    area = drawn["height"] * drawn["width"]
    ratio = drawn["width"] / drawn["height"]
    assert (drawn["top"] >= 0).all()
    assert (drawn["top"] + drawn["height"] <= 1 + 1e-6).all()
    assert (drawn["left"] + drawn["width"] <= 1 + 1e-6).all()
    free = (drawn["height"] < 1) & (drawn["width"] < 1)
    assert (area[free] >= 0.25 - 1e-6).all()
    assert area[free].min() < 0.27
    assert (ratio[free] <= 1.5 + 1e-5).all()
    assert (ratio[free] >= 1 / 1.5 - 1e-5).all()


def test_switching_one_change_leaves_the_others_as_they_were() -> None:
    few, many = changes(AugmentSettings(flip=True), 50), changes(ALL, 50)
    assert torch.equal(few["flip"], many["flip"])
    again = changes(AugmentSettings(flip=True, crop=0.3), 50)
    assert torch.equal(again["left"], many["left"])


@pytest.mark.parametrize("kind", ["brightness", "contrast", "saturation", "hue"])
def test_colours_agree_with_torchvision(kind: str) -> None:
    functional = pytest.importorskip("torchvision.transforms.functional")
    factor = {"brightness": 1.3, "contrast": 0.6, "saturation": 0.2, "hue": 0.2}[kind]
    neutral = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0, kind: factor}
    settings = AugmentSettings(**{kind: 0.5})
    pictures = images(2)
    drawn = {name: torch.full((2,), value) for name, value in neutral.items()}
    ours = augment(settings, pictures, drawn) / 255
    theirs = getattr(functional, f"adjust_{kind}")(pictures.float() / 255, factor)
    # torchvision rounds the luma weights to four digits.
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


def test_a_third_of_a_turn_exchanges_the_channels_and_a_whole_one_changes_nothing() -> None:
    pictures = images(2).float()
    third = turn_hue(pictures, torch.full((2,), 1 / 3))
    torch.testing.assert_close(third, pictures.roll(1, dims=-3), atol=1e-2, rtol=0)
    torch.testing.assert_close(turn_hue(pictures, torch.ones(2)), pictures, atol=1e-2, rtol=0)
    grey = grey_level(pictures).expand(pictures.shape)
    torch.testing.assert_close(turn_hue(grey, torch.full((2,), 0.3)), grey)


def test_an_image_does_not_depend_on_its_neighbours() -> None:
    pictures, drawn = images(2, 3), changes(ALL, 6)
    drawn = {name: value.view(2, 3) for name, value in drawn.items()}
    together = augment(ALL, pictures, drawn)
    for m in range(2):
        for b in range(3):
            alone = augment(ALL, pictures[m, b], {n: v[m, b] for n, v in drawn.items()})
            torch.testing.assert_close(alone, together[m, b], atol=1e-4, rtol=0)
    assert together.min() >= 0
    assert together.max() <= 255
