"""Features of images in a pre-trained backbone that stays as it is, as a file of feature vectors.

What a party with few, private images trains is often the last layer alone: its input can be
computed once, and only ``width`` numbers an image are left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedharmony.data.base import Images, cache_folder
from fedharmony.experiments.build import Assembly, assemble
from fedharmony.experiments.machine import switch_torch
from fedharmony.experiments.settings import load_settings
from fedharmony.files import replacing

#: Images that go through the backbone at a time.
BATCH = 128


def embedded(config: str, changes: Sequence[str]) -> Path:
    """The file of features of a data set's images, made if it is not in the cache folder yet.

    It keeps the data set's classes, names, split and unknown labels.
    """
    settings = load_settings(config, ["run.method=fedavg", *changes])
    switch_torch(settings.engine)
    assembly = assemble(settings)
    data, (parameters, _) = assembly.loaded, assembly.blueprint.parameters
    sha = hashlib.sha256(json.dumps({**assembly.bound, "partition": ""}).encode())
    for name, tensor in sorted(parameters.items()):
        if not name.startswith("head."):
            sha.update(name.encode() + tensor.numpy().tobytes())
    file = cache_folder() / f"features-{sha.hexdigest()[:20]}.npz"
    if not file.exists():
        parts = {"train": data.train, "test": data.test}
        known = [np.ones_like(p.labels) if p.known is None else p.known for p in parts.values()]
        names = [
            part.ids or [f"{which} {i}" for i in range(len(part))] for which, part in parts.items()
        ]
        with replacing(file) as out:
            np.savez(
                out,
                X=np.concatenate([features(assembly, p.images) for p in parts.values()]),
                Y=np.concatenate([part.labels for part in parts.values()]),
                known=np.concatenate(known),
                ids=np.concatenate(names),
                split=np.repeat([*parts], [len(part) for part in parts.values()]),
                classes=np.array(data.classes),
            )
    return file


@torch.no_grad()
def features(assembly: Assembly, images: Images) -> npt.NDArray[np.float32]:
    """What the backbone makes of each image, (N, D), before any training."""
    plan = assembly.blueprint
    params = {n: t.to(assembly.device).unsqueeze(0) for n, t in plan.parameters[0].items()}
    found = []
    for index in torch.split(torch.arange(len(images)), BATCH):
        shown = plan.method.normalise(images.gather(index, assembly.device), {}, {})
        found.append(plan.model.features(params, shown.unsqueeze(0))[0].float().cpu())
        print(f"\r{min(int(index[-1]) + 1, len(images)):,} images embedded", end="", flush=True)
    print()
    return torch.cat(found).numpy()
