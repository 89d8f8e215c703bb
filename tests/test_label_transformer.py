"""The label transformer against torch.nn, and dropout by hash against arithmetic and chance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedharmony.errors import ConfigError
from fedharmony.models.base import dropout, stack
from fedharmony.models.label_transformer import NEGATIVE, POSITIVE, UNKNOWN, LabelTransformer
from fedharmony.types import Tensors

SMALL = LabelTransformer(width=6, classes=5, embedding=16, heads=4, layers=2, feedforward=24)


class Reference(nn.Module):
    """C-Tran's head built from torch.nn modules, for one client."""

    def __init__(self, head: LabelTransformer, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        dtype = params["head.out.weight"].dtype
        self.labels, self.states = params["head.labels"], params["head.states"]
        self.project = nn.Linear(head.width, head.embedding, dtype=dtype)
        self.norm = nn.LayerNorm(head.embedding, dtype=dtype)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                head.embedding,
                head.heads,
                head.feedforward,
                head.rate,
                activation="relu",
                batch_first=True,
                norm_first=False,
                dtype=dtype,
            )
            for _ in range(head.layers)
        )
        self.out = nn.Linear(head.embedding, head.classes, dtype=dtype)
        self.load_state_dict({self.renamed(n): t for n, t in params.items() if self.renamed(n)})

    @staticmethod
    def renamed(name: str) -> str:
        """Our name of a trained parameter as torch's; empty for a table."""
        if name in ("head.labels", "head.states"):
            return ""
        name = name.removeprefix("head.")
        for ours, theirs in (
            (".qkv.", ".self_attn.in_proj_"),
            (".proj.", ".self_attn.out_proj."),
            (".fc1.", ".linear1."),
            (".fc2.", ".linear2."),
        ):
            name = name.replace(ours, theirs)
        return name

    def forward(self, patches: Tensor, states: Tensor) -> Tensor:
        """(B, N, D) and (B, C) to (B, C)."""
        tokens = torch.stack([self.labels + self.states[row] for row in states])
        x = self.norm(torch.cat([self.project(patches), tokens], dim=1))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.out(x[:, patches.shape[1] :])
        return logits.diagonal(dim1=1, dim2=2)


def random_params(
    head: LabelTransformer, seed: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Norms and biases far from ones and zeros, so that each of them matters; the rest as drawn."""
    generator = torch.Generator().manual_seed(seed)
    params = head.init(generator)
    for tensor in params.values():
        if tensor.dim() == 1:
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in params.items()}


def random_case(
    head: LabelTransformer, seed: int, images: int = 3, patches: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Patches (B, N, D) float64, states (B, C) and dropout seeds (B,) of one client."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(images, patches, head.width, generator=generator, dtype=torch.float64)
    states = torch.randint(3, (images, head.classes), generator=generator)
    return features, states, torch.randint(2**31, (images,), generator=generator)


# -- the same function as one made of torch.nn ----------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["f32", "f64"]
)
@pytest.mark.parametrize(
    "head",
    [
        LabelTransformer(width=24, classes=7),  # 512 wide, 4 heads, 3 layers, feed-forward 512
        SMALL,
        LabelTransformer(width=3, classes=1, embedding=4, heads=1, layers=1, feedforward=2),
    ],
    ids=["default", "small", "one label"],
)
def test_equals_torch_nn(head: LabelTransformer, dtype: torch.dtype, tolerance: float) -> None:
    """Post-norm encoder layers with ReLU, LayerNorm before them, the diagonal of the read-out."""
    params = random_params(head, 1, dtype)
    features, states, _ = random_case(head, 2)
    reference = Reference(head, params).eval()
    ours = {name: tensor.unsqueeze(0) for name, tensor in params.items()}
    inputs = {"states": states.unsqueeze(0)}
    with torch.no_grad():
        expected = reference(features.to(dtype), states)
        actual = head.apply(ours, features.to(dtype).unsqueeze(0), inputs)[0]
    assert actual.shape == (3, head.classes)
    assert actual.dtype == dtype
    assert float((actual - expected).abs().max()) <= tolerance * max(1, expected.abs().max())


def test_defaults_are_those_of_the_paper() -> None:
    head = LabelTransformer(width=768, classes=20)
    shapes = head.shapes()
    assert (head.embedding, head.heads, head.layers, head.feedforward, head.rate) == (
        (512, 4, 3, 512, 0.1)
    )
    assert shapes["head.project.weight"] == (512, 768)
    assert shapes["head.layers.2.fc1.weight"] == (512, 512)
    assert "head.layers.3.fc1.weight" not in shapes


def test_gradients_equal_torch_nn() -> None:
    params = random_params(SMALL, 1)
    features, states, _ = random_case(SMALL, 2)
    reference = Reference(SMALL, params)
    reference.eval()
    weights = torch.linspace(-1, 2, 15, dtype=torch.float64).view(3, 5)
    torch.autograd.backward((reference(features, states) * weights).sum())
    leaves = {n: t.unsqueeze(0).requires_grad_(n not in SMALL.frozen) for n, t in params.items()}
    out = SMALL.apply(leaves, features.unsqueeze(0), {"states": states.unsqueeze(0)})[0]
    torch.autograd.backward((out * weights).sum())
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, leaf in leaves.items():
        if name in SMALL.frozen:
            assert leaf.grad is None
        else:
            assert leaf.grad is not None
            torch.testing.assert_close(
                leaf.grad[0], expected[Reference.renamed(name)], atol=1e-11, rtol=1e-9
            )


def by_hand(
    head: LabelTransformer, p: Mapping[str, Tensor], patches: Tensor, states: Tensor, seed: Tensor
) -> Tensor:
    """One image in training, each formula written out; its dropout at places 4i to 4i + 3."""

    def drop(values: Tensor, place: int) -> Tensor:
        return dropout(values[None, None], head.rate, seed.view(1, 1), place)[0, 0]

    def norm(values: Tensor, name: str) -> Tensor:
        centred = values - values.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    def map(values: Tensor, name: str) -> Tensor:
        return values @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    tokens = [p["head.labels"][c] + p["head.states"][s] for c, s in enumerate(states)]
    x = norm(torch.cat([map(patches, "head.project"), torch.stack(tokens)]), "head.norm")
    for i in range(head.layers):
        layer, d = f"head.layers.{i}", head.embedding // head.heads
        query, key, value = map(x, f"{layer}.qkv").chunk(3, dim=-1)
        parts = [slice(h * d, (h + 1) * d) for h in range(head.heads)]
        weights = [
            torch.softmax(query[:, part] @ key[:, part].T / math.sqrt(d), -1) for part in parts
        ]
        kept = drop(torch.stack(weights), 4 * i)
        mixed = torch.cat([kept[h] @ value[:, part] for h, part in enumerate(parts)], dim=-1)
        x = norm(x + drop(map(mixed, f"{layer}.proj"), 4 * i + 1), f"{layer}.norm1")
        hidden = drop(map(x, f"{layer}.fc1").clamp(min=0), 4 * i + 2)
        x = norm(x + drop(map(hidden, f"{layer}.fc2"), 4 * i + 3), f"{layer}.norm2")
    labels = x[len(patches) :]
    return torch.stack(
        [labels[c] @ p["head.out.weight"][c] + p["head.out.bias"][c] for c in range(head.classes)]
    )


def test_training_drops_attention_weights_and_three_layers_of_values() -> None:
    head = LabelTransformer(6, 5, embedding=16, heads=4, layers=2, feedforward=24, rate=0.3)
    params = random_params(head, 3)
    features, states, seeds = random_case(head, 4)
    ours = {name: tensor.unsqueeze(0) for name, tensor in params.items()}
    inputs = {"states": states.unsqueeze(0), "dropout": seeds.unsqueeze(0)}
    actual = head.apply(ours, features.unsqueeze(0), inputs)[0]
    expected = torch.stack(
        [by_hand(head, params, *case) for case in zip(features, states, seeds, strict=True)]
    )
    torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-10)
    still = head.apply(ours, features.unsqueeze(0), {"states": states.unsqueeze(0)})[0]
    assert float((actual - still).abs().min()) > 1e-6


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_stacked_equals_single(rate: float) -> None:
    """Three clients with their own weights, images, states and seeds; outputs and gradients."""
    head = LabelTransformer(6, 5, embedding=16, heads=4, layers=2, feedforward=24, rate=rate)
    tables = {n: t for n, t in random_params(head, 9).items() if n in head.frozen}
    clients = [{**random_params(head, seed), **tables} for seed in range(3)]
    cases = [random_case(head, 10 + seed) for seed in range(3)]
    names = [name for name in clients[0] if name not in head.frozen]

    def run(chosen: list[int]) -> tuple[Tensor, Tensors]:
        params = stack([clients[k] for k in chosen])
        for name in names:
            params[name].requires_grad_()
        features, states, seeds = (torch.stack(part) for part in zip(*cases, strict=True))
        inputs = {"states": states[chosen], "dropout": seeds[chosen]}
        out = head.apply(params, features[chosen], inputs)
        torch.autograd.backward(out.square().sum())
        return out.detach(), {n: params[n].grad for n in names}  # type: ignore[misc]

    together, gradients = run([0, 1, 2])
    for k in range(3):
        alone, own = run([k])
        torch.testing.assert_close(together[k], alone[0], atol=1e-12, rtol=1e-11)
        for name in names:
            torch.testing.assert_close(gradients[name][k], own[name][0], atol=1e-11, rtol=1e-9)


def test_images_do_not_influence_each_other() -> None:
    params = {n: t.unsqueeze(0) for n, t in random_params(SMALL, 1).items()}
    features, states, seeds = (part.unsqueeze(0) for part in random_case(SMALL, 2))
    inputs = {"states": states, "dropout": seeds}
    before = SMALL.apply(params, features, inputs)
    features[0, 2], states[0, 2], seeds[0, 2] = 7.0, POSITIVE, 5
    after = SMALL.apply(params, features, inputs)
    torch.testing.assert_close(after[0, :2], before[0, :2], atol=1e-13, rtol=1e-12)
    assert not torch.allclose(after[0, 2], before[0, 2])


# -- states ---------------------------------------------------------------------------------------


def test_without_states_all_labels_are_unknown_and_unknown_adds_nothing() -> None:
    params = {n: t.unsqueeze(0) for n, t in random_params(SMALL, 1).items()}
    features, states, _ = random_case(SMALL, 2)
    plain = SMALL.apply(params, features.unsqueeze(0))
    unknown = torch.full_like(states, UNKNOWN).unsqueeze(0)
    assert torch.equal(plain, SMALL.apply(params, features.unsqueeze(0), {"states": unknown}))
    no_states = {**params, "head.states": torch.zeros_like(params["head.states"])}
    assert torch.equal(plain, SMALL.apply(no_states, features.unsqueeze(0)))


def test_a_known_label_changes_the_others() -> None:
    params = {n: t.unsqueeze(0) for n, t in random_params(SMALL, 1).items()}
    features, _, _ = random_case(SMALL, 2, images=1)
    outputs = []
    for state in (UNKNOWN, NEGATIVE, POSITIVE):
        states = torch.tensor([[[state, 0, 0, 0, 0]]])
        outputs.append(SMALL.apply(params, features.unsqueeze(0), {"states": states})[0, 0])
    for a, b in itertools.combinations(outputs, 2):
        assert float((a - b).abs().min()) > 1e-6


# -- initial parameters ---------------------------------------------------------------------------


def test_initial_weights_fill_the_stated_ranges() -> None:
    """Uniform in ±1/√fan_in: within it, nearly up to it, standard deviation 1/√(3 fan_in)."""
    head = LabelTransformer(width=48, classes=20, embedding=64, heads=4, layers=2, feedforward=96)
    params = head.init(torch.Generator().manual_seed(0))
    assert list(params) == list(head.shapes())
    assert {n: tuple(t.shape) for n, t in params.items()} == head.shapes()
    for name, tensor in params.items():
        assert tensor.dtype == torch.float32
        if name in head.frozen:
            continue
        if ".norm" in name:
            assert tensor.eq(1.0 if name.endswith("weight") else 0.0).all()
            continue
        part = name.rsplit(".", 2)[1]
        bound = {"project": 48, "fc2": 96}.get(part, 64) ** -0.5
        assert float(tensor.abs().max()) <= bound
        if tensor.numel() > 1000:
            assert float(tensor.min()) < -0.99 * bound
            assert float(tensor.max()) > 0.99 * bound
            assert float(tensor.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
            assert float(tensor.mean()) == pytest.approx(0, abs=0.05 * bound)
        else:
            assert float(tensor.abs().max()) > 0.7 * bound  # all of 20 below: chance 0.7^20
    assert not torch.equal(params["head.layers.0.fc1.bias"], params["head.layers.1.fc1.bias"])


@pytest.mark.parametrize("classes", [1, 5, 14])
def test_random_tables_are_orthonormal_where_the_width_allows(classes: int) -> None:
    """C + 2 ≤ 16: all label rows and the two state rows are orthonormal; unknown is zero."""
    head = LabelTransformer(6, classes, embedding=16, heads=4)
    params = head.init(torch.Generator().manual_seed(0))
    rows = torch.cat([params["head.labels"], params["head.states"][1:]]).double()
    torch.testing.assert_close(rows @ rows.T, torch.eye(classes + 2).double(), atol=1e-6, rtol=0)
    assert params["head.states"][UNKNOWN].eq(0).all()


@pytest.mark.parametrize("classes", [15, 40])
def test_random_tables_are_unit_vectors_where_it_does_not(classes: int) -> None:
    head = LabelTransformer(6, classes, embedding=16, heads=4)
    params = head.init(torch.Generator().manual_seed(0))
    rows = torch.cat([params["head.labels"], params["head.states"][1:]])
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(classes + 2))
    products = rows @ rows.T - torch.eye(classes + 2)
    assert float(products.abs().max()) < 0.99  # no two alike
    assert params["head.states"][UNKNOWN].eq(0).all()


def text_tables() -> tuple[Tensor, Tensor]:
    rows = F.normalize(torch.arange(1.0, 113.0).view(7, 16).sin(), dim=-1)
    return rows[:5], torch.cat([torch.zeros(1, 16), rows[5:]])


def test_text_replaces_the_tables_and_nothing_else() -> None:
    text = text_tables()
    with_text = LabelTransformer(6, 5, 16, 4, 2, 24, text=text)
    given = with_text.init(torch.Generator().manual_seed(3))
    random = SMALL.init(torch.Generator().manual_seed(3))
    assert torch.equal(given["head.labels"], text[0])
    assert torch.equal(given["head.states"], text[1])
    assert not torch.equal(random["head.labels"], text[0])
    for name in random:
        if name not in SMALL.frozen:
            assert torch.equal(given[name], random[name]), name


@pytest.mark.parametrize("text", [None, text_tables()], ids=["random", "text"])
def test_swapped_states_exchange_the_two_words(text: tuple[Tensor, Tensor] | None) -> None:
    tables = [
        LabelTransformer(6, 5, 16, 4, 2, 24, text=text, swap_states=swap).init(
            torch.Generator().manual_seed(3)
        )
        for swap in (False, True)
    ]
    right, swapped = (params["head.states"] for params in tables)
    assert torch.equal(swapped[UNKNOWN], right[UNKNOWN])
    assert torch.equal(swapped[NEGATIVE], right[POSITIVE])
    assert torch.equal(swapped[POSITIVE], right[NEGATIVE])
    assert not torch.equal(right[NEGATIVE], right[POSITIVE])
    assert torch.equal(tables[0]["head.labels"], tables[1]["head.labels"])


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="width 10 cannot have 4 heads"):
        LabelTransformer(6, 5, embedding=10, heads=4)


# -- dropout --------------------------------------------------------------------------------------


def lowbias32(x: int) -> int:
    """The hash in Python's own integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def kept_by_hand(seed: int, place: int, position: int, rate: float) -> bool:
    """Low 16 bits of a word for an even position, high ones for the next; signed, against rate."""
    row = lowbias32((seed + place * 0x9E3779B1) % 2**32)
    word = lowbias32(row ^ lowbias32(position // 2))
    bits = word >> 16 * (position % 2) & 0xFFFF
    signed = bits - 2**16 if bits >= 2**15 else bits
    return signed >= round(rate * 2**16) - 2**15


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_masks_are_the_stated_arithmetic(rate: float) -> None:
    """Torch's wrapping int32 agrees with whole numbers modulo 2³², at the extremes too.

    37 positions: an odd number, and no multiple of what a vector instruction takes at a time.
    """
    seeds = [0, 1, 7, 2**16, 2**30 + 3, 2**31 - 1]
    for place in (0, 1, 11, 2**31 - 1):
        ours = dropout(torch.ones(2, 3, 37), rate, torch.tensor(seeds).view(2, 3), place) > 0
        for row, seed in zip(ours.flatten(0, 1), seeds, strict=True):
            assert row.tolist() == [kept_by_hand(seed, place, i, rate) for i in range(37)]


@pytest.mark.parametrize(
    "shape", [(4, 6, 10), (2, 3, 36, 36), (5, 7)], ids=["values", "attention", "odd"]
)
def test_masks_do_not_depend_on_the_stack(shape: tuple[int, ...]) -> None:
    """Row by row, in another order, in another precision: the same mask."""
    seeds = torch.randint(2**31, (3, 4), generator=torch.Generator().manual_seed(0))
    whole = dropout(torch.ones(3, 4, *shape), 0.3, seeds, 2)
    for m, b in itertools.product(range(3), range(4)):
        alone = dropout(torch.ones(1, 1, *shape), 0.3, seeds[m, b].view(1, 1), 2)
        assert torch.equal(alone[0, 0], whole[m, b])
    other = dropout(torch.ones(2, 3, *shape, dtype=torch.float64), 0.3, seeds[1:, 1:].flip(0), 2)
    assert torch.equal(other > 0, whole[1:, 1:].flip(0) > 0)
    flat = dropout(torch.ones(3, 4, math.prod(shape)), 0.3, seeds, 2)
    assert torch.equal(flat.view(whole.shape), whole)


def test_seeds_are_only_read() -> None:
    for dtype in (torch.int64, torch.int32):
        seeds = torch.tensor([[5, 6]], dtype=dtype)
        first = dropout(torch.ones(1, 2, 50), 0.5, seeds, 0)
        assert seeds.tolist() == [[5, 6]]
        assert torch.equal(first, dropout(torch.ones(1, 2, 50), 0.5, seeds.long(), 0))


def drops(rate: float, seeds: Tensor, place: int, positions: int) -> Tensor:
    """(seeds, positions) float64, 1 where an entry is dropped."""
    ones = torch.ones(1, len(seeds), positions)
    return (dropout(ones, rate, seeds.unsqueeze(0), place)[0] == 0).double()


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.25, 0.5, 0.9])
def test_rate_is_binomial(rate: float) -> None:
    """Within 4.5 standard deviations in all; per seed and per position spread as chance would.

    The sum over 500 seeds of (drops − n r)² / (n r (1 − r)) has mean 500 and deviation √1000.
    """
    dropped = drops(rate, torch.arange(500), 3, 800)
    variance = rate * (1 - rate)
    total = dropped.numel()
    assert abs(float(dropped.sum()) - total * rate) < 4.5 * math.sqrt(total * variance)
    for axis in (0, 1):
        n, groups = dropped.shape[axis], dropped.shape[1 - axis]
        counts = dropped.sum(axis)
        chi = float((counts - n * rate).square().sum() / (n * variance))
        # Few expected drops make the sum's own deviation larger: kurtosis 1/(n variance).
        deviation = math.sqrt(groups * (2 + 1 / (n * variance)))
        assert abs(chi - groups) < 4.5 * deviation


def independent(a: Tensor, b: Tensor) -> float:
    """Chi-square (one degree of freedom) of the two by two table of two masks."""
    n = a.numel()
    covariance = float((a * b).mean() - a.mean() * b.mean())
    return n * covariance**2 / float(a.mean() * (1 - a.mean()) * b.mean() * (1 - b.mean()))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_are_independent(rate: float) -> None:
    """Between places, neighbouring positions and neighbouring seeds; 1 in 16,000 exceeds 16."""
    seeds = torch.arange(400)
    mask = drops(rate, seeds, 0, 1000)
    for place in (1, 2, 3, 4, 8):
        assert independent(mask, drops(rate, seeds, place, 1000)) < 16
    for step in (1, 2, 3, 16, 36, 64):
        assert independent(mask[:, step:], mask[:, :-step]) < 16
        assert independent(mask[step:], mask[:-step]) < 16
    assert independent(mask[:, ::2], mask[:, 1::2]) < 16  # two decisions of one hash
    assert independent(mask[1:, 1:], drops(rate, seeds, 1, 1000)[:-1, :-1]) < 16


def test_no_two_rows_or_columns_resemble_each_other() -> None:
    """Correlations of all pairs, scaled by √n, are standard normal: variance 1, largest about 5."""
    mask = drops(0.25, torch.arange(600), 1, 900)
    for rows in (mask, mask.T):
        z = (rows - 0.25) / math.sqrt(0.25 * 0.75)
        i, j = torch.triu_indices(len(z), len(z), 1)
        products = (z @ z.T / math.sqrt(z.shape[1]))[i, j]
        assert float(products.square().mean()) == pytest.approx(1, abs=0.02)
        assert float(products.abs().max()) < 6.5


def test_dropout_values_and_gradient() -> None:
    """A quarter dropped: 3/4 stay, each times 4/3; the gradient is the same factor."""
    seeds = torch.tensor([[3, 4], [5, 6]])
    x = torch.randn(2, 2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    factor = dropout(torch.ones_like(x), 0.25, seeds, 1).detach()
    assert set(factor.flatten().tolist()) == {0.0, 4 / 3}
    y = dropout(x, 0.25, seeds, 1)
    assert torch.equal(y.detach(), x.detach() * factor)
    (gradient,) = torch.autograd.grad((y * y.detach()).sum(), x)
    torch.testing.assert_close(gradient, factor * factor * x.detach())
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.25, seeds, 1), (x,))


def test_dropout_keeps_the_mean() -> None:
    """Whatever stays is scaled by exactly one over the chance to stay, 1 − 6554/65536 for 0.1."""
    kept = dropout(torch.ones(1, 1, 9, dtype=torch.float64), 0.1, torch.tensor([[1]]), 0)
    assert float(kept.max()) == pytest.approx(65536 / (65536 - 6554), rel=1e-15)


def test_extreme_rates() -> None:
    x, seeds = torch.randn(1, 2, 500), torch.tensor([[1, 2]])
    assert dropout(x, 0.0, seeds, 0) is x
    almost = dropout(x, 1 - 1e-9, seeds, 0)
    assert torch.isfinite(almost).all()
    assert int((almost != 0).sum()) <= 3
    assert dropout(x[:, :, :0], 0.5, seeds, 0).shape == (1, 2, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("shape", [(36, 64), (4, 36, 36), (5, 7)])
def test_masks_are_the_same_on_cuda(shape: tuple[int, ...]) -> None:
    seeds = torch.randint(2**31, (3, 4), generator=torch.Generator().manual_seed(0))
    for place in (0, 11):
        here = dropout(torch.ones(3, 4, *shape), 0.1, seeds, place)
        there = dropout(torch.ones(3, 4, *shape, device="cuda"), 0.1, seeds.cuda(), place)
        assert torch.equal(here, there.cpu())
