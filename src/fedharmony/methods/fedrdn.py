"""FedRDN: images normalised with the input statistics of a randomly drawn client.

Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning", CVPR
2025, arXiv 2306.09363. Idea: clients exchange the mean and standard deviation of their images once;
each then trains under everybody's normalisation, which takes away the difference between theirs.

====================================================  ============================
``μ_k = (1/n) Σ_i mean(x_i)``, ``σ_k = (1/n) Σ std``  ``statistics``
``x̂ = (x − μ_j)/σ_j``, j drawn from all clients       ``draw``, ``normalise``
====================================================  ============================

Statistics are means over images of per-image values (biased standard deviation), of the images as
they are, without augmentation.

Deviation: a feature vector has no statistics of its own. Of features, ``μ_k`` and ``σ_k`` are the
mean and the standard deviation over the client's samples, per feature, after the standardisation of
the data set; a feature that hardly varies at a client (``σ_k < min_std``) has ``σ_k = 1`` there.

Deviation: the paper tests each client's images with that client's statistics. The global test set
has no client: it is normalised with the mean of the clients' statistics, weighted by their number
of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedharmony.losses import Batch
from fedharmony.methods.base import (
    Method,
    Outcome,
    Stage,
    Sweep,
    methods,
    of_pixels,
    stacked,
    zeros,
)
from fedharmony.types import Form, Group, Groups, Messages, Record, Replies, Tensors

STATISTICS = "statistics"  # reply: μ_k, σ_k; message: all of them
TABLE = "statistics_table"  # state: those of every client heard


@methods.register("fedrdn")
class FedRDN(Method):
    """Normalisation with the statistics of random clients (Yan et al., 2025)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings of FedRDN.

        Attributes:
            draw: "image_pair": one client j per image and epoch, as the paper says;
                "batch_independent": one mean and, independently, one standard deviation per batch,
                as the authors' code does.
            collect: statistics from "everyone" before the first round, or from each "cohort" when
                it takes part (the list then grows).
            min_images: clients with fewer images are not in the list.
            min_std: lower limit of σ, per channel: a flat image would blow up its inputs. Below
                it, a feature has σ = 1.
        """

        draw: Literal["image_pair", "batch_independent"] = "image_pair"
        collect: Literal["everyone", "cohort"] = "everyone"
        min_images: Annotated[int, Ge(1)] = 1
        min_std: Annotated[float, Gt(0)] = 0.05

    config: Config

    search: ClassVar[Mapping[str, Sequence[Any]]] = {"draw": ("image_pair", "batch_independent")}

    @property
    def no_sums(self) -> str:
        """The list that clients draw from."""
        return (
            "clients draw from a list of everybody's mean and standard deviation, and a sum is no "
            "list. Use federation.server_sees = 'replies', or another method"
        )

    def stages(self, round: int) -> Sequence[Stage]:
        """``statistics`` before the first round (or of each cohort), then ``update``."""
        update, everyone = super().stages(round), self.config.collect == "everyone"
        if everyone and round > 0:
            return update
        ask = Stage("statistics", self.ask, self.collect, False, self.statistics(), everyone)
        return [ask, *update]

    # -- statistics --------------------------------------------------------------------------------

    def statistics(self) -> Sweep:
        """What a client tells about its inputs: (channels,) or (features,) each."""
        return self._of_images() if self.task.pixels else self._of_features()

    def _of_images(self) -> Sweep:
        """Per channel, the mean over images of their mean and of their standard deviation.

        Per image from whole numbers, ``std = √(N Σx² − (Σx)²) / N`` over its N pixels: no rounding
        before the root.
        """
        channels = len(self.task.mean)

        start = zeros(mean=(channels,), std=(channels,), rows=())

        def fold(carry: Tensors, images: Tensor, batch: Batch) -> Tensors:
            pixels = images.flatten(2).int()
            count, total, squares = pixels.shape[-1], pixels.sum(-1), pixels.square().sum(-1)
            rows = batch.rows.double()
            return {
                "mean": carry["mean"] + rows @ total.double() / count,
                "std": carry["std"] + rows @ (count * squares - total**2).double().sqrt() / count,
                "rows": carry["rows"] + rows.sum(),
            }

        def finish(carry: Tensors, params: Group) -> Tensors:
            scale = 255 * carry["rows"]
            return {name: (carry[name] / scale).float() for name in ("mean", "std")}

        # Of pixels in [0, 1]; their standard deviation is at most ½.
        forms = {
            "mean": Form((channels,), low=0, high=1),
            "std": Form((channels,), low=0, high=0.5),
        }
        return Sweep(STATISTICS, "images", start, fold, finish, lambda params: forms)

    def _of_features(self) -> Sweep:
        """Per standardised feature z, ``μ = mean(z)`` and ``σ = √(mean(z²) − μ²)`` over samples."""
        features = len(self.task.mean)

        start = zeros(sum=(features,), squares=(features,), rows=())

        def fold(carry: Tensors, inputs: Tensor, batch: Batch) -> Tensors:
            z, rows = Method.normalise(self, inputs, {}, {}).double(), batch.rows.double()
            return {
                "sum": carry["sum"] + rows @ z,
                "squares": carry["squares"] + rows @ z.square(),
                "rows": carry["rows"] + rows.sum(),
            }

        def finish(carry: Tensors, params: Group) -> Tensors:
            mean = carry["sum"] / carry["rows"]
            std = (carry["squares"] / carry["rows"] - mean.square()).clamp(min=0.0).sqrt()
            std = torch.where(std < self.config.min_std, 1.0, std)
            return {"mean": mean.float(), "std": std.float()}

        forms = {"mean": Form((features,)), "std": Form((features,), low=self.config.min_std)}
        return Sweep(STATISTICS, "images", start, fold, finish, lambda params: forms)

    def collect(self, state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
        """Put the replies into the table, over older entries of the same clients.

        Logs how many clients are listed, and how far their mean lies from the normalisation that
        the model was made for: the largest ``|μ̄ − mean| / std`` of a channel.
        """
        heard = list(replies)
        if not heard:
            return Outcome(state)
        table = {
            name: torch.stack([reply.record.get(STATISTICS)[name] for reply in heard])
            for name in ("mean", "std")
        }
        device = table["mean"].device
        table["client"] = torch.tensor([reply.client for reply in heard], device=device)
        table["examples"] = torch.tensor([reply.examples for reply in heard], device=device)
        if before := state.get(TABLE):
            stay = ~torch.isin(before["client"], table["client"])
            table = {name: torch.cat([before[name][stay], new]) for name, new in table.items()}
        order = table["client"].argsort()
        state = state.replace({TABLE: {name: values[order] for name, values in table.items()}})
        found = self.evaluation(state)[STATISTICS]
        shifts = found["pooled_mean"]
        if self.task.pixels:  # features are standardised already
            mean, std = (
                torch.tensor(own, device=device) for own in (self.task.mean, self.task.std)
            )
            shifts = (shifts - mean) / std
        shift = float(shifts.abs().max())
        log = {"clients_listed": len(found["mean"]), "normalisation_shift": shift}
        return Outcome(state, log=log)

    # -- training ----------------------------------------------------------------------------------

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Messages:
        """θ and the list of statistics, the same for everybody."""
        message = next(iter(super().broadcast(state, round, clients).values()))
        return dict.fromkeys(clients, message.replace(self.evaluation(state)))

    def evaluation(self, state: Record) -> Groups:
        """The list (K', 3), or (K', F) of F features, for training; one pair for all else.

        That pair is the mean over all clients heard by number of images, listed or not.
        """
        table = state.get(TABLE)
        if not table:
            return {}
        listed = table["examples"] >= self.config.min_images
        listed = listed if bool(listed.any()) else torch.ones_like(listed)
        share = (table["examples"].double() / table["examples"].sum()).unsqueeze(-1)
        pooled = {name: (share * table[name]).sum(0).float() for name in ("mean", "std")}
        return {
            STATISTICS: {
                "mean": table["mean"][listed],
                "std": table["std"][listed].clamp(min=self.config.min_std),
                "pooled_mean": pooled["mean"],
                "pooled_std": pooled["std"].clamp(min=self.config.min_std),
            }
        }

    def normalisation(self, state: Record) -> tuple[Sequence[float], Sequence[float]]:
        """The pooled statistics; those of features come on top of the model's own."""
        if not (message := self.evaluation(state)):
            return super().normalisation(state)
        found = message[STATISTICS]
        mean, std = (found[name].double().cpu() for name in ("pooled_mean", "pooled_std"))
        if not self.task.pixels:
            own_mean, own_std = (
                torch.tensor(own, dtype=torch.float64) for own in (self.task.mean, self.task.std)
            )
            mean, std = own_mean + own_std * mean, own_std * std
        return mean.tolist(), std.tolist()

    def draw(self, generator: torch.Generator, images: int) -> Tensors:
        """Numbers in [0, 1) that choose whose mean and whose standard deviation an image gets."""
        if self.config.draw == "image_pair":
            choice = torch.rand(images, generator=generator)
            return {"mean": choice, "std": choice}
        mean, std = torch.rand(2, generator=generator)
        return {"mean": mean.expand(images), "std": std.expand(images)}

    @stacked
    def normalise(self, images: Tensor, message: Groups, draws: Group) -> Tensor:
        """``(x − μ_j)/σ_j`` with drawn j; outside of training, the pooled statistics."""
        standard = super().normalise
        if STATISTICS not in message:  # nobody answered
            return standard(images, message, draws)
        found = message[STATISTICS]
        if draws:
            mean, std = (chosen(found[name], draws[name]) for name in ("mean", "std"))
        else:
            mean, std = (found[name].unsqueeze(-2) for name in ("pooled_mean", "pooled_std"))
        if not self.task.pixels:
            return (standard(images, message, draws) - mean) / std
        return (images.float() - of_pixels(mean)) / of_pixels(std)


def chosen(table: Tensor, choice: Tensor) -> Tensor:
    """Rows of a table (..., K, F) by numbers in [0, 1), (..., B) to (..., B, F).

    >>> table = torch.tensor([[1.0, 1, 1], [2, 2, 2], [3, 3, 3]])
    >>> chosen(table, torch.tensor([0.0, 0.5, 0.99])).tolist()
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]]
    """
    index = (choice * table.shape[-2]).long()  # float32 numbers below 1: never rounded up to K
    table = table.expand(*choice.shape[:-1], -1, -1)
    return table.take_along_dim(index.unsqueeze(-1), dim=-2)
