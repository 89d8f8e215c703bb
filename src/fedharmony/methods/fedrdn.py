"""FedRDN: images normalised with the input statistics of a randomly drawn client.

Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning", CVPR
2025, arXiv 2306.09363. Idea: clients exchange the mean and standard deviation of their images once;
each then trains under everybody's normalisation, which takes away the difference between theirs.

====================================================  ============================
``μ_k = (1/n) Σ_i mean(x_i)``, ``σ_k = (1/n) Σ std``  ``statistics``
``x̂ = (x − μ_j)/σ_j``, j drawn from all clients       ``draw``, ``normalise``
====================================================  ============================

Statistics are means over images of per-image values (biased standard deviation), of the images as
they are, without augmentation. The global test set has no client: it is normalised with the mean of
the clients' statistics, weighted by their number of images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedharmony.losses import Batch
from fedharmony.methods.base import Groups, Method, Outcome, Stage, Sweep, methods, stacked
from fedharmony.types import Record, Reply, Tensors

STATISTICS = "statistics"  # reply: μ_k, σ_k; message: all of them
TABLE = "statistics_table"  # state: those of every client heard


@methods.register("fedrdn")
class FedRDN(Method):
    """Normalisation with the statistics of random clients (Yan et al., 2025)."""

    @dataclass(frozen=True)
    class Config:
        """Settings of FedRDN.

        Attributes:
            draw: "image_pair": one client j per image and epoch, as the paper says;
                "batch_independent": one mean and, independently, one standard deviation per batch,
                as the authors' code does.
            collect: statistics from "everyone" before the first round, or from each "cohort" when
                it takes part (the list then grows).
            min_images: clients with fewer images are not in the list.
            min_std: lower limit of σ, per channel: a flat image would blow up its inputs.
        """

        draw: Literal["image_pair", "batch_independent"] = "image_pair"
        collect: Literal["everyone", "cohort"] = "everyone"
        min_images: Annotated[int, Ge(1)] = 1
        min_std: Annotated[float, Gt(0)] = 0.05

    search: ClassVar[Mapping[str, Sequence[Any]]] = {"draw": ("image_pair", "batch_independent")}

    def stages(self, round: int) -> Sequence[Stage]:
        """``statistics`` before the first round (or of each cohort), then ``update``."""
        update = Stage("update", self.broadcast, self.aggregate)
        everyone = self.config.collect == "everyone"
        if everyone and round > 0:
            return [update]
        ask = Stage("statistics", self._ask, self.collect, False, self.statistics(), everyone)
        return [ask, update]

    # -- statistics --------------------------------------------------------------------------------

    def statistics(self) -> Sweep:
        """Per channel, the mean over images of their mean and of their standard deviation."""

        def start(params: Mapping[str, Tensor]) -> Tensors:
            zeros = torch.zeros(len(self.task.mean), dtype=torch.float64)
            return {"mean": zeros, "std": zeros.clone(), "rows": torch.zeros(())}

        def fold(carry: Tensors, images: Tensor, batch: Batch) -> Tensors:
            pixels = images.double().flatten(2) / 255
            rows = batch.rows.unsqueeze(-1)
            return {
                "mean": carry["mean"] + (pixels.mean(-1) * rows).sum(0),
                "std": carry["std"] + (pixels.std(-1, correction=0) * rows).sum(0),
                "rows": carry["rows"] + batch.rows.sum(),
            }

        def finish(carry: Tensors, params: Mapping[str, Tensor]) -> Tensors:
            return {name: (carry[name] / carry["rows"]).float() for name in ("mean", "std")}

        channels = (len(self.task.mean),)
        shapes = {"mean": channels, "std": channels}
        return Sweep(STATISTICS, "images", start, fold, finish, lambda params: shapes)

    def _ask(self, state: Record, round: int, clients: Sequence[int]) -> Mapping[int, Record]:
        """A message without a model: statistics of images need none."""
        return dict.fromkeys(clients, Record())

    def collect(
        self, state: Record, round: int, sent: Mapping[int, Record], replies: Iterator[Reply]
    ) -> Outcome:
        """Put the replies into the table, over older entries of the same clients."""
        table = state.get(TABLE)
        rows = {
            int(client): {name: table[name][i] for name in ("mean", "std", "examples")}
            for i, client in enumerate(table.get("client", ()))
        }
        for reply in replies:
            found = reply.record.get(STATISTICS)
            rows[reply.client] = {**found, "examples": torch.tensor(reply.examples)}
        if not rows:
            return Outcome(state)
        device = next(iter(rows.values()))["mean"].device
        fresh: Tensors = {"client": torch.tensor(sorted(rows))}
        for name in ("mean", "std", "examples"):
            fresh[name] = torch.stack([rows[k][name].to(device) for k in sorted(rows)])
        return Outcome(state.replace({TABLE: fresh}))

    # -- training ----------------------------------------------------------------------------------

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Mapping[int, Record]:
        """θ and the list of statistics, the same for everybody."""
        message = next(iter(super().broadcast(state, round, clients).values()))
        return dict.fromkeys(clients, message.replace(self.evaluation(state)))

    def evaluation(self, state: Record) -> Groups:
        """The list (K', 3) for training, and its mean by number of images for everything else."""
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

    def draw(self, generator: torch.Generator, images: int) -> Tensors:
        """Numbers in [0, 1) that choose a client for each image's mean and standard deviation."""
        if self.config.draw == "image_pair":
            choice = torch.rand(images, generator=generator)
            return {"mean": choice, "std": choice}
        mean, std = torch.rand(2, generator=generator)
        return {"mean": mean.expand(images), "std": std.expand(images)}

    @stacked
    def normalise(self, images: Tensor, message: Groups, draws: Mapping[str, Tensor]) -> Tensor:
        """``(x − μ_j)/σ_j`` with drawn j; outside of training, the pooled statistics."""
        if STATISTICS not in message:  # nobody answered
            return super().normalise(images, message, draws)
        found = message[STATISTICS]
        mean, std = found["pooled_mean"], found["pooled_std"]
        if draws:
            clients = len(found["mean"])
            mean, std = (
                found[name][(draws[name] * clients).long().clamp(max=clients - 1)]
                for name in ("mean", "std")
            )
        mean, std = (values[..., None, None] * 255.0 for values in (mean, std))
        return (images.float() - mean) / std
