"""The card of an exported model: what it is, how good, and what it cannot do, in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedharmony.errors import some
from fedharmony.experiments.trained import TrainedModel
from fedharmony.models.base import FeatureSpec
from fedharmony.privacy import REPRODUCIBLE

#: Labels that a table lists; of more, config.json has them all.
MOST_ROWS = 100


def model_card(model: TrainedModel, config: Mapping[str, Any], onnx: bool) -> str:
    """The card as Markdown, from ``config.json``; ``onnx``: ``model.onnx`` stands beside it."""
    settings, results = model.settings, model.results
    title = f"# {settings.data.common.name}, {len(model.classes)} labels ({results['label']})"
    parts = [
        title,
        _what(model),
        "## How good it is",
        _metrics(results),
        _labels(model),
        "## How to use it",
        *_use(model, config, onnx),
        *_privacy(model),
        "## Limits",
        "\n".join(f"- {sentence}" for sentence in _limits(model)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _what(model: TrainedModel) -> str:
    settings, sizes = model.settings, [n for n in model.facts.sizes.values() if n]
    where = "in one place" if settings.federation.central else f"by {len(sizes):,} clients"
    kind = "samples" if isinstance(model.facts.input, FeatureSpec) else "images"
    private = bool(model.results.get("privacy"))  # ε covers neither how many, nor the seed
    amount = "" if private else f"{sum(sizes):,} {kind} of "
    seed = "" if private else f" (seed {settings.run.seed})"
    return (
        f"A multi-label model: it gives each of {len(model.classes)} labels a score from 0 to 1. "
        f"It takes {model.facts.input}. It was trained with fedharmony {where} on "
        f"{amount}the data set `{settings.data.common.name}`, with the method "
        f"`{settings.run.method}` in {model.results['rounds_done']:,} rounds{seed}, "
        f"as a `{settings.model.common.name}`."
    )


def privacy_facts(spent: Mapping[str, Any]) -> list[str]:
    """What a run promises its clients, for card, report and terminal.

    Earlier versions drew noise from the seed of the run, and did not say so.

    >>> privacy_facts({"epsilon": 7.996, "delta": 1e-5, "rounds": 12})[1:]
    ['rounds done: 12', 'not private: its noise can be reproduced']
    """
    facts = [f"differential privacy of clients: ε = {spent['epsilon']:.2f}, δ = {spent['delta']:g}"]
    words = {"unit": "unit of protection: {}", "rounds": "rounds done: {:,}"}
    words |= {"noise_by": "noise added by the {}", "note": "{}"}
    facts += [text.format(spent[key]) for key, text in words.items() if spent.get(key) is not None]
    if spent.get("reproducible", True) and REPRODUCIBLE not in str(spent.get("note")):
        facts.append(REPRODUCIBLE)
    return facts


def _privacy(model: TrainedModel) -> Iterator[str]:
    if spent := model.results.get("privacy"):
        more = " and the means of features" if isinstance(model.facts.input, FeatureSpec) else ""
        yield "## Privacy"
        yield "\n".join(f"- {fact}" for fact in privacy_facts(spent))
        yield f"ε is about what clients sent in training. It does not cover the test images{more}."


def _metrics(results: Mapping[str, Any]) -> str:
    """On the test set, beside what a predictor reaches that never looks at the image."""
    chosen = (results.get("thresholds") or {}).get("metrics", {})
    floor = results["baselines"]["prevalence"]
    own = ["with its own thresholds"] if chosen else []
    heads = ["", "this model", *own, "label shares only"]
    rows = [f"| {' | '.join(heads)} |", f"| --- |{' --: |' * (len(heads) - 1)}"]
    for name, value in results["metrics"].items():
        cells = [name, _percent(value)]
        cells += [_percent(chosen.get(name))] if chosen else []
        rows.append(f"| {' | '.join([*cells, _percent(floor[name])])} |")
    return (
        "On its test set, in per cent (one run; mAP and O-mAP rank scores, the others count labels "
        f"at the threshold {results['metric_options']['threshold']:g}):\n\n" + "\n".join(rows)
    )


def _labels(model: TrainedModel) -> str:
    if len(model.classes) > MOST_ROWS:
        return "`config.json` lists the labels and their thresholds."
    rows = [
        "| label | test positives | average precision | threshold |",
        "| --- | --: | --: | --: |",
    ]
    for entry, threshold in zip(model.results["per_label"], model.thresholds, strict=True):
        name = entry["label"].replace("|", "\\|")
        cells = [name, f"{entry['positives']:,}", _percent(entry["ap"]), f"{threshold:.3f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _use(model: TrainedModel, config: Mapping[str, Any], onnx: bool) -> Iterator[str]:
    own = config["fedharmony"]
    mean, std = own["normalisation"]["mean"], own["normalisation"]["std"]
    if "architecture" in config:
        yield (
            "```python\nimport timm, torch\n\n"
            'model = timm.create_model("local-dir:THIS_FOLDER", pretrained=True).eval()\n'
            "scores = model(images).sigmoid()  # images: (N, 3, H, W), normalised\n```"
        )
    else:
        yield (
            f"It is no model of timm: {own['why_not_timm']}. `model.safetensors` has fedharmony's "
            "own names. Use `fedharmony predict RUN IMAGES`"
            + (", or `model.onnx`." if onnx else ", or export it again with `--onnx`.")
        )
    if isinstance(model.facts.input, FeatureSpec):
        yield "Feature x becomes (x − mean) / std first; `config.json` has both, and the names."
    else:
        size = " × ".join(map(str, own["image_size"]))
        yield (
            f"Images are turned upright, converted to RGB, resized to {size} pixels "
            f"(`{own['resize']}`, bilinear with antialiasing), divided by 255, and normalised with "
            f"mean {_numbers(mean)} and standard deviation {_numbers(std)}."
        )
    if onnx:
        yield (
            "`model.onnx` takes `images` as they are (no normalisation; uint8 pixels or float32 "
            "features) and gives `scores`."
        )
    yield "A label is given where its score reaches its threshold (`thresholds` in `config.json`)."


def _limits(model: TrainedModel) -> Iterator[str]:
    results = model.results
    yield "It was measured on one test set. On images of another kind it will be worse."
    yield "Scores are not probabilities that were checked: look at the calibration in the report."
    if results.get("thresholds") is None:
        yield "All labels share one threshold, which suits some of them badly."
    unmeasured = [e["label"] for e in results["per_label"] if not e["positives"]]
    if unmeasured:
        yield f"No test image has {some(unmeasured)}: nothing is known of how well it is found."
    if never := results["n_classes_never_predicted"]:
        yield f"{never} of {len(model.classes)} labels were given to no test image at all."
    if lost := results["clients_lost"]:
        yield f"{lost:,} times a client failed and was left out of training."
    if not model.settings.federation.central and not results.get("privacy"):
        yield (
            "Clients kept their images. A model can still reveal something about what it was "
            "trained on, and this one was trained without noise."
        )
    yield "It has no licence of its own: ask whoever trained it, and mind that of the data."


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
