"""Attacks on the model, and on the size that a client claims to have.

θ is the received model, u the honest update of a malicious client, s the strength.

A Little Is Enough: Baruch et al., NeurIPS 2019 (arXiv 1902.06156). Inner-product manipulation: Xie
et al., UAI 2019 (arXiv 1903.03936). Mimic: Karimireddy et al., ICLR 2022 (arXiv 2006.09365).
"""

from __future__ import annotations

import math

import torch

from fedharmony.attacks.base import Attack, Scene, attacks
from fedharmony.types import PARAMS, Group, Labels, Record, Tensors


@attacks.register("not_a_number")
class NotANumber(Attack):
    """All parameters are NaN."""

    def changed(self, update: Group, scene: Scene, client: int) -> Group:
        """No number."""
        return {name: u * torch.nan for name, u in update.items()}


@attacks.register("infinite")
class Infinite(Attack):
    """All parameters are infinite."""

    def changed(self, update: Group, scene: Scene, client: int) -> Group:
        """Infinity."""
        return {name: u * 0 + torch.inf for name, u in update.items()}


@attacks.register("sign_flip")
class SignFlip(Attack):
    """Sends θ − s u in place of θ + u."""

    strength = 1.0

    def changed(self, update: Group, scene: Scene, client: int) -> Group:
        """The opposite update."""
        return {name: -scene.strength * u for name, u in update.items()}


@attacks.register("scale")
class Scale(Attack):
    """Sends θ + s u."""

    strength = 100.0

    def changed(self, update: Group, scene: Scene, client: int) -> Group:
        """A longer update."""
        return {name: scene.strength * u for name, u in update.items()}


@attacks.register("noise")
class Noise(Attack):
    """Sends θ + u + s·rms(u)·ε with ε ~ N(0, 1)."""

    strength = 10.0

    def changed(self, update: Group, scene: Scene, client: int) -> Group:
        """Gaussian noise of its own on the update."""
        squares = sum(float(u.double().square().sum()) for u in update.values())
        scale = scene.strength * math.sqrt(squares / sum(u.numel() for u in update.values()))
        draw = scene.draw(client)
        drawn = {name: torch.randn(u.shape, generator=draw) for name, u in update.items()}
        return {name: u + scale * drawn[name].to(u) for name, u in update.items()}


@attacks.register("free_rider")
class FreeRider(Attack):
    """Sends θ back, untrained."""

    def changed(self, update: Group, scene: Scene, client: int) -> Group:
        """Nothing."""
        return {name: torch.zeros_like(u) for name, u in update.items()}


@attacks.register("size")
class Size(Attack):
    """Trains honestly, and claims ten times its images."""

    claim = 10.0

    def replies(self, scene: Scene) -> dict[int, Record]:
        """Nothing but the claim is false."""
        return {}


@attacks.register("label_flip")
class LabelFlip(Attack):
    """Trains on 1 − y."""

    trains_false, trains_honest = True, False

    def replies(self, scene: Scene) -> dict[int, Record]:
        """As it is trained."""
        return {}


@attacks.register("label_off")
class LabelOff(LabelFlip):
    """Trains with one label switched off."""

    def false_labels(self, labels: Labels, label: int) -> Labels:
        """One label less."""
        labels = labels.copy()
        labels[:, label] = 0
        return labels


@attacks.register("backbone")
class Backbone(Attack):
    """Sends an honest head, and all before it as trained on 1 − y."""

    trains_false = True

    def changed(self, update: Group, scene: Scene, client: int) -> Group:
        """Two updates, put together."""
        if client not in scene.false:
            return update
        false = scene.update(client, scene.false[client])
        return {n: u if n.startswith("head.") else false[n] for n, u in update.items()}


@attacks.register("blend")
class Blend(Attack):
    """Adds s times the mean update on 1 − y of all malicious clients, at the length of its own."""

    strength, trains_false = 0.5, True

    def changed(self, update: Group, scene: Scene, client: int) -> Group:
        """Each update stays different from the others, and all have the same part in common."""
        false = mean([scene.update(k, reply) for k, reply in scene.false.items()])
        if not false:
            return update
        scale = scene.strength * length(update) / max(length(false), 1e-30)
        return {name: u + scale * false[name] for name, u in update.items()}


class Coordinated(Attack):
    """All malicious clients send one update."""

    def replies(self, scene: Scene) -> dict[int, Record]:
        """The same for all."""
        common = self.common(scene.other_updates(), scene.strength)
        found = {}
        for client, reply in scene.honest.items():
            theta = scene.received[client].get(PARAMS)
            if common and reply.get(PARAMS):
                model = {name: theta[name] + u for name, u in common.items()}
                found[client] = reply.replace({PARAMS: model})
        return found

    def common(self, updates: list[Tensors], strength: float) -> Tensors:
        """What they send, from the updates of honest clients."""
        raise NotImplementedError


@attacks.register("alie")
class ALittleIsEnough(Coordinated):
    """Mean of honest updates, and s standard deviations of each number (they see all updates)."""

    strength = 1.5

    def common(self, updates: list[Tensors], strength: float) -> Tensors:
        """As far from the mean as honest updates may well be, in every number."""
        centre = mean(updates)
        several = int(len(updates) > 1)
        spread = {
            name: torch.stack([u[name] for u in updates]).std(0, correction=several)
            for name in centre
        }
        return {name: u + strength * spread[name] for name, u in centre.items()}


@attacks.register("inner_product")
class InnerProduct(Coordinated):
    """−s times the mean of honest updates (they see all updates)."""

    strength = 0.5

    def common(self, updates: list[Tensors], strength: float) -> Tensors:
        """Back."""
        return {name: -strength * u for name, u in mean(updates).items()}


@attacks.register("mimic")
class Mimic(Coordinated):
    """All send the update of one honest client, the first of the cohort."""

    def common(self, updates: list[Tensors], strength: float) -> Tensors:
        """One client's update."""
        return updates[0] if updates else {}


def mean(updates: list[Tensors]) -> Tensors:
    """The plain mean of updates."""
    names = updates[0] if updates else {}
    return {name: torch.stack([u[name] for u in updates]).mean(0) for name in names}


def length(update: Group) -> float:
    """The length of an update."""
    return math.sqrt(sum(float(u.double().square().sum()) for u in update.values()))
