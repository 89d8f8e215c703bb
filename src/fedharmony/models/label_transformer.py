"""A transformer over image patches and label tokens: the head of C-Tran and FedLGT.

Lanchantin et al., "General Multi-label Image Classification with Transformers", CVPR 2021. Each
label is a token: the text embedding of its name plus an embedding of its state (unknown, negative,
positive). Patches and label tokens attend to each other; label token c gives logit c, through a
read-out row of its own.

Text and state embeddings are frozen, the same for everybody, and never sent. The embedding of
"unknown" is the zero vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedharmony.errors import ConfigError
from fedharmony.models.base import Head, Shapes, attention, dropout, layer_norm, linear
from fedharmony.models.heads import orthonormal_rows
from fedharmony.types import Group, Tensors

UNKNOWN, NEGATIVE, POSITIVE = 0, 1, 2


@dataclass(frozen=True, eq=False)
class LabelTransformer(Head):
    """Post-norm transformer layers over [patches; label tokens].

    Inputs: ``states`` (M, B, C) int64, without which all labels are unknown; ``dropout`` (M, B)
    int64 seeds, without which nothing is dropped.

    >>> head = LabelTransformer(width=6, classes=3, embedding=8, heads=2, layers=1, feedforward=8)
    >>> params = head.init(torch.Generator().manual_seed(0))
    >>> stacked = {name: tensor.unsqueeze(0) for name, tensor in params.items()}
    >>> head.apply(stacked, torch.zeros(1, 5, 4, 6)).shape
    torch.Size([1, 5, 3])

    Attributes:
        width: width D of the patches.
        embedding: width of the tokens.
        text: label table (C, embedding) and state table (3, embedding) in the order unknown,
            negative, positive; none draws random unit vectors from the model's seed.
    """

    width: int
    classes: int
    embedding: int = 512
    heads: int = 4
    layers: int = 3
    feedforward: int = 512
    rate: float = 0.1
    text: tuple[Tensor, Tensor] | None = None
    swap_states: bool = False

    reads = "patches"
    no_closed_form = "it is a transformer over patches and label tokens, which no sums solve"
    frozen = frozenset({"head.labels", "head.states"})

    def __post_init__(self) -> None:
        if self.embedding % self.heads:
            raise ConfigError(
                f"A label transformer of width {self.embedding} cannot have {self.heads} heads, "
                "which must divide it. Change one of the two."
            )

    def shapes(self) -> Shapes:
        """Frozen tables, projection of the patches, norm, layers, one read-out row per label."""
        e, f, c = self.embedding, self.feedforward, self.classes
        shapes: Shapes = {"head.labels": (c, e), "head.states": (3, e)}
        shapes |= _linear("head.project", e, self.width) | _norm("head.norm", e)
        for i in range(self.layers):
            layer = f"head.layers.{i}"
            shapes |= _linear(f"{layer}.qkv", 3 * e, e) | _linear(f"{layer}.proj", e, e)
            shapes |= _norm(f"{layer}.norm1", e) | _norm(f"{layer}.norm2", e)
            shapes |= _linear(f"{layer}.fc1", f, e) | _linear(f"{layer}.fc2", e, f)
        return shapes | _linear("head.out", c, e)

    def init(self, generator: torch.Generator) -> Tensors:
        """Weights and biases uniform in ±1/√fan_in; norms at one and zero; tables as given.

        Random tables are drawn last: with and without text, training starts from the same weights.
        """
        shapes, params = self.shapes(), {}
        for name, shape in shapes.items():
            if ".norm" in name:
                params[name] = torch.full(shape, float(name.endswith("weight")))
            elif name not in self.frozen:
                fan_in = shapes[name.replace(".bias", ".weight")][1]
                uniform = torch.rand(shape, generator=generator) * 2 - 1
                params[name] = uniform * fan_in**-0.5
        labels, states = self.text or self._random_text(generator)
        order = [UNKNOWN, POSITIVE, NEGATIVE] if self.swap_states else [UNKNOWN, NEGATIVE, POSITIVE]
        params |= {"head.labels": labels, "head.states": states[order]}
        return {name: params[name] for name in shapes}

    def _random_text(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Unit vectors in place of text, orthonormal where the width has room for all of them."""
        rows = self.classes + 2
        if rows <= self.embedding:
            table = orthonormal_rows(rows, self.embedding, generator)
        else:
            table = torch.nn.functional.normalize(
                torch.randn(rows, self.embedding, generator=generator), dim=-1
            )
        states = torch.cat([torch.zeros(1, self.embedding), table[self.classes :]])
        return table[: self.classes], states

    def apply(self, params: Group, features: Tensor, inputs: Group | None = None) -> Tensor:
        """Logits (M, B, C) from patches (M, B, N, D)."""
        inputs = inputs or {}
        clients, images, patches = features.shape[:3]
        states = inputs.get("states")
        if states is None:
            states = features.new_zeros(clients, images, self.classes, dtype=torch.long)
        # The tables are the same for all clients: read the first client's.
        labels = params["head.labels"][0] + params["head.states"][0][states]
        x = linear(features, params["head.project.weight"], params["head.project.bias"])
        x = torch.cat([x, labels.to(x.dtype)], dim=2)
        x = layer_norm(x, params["head.norm.weight"], params["head.norm.bias"], 1e-5)
        for i in range(self.layers):
            x = self._layer(params, f"head.layers.{i}", x, inputs.get("dropout"), 4 * i)
        rows, bias = params["head.out.weight"].unsqueeze(1), params["head.out.bias"].unsqueeze(1)
        return (x[:, :, patches:] * rows).sum(-1) + bias

    def _layer(
        self, params: Group, name: str, x: Tensor, seeds: Tensor | None, place: int
    ) -> Tensor:
        """``x ← LN(x + attention(x))``, ``x ← LN(x + MLP(x))``."""

        def dropped(values: Tensor, offset: int) -> Tensor:
            return values if seeds is None else dropout(values, self.rate, seeds, place + offset)

        def map(part: str, values: Tensor) -> Tensor:
            return linear(values, params[f"{name}.{part}.weight"], params[f"{name}.{part}.bias"])

        def norm(part: str, values: Tensor) -> Tensor:
            weight, bias = params[f"{name}.{part}.weight"], params[f"{name}.{part}.bias"]
            return layer_norm(values, weight, bias, 1e-5)

        clients, images, tokens = x.shape[:3]
        qkv = map("qkv", x).view(clients * images, tokens, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if seeds is None or self.rate == 0.0:
            mixed = attention(query, key, value)
        else:  # dropout on the attention weights needs them in the open
            weights = (query * query.shape[-1] ** -0.5 @ key.mT).softmax(dim=-1)
            weights = dropped(weights.view(clients, images, -1, tokens, tokens), 0)
            mixed = weights.view(clients * images, -1, tokens, tokens) @ value
        mixed = mixed.transpose(1, 2).reshape(x.shape)
        x = norm("norm1", x + dropped(map("proj", mixed), 1))
        hidden = dropped(map("fc1", x).relu(), 2)
        return norm("norm2", x + dropped(map("fc2", hidden), 3))


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
