"""FedLGT: label tokens with universal embeddings, and masks that follow the global model's doubts.

Liu et al., "Language-Guided Transformer for Federated Multi-Label Classification", AAAI 2024, arXiv
2312.07165; built on C-Tran (Lanchantin et al., CVPR 2021). Idea: all clients share one frozen text
embedding per label, so that label correlations learnt by a transformer over label tokens stay
comparable; in training, part of the labels is given as known input, but never those about which the
received global model is unsure: these the client must learn to predict.

====================================================  ============================
``token_c = text_c + state(s_c)``, zero for unknown   ``LabelTransformer``
``n_known ~ U{0, …, ⌊0.75 C⌋}``, a random subset      ``draw``, ``inputs``
``|σ(z_c) − 0.5| ≤ ε`` (received model): unknown      ``inputs``
``Σ_images Σ_{c unknown} BCE_c``                      ``loss``
====================================================  ============================

The server averages as FedAvg does; at inference all labels are unknown.

Deviation: the released code masks by doubt only the first image of each batch and exchanges the
words "positive" and "negative"; here every image is masked and the words stand where they belong
(the preset ``released`` does as the code does). The backbone's patches, brought to the width of the
tokens by a linear map, take the place of a ResNet's feature map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from fedharmony.config import FilePath, shared
from fedharmony.losses import Batch, entries
from fedharmony.methods.base import Method, Task, methods, stacked
from fedharmony.models.label_text import load_label_text
from fedharmony.models.label_transformer import UNKNOWN, LabelTransformer
from fedharmony.types import Groups, Tensors

RANDOM_TEXT = (
    "FedLGT has no text embeddings of the labels (methods.fedlgt.text), so it describes them by "
    "random vectors, and its results are shown as fedlgt-randtext. docs/methods/fedlgt.md says how "
    "to make the file."
)


@methods.register("fedlgt")
class FedLGT(Method):
    """Label tokens with universal text embeddings, client-aware masks (Liu et al., 2024)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings of FedLGT.

        Attributes:
            text: file of text embeddings of the labels (see ``docs/methods/fedlgt.md``); none draws
                random unit vectors from the model's seed and names the run ``fedlgt-randtext``.
            ca_mle: in which images the labels the received model doubts are kept unknown: "all",
                the "first" of each batch (as the released code does), or "off" for none.
            margin: ε; a label is doubted when its probability is this near to 0.5.
            known_share: largest share of the labels that is given as known.
            swap_states: exchange the words for positive and negative, as the released code does.
            embedding: width of the tokens; a text file must have the same.
            heads: attention heads.
            layers: transformer layers.
            feedforward: hidden width of a layer's MLP.
            dropout: rate inside the transformer, in training.
            max_norm: largest norm of a client's gradient.
        """

        text: FilePath | None = None
        ca_mle: Literal["all", "first", "off"] = "all"
        margin: Annotated[float, Ge(0), Le(0.5)] = 0.02
        known_share: Annotated[float, Ge(0), Lt(1)] = 0.75
        swap_states: bool = False
        embedding: Annotated[int, Ge(1)] = 512
        heads: Annotated[int, Ge(1)] = 4
        layers: Annotated[int, Ge(1), Le(1000)] = 3
        feedforward: Annotated[int, Ge(1)] = 512
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
        max_norm: Annotated[float, Gt(0)] = 10.0

    config: Config

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "released": {"ca_mle": "first", "swap_states": True},
    }
    search: ClassVar[Mapping[str, Sequence[Any]]] = {"margin": (0.0, 0.02, 0.1, 0.25)}

    def __init__(self, config: Config, task: Task) -> None:
        super().__init__(config, task)
        self.asks_received_model = config.ca_mle != "off"
        self.max_grad_norm = config.max_norm
        # In decimals, as written: 0.29 · 100 is 29, not 28.999….
        self.most = int(Decimal(str(config.known_share)) * task.classes)

    @classmethod
    def suffix(cls, config: Method.Config) -> str:
        """Without text embeddings it is not the method of the paper."""
        assert isinstance(config, cls.Config)
        return "" if config.text else "-randtext"

    @property
    def remark(self) -> str:
        """What the name means that results have without text embeddings."""
        return "" if self.config.text else RANDOM_TEXT

    def head(self, width: int) -> LabelTransformer:
        """The label transformer, with its frozen tables."""
        config, text = self.config, None
        if config.text:
            text = load_label_text(config.text, self.task.labels, config.embedding)
        made = shared(LabelTransformer, config, rate=config.dropout, text=text)
        return LabelTransformer(width, self.task.classes, **made)

    def draw(self, generator: torch.Generator, images: int) -> Tensors:
        """Per image: how many labels are known, in which order they become so, a dropout seed."""
        return {
            "count": torch.rand(images, generator=generator),
            "order": torch.rand(images, self.task.classes, generator=generator),
            "dropout": torch.randint(2**31, (images,), generator=generator),
        }

    @stacked
    def inputs(self, batch: Batch, message: Groups, received: Tensor | None) -> Tensors:
        """The state of each label: a random subset known, doubtful ones and the rest unknown."""
        # Below 1 in float32, a draw times a whole number stays below it: at most ``most`` known.
        count = (batch.draws["count"] * (self.most + 1)).long()
        rank = batch.draws["order"].argsort(dim=-1, stable=True).argsort(dim=-1)
        known = (rank < count.unsqueeze(-1)) & (batch.counted > 0)
        if received is not None:
            unsure = (received.sigmoid() - 0.5).abs() <= self.config.margin
            if self.config.ca_mle == "first":
                first = torch.arange(unsure.shape[-2], device=unsure.device) == 0
                unsure = unsure & first.unsqueeze(-1)
            known = known & ~unsure
        states = torch.where(known, 1 + batch.labels.long(), UNKNOWN)
        return {"states": states, "dropout": batch.draws["dropout"]}

    @stacked
    def loss(
        self, outputs: Tensor, batch: Batch, message: Groups, carry: Tensors
    ) -> tuple[Tensor, Tensors]:
        """``Σ_images Σ_{c unknown} BCE_c``: a sum, over unknown labels only."""
        unknown = (batch.inputs["states"] == UNKNOWN) * batch.counted
        return (entries(self.task.loss, outputs, batch) * unknown).sum((-2, -1)), carry
