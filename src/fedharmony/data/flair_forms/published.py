"""FLAIR as published: ``labels_and_metadata.json`` and the folder ``small_images``."""

from __future__ import annotations

from fedharmony.data.flair_forms.records import FIELD, Collector, Level, Records
from fedharmony.data.table import RowError
from fedharmony.data.tree import Tree
from fedharmony.errors import DataError
from fedharmony.reading import parse_json

METADATA = "labels_and_metadata.json"
IMAGES = "small_images"


def read_json(tree: Tree, level: Level) -> Records:
    """``labels_and_metadata.json`` and the folder ``small_images``."""
    where = tree.locate(METADATA)
    try:
        content = parse_json(tree.read(METADATA))
    except ValueError as error:  # also what is not text at all
        raise DataError(
            f"{where} is not valid JSON: {error}. It is damaged or was not copied to its end; get "
            "the file again."
        ) from error
    if not isinstance(content, list):
        raise DataError(
            f"{where} holds {type(content).__name__}, not a list of records. Get the file again."
        )
    collector = Collector(level)
    names = []
    for number, record in enumerate(content, start=1):
        try:
            image, labels = record["image_id"], record[FIELD[level]]
            collector.add(image, record["user_id"], record["partition"], labels)
        except (KeyError, TypeError):
            raise DataError(
                f"{where}, record {number}: a record needs image_id, user_id, partition and "
                f"{FIELD[level]}, this one is {str(record)[:200]}. Get the file again."
            ) from None
        except RowError as problem:
            raise DataError(f"{where}, record {number}: {problem} Get the file again.") from None
        names.append(f"{IMAGES}/{image}.jpg")
    return collector.finish(lambda index: tree.images([names[i] for i in index]), where)
