"""A few dozen pictures in each of the forms in which FLAIR is distributed."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

SIDE = 32


class Record(NamedTuple):
    """One image of the data set."""

    image_id: str
    user_id: str
    partition: str
    labels: tuple[str, ...]
    fine_grained_labels: tuple[str, ...]


#: Users with 1, 2 and 30 training images; a validation user under the word "dev" and one under
#: "val"; two test users. "material" is a coarse name and a fine one; "bag" stands under two coarse
#: names. Ids and users are in no order.
KINDS = (
    (("equipment", "material", "structure"), ("bag", "material", "door")),
    (("plant",), ("tree", "flower")),
    (("animal", "outdoor", "plant"), ("dog", "blue_sky", "tree")),
    (("material",), ("bag",)),
)
OWNERS = (
    ("59769174@N00", "train", 2),
    ("7@N01", "train", 30),
    ("30000001@N07", "train", 1),
    ("88@N02", "dev", 1),
    ("12@N03", "val", 2),
    ("99@N04", "test", 3),
    ("11@N05", "test", 4),
)


def _records() -> tuple[Record, ...]:
    owners = [(user, partition) for user, partition, count in OWNERS for _ in range(count)]
    return tuple(
        Record(str(14_913_474_848 + 7919 * number % 1009), *owner, *KINDS[number % len(KINDS)])
        for number, owner in enumerate(owners)
    )


RECORDS = _records()


def part(partition: str) -> list[Record]:
    """The records of a partition, under either of its names."""
    words = {"val": ("val", "dev")}.get(partition, (partition,))
    return [record for record in RECORDS if record.partition in words]


def jpeg(record: Record) -> bytes:
    """The encoded image: a colour and a gradient that no other record has."""
    seed = np.frombuffer(record.image_id.encode().rjust(16, b"0"), np.uint8)[-3:]
    ramp = np.linspace(0, 100, SIDE)[:, None, None] + 0.2 * np.arange(SIDE)[:, None]
    pixels = (ramp + 5.0 * (seed - 48)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def as_json(records: tuple[Record, ...] = RECORDS) -> list[dict[str, Any]]:
    """The content of ``labels_and_metadata.json``."""
    return [
        {key: list(value) if isinstance(value, tuple) else value for key, value in pairs.items()}
        for pairs in (record._asdict() for record in records)
    ]


def write_json(folder: Path) -> Path:
    """The published form, unpacked."""
    images = folder / "small_images"
    images.mkdir(parents=True)
    for record in RECORDS:
        (images / f"{record.image_id}.jpg").write_bytes(jpeg(record))
    (folder / "labels_and_metadata.json").write_text(json.dumps(as_json()))
    (folder / "label_relationship.txt").write_text("bag -> equipment\nbag -> material\n")
    return folder


def write_packed(folder: Path) -> Path:
    """The published form as it is downloaded, in two archives."""
    folder.mkdir()
    (folder / "labels_and_metadata.json").write_text(json.dumps(as_json()))
    for number in range(2):
        with tarfile.open(folder / f"small_images-0{number}.tar.gz", "w:gz") as tar:
            for record in RECORDS[number::2]:
                member = tarfile.TarInfo(f"small_images/{record.image_id}.jpg")
                data = jpeg(record)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder


def write_parquet(folder: Path, *, partition_column: bool = True, row_group: int = 7) -> Path:
    """The files of the Hugging Face data set; the training images are in two of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "data").mkdir(parents=True)
    train = part("train")
    files = {
        "train-00000-of-00002": train[:20],
        "train-00001-of-00002": train[20:],
        "val-00000-of-00001": part("val"),
        "test-00000-of-00001": part("test"),
    }
    for name, records in files.items():
        columns: dict[str, Any] = {
            "user_id": [record.user_id for record in records],
            "image_id": pa.array([int(record.image_id) for record in records], pa.int64()),
            "labels": [list(record.labels) for record in records],
            "fine_grained_labels": [list(record.fine_grained_labels) for record in records],
            "image": [
                {"bytes": jpeg(record), "path": f"{record.image_id}.jpg"} for record in records
            ],
        }
        if partition_column:
            columns["partition"] = [record.partition for record in records]
        pq.write_table(
            pa.table(columns), folder / "data" / f"{name}.parquet", row_group_size=row_group
        )
    return folder
