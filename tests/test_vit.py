"""The stacked vision transformer: against timm, against single models, against differences."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedharmony.config import build
from fedharmony.errors import ConfigError
from fedharmony.models.base import (
    Head,
    InputSpec,
    Model,
    Shapes,
    attention,
    layer_norm,
    linear,
    models,
    stack,
    unstack,
)
from fedharmony.models.heads import LinearHead
from fedharmony.models.vit import ViT, ViTBase, ViTTiny
from fedharmony.rng import torch_rng
from fedharmony.types import Tensors

SMALL = ViT.Config(width=16, depth=2, heads=2, patch=4)


def make(config: ViT.Config = SMALL, height: int = 8, width: int = 12, classes: int = 5) -> Model:
    return Model(ViT(config, InputSpec(3, height, width)), LinearHead(config.width, classes))


def random_params(model: Model, seed: int) -> Tensors:
    """Parameters far from their initial zeros and ones, so that each of them matters."""
    generator = torch_rng(seed, "params")
    return {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.init(generator).items()
    }


def random_images(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch_rng(seed, "images"))


def double(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items()}


def leaves(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def gradients(outputs: Tensor, params: Mapping[str, Tensor]) -> Tensors:
    """Gradients of an uneven sum of the outputs."""
    weights = torch.linspace(-1, 2, outputs.numel(), dtype=outputs.dtype).view(outputs.shape)
    grads = torch.autograd.grad((weights * outputs).sum(), list(params.values()))
    return dict(zip(params, grads, strict=True))


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, tensor.abs().max().item())
        assert (actual[name] - tensor).abs().max().item() <= tol * scale, name


@pytest.mark.parametrize(
    ("config", "height", "width"),
    [
        (ViT.Config(width=16, depth=1, heads=2, patch=4), 8, 8),
        (ViT.Config(width=24, depth=3, heads=3, patch=8, mlp_ratio=2.5), 16, 40),
        (ViT.Config(), 32, 32),
        (ViT.Config(width=32, depth=2, heads=4, patch=4), 48, 64),  # long: fused attention
    ],
)
def test_equals_timm(config: ViT.Config, height: int, width: int) -> None:
    """The forward pass of timm's VisionTransformer with the same (same-named) parameters."""
    timm = pytest.importorskip("timm.models.vision_transformer")
    reference = timm.VisionTransformer(
        img_size=(height, width),
        patch_size=config.patch,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_ratio,
        num_classes=5,
    ).eval()
    model = make(config, height, width)
    params = random_params(model, 0)
    reference.load_state_dict(params, strict=True)
    assert list(params) == list(reference.state_dict())
    images = random_images(1, 3, 3, height, width)
    stacked = stack([params])
    with torch.no_grad():
        tokens = model.backbone.tokens(stacked, images[None])[0]
        torch.testing.assert_close(tokens, reference.forward_features(images), rtol=0, atol=1e-5)
        outputs = model.apply(stacked, images[None])[0]
        torch.testing.assert_close(outputs, reference(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_stack_equals_single_models(dtype: torch.dtype, tol: float, long: bool) -> None:
    """M stacked clients give the outputs and gradients of M models applied one by one."""
    size = (48, 48) if long else (8, 12)
    model = make(SMALL, *size)
    clients = [{n: t.to(dtype) for n, t in random_params(model, k).items()} for k in range(3)]
    images = random_images(9, 3, 2, 3, *size).to(dtype)

    params = leaves(stack(clients))
    outputs = model.apply(params, images)
    stacked = gradients(outputs, params)
    weights = torch.linspace(-1, 2, outputs.numel(), dtype=dtype).view(outputs.shape)
    for k, client in enumerate(clients):
        single = leaves(stack([client]))
        alone = model.apply(single, images[k : k + 1])
        torch.testing.assert_close(outputs[k], alone[0], rtol=0, atol=tol)
        grads = torch.autograd.grad((weights[k] * alone[0]).sum(), list(single.values()))
        expected = {name: grad[0] for name, grad in zip(single, grads, strict=True)}
        assert_close(unstack(stacked, k), expected, tol)


@pytest.mark.parametrize("shape", [(3, 2, 5, 4), (3, 2, 4), (2, 1, 5, 4)])
def test_norms_sum_their_gradients_by_image_or_at_once(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """Both forms: torch's layer norm of each client, its values and its gradients."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in (shape, (shape[0], 4), (shape[0], 4))
    )
    inputs, found = (x, weight, bias), []
    for by_image in (None, False, True):
        if by_image is None:
            own = [F.layer_norm(x[m], (4,), weight[m], bias[m], 1e-6) for m in range(shape[0])]
            y = torch.stack(own)
        else:
            monkeypatch.setattr(
                "fedharmony.models.base.sums_by_image", lambda x, answer=by_image: answer
            )
            y = layer_norm(x, weight, bias, 1e-6)
            assert ("Expand" in str(y.grad_fn.next_functions)) == by_image
        found.append([y, *torch.autograd.grad(y.pow(3).sum(), inputs)])
    for expected, at_once, by_image in zip(*found, strict=True):
        torch.testing.assert_close(at_once, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(by_image, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("class_only", [False, True])
def test_biases_behind_attention_change_nothing(
    monkeypatch: pytest.MonkeyPatch, class_only: bool
) -> None:
    """Where a bias costs a pass, those of keys and values are spared; same outputs and gradients.

    The gradient of a bias of keys is 0: ``softmax(s + c) = softmax(s)`` for the same c in a row.
    """
    vit = ViT(ViT.Config(width=12, depth=2, heads=3, patch=4), InputSpec(3, 8, 8))
    found = []
    for late in (False, True):
        monkeypatch.setattr("fedharmony.models.vit.adds_bias_apart", lambda weight, late=late: late)
        monkeypatch.setattr("fedharmony.models.base.adds_bias_apart", lambda weight: False)
        generator = torch.Generator().manual_seed(0)
        params = {
            name: (t + 0.3 * torch.randn(3, *t.shape, generator=generator)).double()
            for name, t in vit.init(generator).items()
        }
        leaves = {name: t.requires_grad_() for name, t in params.items()}
        images = torch.randn(3, 2, 3, 8, 8, generator=generator).double()
        outputs = (vit.features if class_only else vit.tokens)(leaves, images)
        gradients = torch.autograd.grad(outputs.square().sum(), list(leaves.values()))
        found.append([outputs, *gradients])
    biases = [g for n, g in zip(["", *leaves], found[1], strict=True) if n.endswith("qkv.bias")]
    assert len(biases) == 2
    for bias in biases:
        query, key, value = bias.split(12, dim=1)
        assert query.abs().min() > 1e-6
        assert value.abs().min() > 1e-6
        assert not key.any()
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def test_features_are_the_class_token() -> None:
    """The shortcut through the last block changes neither value nor gradient."""
    backbone = make().backbone
    clients = [double(random_params(make(), k)) for k in range(2)]
    params = leaves({n: t for n, t in stack(clients).items() if not n.startswith("head.")})
    images = random_images(3, 2, 4, 3, 8, 12).double()
    short, whole = backbone.features(params, images), backbone.tokens(params, images)[:, :, 0]
    torch.testing.assert_close(short, whole, rtol=0, atol=1e-12)
    assert_close(gradients(short, params), gradients(whole, params), 1e-12)


def test_padding_rows_change_nothing() -> None:
    """Outputs and gradients of real rows are those of a batch without the padding."""
    model = make()
    params = leaves(stack([double(random_params(model, k)) for k in range(2)]))
    images = random_images(5, 2, 3, 3, 8, 12).double()
    padded = torch.cat([images, torch.full((2, 2, 3, 8, 12), 1e3, dtype=torch.float64)], dim=1)
    outputs, with_padding = model.apply(params, images), model.apply(params, padded)[:, :3]
    torch.testing.assert_close(with_padding, outputs, rtol=0, atol=1e-12)
    assert_close(gradients(with_padding, params), gradients(outputs, params), 1e-12)


def test_clients_do_not_mix() -> None:
    """A client whose images or parameters are not finite leaves the others untouched."""
    model = make()
    params = stack([random_params(model, k) for k in range(3)])
    images = random_images(6, 3, 2, 3, 8, 12)
    before = model.apply(params, images)
    images[0] = torch.nan
    for tensor in params.values():
        tensor[2] = torch.inf
    after = model.apply(params, images)
    assert torch.equal(after[1], before[1])
    assert after[0].isnan().all()
    assert after[2].isnan().all()


def test_gradient_against_differences() -> None:
    """⟨∇f, v⟩ = (f(θ + hv) − f(θ − hv)) / 2h, for one direction v in each parameter."""
    model = make(ViT.Config(width=4, depth=2, heads=2, patch=2), 4, 4, classes=2)
    params = leaves(stack([double(random_params(model, k)) for k in range(2)]))
    images = random_images(7, 2, 2, 3, 4, 4).double()
    weights = torch.linspace(-1, 2, 8, dtype=torch.float64).view(2, 2, 2)
    analytic = gradients(model.apply(params, images), params)
    generator, step = torch_rng(0, "direction"), 1e-5
    for name, tensor in params.items():
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ends = [
                (weights * model.apply({**params, name: tensor + sign * step * direction}, images))
                .sum()
                .item()
                for sign in (1, -1)
            ]
        numeric = (ends[0] - ends[1]) / (2 * step)
        expected = (analytic[name] * direction).sum().item()
        assert numeric == pytest.approx(expected, rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize("grad", [False, True])
def test_expanded_parameters(grad: bool) -> None:
    """Shared parameters, expanded or of length 1, act like copies; gradients stay per client."""
    model = make()
    client = double(random_params(model, 0))
    images = random_images(8, 3, 2, 3, 8, 12).double()
    copies = leaves(stack([client] * 3))
    expanded = {n: t.expand(3, *t.shape) for n, t in client.items()}
    single = {n: t.unsqueeze(0) for n, t in client.items()}
    if grad:
        expanded, single = leaves(expanded), leaves(single)
    expected = model.apply(copies, images)
    for params in (expanded, single):
        torch.testing.assert_close(model.apply(params, images), expected, rtol=0, atol=1e-12)
    if grad:
        per_client = gradients(expected, copies)
        assert_close(gradients(model.apply(expanded, images), expanded), per_client, 1e-12)
        summed = {n: g.sum(0, keepdim=True) for n, g in per_client.items()}
        assert_close(gradients(model.apply(single, images), single), summed, 1e-12)


def test_shared_backbone_under_own_heads() -> None:
    """Some parameters may be shared while others are the client's own."""
    model = make()
    clients = [double(random_params(model, k)) for k in range(3)]
    mixed = [{**clients[0], "head.bias": client["head.bias"]} for client in clients]
    params = stack(mixed)
    shared = {n: t[:1].expand(t.shape) if n != "head.bias" else t for n, t in params.items()}
    images = random_images(8, 3, 2, 3, 8, 12).double()
    torch.testing.assert_close(
        model.apply(shared, images), model.apply(params, images), rtol=0, atol=1e-12
    )


def test_autocast() -> None:
    """Under bfloat16 autocast outputs stay near float32 and gradients keep the leaves' dtype."""
    model = make()
    params = leaves(stack([random_params(model, k) for k in range(2)]))
    images = random_images(4, 2, 3, 3, 8, 12)
    exact = model.apply(params, images)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model.apply(params, images)
    assert outputs.dtype == torch.bfloat16
    assert (outputs.float() - exact).abs().max() < 0.05 * exact.abs().max()
    for name, grad in gradients(outputs.float(), params).items():
        assert grad.dtype == torch.float32, name
        assert grad.isfinite().all(), name


def test_init_is_deterministic_and_leaves_the_global_state_alone() -> None:
    model = make()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = model.init(torch_rng(3, "model"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = model.init(torch_rng(3, "model")), model.init(torch_rng(4, "model"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["pos_embed"], other["pos_embed"])
    assert {n: tuple(t.shape) for n, t in first.items()} == model.shapes()
    assert all(t.dtype == torch.float32 for t in first.values())


def test_init_distributions() -> None:
    """timm's: σ = 0.02 for weights and positions, 1e-6 for the class token, 1/√192 for patches."""
    params = make(ViT.Config(width=128), 64, 64).init(torch_rng(0, "model"))
    for name in ("pos_embed", "blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight", "head.weight"):
        assert params[name].std().item() == pytest.approx(0.02, rel=0.1), name
        assert abs(params[name].mean().item()) < 3e-3, name
    assert params["cls_token"].std().item() == pytest.approx(1e-6, rel=0.3)
    bound = 1 / math.sqrt(3 * 8 * 8)
    for name in ("patch_embed.proj.weight", "patch_embed.proj.bias"):
        assert bound * 0.9 < params[name].abs().max().item() <= bound
    for name in ("blocks.0.norm1", "blocks.1.norm2", "norm"):
        assert (params[f"{name}.weight"] == 1).all()
        assert (params[f"{name}.bias"] == 0).all()
    for name in ("blocks.0.attn.qkv", "blocks.1.attn.proj", "blocks.0.mlp.fc1", "head"):
        assert (params[f"{name}.bias"] == 0).all()


def test_sizes_of_vit_base() -> None:
    """ViT-B/16 at 224 pixels has 85,798,656 parameters; 20 labels add 768 · 20 + 20."""
    backbone = ViTBase(ViTBase.Config(), InputSpec(3, 224, 224))
    assert sum(math.prod(shape) for shape in backbone.shapes().values()) == 85_798_656
    assert Model(backbone, LinearHead(768, 20)).num_parameters == 85_798_656 + 15_380
    assert backbone.init_buffers() == {}


def test_registered_presets() -> None:
    sizes = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}
    for size, (width, depth, heads) in sizes.items():
        config = models[f"vit_{size}_patch16"].Config()
        assert (config.width, config.depth, config.heads, config.patch) == (width, depth, heads, 16)
    assert models["vit"] is ViT


def test_settings() -> None:
    config = build(ViTTiny.Config, {"depth": 3, "mean": [0.1, 0.2, 0.3]}, "model")
    assert (config.depth, config.width, config.mean) == (3, 192, (0.1, 0.2, 0.3))
    for wrong in ({"depth": 0}, {"mlp_ratio": 0.0}, {"std": [0.5, 0.5, 0.0]}, {"weights": 3}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            build(ViT.Config, wrong, "model")


@pytest.mark.parametrize(
    ("config", "input", "message"),
    [
        (ViT.Config(width=10, heads=4), InputSpec(3, 32, 32), "width 10 cannot have 4 heads"),
        (ViT.Config(patch=8), InputSpec(3, 36, 32), "36 × 32 pixels .* multiples of 8"),
        (ViT.Config(patch=8), InputSpec(3, 32, 36), "32 × 36 pixels .* multiples of 8"),
        (ViT.Config(), InputSpec(1, 32, 32), "RGB"),
    ],
)
def test_impossible_sizes(config: ViT.Config, input: InputSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ViT(config, input)


def test_attention_by_hand() -> None:
    """With d = 1, q = 1 and keys (ln 3, 0) the weights are (3/4, 1/4): values (4, 8) give 5.

    With keys (ln 128, 0, ..., 0), 128 zeros, the first weight is 128/256: values (1, 0, ...) give
    0.5 (the long sequence takes the fused kernel).
    """
    key, value = torch.tensor([math.log(3), 0.0]), torch.tensor([4.0, 8.0])
    for queries in (1, 2):  # one query is computed differently
        query = torch.ones(1, 1, queries, 1)
        result = attention(query, key.view(1, 1, 2, 1), value.view(1, 1, 2, 1))
        torch.testing.assert_close(result, torch.full((1, 1, queries, 1), 5.0))
    key, value = torch.zeros(1, 1, 129, 1), torch.zeros(1, 1, 129, 1)
    key[..., 0, 0], value[..., 0, 0] = math.log(128), 1.0
    result = attention(torch.ones(1, 1, 1, 1), key, value)
    torch.testing.assert_close(result, torch.full((1, 1, 1, 1), 0.5))


def test_attention_scale_by_hand() -> None:
    """With d = 4 the product is divided by 2: q·k = 2 ln 3 gives weights (3/4, 1/4)."""
    query = torch.full((1, 1, 1, 4), 0.5)
    key = torch.stack([torch.full((4,), math.log(3)), torch.zeros(4)]).view(1, 1, 2, 4)
    value = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1)
    for rows in (1, 2):
        result = attention(query.expand(1, 1, rows, 4), key, value)
        torch.testing.assert_close(result, torch.full((1, 1, rows, 1), 5.0))


def test_layers_by_hand() -> None:
    """Two clients, one row (1, 2): W₁ = (3, 4), b₁ = 5 gives 16; W₂ = (−1, 1), b₂ = 0 gives 1.

    The layer norm of (1, 3) is (−1, 1); with γ = (2, 2), β = (1, 0) it is (−1, 2).
    """
    x = torch.tensor([[[1.0, 2.0]], [[1.0, 2.0]]])
    weight = torch.tensor([[[3.0, 4.0]], [[-1.0, 1.0]]])
    assert linear(x, weight, torch.tensor([[5.0], [0.0]])).flatten().tolist() == [16.0, 1.0]
    x = torch.tensor([[[1.0, 3.0]], [[1.0, 3.0]]])
    weight, bias = torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    expected = torch.tensor([[[-1.0, 1.0]], [[-1.0, 2.0]]])
    torch.testing.assert_close(layer_norm(x, weight, bias, eps=0.0), expected)
    eps = layer_norm(x, weight, bias, eps=3.0)  # the variance is 1: √(1 + 3) = 2
    torch.testing.assert_close(eps[0, 0], torch.tensor([-0.5, 0.5]))


@dataclass(frozen=True)
class MaskedTokenHead(Head):
    """Weighs each token by a frozen table and an input: an unusual head, to test the interface."""

    reads = "patches"
    frozen = frozenset({"head.table"})
    tokens: int

    def shapes(self) -> Shapes:
        return {"head.table": (self.tokens,), "head.scale": (1,)}

    def init(self, generator: torch.Generator) -> Tensors:
        table = torch.rand(self.tokens, generator=generator)
        return {"head.table": table, "head.scale": torch.ones(1)}

    def apply(
        self,
        params: Mapping[str, Tensor],
        features: Tensor,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        assert inputs is not None
        weights = (params["head.table"] * params["head.scale"]).unsqueeze(1) * inputs["mask"]
        return (features * weights.unsqueeze(-1)).sum(dim=2)


def test_heads_are_pluggable() -> None:
    """A head may read all patches and further inputs, and keep parameters out of training."""
    backbone = ViT(SMALL, InputSpec(3, 8, 12))
    model = Model(backbone, MaskedTokenHead(tokens=6))
    params = model.init(torch_rng(0, "model"))
    assert {n: tuple(t.shape) for n, t in params.items()} == model.shapes()
    trained, frozen = model.divide(params)
    assert "head.scale" in trained
    assert list(frozen) == ["head.table"]
    assert {**trained, **frozen}.keys() == params.keys()
    images = random_images(2, 2, 3, 3, 8, 12)
    mask = torch.zeros(2, 3, 6)
    mask[:, :, 4] = 1.0
    stacked = stack([params, params])
    outputs = model.apply(stacked, images, {"mask": mask})
    expected = params["head.table"][4] * backbone.tokens(stacked, images)[:, :, 1 + 4]
    torch.testing.assert_close(outputs, expected)


def test_stack_and_unstack_are_inverse_and_unstack_copies_nothing() -> None:
    clients = [random_params(make(), k) for k in range(3)]
    stacked = stack(clients)
    for k, client in enumerate(clients):
        again = unstack(stacked, k)
        assert all(torch.equal(again[name], client[name]) for name in client)
        offset = again["norm.bias"].storage_offset()
        assert again["norm.bias"].untyped_storage().data_ptr() == (
            stacked["norm.bias"].untyped_storage().data_ptr()
        )
        assert offset == k * again["norm.bias"].numel()
    assert stack([{}, {}]) == {}
