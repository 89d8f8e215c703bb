"""Whether a reply or share can be used: it has what was asked for, in its form, and in range."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedharmony.errors import shown
from fedharmony.types import LARGEST, Form, Forms, Group, Packed, Record, shapes_of

#: How far a number may lie outside of its range by rounding.
ROUNDING = 1e-6
_ANY = (-math.inf, math.inf)


def problem(record: Record, expected: Forms, finite: bool | None = None) -> str | None:
    """Why a reply cannot be used, or None: a tensor is missing, or does not have its form.

    ``finite``: whether the values are finite, where its client knows; if so they need no look.

    >>> expected = {"params": {"w": Form((1,), low=0.0)}}
    >>> problem(Record({"params": {"w": torch.tensor([float("nan")])}}), expected)
    'params/w holds a value that is not finite'
    >>> problem(Record({"params": {"w": torch.tensor([1])}}), expected)
    'params/w is of torch.int64, expected torch.float32'
    >>> problem(Record({"params": {"w": torch.tensor([-0.5])}}), expected)
    'params/w holds -0.5, outside of [0, inf]'
    """
    for group in record.groups:
        if group not in expected and record.get(group):
            return f"group {group!r} was not asked for"
    for group, forms in expected.items():
        if (reason := _misformed(group, record.get(group), forms)) is not None:
            return reason
    if (reason := out_of_range(record, expected, finite)) is not None:
        return reason
    for name, value in record.scalars.items():
        if isinstance(value, str) or not abs(value) <= LARGEST:  # a whole number has no largest
            return f"{name} is {shown(value)}, no finite number up to {LARGEST:.2g}"
    return None if finite is not False else "it holds a value that is not finite"


def _misformed(group: str, tensors: Group, forms: Mapping[str, Form]) -> str | None:
    """The first tensor of a group that is missing, or of another shape or type than expected."""
    if tensors.keys() != forms.keys():
        odd = sorted(tensors.keys() ^ forms.keys())
        return f"group {group!r} has missing or unexpected tensors: {', '.join(odd[:3])}"
    found = shapes_of(tensors)
    for name, form in forms.items():
        shape, dtype = found[name]
        if shape != form.shape:
            return f"{group}/{name} has shape {shape}, expected {form.shape}"
        if dtype != form.dtype:
            return f"{group}/{name} is of {dtype}, expected {form.dtype}"
    return None


def out_of_range(record: Record, expected: Forms, finite: bool | None) -> str | None:
    """The first tensor with a value that is not finite, too large, or not in its range."""
    looked: list[tuple[str, Tensor, tuple[float, float]]] = []
    for group, members in record.groups.items():
        ranges = {name: (form.low, form.high) for name, form in expected.get(group, {}).items()}
        if isinstance(members, Packed) and set(ranges.values()) <= {_ANY}:
            looked.append((group, members.row, _ANY))
            continue
        for name, tensor in members.items():
            if tensor.is_floating_point() and tensor.numel():
                looked.append((f"{group}/{name}", tensor, ranges.get(name, _ANY)))
    looked = [(n, t, r) for n, t, r in looked if not (finite and r == _ANY)]
    if not looked:
        return None
    # One look at the device for the whole record, not one per tensor; some may lie elsewhere.
    place = max((t.device for _, t, _ in looked), key=lambda device: device.type == "cuda")
    ends = torch.stack([torch.stack(t.detach().aminmax()).double().to(place) for _, t, _ in looked])
    for (name, tensor, (low, high)), (least, most) in zip(looked, ends.tolist(), strict=True):
        if not (least >= -LARGEST and most <= LARGEST):  # a NaN is the least and the most
            packed = {f"{name}/{n}": t for n, t in record.get(name).items()}
            return _unusable(packed or {name: tensor})
        if least < low - ROUNDING or most > high + ROUNDING:
            worst = least if least < low - ROUNDING else most
            return f"{name} holds {worst:g}, outside of [{low:g}, {high:g}]"
    return None


def _unusable(tensors: Group) -> str:
    """Which of the tensors no model can be made with."""
    name = next(n for n, t in tensors.items() if not bool((t.abs() <= LARGEST).all()))
    if not bool(tensors[name].isfinite().all()):
        return f"{name} holds a value that is not finite"
    size = float(tensors[name].abs().max())
    return f"{name} holds {size:g}, and the square of a number above {LARGEST:.2g} overflows"
