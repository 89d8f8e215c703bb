"""Models of feature vectors, and every method on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedharmony.engine.memory import ClientMemory
from fedharmony.errors import ConfigError
from fedharmony.experiments.build import Assembly, assemble
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import Settings, load_settings
from fedharmony.losses import Batch
from fedharmony.methods.base import Method, Task, methods
from fedharmony.methods.fedrdn import STATISTICS, TABLE, FedRDN
from fedharmony.models.base import FeatureSpec, Model, stack
from fedharmony.models.heads import LinearHead
from fedharmony.models.mlp import Linear, Mlp
from fedharmony.types import PARAMS, Tensors

#: Methods whose head needs the patches of an image.
OF_IMAGES = {"fedlgt"}
ON_FEATURES = [name for name in methods.names() if name not in OF_IMAGES]
SMALL = ["run.rounds=2", "train.epochs=2", "split.clients=4", "model.hidden=[8]"]
SMALL += ["engine.threads=1", "engine.device=cpu", "run.eval_every=2"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 samples of 5 features on very different scales, 3 labels that depend on them."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(150, 5))
    scale, shift = np.array([1, 1e3, 1e-3, 50, 0.1]), np.array([0, 1e4, 0, -20, 5])
    Y = z @ rng.normal(size=(5, 3)) + 2 * rng.normal(size=(150, 3)) > 0.5
    path = tmp_path_factory.mktemp("data") / "a.npz"
    np.savez(path, X=z * scale + shift, Y=Y.astype(int))
    return path


def settings(file: Path, *changes: str) -> Settings:
    return load_settings("features", [f"data.path={file}", *SMALL, *changes])


def trained(file: Path, folder: Path, *changes: str) -> tuple[Assembly, Tensors, Any]:
    """A run: what it was made of, the model it ended with, and its results."""
    wanted = settings(file, *changes)
    results = start(wanted, RunFolder(folder), lambda event: None)
    return assemble(wanted), RunFolder(folder).load_state(wanted).state.get(PARAMS), results


# The models ---------------------------------------------------------------------------------------


def test_mlp_by_hand() -> None:
    """X = (1, 2): W₀x + b₀ = (1 − 2 + 0, 3 + 2 + 1) = (−1, 6), ReLU (0, 6), then 6 · 2 − 1 = 11."""
    spec = FeatureSpec((0.0, 0.0), (1.0, 1.0))
    mlp = Mlp(Mlp.Config(hidden=(2, 1)), spec)
    params = {
        "layers.0.weight": torch.tensor([[[1.0, -1.0], [3.0, 1.0]]]),
        "layers.0.bias": torch.tensor([[0.0, 1.0]]),
        "layers.1.weight": torch.tensor([[[5.0, 2.0]]]),
        "layers.1.bias": torch.tensor([[-1.0]]),
    }
    x = torch.tensor([[[1.0, 2.0]]])
    assert mlp.features(params, x).tolist() == [[[11.0]]]
    assert mlp.tokens(params, x).tolist() == [[[[11.0]]]]
    smooth = Mlp(Mlp.Config(hidden=(2, 1), activation="gelu"), spec).features(params, x)
    gelu = torch.nn.GELU()
    assert smooth.item() == pytest.approx(
        gelu(5 * gelu(torch.tensor(-1.0)) + 2 * gelu(torch.tensor(6.0)) - 1).item(), rel=1e-6
    )


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_stack_equals_torch_modules(activation: str) -> None:
    """Three clients at once give what three ``nn.Sequential`` give, with the same gradients."""
    spec = FeatureSpec((0.0,) * 6, (1.0,) * 6)
    mlp = Mlp(Mlp.Config(hidden=(7, 4), activation=activation), spec)
    model = Model(mlp, LinearHead(mlp.width, 3))
    clients = [model.init(torch.Generator().manual_seed(s)) for s in range(3)]
    params = {n: t.double().requires_grad_() for n, t in stack(clients).items()}
    x = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    outputs = model.apply(params, x)
    outputs.square().sum().backward()
    act = {"relu": torch.nn.ReLU, "gelu": torch.nn.GELU}[activation]
    names = ["layers.0", "layers.1", "head"]
    for k, client in enumerate(clients):
        layers = [torch.nn.Linear(a, b).double() for a, b in ((6, 7), (7, 4), (4, 3))]
        for layer, name in zip(layers, names, strict=True):
            layer.load_state_dict({n: client[f"{name}.{n}"] for n in ("weight", "bias")})
        alone = torch.nn.Sequential(layers[0], act(), layers[1], act(), layers[2])(x[k])
        torch.testing.assert_close(outputs[k], alone)
        alone.square().sum().backward()
        for layer, name in zip(layers, names, strict=True):
            torch.testing.assert_close(params[f"{name}.weight"].grad[k], layer.weight.grad)
            torch.testing.assert_close(params[f"{name}.bias"].grad[k], layer.bias.grad)


def test_initial_weights() -> None:
    mlp = Mlp(Mlp.Config(hidden=(400,)), FeatureSpec((0.0,) * 100, (1.0,) * 100))
    params = mlp.init(torch.Generator().manual_seed(0))
    assert params["layers.0.weight"].std().item() == pytest.approx(0.02**0.5, rel=0.02)
    assert not params["layers.0.bias"].any()
    assert all(params[n].shape == shape for n, shape in mlp.shapes().items())


def test_given_statistics() -> None:
    spec = FeatureSpec((1.0, 2.0), (3.0, 4.0))
    plain = Linear(Linear.Config(), spec)
    assert (plain.mean, plain.std) == ((1.0, 2.0), (3.0, 4.0))
    own = Mlp(Mlp.Config(mean=(0.0,), std=(5.0, 6.0)), spec)
    assert (own.mean, own.std) == ((0.0, 0.0), (5.0, 6.0))
    with pytest.raises(ConfigError, match=r"mean has 3 numbers, but the data have 2 features"):
        Linear(Linear.Config(mean=(0.0, 0.0, 0.0)), spec)


def test_inputs_are_standardised(file: Path) -> None:
    """Whatever their scale, the model sees training features of mean 0 and deviation 1."""
    made = assemble(settings(file))
    x = made.data.train.images.gather(torch.arange(len(made.data.train)), "cpu")
    seen = made.blueprint.method.normalise(x, {}, {})
    torch.testing.assert_close(seen.mean(0), torch.zeros(5), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(5), atol=1e-4, rtol=0)


# Against scikit-learn -----------------------------------------------------------------------------


def test_linear_in_one_place_is_logistic_regression(file: Path, tmp_path: Path) -> None:
    """Trained to the end in one place, the loss is that of scikit-learn's optimum to 1e-4.

    Without penalty the loss is convex with one optimum (classes overlap), so loss and scores must
    agree, probabilities to 0.01. One client has all 120 samples, and a batch holds them all.
    """
    made, params, _ = trained(
        *(file, tmp_path / "run", "model.name=linear", "model.hidden=", "run.method=fedavg"),
        *(
            "split.name=iid",
            "split.clients=1",
            "train.epochs=300",
            "train.batch_size=120",
            "train.lr=0.05",
        ),
    )
    part = made.data.train
    x = part.images.gather(torch.arange(len(part)), "cpu")
    z = made.blueprint.method.normalise(x, {}, {})
    scores = (z @ params["head.weight"].T + params["head.bias"]).double().sigmoid().numpy()
    best = np.stack(
        [
            LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000)
            .fit(z.double().numpy(), labels)
            .predict_proba(z.double().numpy())[:, 1]
            for labels in part.labels.T
        ],
        axis=1,
    )

    def loss(p: np.ndarray) -> float:
        return float(-np.where(part.labels == 1, np.log(p), np.log1p(-p)).mean())

    assert loss(best) <= loss(scores) <= loss(best) + 1e-4
    np.testing.assert_allclose(scores, best, atol=0.01)


# Every method -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ON_FEATURES)
def test_every_method_trains_stacked_as_singly(name: str, file: Path, tmp_path: Path) -> None:
    """Up to the order of sums, four clients at once end where four clients in turn end."""
    _, together, results = trained(file, tmp_path / "a", f"run.method={name}")
    _, singly, _ = trained(file, tmp_path / "b", f"run.method={name}", "engine.stack=1")
    assert results["metrics"]["mAP"] > results["baselines"]["prevalence"]["mAP"]
    for tensor in together:
        torch.testing.assert_close(together[tensor], singly[tensor], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [n for n in ON_FEATURES if n != "spherefed"])
def test_every_method_trains_a_linear_model(name: str, file: Path) -> None:
    made = assemble(settings(file, f"run.method={name}", "model.name=linear", "model.hidden="))
    state, losses = made.initial_state(), []
    made.federation(ClientMemory()).run(
        state, 0, lambda e: losses.append(e.get("train_loss")), lambda t, s: None
    )
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["run.method=fedlgt"], "'fedlgt' cannot be used with model 'mlp': it reads the patches"),
        (["model.name=vit", "model.hidden="], "'vit' takes images, but .* vectors of 5 features"),
        (["augment.flip=true"], r"\[augment\] changes images"),
        (
            ["model.name=linear", "model.hidden=", "run.method=spherefed"],
            "no other layer to train",
        ),
    ],
)
def test_what_does_not_fit_is_refused(file: Path, changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assemble(settings(file, *changes))


def test_a_model_of_features_is_refused_for_images() -> None:
    small = ["data.train=40", "data.test=20", "split.clients=2", "engine.device=cpu"]
    with pytest.raises(ConfigError, match=r"'mlp' takes feature vectors, but .* images of 32 × 32"):
        assemble(load_settings("demo", [*small, "model.name=mlp"]))


# FedRDN's statistics of features ------------------------------------------------------------------


def task(**others: Any) -> Task:
    return Task(
        **{"classes": 1, "clients": 2, "rounds": 1, "batch_size": 2, "epochs": 1, "seed": 0},
        **{"width": 2, "lr": 0.1, "pixels": False, "mean": (1.0, 0.0), "std": (2.0, 1.0), **others},
    )


def test_statistics_of_features_by_hand() -> None:
    """Standardised, the first feature of (3, 7) and (7, 7) is 1 and 3: mean 2, deviation 1.

    The second is 7 and 7: it does not vary at this client, so its deviation counts as 1.
    """
    method = FedRDN(FedRDN.Config(), task())
    sweep, rows = method.statistics(), torch.tensor([1.0, 1.0, 0.0])  # the last is padding
    x = torch.tensor([[3.0, 7.0], [7.0, 7.0], [99.0, 99.0]])
    batch = Batch(torch.zeros(3, 1), rows, rows.unsqueeze(-1))
    found = sweep.finish(sweep.fold(sweep.start({}), x, batch), {})
    assert found["mean"].tolist() == [2.0, 7.0]
    assert found["std"].tolist() == [1.0, 1.0]


def test_normalisation_with_a_clients_statistics() -> None:
    """X = (5, 4) standardised is (2, 4); with μ = (1, 1) and σ = (½, 3): (2, 1)."""
    method = FedRDN(FedRDN.Config(), task())
    one = {"mean": torch.tensor([[1.0, 1.0]]), "std": torch.tensor([[0.5, 3.0]])}
    pooled = {f"pooled_{name}": values[0] for name, values in one.items()}
    x, message = torch.tensor([[5.0, 4.0]]), {STATISTICS: {**one, **pooled}}
    draws = {"mean": torch.tensor([0.3]), "std": torch.tensor([0.3])}
    assert method.normalise(x, message, draws).tolist() == [[2.0, 1.0]]
    assert method.normalise(x, message, {}).tolist() == [[2.0, 1.0]]


def test_clients_tell_their_own_statistics(file: Path) -> None:
    """After round 0 the table holds mean and deviation of each client's standardised features."""
    made = assemble(settings(file, "run.method=fedrdn"))
    state = made.federation(ClientMemory()).run(
        made.initial_state(), 0, lambda event: None, lambda t, s: None
    )
    table = state.get(TABLE)
    for k, index in made.clients.items():
        own = made.data.train.images.gather(torch.from_numpy(index), "cpu")
        z = Method.normalise(made.blueprint.method, own, {}, {})
        torch.testing.assert_close(table["mean"][k], z.mean(0), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(table["std"][k], z.std(0, correction=0), atol=1e-5, rtol=1e-5)
