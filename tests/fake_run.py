"""Writes run folders that look like real ones, without training anything (for report tests).

Everything is drawn from seeded generators: the same arguments give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fedharmony.config import to_toml
from fedharmony.experiments.settings import load_settings
from fedharmony.rng import numpy_rng

#: Test images.
TEST = 1000
METRICS = ("mAP", "O-mAP", "CP", "CR", "CF1", "OP", "OR", "OF1")
METHODS = (
    "fedavg",
    "fedprox",
    "fednova",
    "fedcurv",
    "spherefed",
    "fedlgt",
    "fedrdn",
    "fedharmony",
)


def class_names(count: int) -> list[str]:
    """``count`` label names: colour and digit, as in the demo, then colour and larger numbers."""
    colours = ("red", "blue", "green", "gold", "grey", "pink")
    per_colour = 10 if count <= 20 else math.ceil(count / len(colours))
    return [f"{colour} {digit}" for colour in colours for digit in range(per_colour)][:count]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _planted(classes: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A block correlation matrix and the block of each label (the last labels in no block)."""
    blocks = np.arange(classes) % max(2, min(6, classes // 5))
    blocks[classes - max(1, classes // 10) :] = -1
    same = (blocks[:, None] == blocks[None, :]) & (blocks[:, None] >= 0)
    noise = rng.normal(0.0, 0.04, (classes, classes))
    planted = np.where(same, 0.45, -0.08) + (noise + noise.T) / 2
    np.fill_diagonal(planted, 1.0)
    return np.clip(planted, -1, 1), blocks


def _shrunk(matrix: np.ndarray, scale: float, noise: float, rng: np.random.Generator) -> np.ndarray:
    jitter = rng.normal(0.0, noise, matrix.shape)
    out = np.clip(matrix * scale + (jitter + jitter.T) / 2, -1, 1)
    np.fill_diagonal(out, 1.0)
    return out


def _shares(counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Label shares of clients, largest first, in at most 400 groups."""
    rows = (counts / np.maximum(sizes, 1)[:, None])[np.argsort(-sizes, kind="stable")]
    return np.stack([part.mean(0) for part in np.array_split(rows, min(len(rows), 400))])


def _harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b else 0.0


def _metrics(level: float, rng: np.random.Generator) -> dict[str, float]:
    """Eight plausible fractions around the quality ``level`` in [0, 1]."""
    jitter = rng.normal(0.0, 0.004, 6)
    values = {
        "mAP": 0.14 + 0.64 * level + jitter[0],
        "O-mAP": 0.16 + 0.66 * level + jitter[1],
        "CP": 0.1 + 0.68 * level + jitter[2],
        "CR": max(0.0, 0.03 + 0.58 * level + jitter[3]),
        "OP": 0.2 + 0.6 * level + jitter[4],
        "OR": max(0.0, 0.05 + 0.6 * level + jitter[5]),
    }
    values["CF1"] = _harmonic(values["CP"], values["CR"])
    values["OF1"] = _harmonic(values["OP"], values["OR"])
    return {name: float(np.clip(values[name], 0, 1)) for name in METRICS}


def write_fake_run(
    folder: Path,
    *,
    method: str = "fedharmony",
    label: str | None = None,
    seed: int = 0,
    classes: int = 20,
    names: Sequence[str] | None = None,
    rounds: int = 30,
    clients: int = 20,
    cohort: int = 8,
    done: int | None = None,
    status: str = "completed",
    results: bool = True,
    failures: bool = True,
) -> Path:
    """Write a run folder.

    Args:
        folder: Where to write; made if it does not exist.
        method: Decides the quality of the curves, the log keys and (``fedharmony``) whether
            consensus, clusters and planted correlation are there.
        label: Display name; ``method`` if None.
        seed: Run seed; the data and the partition do not depend on it.
        classes: Number of labels.
        names: Label names; colours and digits if None.
        rounds: Rounds the run was to have.
        clients: Number of clients.
        cohort: Clients per round.
        done: Rounds that were run; all if None.
        status: How the run ended; ``"unfinished"`` writes no finish event.
        results: Whether ``results.json`` and ``matrices.safetensors`` are there.
        failures: Whether some clients drop out or fail.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    label = label or method
    names = list(names) if names is not None else class_names(classes)
    classes = len(names)
    done = rounds if done is None else done
    data, run = numpy_rng(7, "data"), numpy_rng(seed, method)
    harmony = method == "fedharmony"
    strength = 0.80 + 0.02 * (METHODS.index(method) if method in METHODS else 3)

    planted, blocks = _planted(classes, data)
    true = _shrunk(planted, 0.95, 0.03, data)
    sizes = np.sort(data.integers(40, 400, clients))[data.permutation(clients)]
    prevalence = data.uniform(0.04, 0.35, classes)
    shares = np.array([data.dirichlet(np.full(classes, 0.3)) * prevalence.sum() for _ in sizes])
    counts = np.minimum((shares * sizes[:, None]).round(), sizes[:, None]).astype(np.int64)
    parameters = 131_220

    changes = [f"run.seed={seed}", f"run.rounds={rounds}", "federation.drop_rate=0.05"]
    changes += [f"data.train={sizes.sum()}", f"data.test={TEST}", f"split.clients={clients}"]
    demo = load_settings("demo", [*changes, f"federation.cohort={min(cohort, clients)}"])
    config = (demo.central(seed) if method == "central" else demo.with_run(method)).tree()
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    _write_json(
        folder / "environment.json",
        {
            "fedharmony": "0.1.0",
            "python": "3.12.4",
            "torch": "2.6.0",
            "numpy": "2.1.0",
            "platform": "Linux-6.1-x86_64",
            "device": "cpu",
            "threads": 2,
            "command": f"fedharmony run demo.toml --method {label} --seed {seed}",
        },
    )
    _write_json(
        folder / "split_report.json",
        {
            "clients": clients,
            "size_min": int(sizes.min()),
            "size_median": float(np.median(sizes)),
            "size_max": int(sizes.max()),
            "jensen_shannon": 0.146,
            "correlation_drift": 0.134,
            "correlation_drift_iid": 0.103,
            "sha256": "9f2c" * 16,
        },
    )

    lines: list[dict[str, Any]] = [
        {
            "event": "start",
            "time": "2026-01-05T10:00:00+00:00",
            "method": method,
            "label": label,
            "rounds": rounds,
            "clients": clients,
            "cohort": cohort,
            "classes": names,
            "train_images": int(sizes.sum()),
            "test_images": TEST,
            "parameters": parameters,
            "client_names": None,
            "device": "cpu",
            "precision": "float32",
            "compiled": False,
            "graphs": False,
            "resumed_at": None,
        }
    ]
    schedule = numpy_rng(seed, "schedule")
    metrics, structure = _metrics(0.0, run), _structure(0.0)
    seconds = bytes_up = bytes_down = 0.0
    for index in range(done):
        members = sorted(int(k) for k in schedule.choice(clients, min(cohort, clients), False))
        dropped = members[:1] if failures and index % 9 == 4 else []
        failed = members[-1:] if failures and index % 14 == 7 else []
        reported = [k for k in members if k not in dropped and k not in failed]
        raw = np.array([sizes[k] for k in reported], dtype=float)
        if harmony:
            raw = raw ** (1 - index / rounds) * run.uniform(0.5, 1.5, len(reported))
        weights = raw / raw.sum()
        progress = 1 - math.exp(-3.2 * (index + 1) / rounds)
        level = strength * progress + float(run.normal(0, 0.008))
        examples = int(sum(sizes[k] for k in reported))
        spent = 0.9 + 0.2 * float(run.random())
        log: dict[str, float] = {}
        if harmony:
            log = {
                "alpha": max(0.0, 1 - index / rounds),
                "align_weight": min(1.0, index / 5),
                "discrepancy": 0.02 * math.exp(-index / 12) + 0.001 * float(run.random()),
                "effective_clients": float(1 / (weights**2).sum()),
                "cluster_agreement": 0.6 + 0.35 * progress,
            }
        elif method == "fedcurv":
            log = {"pull_strength": 0.004 * math.exp(-index / 15) + 0.0004 * float(run.random())}
        down, up = 4 * parameters * len(members), 4 * parameters * len(reported)
        lines.append(
            {
                "event": "round",
                "time": f"2026-01-05T10:{index // 60:02d}:{index % 60:02d}+00:00",
                "round": index,
                "cohort": members,
                "reported": reported,
                "left_out": [
                    {
                        "client": k,
                        "name": "",
                        "stage": "update",
                        "round": index,
                        "reason": "loss is not finite" if k in failed else "it was lost",
                        "cause": "failed" if k in failed else "dropped",
                    }
                    for k in (*dropped, *failed)
                ],
                "fallbacks": {},
                "examples": examples,
                "images": examples,
                "padding": 0.0,
                "seconds": spent,
                "images_per_second": examples / spent,
                "bytes_down": down,
                "bytes_up": up,
                "train_loss": 0.12 + 0.5 * math.exp(-4 * (index + 1) / rounds),
                "weights": {str(k): float(w) for k, w in zip(reported, weights, strict=True)},
                "log": log,
            }
        )
        metrics = _metrics(level, run)
        structure = _structure(level + (0.08 if harmony else 0.0))
        lines.append(
            {
                "event": "evaluate",
                "time": f"2026-01-05T10:{index // 60:02d}:{index % 60:02d}+00:00",
                "round": index,
                "seconds": 0.31,
                "metrics": metrics,
                "structure": structure,
            }
        )
        seconds, bytes_up, bytes_down = seconds + spent + 0.31, bytes_up + up, bytes_down + down
    if status != "unfinished":
        lines.append(
            {
                "event": "finish",
                "time": "2026-01-05T10:59:59+00:00",
                "status": status,
                "seconds": seconds,
            }
            | ({} if status == "completed" else {"reason": "stopped by Ctrl-C"})
        )
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    if not results:
        return folder

    positives = np.maximum(1, (prevalence * TEST).astype(int))
    positives[-1] = 0
    aps = np.clip(metrics["mAP"] + run.normal(0, 0.12, classes), 0.02, 0.99)
    rate = float(positives.mean()) / TEST
    _write_json(
        folder / "results.json",
        {
            "method": method,
            "label": label,
            "status": status,
            "seed": seed,
            "rounds_done": done,
            "rounds": rounds,
            "metrics": metrics,
            "structure": structure,
            "per_label": [
                {
                    "label": name,
                    "ap": None if positives[i] == 0 else float(aps[i]),
                    "precision": float(np.clip(aps[i] + 0.05, 0, 1)),
                    "recall": float(np.clip(aps[i] - 0.1, 0, 1)),
                    "positives": int(positives[i]),
                }
                for i, name in enumerate(names)
            ],
            "baselines": {
                "prevalence": dict.fromkeys(METRICS, 0.0) | {"mAP": rate, "O-mAP": 1.4 * rate},
                "all positive": {
                    "mAP": rate,
                    "O-mAP": rate,
                    "CP": rate,
                    "CR": 1.0,
                    "CF1": _harmonic(rate, 1.0),
                    "OP": rate,
                    "OR": 1.0,
                    "OF1": _harmonic(rate, 1.0),
                },
            },
            "n_classes_with_positives": int((positives > 0).sum()),
            "n_classes_never_predicted": 1,
            "seconds": seconds,
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
            "parameters_sha256": "ab12" * 16,
            "config_sha256": "cd34" * 16,
            "metric_options": {
                "threshold": 0.5,
                "ap_ties": "grouped",
                "ap_bins": None,
                "empty_class": "skip",
                "cr_over": "all",
                "op_mode": "exact",
                "f1_mode": "of_means",
                "topk": None,
            },
        },
    )
    defined = (positives > 0).astype(np.uint8)
    learned = _shrunk(true, 0.7 if harmony else 0.5, 0.05, run)
    tensors: dict[str, np.ndarray] = {
        "true": true.astype(np.float32),
        "true_defined": defined,
        "learned": learned.astype(np.float32),
        "learned_hard": _shrunk(true, 0.85, 0.08, run).astype(np.float32),
        "client_label_shares": _shares(counts, sizes),
        "client_sizes": sizes.astype(np.int64),
    }
    if harmony:
        known = np.ones((classes, classes), dtype=np.uint8)
        known[0, -2] = known[-2, 0] = 0
        tensors |= {
            "planted": planted.astype(np.float32),
            "consensus": _shrunk(true, 0.6, 0.03, run).astype(np.float32),
            "consensus_known": known,
            "clusters": blocks.astype(np.int64),
        }
    save_file(tensors, folder / "matrices.safetensors")
    return folder


def _structure(level: float) -> dict[str, float | None]:
    level = min(1.0, max(0.0, level))
    return {
        "n_pairs": 190,
        "true_mean_abs": 0.12,
        "soft_rmse": 0.16 - 0.09 * level,
        "soft_pearson": 0.9 * level,
        "soft_mean_abs": 0.04 + 0.08 * level,
        "hard_rmse": 0.2 - 0.1 * level,
        "hard_pearson": 0.8 * level,
        "hard_mean_abs": 0.06 + 0.07 * level,
    }


def write_fake_comparison(
    folder: Path,
    methods: Sequence[str] = ("fedavg", "fedharmony"),
    seeds: Sequence[int] = (0, 1, 2),
    **options: Any,
) -> Path:
    """Write a comparison folder: one run per method and seed, and ``comparison.json``."""
    runs = []
    for method in methods:
        for seed in seeds:
            relative = f"{method.replace(':', '-')}/seed-{seed}"
            write_fake_run(
                folder / relative,
                method=method.split(":")[0],
                label=method,
                seed=seed,
                **options,
            )
            runs.append({"label": method, "seed": seed, "folder": relative})
    _write_json(
        folder / "comparison.json",
        {"config": "demo", "methods": list(methods), "seeds": list(seeds), "runs": runs},
    )
    return folder
