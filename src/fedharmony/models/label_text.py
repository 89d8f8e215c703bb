"""Text embeddings of label names, as a file: made once, read by everybody.

The file is a safetensors file with three tensors of unit rows, ``labels`` (C, E), ``negative`` (E,)
and ``positive`` (E,), and the label names as JSON under ``labels`` in its metadata.

To make one where the ``transformers`` package and CLIP's weights are available::

    python -m fedharmony.models.label_text --classes names.txt --out labels.safetensors

``names.txt`` has one label per line, in the order of the data. A label that stands for several
things may list them after a tab (``animal<TAB>dog, cat, bird``): the list is then put into the
sentence in place of the name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedharmony.errors import DataError, FedHarmonyError
from fedharmony.files import write_atomically

#: The sentence a label is put into, and the words for its state.
SENTENCE = "The photo contains {}."
WORDS = ("negative", "positive")

#: Sentences to vectors (number, E).
Encoder = Callable[[Sequence[str]], Tensor]


def load_label_text(path: str | Path, labels: Sequence[str], width: int) -> tuple[Tensor, Tensor]:
    """Label table (C, width) and state table (3, width): unknown (zero), negative, positive."""
    make = "Make one with 'python -m fedharmony.models.label_text' (see its --help)."
    try:
        with safe_open(path, framework="pt") as file:
            names = list(json.loads((file.metadata() or {}).get("labels", "[]")))
            table, *states = (file.get_tensor(name).float() for name in ("labels", *WORDS))
    except FileNotFoundError:
        raise DataError(f"There is no file of label text embeddings at {path}. {make}") from None
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not a file of label text embeddings ({error}). {make}"
        ) from None
    if names != list(labels):
        odd = next(
            (f"{a!r} instead of {b!r}" for a, b in zip(names, labels, strict=False) if a != b),
            f"{len(names)} instead of {len(labels)} labels",
        )
        raise DataError(
            f"{path} holds text embeddings of other labels than the data's, or in another order: "
            f"{odd}. {make}"
        )
    found = table.shape[-1] if table.dim() else 1
    if found != width:
        raise DataError(
            f"{path} holds text embeddings of width {found}, the setting says {width}. Set "
            "methods.fedlgt.embedding to the width of the file."
        )
    shapes = [tuple(tensor.shape) for tensor in (table, *states)]
    lengths = torch.cat([tensor.norm(dim=-1).flatten() for tensor in (table, *states)])
    unit = bool(((lengths - 1.0).abs() < 1e-3).all())
    if shapes != [(len(names), width), (width,), (width,)] or not unit:
        raise DataError(f"{path} is damaged: its tensors are not one unit vector per label. {make}")
    return table, torch.stack([torch.zeros(width), *states])


def write_label_text(path: str | Path, labels: Mapping[str, str], encode: Encoder) -> None:
    """Encode each label's sentence and the two state words, and write them as unit vectors.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "text.safetensors"
    >>> write_label_text(path, {"cat": "cat"}, lambda texts: torch.eye(4)[: len(texts)] * 3)
    >>> load_label_text(path, ["cat"], 4)[0].tolist()
    [[1.0, 0.0, 0.0, 0.0]]

    ``labels`` gives, for each name in the order of the data, what stands for it in the sentence.
    """
    sentences = [SENTENCE.format(text) for text in labels.values()]
    vectors = F.normalize(encode([*sentences, *WORDS]).float(), dim=-1)
    tensors = {"labels": vectors[: len(labels)].contiguous()}
    for word, vector in zip(WORDS, vectors[len(labels) :], strict=True):
        tensors[word] = vector.contiguous()
    data = safetensors.torch.save(tensors, {"labels": json.dumps(list(labels))})
    write_atomically(path, data)


def shortened(sentence: str, tokens: Callable[[str], int], limit: int) -> str:
    """The sentence without the last names of its list, as many as it takes to fit.

    The end of the sentence stays: CLIP reads the meaning of a text off its last token.

    >>> shortened("The photo contains dog, cat, bird.", len, 30)
    'The photo contains dog, cat.'

    ``tokens`` says how many tokens a text has, ``limit`` how many it may have.
    """
    text = sentence
    while tokens(text) > limit:
        text, comma, _ = text.rpartition(",")
        if not comma:
            raise DataError(
                f"The text encoder reads {limit} tokens, too few for {sentence!r}. Shorten the "
                "label's name, or list other names for it."
            )
        text += "."
    return text


def clip_encoder(model: str) -> Encoder:
    """CLIP's text encoder, from a local folder or by name; needs ``transformers``."""
    try:
        from transformers import AutoTokenizer, CLIPTextModelWithProjection
    except ImportError:
        raise DataError(
            "Making text embeddings needs the package 'transformers': pip install transformers."
        ) from None
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = CLIPTextModelWithProjection.from_pretrained(model).eval()
    limit = network.config.max_position_embeddings

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Tensor:
        fitting = [shortened(t, lambda t: len(tokenizer(t)["input_ids"]), limit) for t in texts]
        tokens = tokenizer(fitting, padding=True, return_tensors="pt")
        embeddings: Tensor = network(**tokens).text_embeds
        return embeddings

    return encode


def read_names(path: str | Path) -> dict[str, str]:
    """Label names and what stands for each in its sentence, from lines ``name[<TAB>text]``."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The label names in {path} cannot be read: {error}.") from None
    pairs = [line.partition("\t") for line in lines if line.strip()]
    names = {name.strip(): text.strip() or name.strip() for name, _, text in pairs}
    if not names or len(names) < len(pairs):
        raise DataError(f"{path} must hold one label name per line, each of them once.")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: names in, file out."""
    parser = argparse.ArgumentParser(description="Write CLIP text embeddings of label names.")
    parser.add_argument(
        "--classes",
        required=True,
        help="text file, one label name per line; after a tab, a list of names in its place",
    )
    parser.add_argument("--model", default="openai/clip-vit-base-patch16", help="name or folder")
    parser.add_argument("--out", required=True, help="safetensors file to write")
    options = parser.parse_args(arguments)
    try:
        write_label_text(options.out, read_names(options.classes), clip_encoder(options.model))
    except (FedHarmonyError, OSError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
