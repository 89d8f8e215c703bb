"""Text embeddings of labels: files that do not fit, and CLIP's encoder with a stand-in for it."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedharmony.errors import DataError
from fedharmony.models.label_text import (
    clip_encoder,
    load_label_text,
    main,
    read_names,
    shortened,
    write_label_text,
)

NAMES = ("cat", "dog", "red bus")


def encode(texts: Sequence[str]) -> Tensor:
    """Four numbers that depend on every letter."""
    codes = [[ord(letter) for letter in text] for text in texts]
    return torch.tensor([[sum(c), len(c), c[0] * c[-1], sum(c[::2])] for c in codes]).float()


def written(path: Path, names: Sequence[str] = NAMES) -> Path:
    write_label_text(path, {name: name for name in names}, encode)
    return path


def rewritten(path: Path, **changes: Tensor | None) -> Path:
    """The file with some tensors replaced (None: left out)."""
    tensors = {**safetensors.torch.load_file(written(path)), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    safetensors.torch.save_file(kept, path, {"labels": json.dumps(NAMES)})
    return path


# -- files ----------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Unit vectors of "The photo contains {}." in the order of the labels; zero for unknown."""
    labels, states = load_label_text(written(tmp_path / "text.safetensors"), NAMES, 4)
    assert labels.shape == (3, 4)
    assert states.shape == (3, 4)
    for row, name in zip(labels, NAMES, strict=True):
        vector = encode([f"The photo contains {name}."])[0]
        torch.testing.assert_close(row, vector / vector.norm())
    assert states[0].eq(0).all()
    for row, word in zip(states[1:], ("negative", "positive"), strict=True):
        vector = encode([word])[0]
        torch.testing.assert_close(row, vector / vector.norm())


def test_a_list_stands_in_for_the_name(tmp_path: Path) -> None:
    path = tmp_path / "text.safetensors"
    write_label_text(path, {"animal": "dog, cat", "car": "car"}, encode)
    labels, _ = load_label_text(path, ["animal", "car"], 4)
    vector = encode(["The photo contains dog, cat."])[0]
    torch.testing.assert_close(labels[0], vector / vector.norm())


def test_half_precision_encoders_give_unit_vectors(tmp_path: Path) -> None:
    path = tmp_path / "text.safetensors"
    write_label_text(path, {"cat": "cat"}, lambda texts: (encode(texts) / 1000).half())
    labels, states = load_label_text(path, ["cat"], 4)
    assert labels.dtype == states.dtype == torch.float32
    torch.testing.assert_close(labels.norm(dim=-1), torch.ones(1))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("cat", "cow", "red bus"), "other labels.*'dog' instead of 'cow'"),
        (("dog", "cat", "red bus"), "in another order: 'cat' instead of 'dog'"),
        (("cat", "dog"), "3 instead of 2 labels"),
        (("cat", "dog", "red bus", "tree"), "3 instead of 4 labels"),
        ((), "3 instead of 0 labels"),
    ],
    ids=["other", "order", "fewer", "more", "none"],
)
def test_labels_that_do_not_match(tmp_path: Path, labels: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_label_text(written(tmp_path / "text.safetensors"), labels, 4)
    assert "python -m fedharmony.models.label_text" in str(caught.value)


def test_another_width(tmp_path: Path) -> None:
    path = written(tmp_path / "text.safetensors")
    with pytest.raises(DataError, match=r"width 4, the setting says 512\. Set methods\.fedlgt\."):
        load_label_text(path, NAMES, 512)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no file .*none\.safetensors\. Make one with"):
        load_label_text(tmp_path / "none.safetensors", NAMES, 4)


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x08\0\0\0\0\0\0\0{}{}{}{}", "half"])
def test_a_damaged_file(tmp_path: Path, content: bytes | str) -> None:
    path = written(tmp_path / "text.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if isinstance(content, str) else content)
    with pytest.raises(DataError, match="is not a file of label text embeddings"):
        load_label_text(path, NAMES, 4)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a file of label text embeddings"):
        load_label_text(tmp_path, NAMES, 4)


@pytest.mark.parametrize("names", ["{", "5", "null"])
def test_names_that_are_no_list(tmp_path: Path, names: str) -> None:
    path = written(tmp_path / "text.safetensors")
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, {"labels": names})
    with pytest.raises(DataError, match="is not a file of label text embeddings"):
        load_label_text(path, NAMES, 4)


def test_a_file_without_names(tmp_path: Path) -> None:
    path = written(tmp_path / "text.safetensors")
    safetensors.torch.save_file(safetensors.torch.load_file(path), path)
    with pytest.raises(DataError, match="0 instead of 3 labels"):
        load_label_text(path, NAMES, 4)


def test_a_file_without_a_tensor(tmp_path: Path) -> None:
    for name in ("labels", "negative", "positive"):
        path = rewritten(tmp_path / "text.safetensors", **{name: None})
        with pytest.raises(DataError, match="is not a file of label text embeddings"):
            load_label_text(path, NAMES, 4)


UNIT = torch.eye(4)


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": UNIT},
        {"labels": UNIT[:3] * 2},
        {"labels": torch.full((3, 4), torch.nan)},
        {"labels": torch.zeros(3, 4)},
        {"negative": UNIT[:1]},
        {"positive": UNIT[0] * 0.5},
        {"positive": torch.ones(1)},
    ],
    ids=["rows", "length", "nan", "zero", "shape", "word", "word width"],
)
def test_tensors_that_are_not_unit_vectors(tmp_path: Path, changes: dict[str, Tensor]) -> None:
    path = rewritten(tmp_path / "text.safetensors", **changes)
    with pytest.raises(DataError, match="is damaged: its tensors are not one unit vector"):
        load_label_text(path, NAMES, 4)


# -- long lists -----------------------------------------------------------------------------------


def words(text: str) -> int:
    return len(text.split())


def test_lists_lose_their_last_names_never_the_end_of_the_sentence() -> None:
    """ "The photo contains" is three words: with room for five, two names stay."""
    sentence = "The photo contains dog, cat, bird, fish."
    assert shortened(sentence, words, 7) == sentence
    assert shortened(sentence, words, 6) == "The photo contains dog, cat, bird."
    assert shortened(sentence, words, 5) == "The photo contains dog, cat."
    assert shortened(sentence, words, 4) == "The photo contains dog."
    with pytest.raises(DataError, match=r"reads 3 tokens, too few for 'The photo.*fish\.'"):
        shortened(sentence, words, 3)


# -- CLIP, with a stand-in for transformers -------------------------------------------------------


class Tokenizer:
    """A word is a token; a start and an end token are added, the rest is padded with 0."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, text: str | list[str], **options: Any) -> Any:
        if isinstance(text, str):
            assert not options
            return {"input_ids": [1, *(len(word) for word in text.split()), 2]}
        assert options == {"padding": True, "return_tensors": "pt"}  # nothing is cut off
        self.batches.append(text)
        rows = [self(t)["input_ids"] for t in text]
        longest = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class Network:
    """Remembers how it was called; its embedding of a text is the text's tokens."""

    config = SimpleNamespace(max_position_embeddings=77)

    def __init__(self) -> None:
        self.training = True
        self.seen: list[tuple[bool, bool, int]] = []

    def eval(self) -> Network:
        self.training = False
        return self

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        self.seen.append((self.training, torch.is_grad_enabled(), input_ids.shape[1]))
        lengths = attention_mask.sum(-1, keepdim=True)
        last = input_ids.gather(1, lengths - 1)
        return SimpleNamespace(text_embeds=torch.cat([lengths, last, input_ids[:, :6]], 1).float())


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module with the two classes that are used; what they were asked for."""
    asked: list[tuple[str, str]] = []
    tokenizer, network = Tokenizer(), Network()

    def loader(kind: str, result: Any) -> SimpleNamespace:
        def from_pretrained(model: str) -> Any:
            asked.append((kind, model))
            return result

        return SimpleNamespace(from_pretrained=from_pretrained)

    module = ModuleType("transformers")
    module.AutoTokenizer = loader("tokenizer", tokenizer)  # type: ignore[attr-defined]
    module.CLIPTextModelWithProjection = loader("network", network)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    return SimpleNamespace(asked=asked, tokenizer=tokenizer, network=network)


def test_clip_is_asked_once_in_evaluation_mode_without_gradient(
    transformers: SimpleNamespace,
) -> None:
    vectors = clip_encoder("folder/clip")(["The photo contains cat.", "negative"])
    assert transformers.asked == [("tokenizer", "folder/clip"), ("network", "folder/clip")]
    assert transformers.network.seen == [(False, False, 6)]
    # Lengths with start and end; the end token 2; then the tokens: 1 for the start, word lengths.
    assert vectors.tolist() == [[6, 2, 1, 3, 5, 8, 4, 2], [3, 2, 1, 8, 2, 0, 0, 0]]


def test_clip_reads_77_tokens_and_the_end_of_the_sentence(transformers: SimpleNamespace) -> None:
    """Start, three words, n names, end: 5 + n tokens. Of 100 names 72 fit, and the full stop."""
    names = [f"name{i}" for i in range(100)]
    encode = clip_encoder("clip")
    vectors = encode([f"The photo contains {', '.join(names)}.", "positive"])
    assert transformers.tokenizer.batches == [
        [f"The photo contains {', '.join(names[:72])}.", "positive"]
    ]
    assert transformers.network.seen == [(False, False, 77)]
    assert vectors[0, :2].tolist() == [77, 2]  # the end token is there
    with pytest.raises(DataError, match="reads 77 tokens"):
        encode(["The photo contains " + "very " * 80 + "long name."])


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match="pip install transformers"):
        clip_encoder("clip")


# -- command line ---------------------------------------------------------------------------------


def test_names_file(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text(" cat \n\nanimal\tdog, Vögel \nred bus\n", encoding="utf-8")
    assert read_names(path) == {"cat": "cat", "animal": "dog, Vögel", "red bus": "red bus"}
    assert list(read_names(path)) == ["cat", "animal", "red bus"]


@pytest.mark.parametrize("content", ["", "\n \n", "cat\ndog\ncat\n"], ids=["no", "blank", "twice"])
def test_names_files_that_cannot_be_meant(tmp_path: Path, content: str) -> None:
    path = tmp_path / "names.txt"
    path.write_text(content)
    with pytest.raises(DataError, match="one label name per line, each of them once"):
        read_names(path)


def test_main_writes_a_file_for_the_data(tmp_path: Path, transformers: SimpleNamespace) -> None:
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    out = tmp_path / "text.safetensors"
    main(["--classes", str(tmp_path / "names.txt"), "--out", str(out)])
    assert transformers.asked[0] == ("tokenizer", "openai/clip-vit-base-patch16")
    assert transformers.tokenizer.batches == [
        [*(f"The photo contains {name}." for name in NAMES), "negative", "positive"]
    ]
    labels, states = load_label_text(out, NAMES, 8)
    torch.testing.assert_close(labels.norm(dim=-1), torch.ones(3))
    torch.testing.assert_close(states.norm(dim=-1), torch.tensor([0.0, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("names", "out", "message"),
    [
        ("none.txt", "text.safetensors", "cannot be read"),
        ("names.txt", "no/folder/text.safetensors", "No such file or directory"),
    ],
)
def test_main_explains_itself(
    tmp_path: Path,
    transformers: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    names: str,
    out: str,
    message: str,
) -> None:
    (tmp_path / "names.txt").write_text("cat")
    with pytest.raises(SystemExit) as caught:
        main(["--classes", str(tmp_path / names), "--out", str(tmp_path / out)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_as_a_module(
    tmp_path: Path, transformers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m fedharmony.models.label_text --classes … --model … --out …``."""
    (tmp_path / "names.txt").write_text("cat\ndog")
    out = tmp_path / "text.safetensors"
    options = ["--classes", str(tmp_path / "names.txt"), "--model", "my/clip", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["label_text", *options])
    monkeypatch.delitem(sys.modules, "fedharmony.models.label_text")
    runpy.run_module("fedharmony.models.label_text", run_name="__main__")
    assert transformers.asked[1] == ("network", "my/clip")
    assert load_label_text(out, ["cat", "dog"], 8)[0].shape == (2, 8)
