"""The ledger of a private run in its folder, and the key of the round under way.

A round writes in this order, each step forced to the disk before the next:

1. ``noise.key``: its key, for the owner alone to read (mode 0600);
2. ``privacy.json``: what it costs;
3. its cohort and its noise are drawn; at its end comes the checkpoint;
4. ``privacy.json``: the round is committed; ``noise.key`` is deleted.

So no round that drew anything is missing from the ledger, and the key file never opens an earlier
round. What a file system keeps of deleted files (journals, snapshots, backups) is beyond this.

A round that was cut short between 2 and 4 has spent its ε. A simulation repeats it with its key, to
the bit: nothing of it was given away, as the state was not saved, and the same clients answer the
same again. Sites may answer otherwise the second time (one is away, or was slow), and may have seen
a model of the first attempt: two sums under the same noise would give away their difference. With
sites, and where the key is lost, the round therefore counts as spent, and begins anew under another
key.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from fedharmony.errors import CheckpointError
from fedharmony.experiments.folder import RunFolder
from fedharmony.files import sync_folder
from fedharmony.privacy import Budget, Entry, Ledger
from fedharmony.records import ADVICE, write_file

logger = logging.getLogger(__name__)

LEDGER, KEY = "privacy.json", "noise.key"


class FolderLedger(Ledger):
    """A ledger that a run can be resumed with.

    ``rounds_done`` are those that the checkpoint stands after; ``repeats``: whether a round that
    was cut short can be repeated to the bit.
    """

    def __init__(
        self, folder: RunFolder, budget: Budget, seed: int | None, rounds_done: int, repeats: bool
    ) -> None:
        super().__init__(budget, seed)
        self._folder = folder
        self._run, entries, self._kept = read(folder, rounds_done)
        repeated = entries[-1] if self._kept and repeats else None
        for entry in entries:
            if entry.round < rounds_done and entry.state == "begun":  # killed before step 4
                entry = replace(entry, state="committed")
            elif entry.round >= rounds_done and entry is not repeated and entry.state != "lost":
                entry = replace(entry, state="lost")
                logger.warning(
                    "Round %d was cut short and cannot be repeated: it counts as spent, and begins "
                    "anew under another key.",
                    entry.round + 1,
                )
            self.entries.append(entry)
        if repeated is None:
            self._kept = b""
            self._delete_key()
        self._save()

    def _opened(self, entry: Entry) -> bytes:
        """The key of a round that is repeated, or a new one."""
        kept, self._kept = self._kept, b""
        if kept and self.entries[-1].price == entry.price:
            logger.info("Round %d is repeated with its own key.", entry.round + 1)
            return kept
        if kept:
            self.entries[-1] = replace(self.entries[-1], state="lost")
        return super()._opened(entry)

    def _enter(self, entry: Entry, key: bytes) -> None:
        """The key first: a round in the ledger has one, unless it was lost."""
        named = {"run": self._run, "round": entry.round, "key": key.hex()}
        write_file(self._folder[KEY], json.dumps(named).encode(), 0o600)
        sync_folder(self._folder.path)
        super()._enter(entry, key)
        self._save()

    def commit(self, round: int) -> None:
        """The state after the round is saved: its key goes."""
        super().commit(round)
        self.entries[-1] = replace(self.entries[-1], state="committed")
        self._save()
        self._delete_key()

    def _save(self) -> None:
        content = {"run": self._run, "rounds": [asdict(entry) for entry in self.entries]}
        self._folder.write_json(LEDGER, {**content, "sha256": _sha256(content)})
        sync_folder(self._folder.path)

    def _delete_key(self) -> None:
        self._folder[KEY].unlink(missing_ok=True)
        sync_folder(self._folder.path)


def read(folder: RunFolder, rounds_done: int) -> tuple[str, list[Entry], bytes]:
    """The run's identity, its rounds, and the key of the last one, if that can be repeated.

    What is damaged, or belongs to another run, is refused; nothing is changed.
    """
    ledger, run, entries = folder[LEDGER], uuid.uuid4().hex, list[Entry]()
    if content := _json(ledger):
        try:
            run, entries = content["run"], [Entry(**one) for one in content["rounds"]]
            sealed = _sha256({"run": run, "rounds": content["rounds"]}) == content["sha256"]
        except (KeyError, TypeError):
            sealed = False
        if not sealed:
            raise CheckpointError(f"{ledger} is damaged: its checksum does not match. {ADVICE}")
    elif rounds_done or folder.read_events():
        raise CheckpointError(
            f"{ledger} is gone, or an earlier version of fedharmony began this run. Without it "
            f"nobody knows what the run has spent. {ADVICE}"
        )
    if missing := set(range(rounds_done)) - {entry.round for entry in entries}:
        raise CheckpointError(
            f"{ledger} knows nothing of round {min(missing) + 1}, and the checkpoint stands after "
            f"round {rounds_done}: it is an older copy. {ADVICE}"
        )
    file = folder[KEY]
    if not (named := _json(file)):
        return run, entries, b""
    round, key = named.get("round"), b""
    with suppress(TypeError, ValueError):
        key = bytes.fromhex(named.get("key", ""))
    advice = "Delete it: if a round was under way, it then counts as spent, and begins anew."
    if named.get("run") != run:
        raise CheckpointError(f"{file} belongs to another run. {advice}")
    if len(key) != 32 or not isinstance(round, int) or round > rounds_done:
        raise CheckpointError(f"{file} is damaged, or belongs to a later round. {advice}")
    last = entries[-1] if entries else None
    under_way = last is not None and last.state == "begun" and last.round == round == rounds_done
    return run, entries, key if under_way else b""


def _json(file: Any) -> Mapping[str, Any]:
    """The object in a file; nothing where there is no file."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error.strerror}. Check its permissions and the disk, then "
            "give the same command again."
        ) from error
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{file} is damaged: it does not hold what was written. {ADVICE}")
    return found


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
