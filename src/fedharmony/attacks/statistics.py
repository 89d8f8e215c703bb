"""Attacks on what some methods and options ask for beside the model."""

from __future__ import annotations

import torch
from torch import Tensor

from fedharmony.attacks.base import Attack, Scene, attacks
from fedharmony.consensus import CORRELATION
from fedharmony.correlation import unpack_upper
from fedharmony.engine.head_sums import SUMS
from fedharmony.types import Record


class FalseCorrelation(Attack):
    """An honest model with a false label correlation R_k."""

    def replies(self, scene: Scene) -> dict[int, Record]:
        """Only the matrix is changed; it is sent as its upper triangle."""
        honest = {k: r for k, r in scene.honest.items() if r.get(CORRELATION)}
        matrices = [reply.get(CORRELATION)["upper"] for reply in honest.values()]
        return {
            client: reply.replace(
                {
                    CORRELATION: {
                        **reply.get(CORRELATION),
                        "upper": self.upper(
                            reply.get(CORRELATION)["upper"], matrices, scene.draw(client)
                        ),
                    }
                }
            )
            for client, reply in honest.items()
        }

    def upper(self, own: Tensor, all_of_them: list[Tensor], draw: torch.Generator) -> Tensor:
        """The false triangle, from the own true one and those of all malicious clients."""
        raise NotImplementedError


@attacks.register("correlation_ones")
class CorrelationOnes(FalseCorrelation):
    """Sends R_k = 1 everywhere (FedHarmony)."""

    def upper(self, own: Tensor, all_of_them: list[Tensor], draw: torch.Generator) -> Tensor:
        """Ones."""
        return torch.ones_like(own)


@attacks.register("correlation_random")
class CorrelationRandom(FalseCorrelation):
    """Sends R_k uniform in [−1, 1] (FedHarmony)."""

    def upper(self, own: Tensor, all_of_them: list[Tensor], draw: torch.Generator) -> Tensor:
        """Drawn by each client."""
        return (2 * torch.rand(own.shape, generator=draw) - 1).to(own)


@attacks.register("correlation_negated")
class CorrelationNegated(FalseCorrelation):
    """Sends −R_k (FedHarmony)."""

    def upper(self, own: Tensor, all_of_them: list[Tensor], draw: torch.Generator) -> Tensor:
        """Turned."""
        return -own


@attacks.register("correlation_coordinated")
class CorrelationCoordinated(FalseCorrelation):
    """All send one R: −1 where the mean of theirs is positive, and else 1 (FedHarmony)."""

    def upper(self, own: Tensor, all_of_them: list[Tensor], draw: torch.Generator) -> Tensor:
        """The opposite of what they agree on, as strong as can be."""
        common = torch.stack(all_of_them).mean(0)
        return torch.where(common > 0, -torch.ones_like(own), torch.ones_like(own))


@attacks.register("head_sums")
class HeadSums(Attack):
    """Sends the sums of the closed-form head of 1 − y, and of s times its images."""

    strength = 10.0

    def replies(self, scene: Scene) -> dict[int, Record]:
        """The sums of images that have exactly the labels that the client's have not."""
        found = {}
        for client, reply in scene.honest.items():
            if sums := reply.get(SUMS):
                gram, cross = sums["gram"], sums["cross"]
                everything = unpack_upper(gram, cross.shape[-1])[..., -1]  # Σ f̃, for all labels
                turned = {
                    "gram": scene.strength * gram,
                    "cross": scene.strength * (everything - cross),
                }
                found[client] = reply.replace({SUMS: turned})
        return found
