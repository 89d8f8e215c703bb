"""FedLGT: masks image by image, the loss by hand, and a whole round against plain torch.nn."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedharmony.config import build
from fedharmony.data.base import LabelledImages
from fedharmony.engine.optimise import clip_gradients
from fedharmony.errors import CheckpointError, ConfigError, DataError
from fedharmony.experiments import run as runs
from fedharmony.experiments.build import assemble
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.losses import Batch, LossSettings
from fedharmony.methods.base import Task
from fedharmony.methods.fedlgt import FedLGT
from fedharmony.models.base import Model
from fedharmony.models.label_text import write_label_text
from fedharmony.models.label_transformer import NEGATIVE, POSITIVE, UNKNOWN, LabelTransformer
from fedharmony.rng import numpy_rng, torch_rng
from fedharmony.types import FROZEN, PARAMS, Record, Tensors
from test_label_transformer import Reference
from toy import SMALL, Toy, same_bits, split, toy_data

TASK = Task(classes=4, clients=3, rounds=2, batch_size=4, epochs=1, seed=0, width=8, lr=0.01)
ALMOST_ONE = 1 - 2.0**-24  # the largest number torch.rand gives in float32


def method(task: Task = TASK, **settings: Any) -> FedLGT:
    return FedLGT(FedLGT.Config(**settings), task)


def of(classes: int) -> Task:
    return replace(TASK, classes=classes)


def batch_of(
    labels: list[list[float]], count: list[float], order: list[list[float]] | None = None
) -> Batch:
    """All entries counted; without ``order`` labels become known from left to right."""
    y = torch.tensor(labels)
    left_to_right = torch.arange(y.shape[1]).expand(y.shape) / 100
    draws = {
        "count": torch.tensor(count),
        "order": left_to_right if order is None else torch.tensor(order),
        "dropout": torch.arange(len(labels)),
    }
    return Batch(y, torch.ones(len(labels)), torch.ones_like(y), draws=draws)


def states(lgt: FedLGT, batch: Batch, received: Tensor | None = None) -> list[list[int]]:
    found: list[list[int]] = lgt.inputs(batch, {}, received)["states"].tolist()
    return found


def logit(p: float) -> float:
    return math.log(p / (1 - p))


# -- which labels are known -----------------------------------------------------------------------


def test_known_labels_by_hand() -> None:
    """C = 4: at most ⌊3⌋ known, n = ⌊4u⌋ for a draw u; the n with the smallest order, true states.

    Image 0: u = 0.6 gives 2; smallest orders at labels 2 and 0. Image 1: u = 0.2 gives 0.
    Image 2: u = 0.9 gives 3; all but label 1.
    """
    batch = batch_of(
        [[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0]],
        [0.6, 0.2, 0.9],
        [[0.3, 0.8, 0.1, 0.5], [0.1, 0.2, 0.3, 0.4], [0.5, 0.9, 0.1, 0.2]],
    )
    assert states(method(ca_mle="off"), batch) == [
        [POSITIVE, UNKNOWN, NEGATIVE, UNKNOWN],
        [UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN],
        [NEGATIVE, UNKNOWN, POSITIVE, NEGATIVE],
    ]
    assert method().inputs(batch, {}, None)["dropout"].tolist() == [0, 1, 2]  # as drawn


@pytest.mark.parametrize(
    ("classes", "share", "most"),
    [
        *((1, 0.75, 0), (2, 0.75, 1), (3, 0.75, 2), (4, 0.75, 3), (17, 0.75, 12)),
        *((20, 0.75, 15), (1628, 0.75, 1221), (100, 0.29, 29), (10, 0.99, 9), (10, 0.0, 0)),
    ],
)
def test_both_ends_of_the_number_known(classes: int, share: float, most: int) -> None:
    """0 for the smallest draw, ⌊share · C⌋ for the largest; 0.29 · 100 is 29 although floats say
    28.999…; never all labels."""
    lgt = method(of(classes), ca_mle="off", known_share=share)
    batch = batch_of([[1.0] * classes] * 2, [0.0, ALMOST_ONE])
    known = (lgt.inputs(batch, {}, None)["states"] != UNKNOWN).sum(-1).tolist()
    assert known == [0, most]


def test_the_largest_draw_never_rounds_up() -> None:
    """(1 − 2⁻²⁴) n in float32 is below n: no whole number is rounded up to."""
    n = torch.arange(1, 20000).float()
    assert (torch.tensor(ALMOST_ONE) * n < n).all()


def chi_square(counts: Mapping[Any, int], kinds: int) -> float:
    total = sum(counts.values())
    missing = (kinds - len(counts)) * total / kinds
    return missing + sum((n - total / kinds) ** 2 / (total / kinds) for n in counts.values())


def test_numbers_and_subsets_are_uniform() -> None:
    """C = 4: n = 0, 1, 2, 3 equally often; among pairs and triples, each equally often.

    Chi-square with 3 and 5 degrees of freedom exceeds 22 and 26 once in 10,000.
    """
    lgt = method(ca_mle="off")
    draws = lgt.draw(torch.Generator().manual_seed(0), 20000)
    assert {name: tuple(t.shape) for name, t in draws.items()} == {
        "count": (20000,),
        "order": (20000, 4),
        "dropout": (20000,),
    }
    batch = batch_of([[1.0] * 4] * 20000, [0.0] * 20000)._replace(draws=draws)
    known = [tuple(c for c in range(4) if row[c]) for row in states(lgt, batch)]
    numbers = Counter(len(subset) for subset in known)
    assert sorted(numbers) == [0, 1, 2, 3]
    assert chi_square(numbers, 4) < 22
    for size, kinds in ((1, 4), (2, 6), (3, 4)):
        assert chi_square(Counter(s for s in known if len(s) == size), kinds) < 26
    labels = Counter(c for subset in known for c in subset)
    assert chi_square(labels, 4) < 22


def test_draws_are_new_for_each_image_and_each_step() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (method().draw(generator, 5) for _ in range(2))
    for name in first:
        rows = torch.cat([first[name], second[name]]).view(10, -1)
        assert len({tuple(row) for row in rows.tolist()}) == 10, name
    seeds = method().draw(generator, 1000)["dropout"]
    assert seeds.dtype == torch.int64
    assert 0 <= int(seeds.min()) < 2**23
    assert 2**31 - 2**23 < int(seeds.max()) < 2**31


def test_equal_draws_are_ordered_by_label() -> None:
    batch = batch_of([[1.0] * 40], [0.5], [[0.5] * 40])
    found = states(method(of(40), ca_mle="off"), batch)[0]
    assert found == [POSITIVE] * 15 + [UNKNOWN] * 25


# -- the received model's doubts ------------------------------------------------------------------

#: Probabilities of the received model for three images and four labels; |p − 0.5| ≤ 0.02 in (0, 1),
#: (0, 2), (1, 0), (2, 2).
OPINION = [[0.1, 0.51, 0.485, 0.9], [0.519, 0.53, 0.01, 0.6], [0.47, 0.521, 0.5, 0.4]]
LABELS: list[list[float]] = [[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]
# Three labels known, from left to right, before the mask.
PLAIN = [[2, 2, 1, 0], [1, 2, 2, 0], [2, 1, 1, 0]]


def opinion() -> Tensor:
    return torch.logit(torch.tensor(OPINION, dtype=torch.float64))


@pytest.mark.parametrize(
    ("ca_mle", "expected"),
    [
        ("all", [[2, 0, 0, 0], [0, 2, 2, 0], [2, 1, 0, 0]]),
        ("first", [[2, 0, 0, 0], [1, 2, 2, 0], [2, 1, 1, 0]]),
        ("off", PLAIN),
    ],
)
def test_doubted_labels_are_unknown(ca_mle: str, expected: list[list[int]]) -> None:
    """Every image's, the first image's of the batch, nobody's."""
    lgt = method(ca_mle=ca_mle)
    assert lgt.asks_received_model == (ca_mle != "off")
    batch = batch_of(LABELS, [ALMOST_ONE] * 3)
    assert states(lgt, batch, opinion() if lgt.asks_received_model else None) == expected


def test_the_first_image_of_each_client() -> None:
    """Two clients as a stack: row 0 of both."""
    lgt = method(ca_mle="first")
    batch = batch_of(LABELS, [ALMOST_ONE] * 3)
    both = Batch(
        labels=torch.stack([batch.labels, batch.labels.flip(0)]),
        rows=torch.ones(2, 3),
        counted=torch.ones(2, 3, 4),
        draws={name: torch.stack([t, t.flip(0)]) for name, t in batch.draws.items()},
    )
    found = lgt.inputs(both, {}, torch.stack([opinion(), opinion().flip(0)]))["states"]
    assert found[0].tolist() == [[2, 0, 0, 0], [1, 2, 2, 0], [2, 1, 1, 0]]
    assert found[1].tolist() == [[2, 1, 0, 0], [1, 2, 2, 0], [2, 2, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_margin_includes_its_ends(dtype: torch.dtype) -> None:
    """Where numbers are exact: σ = 0.5 at margin 0; σ = 0 and 1 at margin 0.5; σ = ¾ at ¼."""
    batch = batch_of([[1.0, 1, 1, 1]], [ALMOST_ONE])
    zero = torch.tensor([[0.0, 1e-3, -1e-3, 0]], dtype=dtype)
    assert states(method(margin=0.0), batch, zero) == [[0, 2, 2, 0]]
    far = torch.tensor([[200.0, -200.0, 0.0, 0]], dtype=dtype)
    assert states(method(margin=0.5), batch, far) == [[0, 0, 0, 0]]
    near = torch.tensor([[logit(0.52 - 1e-5), logit(0.52 + 1e-5), logit(0.48 - 1e-5), 0]])
    assert states(method(), batch, near.to(dtype)) == [[0, 2, 2, 0]]


def test_doubt_never_makes_a_label_known() -> None:
    """None known stays none, however sure the received model is."""
    batch = batch_of(LABELS, [0.0] * 3)
    assert states(method(), batch, torch.full((3, 4), 9.0)) == [[0] * 4] * 3


# -- unknown annotations and padding --------------------------------------------------------------


def test_unknown_annotations_and_padding_have_no_state_and_no_loss() -> None:
    """Label 1 of image 0 is not annotated, image 2 is padding: unknown, and outside of the sum."""
    lgt = method()
    batch = batch_of(LABELS, [ALMOST_ONE] * 3)
    counted = torch.tensor([[1.0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    batch = batch._replace(counted=counted, rows=torch.tensor([1.0, 1, 0]))
    inputs = lgt.inputs(batch, {}, torch.full((3, 4), 9.0))
    assert inputs["states"].tolist() == [[2, 0, 1, 0], [1, 2, 2, 0], [0, 0, 0, 0]]
    outputs = torch.zeros(3, 4, requires_grad=True)
    loss, _ = lgt.loss(outputs, batch._replace(inputs=inputs), {}, {})
    torch.testing.assert_close(loss.detach(), torch.tensor(2 * math.log(2)))
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert gradient.nonzero().tolist() == [[0, 3], [1, 3]]


def test_weights_of_absent_labels() -> None:
    """A weight of ½ halves the entry and leaves it knowable; a weight of 0 leaves the label out."""
    lgt = method(known_share=0.5, ca_mle="off")
    weights = torch.tensor([[0.5, 0.0, 0.5, 1.0]])
    batch = batch_of([[0.0, 0, 0, 1]], [ALMOST_ONE])._replace(counted=weights)
    inputs = lgt.inputs(batch, {}, None)
    assert inputs["states"].tolist() == [[NEGATIVE, UNKNOWN, UNKNOWN, UNKNOWN]]
    loss, _ = lgt.loss(torch.zeros(1, 4), batch._replace(inputs=inputs), {}, {})
    torch.testing.assert_close(loss, torch.tensor(1.5 * math.log(2)))


# -- the loss -------------------------------------------------------------------------------------


def unknown_batch(labels: list[list[float]], state: list[list[int]]) -> Batch:
    batch = batch_of(labels, [0.0] * len(labels))
    return batch._replace(inputs={"states": torch.tensor(state)})


def test_loss_is_the_sum_over_unknown_labels() -> None:
    """σ(log 3) = ¾ and σ(0) = ½. Unknown entries: image 0: y = 1 at ¾, y = 0 at ½; image 1:
    y = 0 at ¾, y = 1 at ½, y = 0 at ½. Sum: log(4/3) + log 2 + log 4 + 2 log 2 = log(128/3).
    """
    z = math.log(3.0)
    outputs = torch.tensor([[z, 0.0, z, 7.0], [z, 0.0, 0.0, -5.0]], dtype=torch.float64)
    batch = unknown_batch([[1, 0, 0, 1], [0, 1, 0, 1]], [[0, 0, 1, 2], [0, 0, 0, 2]])
    loss, carry = method().loss(outputs, batch, {}, {})
    assert carry == {}
    assert loss.shape == ()
    assert float(loss) == pytest.approx(math.log(128 / 3), rel=1e-12)


def test_loss_gradient_is_probability_minus_label_where_unknown() -> None:
    outputs = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    batch = unknown_batch([[1, 0, 0, 1], [0, 1, 0, 1]], [[0, 0, 1, 2], [0, 0, 0, 2]])
    loss, _ = method().loss(outputs, batch, {}, {})
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert gradient.tolist() == [[-0.5, 0.5, 0.0, 0.0], [0.5, -0.5, 0.5, 0.0]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # y = 1 at ½: −log ½; y = 0 at ¾: −log ¼.
        (LossSettings("bce"), math.log(2) + math.log(4)),
        # positives count 3.
        (LossSettings("balanced"), 3 * math.log(2) + math.log(4)),
        # (1 − ½)² log 2 + (¾)² log 4
        (LossSettings("focal"), 0.25 * math.log(2) + 0.5625 * math.log(4)),
        # γ₊ = 0: log 2; q = ¾ − 0.05 = 0.7: 0.7⁴ log(1/0.3)
        (LossSettings("asymmetric"), math.log(2) + 0.7**4 * math.log(1 / 0.3)),
    ],
    ids=lambda value: value.name if isinstance(value, LossSettings) else "",
)
def test_every_task_loss_is_summed_over_unknown_labels(
    settings: LossSettings, expected: float
) -> None:
    """Label 0 present at σ = ½, label 1 absent at σ = ¾; labels 2 and 3 are known."""
    outputs = torch.tensor([[0.0, math.log(3.0), 2.0, 2.0]], dtype=torch.float64)
    batch = unknown_batch([[1, 0, 1, 0]], [[0, 0, 2, 1]])
    batch = batch._replace(positive_weight=torch.full((4,), 3.0))
    loss, _ = method(replace(TASK, loss=settings)).loss(outputs, batch, {}, {})
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    _, events = Toy("fedlgt", loss=settings, sizes=(5, 3), rounds=1, epochs=1).run()
    assert math.isfinite(events[0]["train_loss"])


def test_a_batch_without_unknown_annotated_labels_moves_nothing() -> None:
    """Only one label is annotated, and it is given as known: no loss, no step."""
    batch = batch_of([[1.0, 0, 0, 0]], [ALMOST_ONE])
    batch = batch._replace(counted=torch.tensor([[1.0, 0, 0, 0]]))
    lgt = method(ca_mle="off")
    inputs = lgt.inputs(batch, {}, None)
    assert inputs["states"].tolist() == [[2, 0, 0, 0]]
    outputs = torch.randn(1, 4, requires_grad=True)
    loss, _ = lgt.loss(outputs, batch._replace(inputs=inputs), {}, {})
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert float(loss.detach()) == 0.0
    assert gradient.eq(0).all()


# -- the gradient's norm --------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [0.5, 10.0, 1e6])
def test_clipping_is_torchs_client_by_client(largest: float) -> None:
    """Three clients whose norms are about 0.1, 10 and 1,000, over tensors of several shapes."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.01, 1.0, 100.0], dtype=torch.float64)
    shapes = [(7, 5), (9,), (2, 3, 4), (1,)]
    gradients = [
        scale.view(3, *[1] * len(shape))
        * torch.randn(3, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]
    clipped = [gradient.clone() for gradient in gradients]
    clip_gradients(clipped, largest)
    for m in range(3):
        alone = [nn.Parameter(torch.zeros_like(gradient[m])) for gradient in gradients]
        for parameter, gradient in zip(alone, gradients, strict=True):
            parameter.grad = gradient[m].clone()
        nn.utils.clip_grad_norm_(alone, largest)
        for got, parameter in zip(clipped, alone, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(got[m], parameter.grad, rtol=1e-12, atol=0)


def test_the_limit_is_ten() -> None:
    assert method().max_grad_norm == 10.0
    assert method(max_norm=0.5).max_grad_norm == 0.5


# -- a whole round against plain torch ------------------------------------------------------------


def partly_annotated(images: int) -> LabelledImages:
    data = toy_data(images)
    known = np.random.default_rng(1).random(data.labels.shape) < 0.85
    return LabelledImages(data.images, data.labels, known=known)


class Plain(nn.Module):
    """The toy backbone and the label transformer, of torch.nn modules."""

    def __init__(self, head: LabelTransformer, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.hidden = nn.Linear(48, 8, dtype=torch.float64)
        own = {name: t for name, t in params.items() if name.startswith("head.")}
        self.hidden.load_state_dict({n: params[f"hidden.{n}"] for n in ("weight", "bias")})
        self.head = Reference(head, own)

    def forward(self, pixels: Tensor, states: Tensor) -> Tensor:
        """One image (3, 4, 4) uint8 and its states (C,) to logits (C,)."""
        image = (pixels.float().flatten() - 127.5) / 127.5
        patch = torch.tanh(self.hidden(image.double()))
        logits: Tensor = self.head(patch.view(1, 1, 8), states.view(1, -1))
        return logits[0]

    def weights(self) -> Tensors:
        ours = {Reference.renamed(name): name for name in self.names}
        found = {f"hidden.{n}": t.detach() for n, t in self.hidden.named_parameters()}
        return found | {ours[n]: t.detach() for n, t in self.head.named_parameters()}

    names: tuple[str, ...] = ()


@dataclass
class Seen:
    """What happened in the reference, so that no case is missed by accident."""

    clipped: int = 0
    unclipped: int = 0
    doubted: int = 0
    known: int = 0
    not_annotated: int = 0


def reference_client(toy: Toy, client: int, seen: Seen) -> Tensors:
    """E epochs of one client, image by image and label by label."""
    data, config, classes = toy.data, toy.method.config, toy.task.classes
    assert data is not None
    assert data.known is not None
    trained, frozen = toy.parameters()
    head = toy.model.head
    assert isinstance(head, LabelTransformer)
    local, received = (Plain(head, {**trained, **frozen}).eval() for _ in range(2))
    local.names = tuple(name for name in trained if name.startswith("head."))
    optimiser = torch.optim.SGD(local.parameters(), lr=toy.lr)
    draws, rng = torch_rng(0, "draws", 0, client), numpy_rng(0, "order", 0, client)
    own = split(toy.sizes)[client]
    for order in [rng.permutation(own) for _ in range(toy.epochs)]:
        for first in range(0, len(order), toy.batch_size):
            drawn = toy.method.draw(draws, toy.batch_size)
            loss = torch.zeros((), dtype=torch.float64)
            for row, image in enumerate(order[first : first + toy.batch_size]):
                pixels = data.images.gather(torch.tensor(int(image)), "cpu")
                state = torch.zeros(classes, dtype=torch.int64)
                with torch.no_grad():
                    view = received(pixels, state)
                chance = drawn["order"][row].tolist()
                number = int(float(drawn["count"][row]) * (math.floor(0.75 * classes) + 1))
                for c in sorted(range(classes), key=lambda c: chance[c])[:number]:
                    doubted = abs(1 / (1 + math.exp(-float(view[c]))) - 0.5) <= config.margin
                    if data.known[image, c] and not doubted:
                        state[c] = 2 if data.labels[image, c] else 1
                    seen.doubted += doubted
                outputs = local(pixels, state)
                for c in range(classes):
                    seen.known += int(state[c] != 0)
                    seen.not_annotated += int(not data.known[image, c])
                    if state[c] == 0 and data.known[image, c]:
                        y = torch.tensor(float(data.labels[image, c]), dtype=torch.float64)
                        loss = loss + F.binary_cross_entropy_with_logits(outputs[c], y)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            norm = float(nn.utils.clip_grad_norm_(local.parameters(), config.max_norm))
            seen.clipped += norm > config.max_norm
            seen.unclipped += norm <= config.max_norm
            optimiser.step()
    return local.weights()


def test_a_round_equals_plain_loops() -> None:
    """Doubts, annotations, the last short batch, the sum, the norm's limit and the average."""
    toy = Toy(
        "fedlgt",
        {"dropout": 0.0, "margin": 0.08, "max_norm": 7.0},
        sizes=(13, 6),
        rounds=1,
        dtype=torch.float64,
        optimiser="sgd",
        lr=0.02,
        data=partly_annotated(19),
    )
    state, _ = toy.run()
    seen = Seen()
    clients = [reference_client(toy, client, seen) for client in range(2)]
    assert min(vars(seen).values()) >= 3
    trained = state.get(PARAMS)
    assert trained.keys() == clients[0].keys()
    for name, tensor in trained.items():
        expected = (13 * clients[0][name] + 6 * clients[1][name]) / 19
        torch.testing.assert_close(tensor, expected, atol=1e-12, rtol=1e-10)


# -- identities, to the bit -----------------------------------------------------------------------


def model_after(config: dict[str, Any], **options: Any) -> Record:
    state, _ = Toy("fedlgt", config, sizes=(9, 5, 1), rounds=2, epochs=1, **options).run()
    return Record({PARAMS: state.get(PARAMS)})


@pytest.mark.parametrize(
    ("one", "other", "batch_size"),
    [
        # No logit is exactly 0: with ε = 0 nothing is doubted.
        ({"margin": 0.0}, {"ca_mle": "off"}, 4),
        # A batch of one image: the first is all of them.
        ({"margin": 0.2}, {"margin": 0.2, "ca_mle": "first"}, 1),
        # Nothing known: nothing to hide. ε = ½ hides everything.
        ({"known_share": 0.0}, {"margin": 0.5}, 4),
        ({"known_share": 0.0}, {"known_share": 0.0, "ca_mle": "off"}, 4),
    ],
    ids=["margin 0", "one image", "all hidden", "none known"],
)
def test_settings_that_mean_the_same(
    one: dict[str, Any], other: dict[str, Any], batch_size: int
) -> None:
    assert same_bits(
        model_after(one, batch_size=batch_size), model_after(other, batch_size=batch_size)
    )


def test_every_setting_matters() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"ca_mle": "first"},
        {"ca_mle": "off"},
        {"known_share": 0.3},
        {"swap_states": True},
        {"dropout": 0.0},
        {"dropout": 0.3},
        {"max_norm": 0.1},
        {"margin": 0.1},
    ]
    # Plain SGD: after Adam the first steps hardly depend on a gradient's length.
    models = [model_after({"margin": 0.2, **change}, optimiser="sgd") for change in changes]
    for a, b in itertools.combinations(models, 2):
        assert not same_bits(a, b)


# -- the two passes of a step ---------------------------------------------------------------------


class Recorder:
    """A model that notes how it was applied."""

    def __init__(self, model: Model) -> None:
        self.model, self.backbone = model, model.backbone
        self.calls: list[tuple[bool, Tensors, Mapping[str, Tensor] | None]] = []

    def apply(
        self, params: Tensors, images: Tensor, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        copies = {name: t.detach().clone() for name, t in params.items()}
        self.calls.append((torch.is_grad_enabled(), copies, inputs))
        return self.model.apply(params, images, inputs)


@pytest.mark.parametrize("ca_mle", ["all", "first", "off"])
def test_the_received_model_is_asked_without_gradient_states_or_dropout(ca_mle: str) -> None:
    toy = Toy("fedlgt", {"ca_mle": ca_mle}, sizes=(9, 5), rounds=1, epochs=1)
    step, recorder = toy.trainer.trainer.step, Recorder(toy.model)
    step.model = step.in_training = recorder  # type: ignore[assignment]
    toy.run()
    asked = [call for call in recorder.calls if not call[0]]
    trained = [call for call in recorder.calls if call[0]]
    assert len(trained) == 3
    assert len(asked) == (0 if ca_mle == "off" else 3)
    initial = toy.initial()
    start = {**initial.get(PARAMS), **initial.get(FROZEN)}
    for _, params, inputs in asked:  # in every step the model as received, all labels unknown
        assert inputs is None
        assert all(torch.equal(params[n], t.expand_as(params[n])) for n, t in start.items())
    for _, _, inputs in trained:
        assert inputs is not None
        assert sorted(inputs) == ["dropout", "states"]
    last = trained[-1][1]
    assert not torch.equal(last["head.out.weight"][0], start["head.out.weight"])
    assert torch.equal(last["head.labels"][0], start["head.labels"])


# -- what travels ---------------------------------------------------------------------------------


def test_tables_are_frozen_and_never_travel() -> None:
    toy = Toy("fedlgt", rounds=2)
    initial = toy.initial()
    tables = {"head.labels", "head.states"}
    assert set(initial.get(FROZEN)) == tables
    assert not tables & set(initial.get(PARAMS))
    (message, *_) = toy.method.broadcast(initial, 0, [0, 1]).values()
    assert set(message.groups) == {PARAMS, "buffers"}
    state, events = toy.run()
    assert same_bits(Record({FROZEN: initial.get(FROZEN)}), Record({FROZEN: state.get(FROZEN)}))
    trained = sum(t.numel() for t in initial.get(PARAMS).values())
    shapes = toy.model.shapes()
    assert trained == sum(math.prod(s) for n, s in shapes.items() if n not in tables)
    for event in events:  # five clients, four bytes a number, nothing else
        assert event["bytes_down"] == event["bytes_up"] == 5 * 4 * trained


@pytest.mark.parametrize(("width", "classes"), [(768, 20), (64, 1), (192, 80)])
def test_size_of_the_trained_head(width: int, classes: int) -> None:
    """512 (D + 1) + 1,024 + 3 · 1,577,984 + 513 C; for D = 768 and C = 20: 5,138,964.

    A layer: 4 · 512 · 513 (attention) + 2 · 512 · 513 (feed-forward) + 4 · 512 (norms).
    """
    head = method(of(classes)).head(width)
    trained = sum(math.prod(s) for n, s in head.shapes().items() if n not in head.frozen)
    layer = 6 * 512 * 513 + 4 * 512
    assert layer == 1_577_984
    assert trained == 512 * (width + 1) + 1024 + 3 * layer + 513 * classes
    if (width, classes) == (768, 20):
        assert trained == 5_138_964
        assert 4 * (85_798_656 + trained) == 363_750_480


# -- text -----------------------------------------------------------------------------------------

NAMES = ("cat", "dog", "bus", "red")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.safetensors"
    rows = torch.linspace(-1, 1, 48).view(6, 8).cos()
    write_label_text(path, {n: n for n in NAMES}, lambda texts: rows + torch.eye(6, 8))
    return str(path)


def test_the_file_becomes_the_tables(text: str) -> None:
    task = replace(TASK, labels=NAMES)
    tables = {}
    for swap in (False, True):
        lgt = method(task, text=text, embedding=8, swap_states=swap)
        params = lgt.head(6).init(torch.Generator().manual_seed(0))
        tables[swap] = params["head.states"]
        rows = F.normalize(torch.linspace(-1, 1, 48).view(6, 8).cos() + torch.eye(6, 8), dim=-1)
        torch.testing.assert_close(params["head.labels"], rows[:4])
    torch.testing.assert_close(tables[False], torch.cat([torch.zeros(1, 8), rows[4:]]))
    assert torch.equal(tables[True], tables[False][[0, 2, 1]])


def test_files_that_do_not_fit_are_refused_with_the_head(text: str) -> None:
    for labels, settings, message in (
        (NAMES[::-1], {"embedding": 8}, "in another order"),
        (NAMES, {}, "width 8, the setting says 512"),
        (NAMES, {"embedding": 8, "text": text + "x"}, "There is no file"),
    ):
        with pytest.raises(DataError, match=message):
            method(replace(TASK, labels=labels), **{"text": text, **settings}).head(6)


def test_runs_without_text_say_so() -> None:
    assert FedLGT.suffix(FedLGT.Config()) == "-randtext"
    assert FedLGT.suffix(FedLGT.Config(text="labels.safetensors")) == ""


# -- settings -------------------------------------------------------------------------------------


def test_presets() -> None:
    released = build(FedLGT.Config, FedLGT.presets["released"], "fedlgt")
    assert (released.ca_mle, released.swap_states) == ("first", True)
    default = FedLGT.Config()
    assert (default.ca_mle, default.swap_states, default.margin) == ("all", False, 0.02)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("margin", -0.01), ("margin", 0.51), ("known_share", 1.0), ("known_share", -0.1)),
        *(("ca_mle", "some"), ("dropout", 1.0), ("dropout", -0.1), ("max_norm", 0.0)),
        *(("heads", 0), ("layers", 0), ("feedforward", 0), ("embedding", 0), ("text", 3)),
        ("swap_states", "yes"),
    ],
)
def test_impossible_settings_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"methods.fedlgt.{key} = .* is not allowed"):
        build(FedLGT.Config, {key: value}, "methods.fedlgt")


def test_heads_that_do_not_divide_the_width_are_refused_with_the_head() -> None:
    with pytest.raises(ConfigError, match="width 18 cannot have 4 heads"):
        method(embedding=18).head(6)


# -- odd sizes ------------------------------------------------------------------------------------


def test_one_label() -> None:
    """C = 1: ⌊0.75⌋ = 0 known, so the label is always to be predicted."""
    batch = batch_of([[1.0], [0.0]], [ALMOST_ONE, 0.3])
    assert states(method(of(1)), batch, torch.full((2, 1), 5.0)) == [[0], [0]]
    data = toy_data(8, classes=1)
    state, events = Toy("fedlgt", sizes=(5, 3), rounds=1, data=data).run()
    assert not events[0]["left_out"]
    assert all(torch.isfinite(t).all() for t in state.get(PARAMS).values())


def test_more_labels_than_the_width_has_room_for() -> None:
    data = toy_data(8, classes=SMALL["fedlgt"]["embedding"] - 1)
    _, events = Toy("fedlgt", sizes=(5, 3), rounds=1, epochs=1, data=data).run()
    assert not events[0]["left_out"]


def test_a_text_file_that_changed_stops_a_resumed_run(tmp_path: Path) -> None:
    """Training would use the new table, evaluation the old one of the checkpoint."""
    small = ["data.train=60", "data.test=20", "split.clients=2", "train.epochs=1", "run.rounds=3"]
    shape = ["model.width=16", "model.depth=1", "model.heads=2", "engine.threads=1"]
    text = f"methods.fedlgt.text={tmp_path / 'text.safetensors'}"
    own = [text, "methods.fedlgt.embedding=32", "run.method=fedlgt"]
    classes = assemble(load_settings("demo", [*small, *shape])).data.classes

    def write(seed: int) -> None:
        table = torch.randn(len(classes) + 2, 32, generator=torch_rng(seed, "text"))
        names = {name: name for name in classes}
        write_label_text(tmp_path / "text.safetensors", names, lambda texts: table)

    def stop(event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 1:
            raise KeyboardInterrupt

    write(0)
    settings = load_settings("demo", [*small, *shape, *own])
    assert settings.label == "fedlgt"
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        runs.start(settings, folder, stop)
    write(1)
    with pytest.raises(CheckpointError, match=r"Changed since: file methods\.text"):
        runs.resume(folder, lambda event: None)
    write(0)
    assert runs.resume(folder, lambda event: None)["status"] == "completed"
