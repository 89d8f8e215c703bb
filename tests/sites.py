"""Three small sites with their own tables, and a post that carries parcels to them in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from fedharmony.site.parcel import Parcel
from fedharmony.site.settings import load_site
from fedharmony.site.worker import Worker

CLASSES = ("cat", "dog", "tree")
SIZES = {"ada": 12, "ben": 18, "cy": 8}
#: The demo's settings on these images, small; a single client in a stack, as at a site.
SMALL = [
    *("data.name=table", "data.table=labels.csv", "data.image_size=16", "split.name=natural"),
    *("data.classes=['cat', 'dog', 'tree']", "run.rounds=3", "federation.cohort=2"),
    *("split.clients=", "model.width=8", "model.depth=1", "model.heads=2", "model.patch=8"),
    *("train.epochs=1", "train.batch_size=5", "engine.device=cpu", "engine.threads=1"),
    *("engine.stack=1", "methods.spherefed.projection=24"),
]


def draw_site(folder: Path, name: str, count: int) -> list[str]:
    """Images of a site, with a table of its own; its rows as a pooled table has them."""
    (folder / name).mkdir(parents=True)
    rng, rows, pooled = np.random.default_rng(count), ["image,labels,split"], []
    for i in range(count + 4):
        pixels = rng.integers(0, 255, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{i}.png")
        present = [c for c in CLASSES if rng.random() < 0.5]
        labels, split = "|".join(present) or "|", "train" if i < count else "test"
        rows.append(f"{i}.png,{labels},{split}")
        pooled.append(f"{name}/{i}.png,{labels},{split},{name}")
    (folder / name / "labels.csv").write_text("\n".join(rows) + "\n")
    return pooled


def draw_sites(folder: Path) -> list[str]:
    """All sites below a folder, and the table of all; changes that make a run of the latter."""
    rows = [row for name, count in SIZES.items() for row in draw_site(folder, name, count)]
    (folder / "labels.csv").write_text("\n".join(["image,labels,split,user", *rows]) + "\n")
    return [*SMALL, f"data.path={folder}"]


def site_file(folder: Path, name: str, **changes: str) -> Path:
    """The ``site.toml`` of a site; ``changes`` are lines of its sections."""
    sections = {
        "site": f'name = "{name}"\nclasses = {list(CLASSES)}',
        "data": 'name = "table"\npath = "."\nimage_size = 16',
        "policy": 'statistics = "all"',
        "engine": 'device = "cpu"\nthreads = 1',
    } | changes
    file = folder / name / "site.toml"
    file.write_text("\n".join(f"[{key}]\n{lines}" for key, lines in sections.items()) + "\n")
    return file


def workers(folder: Path, **changes: str) -> dict[str, Worker]:
    return {name: Worker(load_site(site_file(folder, name, **changes))) for name in SIZES}


class Memory:
    """A post in memory: nodes answer in random order, and every parcel becomes bytes."""

    def __init__(self, sites: Mapping[str, Worker], seed: int = 0, registered: bool = True) -> None:
        self.sites = {1000 + i: (name, w) for i, (name, w) in enumerate(sites.items())}
        self.registered, self.rng, self.sent = registered, random.Random(seed), 0
        self.waiting: dict[str, tuple[int, bytes]] = {}
        self.offline: set[int] = set()
        #: What a node answers instead; nothing is silence.
        self.instead: dict[int, Callable[[Parcel], Parcel | str | None]] = {}
        self.log: list[tuple[int, Parcel]] = []

    def nodes(self) -> dict[int, str]:
        online = [n for n in self.sites if n not in self.offline]
        self.rng.shuffle(online)
        return {n: self.sites[n][0] if self.registered else "" for n in online}

    def push(self, parcels: Mapping[int, Parcel], ttl_s: float) -> dict[str, int]:
        numbers = {}
        for node, parcel in parcels.items():
            self.sent += 1
            self.log.append((node, parcel))
            self.waiting[str(self.sent)] = node, parcel.to_bytes()
            numbers[str(self.sent)] = node
        return numbers

    def pull(self, numbers: Collection[str]) -> dict[str, Parcel | str]:
        due = [n for n in numbers if n in self.waiting]
        answers: dict[str, Parcel | str] = {}
        for number in self.rng.sample(due, k=min(len(due), 1)):
            node, data = self.waiting[number]
            question = Parcel.from_bytes(data)
            if (instead := self.instead.get(node)) is None:
                found: Parcel | str | None = self.sites[node][1].answer(question)
            else:
                found = instead(question)
            if found is not None:
                del self.waiting[number]
                whole = isinstance(found, Parcel)
                answers[number] = Parcel.from_bytes(found.to_bytes()) if whole else found
        return answers
