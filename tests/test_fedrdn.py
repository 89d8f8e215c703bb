"""FedRDN against its equations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedharmony.config import build
from fedharmony.data.augment import AugmentSettings
from fedharmony.data.base import DataSet, LabelledImages, TensorImages
from fedharmony.errors import ConfigError
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import evaluate
from fedharmony.experiments.scorer import Scorer
from fedharmony.experiments.settings import compose
from fedharmony.methods.base import Stage, Task
from fedharmony.methods.fedrdn import STATISTICS, TABLE, FedRDN, chosen
from fedharmony.records import load_record, save_record
from fedharmony.rng import torch_rng
from fedharmony.server.federation import FederationSettings
from fedharmony.types import PARAMS, Failure, Record, Reply
from toy import Toy, same_bits, toy_data

TASK = Task(classes=3, clients=4, rounds=3, batch_size=4, epochs=1, seed=0, width=8, lr=0.01)
MODEL = 4 * (8 * 48 + 8 + 6 * 8 + 6)  # bytes of the toy model


def method(**settings: Any) -> FedRDN:
    return FedRDN(FedRDN.Config(**settings), TASK)


def images_of(*images: Sequence[Sequence[int]]) -> Tensor:
    """2 × 2 images from their channels' four pixels."""
    return torch.tensor(images, dtype=torch.uint8).reshape(len(images), 3, 2, 2)


def table_of(*clients: tuple[int, Sequence[float], Sequence[float]]) -> Record:
    """A state that heard these (images, mean, std) of clients 0, 1, and so on."""
    examples, mean, std = zip(*clients, strict=True)
    table = {
        "client": torch.arange(len(clients)),
        "examples": torch.tensor(examples),
        "mean": torch.tensor(mean),
        "std": torch.tensor(std),
    }
    return Record({TABLE: table})


def model_of(state: Record) -> Record:
    return Record({PARAMS: state.get(PARAMS)})


# -- statistics ------------------------------------------------------------------------------------

A = [[0, 0, 255, 255], [0, 0, 0, 255], [102, 204, 102, 204]]
B = [[51] * 4, [255] * 4, [0] * 4]


def test_statistics_by_hand() -> None:
    """Two images of 2 × 2 pixels. Per channel of image A, then of image B, as parts of 255.

    0: (0, 0, 1, 1), mean 0.5, std 0.5; (0.2, …): 0.2, 0. Their means: 0.35, 0.25.
       (The std of all eight pixels would be 0.384, with unbiased std per image 0.289.)
    1: (0, 0, 0, 1), mean 0.25, std √0.1875 = 0.4330127; (1, …): 1, 0. Means: 0.625, 0.2165064.
    2: (0.4, 0.8, 0.4, 0.8), mean 0.6, std 0.2; 0, 0. Means: 0.3, 0.1.

    A model made for mean 0.5 and std 0.5 is off by |0.3 − 0.5| / 0.5 = 0.4 at most.
    """
    labels = np.eye(2, 3, dtype=np.uint8)
    toy = Toy("fedrdn", data=LabelledImages(TensorImages(images_of(A, B)), labels), sizes=(2,))
    state, events = toy.run()
    table = state.get(TABLE)
    expected = {"mean": [[0.35, 0.625, 0.3]], "std": [[0.25, 0.2165064, 0.1]]}
    for name, values in expected.items():
        assert table[name].dtype == torch.float32
        torch.testing.assert_close(table[name], torch.tensor(values), atol=1e-7, rtol=0)
    assert table["client"].tolist() == [0]
    assert table["examples"].tolist() == [2]
    assert events[0]["log"]["clients_listed"] == 1
    assert events[0]["log"]["normalisation_shift"] == pytest.approx(0.4, abs=1e-6)
    assert events[1]["log"] == {}


@pytest.mark.parametrize("stack", [1, 8])
def test_statistics_are_those_of_numpy(stack: int) -> None:
    """Five clients of unequal size in padded batches, float64 per image."""
    toy = Toy("fedrdn", stack=stack, rounds=1)
    table = toy.run()[0].get(TABLE)
    pixels = toy.data.images.pixels.numpy().astype(np.float64) / 255
    for k, own in toy.trainer.data.clients.items():
        per_image = pixels[own].reshape(len(own), 3, -1)
        np.testing.assert_allclose(table["mean"][k], per_image.mean(2).mean(0), rtol=2e-7)
        np.testing.assert_allclose(table["std"][k], per_image.std(2).mean(0), rtol=2e-7)
    assert table["examples"].tolist() == [20, 7, 1, 13, 19]


def test_statistics_are_of_unchanged_images() -> None:
    changes = AugmentSettings(flip=True, crop=0.3, brightness=0.5)
    changed, _ = Toy("fedrdn", changes=changes, rounds=1).run()
    plain_state, _ = Toy("fedrdn", rounds=1).run()
    tables = [Record({TABLE: state.get(TABLE)}) for state in (changed, plain_state)]
    assert same_bits(*tables)
    assert not same_bits(model_of(changed), model_of(plain_state))


def test_payload_and_who_is_asked() -> None:
    """6 floats up from everyone once; the list of 6 · 5 floats and the 6 of evaluation down."""
    _, events = Toy("fedrdn", cohort=2).run()
    assert [e["bytes_up"] for e in events] == [2 * MODEL + 5 * 24, 2 * MODEL, 2 * MODEL]
    assert [e["bytes_down"] for e in events] == [2 * (MODEL + 5 * 24 + 24)] * 3

    def asked(rdn: FedRDN) -> list[list[tuple[str, bool, bool]]]:
        return [[(s.name, s.everyone, s.train) for s in rdn.stages(t)] for t in range(2)]

    update = ("update", False, True)
    assert asked(method()) == [[("statistics", True, False), update], [update]]
    assert asked(method(collect="cohort")) == [[("statistics", False, False), update]] * 2


@pytest.mark.parametrize("collect", ["everyone", "cohort"])
def test_who_is_in_the_list(collect: str) -> None:
    """Everyone from the start, or all who have taken part so far; in client order, each once."""
    toy, seen, events = Toy("fedrdn", {"collect": collect}, rounds=5, cohort=2), [], []
    toy.loop().run(toy.initial(), 0, events.append, lambda t, s: seen.append(s))
    assert len({tuple(e["cohort"]) for e in events}) > 1
    whole = Toy("fedrdn", rounds=1).run()[0].get(TABLE)
    heard: set[int] = set()
    for state, event in zip(seen, events, strict=True):
        heard |= set(event["cohort"])
        listed = list(range(5)) if collect == "everyone" else sorted(heard)
        table = state.get(TABLE)
        assert table["client"].tolist() == listed
        for name in ("mean", "std", "examples"):  # each row is that client's own
            assert torch.equal(table[name], whole[name][listed])
        if collect == "cohort":
            assert event["log"]["clients_listed"] == len(listed)


def test_a_new_reply_replaces_the_old_one() -> None:
    state = table_of((4, (0.1,) * 3, (0.2,) * 3), (5, (0.3,) * 3, (0.4,) * 3))
    fresh = {"mean": torch.full((3,), 0.8), "std": torch.full((3,), 0.9)}
    replies = [Reply(0, 7, Record({STATISTICS: fresh})), Reply(3, 6, Record({STATISTICS: fresh}))]
    table = method().collect(state, 1, {}, iter(replies)).state.get(TABLE)
    assert table["client"].tolist() == [0, 1, 3]
    assert table["examples"].tolist() == [7, 5, 6]
    assert table["mean"][:, 0].tolist() == pytest.approx([0.8, 0.3, 0.8])
    assert table["std"][:, 2].tolist() == pytest.approx([0.9, 0.4, 0.9])


def test_everyone_gets_the_same_list() -> None:
    """One object for all: the same list, and no copies in a stack."""
    state = table_of((1, (0.2,) * 3, (0.1,) * 3), (3, (0.6,) * 3, (0.3,) * 3))
    sent = method().broadcast(state.replace({PARAMS: {"w": torch.ones(1)}}), 0, [4, 7, 9])
    assert list(sent) == [4, 7, 9]
    assert len({id(message) for message in sent.values()}) == 1
    assert set(sent[4].groups) == {"params", "buffers", STATISTICS}
    torch.testing.assert_close(sent[4].get(STATISTICS)["mean"], state.get(TABLE)["mean"])


# -- the list --------------------------------------------------------------------------------------


def test_pooled_statistics_by_hand() -> None:
    """Weights 1/4 and 3/4: mean 0.05 + 0.45 = 0.5, std 0.025 + 0.225 = 0.25 in channel 0."""
    state = table_of((1, (0.2, 0.4, 0), (0.1,) * 3), (3, (0.6, 0.4, 1), (0.3, 0.1, 0.06)))
    found = method().evaluation(state)[STATISTICS]
    torch.testing.assert_close(found["pooled_mean"], torch.tensor([0.5, 0.4, 0.75]))
    torch.testing.assert_close(found["pooled_std"], torch.tensor([0.25, 0.1, 0.07]))


def test_flat_images_do_not_blow_up() -> None:
    """σ is at least min_std, per channel; the table keeps what was measured.

    Pooled: (0.3 + 0.01)/2 = 0.155; (0.06 + 0.02)/2 = 0.04, raised to 0.05; (0 + 0.2)/2 = 0.1. (Had
    the entries been raised first, 0.175, 0.055, 0.125.)
    """
    state = table_of((2, (0.5,) * 3, (0.3, 0.06, 0.0)), (2, (0.5,) * 3, (0.01, 0.02, 0.2)))
    found = method().evaluation(state)[STATISTICS]
    expected = torch.tensor([[0.3, 0.06, 0.05], [0.05, 0.05, 0.2]])
    torch.testing.assert_close(found["std"], expected)
    torch.testing.assert_close(found["pooled_std"], torch.tensor([0.155, 0.05, 0.1]))
    other = method(min_std=0.25).evaluation(state)[STATISTICS]
    torch.testing.assert_close(other["std"].amin(0), torch.tensor([0.25, 0.25, 0.25]))
    assert state.get(TABLE)["std"].min() == 0


@pytest.mark.parametrize(
    ("smallest", "listed"), [(1, [0, 1, 2]), (3, [0, 2]), (4, [2]), (10, [2]), (11, [0, 1, 2])]
)
def test_clients_with_few_images_are_not_listed(smallest: int, listed: list[int]) -> None:
    """Sizes 3, 1, 10; if nobody is large enough, all are listed. The pooled pair counts everyone.

    (3 · 0.1 + 1 · 0.2 + 10 · 0.3) / 14 = 0.25.
    """
    values = [(n, (m,) * 3, (0.2 + m,) * 3) for n, m in ((3, 0.1), (1, 0.2), (10, 0.3))]
    found = method(min_images=smallest).evaluation(table_of(*values))[STATISTICS]
    expected = torch.tensor([[0.1 * (k + 1)] * 3 for k in listed])
    torch.testing.assert_close(found["mean"], expected)
    torch.testing.assert_close(found["std"], 0.2 + expected)
    torch.testing.assert_close(found["pooled_mean"], torch.tensor([0.25] * 3))


# -- normalisation ---------------------------------------------------------------------------------

#: Three clients with clearly different statistics.
THREE = table_of(
    (1, (0.2, 0.3, 0.4), (0.1, 0.2, 0.3)),
    (2, (0.5, 0.6, 0.7), (0.4, 0.5, 0.6)),
    (5, (0.8, 0.1, 0.9), (0.25, 0.35, 0.45)),
)


def plain(images: Tensor, mean: Sequence[int], std: Sequence[int]) -> np.ndarray:
    """(x/255 − μ)/σ in float64, with the mean and the std of the given clients, image by image."""
    table = {n: THREE.get(TABLE)[n].double().numpy() for n in ("mean", "std")}
    pixels = images.numpy().astype(np.float64) / 255
    return np.stack(
        [
            (x - table["mean"][m][:, None, None]) / table["std"][s][:, None, None]
            for x, m, s in zip(pixels, mean, std, strict=True)
        ]
    )


def test_normalisation_is_the_formula() -> None:
    """Draws 0.1, 0.5, 0.9, 0.34 of three clients are 0, 1, 2, 1; mean and std by their own draw."""
    images = toy_data(4).images.pixels
    message = method().evaluation(THREE)
    draws = {"mean": torch.tensor([0.1, 0.5, 0.9, 0.34]), "std": torch.tensor([0.9, 0.1, 0.9, 0.0])}
    found = method().normalise(images, message, draws)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, plain(images, [0, 1, 2, 1], [2, 0, 2, 0]), atol=5e-6)


def test_without_draws_it_is_the_pooled_pair() -> None:
    """Weights 1/8, 2/8, 5/8: first channel (0.2 + 1.0 + 4.0)/8 = 0.65, σ 2.15/8 = 0.26875."""
    images = toy_data(4).images.pixels
    found = method().normalise(images, method().evaluation(THREE), {})
    expected = (images[:, 0].double() / 255 - 0.65) / (2.15 / 8)
    torch.testing.assert_close(found[:, 0].double(), expected, atol=5e-6, rtol=0)


def test_a_stack_of_clients_with_lists_of_their_own() -> None:
    """With a client axis on images, draws and lists: the same as one client at a time."""
    images = toy_data(6).images.pixels.reshape(2, 3, 3, 4, 4)
    draws = {n: torch.rand(2, 3, generator=torch_rng(0, n)) for n in ("mean", "std")}
    lists = [method().evaluation(THREE)[STATISTICS]]
    lists.append({name: values * 1.5 for name, values in lists[0].items()})
    stacked = {STATISTICS: {n: torch.stack([own[n] for own in lists]) for n in lists[0]}}
    for drawn in (draws, {}):
        found = method().normalise(images, stacked, drawn)
        for m in range(2):
            own = {name: values[m] for name, values in drawn.items()}
            alone = method().normalise(images[m], {STATISTICS: lists[m]}, own)
            assert torch.equal(found[m], alone)


def test_every_number_below_one_chooses_a_client() -> None:
    """The largest number drawn, 1 − 2⁻²⁴, times K is in float32 below K: the last row."""
    largest = torch.tensor(1 - 2**-24)
    assert torch.rand(10_000, generator=torch_rng(0, "draws")).max() <= largest < 1
    sizes = torch.cat([torch.arange(1, 100_000), 2 ** torch.arange(24), 2 ** torch.arange(24) - 1])
    sizes = sizes[sizes > 0]
    assert torch.equal((largest * sizes).long(), sizes - 1)
    table = torch.arange(41_131.0).unsqueeze(-1).expand(-1, 3)
    assert chosen(table, torch.stack([largest, 0 * largest]))[:, 0].tolist() == [41_130, 0]


# -- draws -----------------------------------------------------------------------------------------


def clients_drawn(draws: Tensor, clients: int) -> list[int]:
    index = torch.arange(clients, dtype=torch.float32).unsqueeze(-1).expand(-1, 3)
    return chosen(index, draws)[:, 0].long().tolist()


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_one_pair_per_image() -> None:
    """The same client for mean and std; another for each image and each batch; all alike often.

    70,000 draws over 7 clients: χ² with 6 degrees of freedom is below 22.5 in 99.9 % of cases.
    """
    generator = torch_rng(0, "draws", 0, 0)
    batches = [method().draw(generator, 700) for _ in range(100)]
    assert all(torch.equal(draws["mean"], draws["std"]) for draws in batches)
    assert len({clients_drawn(d["mean"], 7)[0] for d in batches}) == 7  # redrawn each time
    drawn = [k for d in batches for k in clients_drawn(d["mean"], 7)]
    assert chi_square(np.bincount(drawn, minlength=7)) < 22.5
    successive = np.zeros((7, 7))
    np.add.at(successive, (drawn[:-1], drawn[1:]), 1)
    assert chi_square(successive) < 85.4  # 48 degrees of freedom, 99.9 %


def test_one_mean_and_one_independent_std_per_batch() -> None:
    """Two clients: the four combinations are equally frequent (χ², 3 degrees of freedom, 16.3)."""
    generator = torch_rng(0, "draws", 0, 0)
    combinations = np.zeros((2, 2))
    for _ in range(2000):
        draws = method(draw="batch_independent").draw(generator, 5)
        assert draws["mean"].shape == draws["std"].shape == (5,)
        (mean,), (std,) = (set(clients_drawn(draws[name], 2)) for name in ("mean", "std"))
        combinations[mean, std] += 1
    assert chi_square(combinations) < 16.3


class Watched(FedRDN):
    """Notes which client's generator was asked for what; the clients are told apart by it."""

    def __init__(self, config: Any, task: Task) -> None:
        super().__init__(config, task)
        self.drawn: dict[int, list[Tensor]] = {}

    def draw(self, generator: torch.Generator, images: int) -> dict[str, Tensor]:
        draws = super().draw(generator, images)
        self.drawn.setdefault(generator.initial_seed(), []).append(draws["mean"])
        return draws


def test_draws_belong_to_seed_round_and_client() -> None:
    """Each client of each round has its own generator and draws once per step, in any stack."""
    noted = []
    for stack in (8, 1):
        toy = Toy("fedrdn", method_class=Watched, rounds=2, stack=stack)
        toy.run()
        noted.append(toy.method.drawn)
    assert noted[0].keys() == noted[1].keys()
    seeds = {(t, k): torch_rng(0, "draws", t, k).initial_seed() for t in range(2) for k in range(5)}
    assert noted[0].keys() == set(seeds.values())
    for (_, k), seed in seeds.items():
        steps = 2 * -(-(20, 7, 1, 13, 19)[k] // 4)  # two epochs of batches of four
        first, second = (torch.stack(drawn[seed]) for drawn in noted)
        assert first.shape == (steps, 4)
        assert torch.equal(first, second)
        assert len(first.unique(dim=0)) == steps  # nothing is drawn twice


# -- identities ------------------------------------------------------------------------------------


def fedavg_with(mean: Tensor, std: Tensor, **options: Any) -> Toy:
    """FedAvg on images normalised with the given constants."""
    toy = Toy("fedavg", **options)
    toy.method.task = replace(toy.task, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    return toy


def alike(images: int = 60) -> LabelledImages:
    """Images that are permutations of the same pixels: different, with the same statistics."""
    rng, data = np.random.default_rng(0), toy_data(images)
    first = data.images.pixels[0].numpy().reshape(3, 16)
    pixels = np.stack([[rng.permutation(channel) for channel in first] for _ in range(images)])
    return replace(data, images=TensorImages(torch.from_numpy(pixels.reshape(images, 3, 4, 4))))


@pytest.mark.parametrize("draw", ["image_pair", "batch_independent"])
@pytest.mark.parametrize("collect", ["everyone", "cohort"])
def test_equal_statistics_are_fedavg(draw: str, collect: str) -> None:
    """Whomever is drawn, the normalisation is the same: FedAvg with it, bit for bit."""
    options = {"data": alike(), "cohort": 3}
    config = {"draw": draw, "collect": collect}
    state, _ = Toy("fedrdn", config, **options).run()
    table = state.get(TABLE)
    assert (table["mean"] == table["mean"][0]).all()
    assert (table["std"] == table["std"][0]).all()
    plain_toy = fedavg_with(table["mean"][0], table["std"][0], **options)
    assert same_bits(model_of(state), model_of(plain_toy.run()[0]))
    assert not same_bits(model_of(state), model_of(Toy("fedavg", **options).run()[0]))


def test_one_client_is_its_own_normalisation() -> None:
    state, _ = Toy("fedrdn", sizes=(9,)).run()
    table = state.get(TABLE)
    expected, _ = fedavg_with(table["mean"][0], table["std"][0], sizes=(9,)).run()
    assert same_bits(model_of(state), model_of(expected))


def test_different_statistics_are_not_fedavg() -> None:
    data = toy_data(60)
    pixels = data.images.pixels.clone()
    pixels[:20] //= 2  # client 0 has darker images
    data = replace(data, images=TensorImages(pixels))
    state, _ = Toy("fedrdn", data=data).run()
    pooled = FedRDN(FedRDN.Config(), TASK).evaluation(state)[STATISTICS]
    mean = fedavg_with(pooled["pooled_mean"], pooled["pooled_std"], data=data)
    assert not same_bits(model_of(state), model_of(mean.run()[0]))
    independent, _ = Toy("fedrdn", {"draw": "batch_independent"}, data=data).run()
    assert not same_bits(model_of(state), model_of(independent))


# -- failures and resuming -------------------------------------------------------------------------


def test_drop_outs_are_not_listed() -> None:
    """Who was lost before the first round is not asked again; training goes on without them."""
    settings = FederationSettings(drop_rate=0.5)
    state, events = Toy("fedrdn", sizes=(9,) * 6 + (6,), federation=settings).run()
    lost = [entry["client"] for entry in events[0]["left_out"]]
    assert 0 < len(lost) < 7
    there = [k for k in range(7) if k not in lost]
    assert state.get(TABLE)["client"].tolist() == there
    assert set(lost) & {*events[1]["reported"], *events[2]["reported"]}
    assert [e["bytes_down"] - 7 * MODEL for e in events] == [7 * 24 * (len(there) + 1)] * 3


class Deaf:
    """A transport on which nobody answers a question for statistics."""

    def __init__(self, transport: Any) -> None:
        self.inner, self.sizes = transport, transport.sizes

    def exchange(
        self, stage: Stage, round: int, messages: Mapping[int, Record]
    ) -> Iterator[Reply | Failure]:
        if stage.name == "statistics":
            return (Failure(k, stage.name, round, "gone") for k in messages)
        return self.inner.exchange(stage, round, messages)


def test_nobody_answers() -> None:
    """The model's own normalisation: FedAvg bit for bit, with the same messages."""
    settings = FederationSettings(max_failures=1.0)
    toy = Toy("fedrdn", federation=settings)
    toy.transport = Deaf(toy.transport)
    state, events = toy.run()
    assert not state.get(TABLE)
    assert toy.method.evaluation(state) == {}
    assert [e["bytes_down"] for e in events] == [5 * MODEL] * 3
    assert [len(e["left_out"]) for e in events] == [5, 0, 0]
    assert same_bits(state, Toy("fedavg").run()[0])


def test_the_list_survives_a_checkpoint(tmp_path: Path) -> None:
    """A growing list and the draws of each round: resumed runs end in the same bits."""
    for draw in ("image_pair", "batch_independent"):
        toy = Toy("fedrdn", {"collect": "cohort", "draw": draw}, rounds=3, cohort=2)
        whole = toy.loop().run(
            toy.initial(), 0, lambda e: None, lambda t, s: save_record(tmp_path / str(t), s)
        )
        resumed = toy.loop().run(load_record(tmp_path / "0"), 1, lambda e: None, lambda t, s: None)
        assert same_bits(whole, resumed)
        assert len(whole.get(TABLE)["client"]) > 2


# -- evaluation ------------------------------------------------------------------------------------


def test_evaluation_uses_the_pooled_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of the test set as in a run, against the model applied to (x/255 − μ̄)/σ̄."""
    train, test = toy_data(40), toy_data(20, seed=1)
    tree = {
        "run": {"method": "fedrdn", "rounds": 1},
        "split": {"name": "iid", "clients": 3},
        "model": {"name": "vit", "width": 8, "depth": 1, "heads": 2, "patch": 4},
    }
    assembly = assemble(compose(tree), data=DataSet("toy", tuple("abcdef"), train, test))
    state = assembly.initial_state().replace(THREE.groups)
    scores: list[Tensor] = []
    call = Scorer.__call__

    def watch(scorer: Scorer, images: Tensor) -> Tensor:
        scores.append(call(scorer, images))
        return scores[-1]

    monkeypatch.setattr(Scorer, "__call__", watch)
    evaluate(assembly, state)
    share = np.array([1, 2, 5]) / 8
    mean, std = (share @ THREE.get(TABLE)[n].double().numpy() for n in ("mean", "std"))
    pixels = test.images.pixels.numpy() / 255
    images = (pixels - mean[:, None, None]) / std[:, None, None]
    params = {n: t[None] for n, t in state.get(PARAMS).items()}
    outputs = assembly.blueprint.model.apply(params, torch.from_numpy(images).float()[None])[0]
    torch.testing.assert_close(torch.cat(scores), outputs.sigmoid(), atol=1e-5, rtol=0)
    scores.clear()
    evaluate(assembly, assembly.initial_state())  # nobody heard: the model's own normalisation
    assert (torch.cat(scores) - outputs.sigmoid()).abs().max() > 1e-3


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"draw": "pixel"}, {"collect": "nobody"}, {"min_images": 0}, {"min_std": 0.0}]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        build(FedRDN.Config, wrong, "methods.fedrdn")
