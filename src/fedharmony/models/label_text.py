"""Text embeddings of label names, as a file: made once, read by everybody.

The file is a safetensors file with three tensors of unit rows, ``labels`` (C, E), ``negative`` (E,)
and ``positive`` (E,), and the label names as JSON under ``labels`` in its metadata.

To make one where the ``transformers`` package and CLIP's weights are available::

    python -m fedharmony.models.label_text --classes names.txt --out labels.safetensors
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedharmony.errors import DataError
from fedharmony.files import write_atomically

#: The sentence a label name is put into, and the words for its state.
SENTENCE = "The photo contains {}."
WORDS = ("negative", "positive")

#: Sentences to vectors (number, E).
Encoder = Callable[[Sequence[str]], Tensor]


def load_label_text(path: str | Path, labels: Sequence[str], width: int) -> tuple[Tensor, Tensor]:
    """Label table (C, width) and state table (3, width): unknown (zero), negative, positive.

    Raises:
        DataError: the file is missing, damaged, of another width, or for other labels.
    """
    make = "Make one with 'python -m fedharmony.models.label_text' (see its --help)."
    try:
        with safe_open(path, framework="pt") as file:
            names = json.loads((file.metadata() or {}).get("labels", "[]"))
            table, *states = (file.get_tensor(name).float() for name in ("labels", *WORDS))
    except FileNotFoundError:
        raise DataError(f"There is no file of label text embeddings at {path}. {make}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(
            f"{path} is not a file of label text embeddings ({error}). {make}"
        ) from None
    if labels and tuple(names) != tuple(labels):
        odd = next(
            (f"{a!r} instead of {b!r}" for a, b in zip(names, labels, strict=False) if a != b),
            f"{len(names)} instead of {len(labels)} labels",
        )
        raise DataError(
            f"{path} holds text embeddings of other labels than the data's, or in another order: "
            f"{odd}. {make}"
        )
    shapes = [tuple(t.shape) for t in (table, *states)]
    if shapes != [(len(names), width), (width,), (width,)]:
        raise DataError(
            f"{path} holds text embeddings of width {table.shape[-1]}, the setting says {width}. "
            "Set methods.fedlgt.embedding to the width of the file."
        )
    return table, torch.stack([torch.zeros(width), *states])


def write_label_text(path: str | Path, labels: Sequence[str], encode: Encoder) -> None:
    """Encode each label's sentence and the two state words, and write them as unit vectors.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "text.safetensors"
    >>> write_label_text(path, ["cat"], lambda texts: torch.eye(4)[: len(texts)] * 3)
    >>> load_label_text(path, ["cat"], 4)[0].tolist()
    [[1.0, 0.0, 0.0, 0.0]]
    """
    vectors = F.normalize(encode([*(SENTENCE.format(name) for name in labels), *WORDS]), dim=-1)
    tensors = {"labels": vectors[: len(labels)].float().contiguous()}
    for word, vector in zip(WORDS, vectors[len(labels) :], strict=True):
        tensors[word] = vector.float().contiguous()
    data = safetensors.torch.save(tensors, {"labels": json.dumps(list(labels))})
    write_atomically(Path(path), data)


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

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Tensor:
        tokens = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        embeddings: Tensor = network(**tokens).text_embeds
        return embeddings

    return encode


def main() -> None:
    """Command line: names in, file out."""
    parser = argparse.ArgumentParser(description="Write CLIP text embeddings of label names.")
    parser.add_argument("--classes", required=True, help="text file, one label name per line")
    parser.add_argument("--model", default="openai/clip-vit-base-patch16", help="name or folder")
    parser.add_argument("--out", required=True, help="safetensors file to write")
    options = parser.parse_args()
    names = [line.strip() for line in Path(options.classes).read_text().splitlines()]
    write_label_text(options.out, [name for name in names if name], clip_encoder(options.model))


if __name__ == "__main__":
    main()
