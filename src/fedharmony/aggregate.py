"""Running sums over replies: the server's memory does not grow with the number of clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedharmony.types import BUFFERS, PARAMS, Group, Layout, Packed, Record, Reply, Tensors, mapped

_ROW = "row"  # where packed tensors are one
#: The group of a share that holds numbers: the weight of the model, and what events say.
NUMBERS = "numbers"


class RunningMean:
    """Weighted mean of named tensors, folded one client at a time: ``Σ w_k x_k / Σ w_k``.

    Sums are kept in float64, so that the result does not depend on the order of clients beyond the
    last bit of the result's own type. Integer tensors are not averaged: the first is kept.

    >>> mean = RunningMean()
    >>> mean.add({"w": torch.tensor([1.0])}, 1.0)
    >>> mean.add({"w": torch.tensor([4.0])}, 2.0)
    >>> mean.result()["w"]
    tensor([3.])
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._sums: Tensors = {}
        self._types: dict[str, torch.dtype] = {}
        self._layout: Layout | None = None

    def add(self, tensors: Group, weight: float) -> None:
        """Fold one client's tensors in with a weight that need not be normalised."""
        if not self.weight and isinstance(tensors, Packed):
            self._layout = tensors.layout
        self.weight += weight
        for name, tensor in self._parts(tensors).items():
            if name not in self._sums:
                self._types[name] = tensor.dtype
                floating = tensor.is_floating_point()
                self._sums[name] = tensor.double() * weight if floating else tensor.clone()
            elif tensor.is_floating_point():
                self._sums[name].add_(tensor, alpha=weight)

    def _parts(self, tensors: Group) -> Group:
        """The tensors; as one if all so far were packed alike (the same sums, far fewer calls)."""
        if self._layout is None:
            return tensors
        if isinstance(tensors, Packed) and tensors.layout == self._layout:
            return {_ROW: tensors.row}
        if _ROW in self._sums:  # packed so far: go on by name
            row, dtype = self._sums.pop(_ROW), self._types.pop(_ROW)
            self._sums = self._layout.views(row)
            self._types = dict.fromkeys(self._sums, dtype)
        self._layout = None
        return tensors

    def result(self, exact: bool = False) -> Group:
        """The mean so far, in the tensors' own types; ``exact`` leaves means in float64."""
        means = {
            name: total / self.weight if total.is_floating_point() else total
            for name, total in self._sums.items()
        }
        if not exact:
            means = {name: t.to(self._types[name]) for name, t in means.items()}
        return means if self._layout is None else Packed(self._layout, means[_ROW])


class ModelMean:
    """Running mean of the model part of replies: parameters and buffers.

    All methods average models through this class, or through one that tolerates malicious clients
    (``robust/``).

    Attributes:
        weights: of the clients in the mean; their sum is 1 as soon as it is made.
        left_out: who was left out of it, and why.
    """

    def __init__(self) -> None:
        self.clients = 0
        self.weights: dict[int, float] = {}
        self.left_out: dict[int, str] = {}
        self._means = {PARAMS: RunningMean(), BUFFERS: RunningMean()}

    def fold(self, reply: Reply, weight: float, buffers: float | None = None) -> None:
        """Fold one client's model in, under its name."""
        self.weights[reply.client] = weight
        self.add(reply.record, weight, buffers)

    def add(self, record: Record, weight: float, buffers: float | None = None) -> None:
        """Fold one model in; its buffers by a weight of their own, if there is one."""
        self.clients += 1
        self._means[PARAMS].add(record.get(PARAMS), weight)
        self._means[BUFFERS].add(record.get(BUFFERS), weight if buffers is None else buffers)

    def means(self, exact: bool = False) -> dict[str, Group]:
        """The mean of both groups; ``exact`` leaves that of parameters in float64."""
        total = sum(self.weights.values())
        self.weights = {client: weight / total for client, weight in self.weights.items()}
        return {group: m.result(exact and group == PARAMS) for group, m in self._means.items()}

    def update(self, state: Record, exact: bool = False) -> Record:
        """``state`` with its model replaced by the mean; unchanged when nobody was folded in.

        Whole numbers (counters among the buffers) keep the server's value: they have no mean.
        """
        if not self.clients:
            return state
        groups: dict[str, Group] = {}
        for group, found in self.means(exact).items():
            before = state.get(group)
            if isinstance(found, Packed) and found.keys() == before.keys():
                groups[group] = found
                continue
            fresh = {n: t for n, t in found.items() if t.is_floating_point() or n not in before}
            groups[group] = {**before, **fresh}
        return state.replace(groups)


def effective_clients(weights: Tensor) -> float:
    """How many equally weighted clients a weighting is worth: ``1 / Σ_k w_k²`` (for sum 1).

    >>> effective_clients(torch.tensor([0.5, 0.5, 0.0]))
    2.0
    """
    return 1 / float(weights.double().square().sum())


def scaled(tensors: Group, factor: float) -> Group:
    """The tensors times a factor, in float64; whole numbers, which have no sum, are left out.

    >>> scaled({"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor(3)}, 2.0)
    {'w': tensor([2., 4.], dtype=torch.float64)}
    """
    if not isinstance(tensors, Packed):
        tensors = {n: t for n, t in tensors.items() if t.is_floating_point()}
    return mapped(lambda t: t.to(torch.float64, copy=True).mul_(factor), tensors)


def shift(sums: Group, by: Group, times: float = 1.0) -> Group:
    """``sums + times · by`` in the place of ``sums``; in one go where both are packed alike.

    >>> shift({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}, -1.0)
    {'w': tensor([2.])}
    """
    if isinstance(sums, Packed) and isinstance(by, Packed) and sums.layout == by.layout:
        sums.row.add_(by.row, alpha=times)
    else:
        for name, tensor in by.items():
            sums[name].add_(tensor, alpha=times)
    return sums


def weighted(record: Record, weight: float) -> Record:
    """A client's share of a sum: its model times its weight, the weight, and its other tensors."""
    groups = {
        group: scaled(members, weight if group in (PARAMS, BUFFERS) else 1.0)
        for group, members in record.groups.items()
    }
    return Record({**groups, NUMBERS: {"weight": torch.tensor(weight, dtype=torch.float64)}})


def numbers_of(reply: Reply) -> dict[str, float]:
    """What events say of a client's training, as numbers that can be added up."""
    n, scalars = reply.examples, reply.record.scalars
    loss, rows = (float(scalars.get(name, 0.0)) for name in ("loss", "rows"))
    return {"examples": n, "loss": n * loss, "rows": rows}


def added(total: Record | None, share: Record) -> Record:
    """A total, which is changed in place, and one more share of the same form."""
    if total is None:
        return Record({g: scaled(members, 1.0) for g, members in share.groups.items()})
    for group, members in share.groups.items():
        shift(total.get(group), members)
    return total


def pooled(total: Record, state: Record) -> dict[str, Group]:
    """A sum of shares as the groups of one reply: the mean model in its own types, and all sums."""
    weight, groups = float(total.get(NUMBERS)["weight"]), dict(total.groups)
    for group in (PARAMS, BUFFERS):
        if sums := groups.get(group):
            groups[group] = typed(mapped(lambda t: t / (weight or 1.0), sums), state.get(group))
    return groups


def typed(tensors: Group, like: Group) -> Group:
    """The tensors in the types of others with the same names."""
    if isinstance(tensors, Packed):
        return Packed(tensors.layout, tensors.row.to(next(iter(like.values())).dtype))
    return {name: tensor.to(like[name].dtype) for name, tensor in tensors.items()}
