"""Where annotation files and encoded images come from: folders and archives, seen as one tree.

A loader asks a :class:`Tree` for names such as ``VOC2012/JPEGImages/2008_000002.jpg`` and need not
know whether the user unpacked the archives. A name is looked up in the folder first and in the
archives that lie in it second, so a packed and an unpacked data set read the same.

``.tar`` and ``.zip`` are indexed once and then read at random, by any number of threads. Random
reads in a ``.tar.gz`` would have to start at its beginning every time; it is therefore unpacked
once, in one pass, to a ``.tar`` in the cache folder.

What is read is bounded: files are regular ones (a pipe or device is refused), an image has at most
:data:`IMAGE_LIMIT` bytes, and unpacking stops at the size that an archive declares, which may not
be out of proportion to the packed one.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, Protocol, TypeAlias

from fedharmony.data.base import cache_folder
from fedharmony.data.derived import building, new_file
from fedharmony.errors import DataError
from fedharmony.reading import FILE_LIMIT, is_file, is_folder, is_there, read_regular, user_path

#: Endings of the archives that can be read.
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
#: Folders that the publishers' archives, or habit, put around a data set.
WRAPPERS = ("VOCdevkit", "coco", "flair")

#: Bytes of an encoded image.
IMAGE_LIMIT = 256 << 20
#: A packed file may become this many times larger, and any may reach this size. Annotations shrink
#: to a tenth; a file made to fill the memory or the disk shrinks to a thousandth.
UNPACKED_RATIO, UNPACKED_LEAST = 100, 64 << 20

COPY = 1 << 20  # bytes copied at a time
BLOCK = 512  # a tar archive is a sequence of such blocks
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error)
GZIP, ZIP = b"\x1f\x8b", b"PK"  # how such files begin


class ImageFiles(Protocol):
    """N encoded images, read by index; several threads may do so at once."""

    def __len__(self) -> int:
        """The number of files N."""

    def name(self, i: int) -> str:
        """File ``i`` for messages: its path, or ``archive:member``."""

    def read(self, i: int) -> bytes:
        """The encoded bytes of file ``i``; :class:`DataError` naming it when that fails."""

    def fingerprint(self) -> str:
        """SHA-256 that changes when a name or a file does; cheap, since no file is read."""


class Folder:
    """The files below a folder. :class:`Archive` has the same methods."""

    slow = False

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def where(self) -> str:
        """The place, for messages."""
        return f"folder {self.root}"

    def stamp(self, name: str) -> str | None:
        """What changes with the content of a file: size and time of the last change.

        None when there is no such file.
        """
        try:
            found = (self.root / name).stat()
        except OSError:
            return None
        return f"{found.st_size} {found.st_mtime_ns}"

    def list(self, folder: str) -> list[str]:
        """Base names in a folder; empty when there is none of that name."""
        try:
            return os.listdir(self.root / folder)  # noqa: PTH208 (names, not paths)
        except OSError:
            return []

    def locate(self, name: str) -> str:
        """A file of this place, for messages."""
        return str(self.root / name)

    def read(self, name: str, limit: int) -> bytes:
        """The content of a file that is there and has at most ``limit`` bytes."""
        try:
            return read_regular(self.root / name, limit)
        except OSError as error:
            raise DataError(f"{self.root / name} cannot be read: {error.strerror}.") from error


class Member(NamedTuple):
    """Where a file lies in an archive, and what is known of it without reading it."""

    packed: int
    size: int
    stamp: str
    offset: int = 0  # of the content, in a tar
    info: zipfile.ZipInfo | None = None  # in a zip


class Archive:
    """The members of a ``.tar``, ``.tar.gz``, ``.tgz`` or ``.zip`` file.

    Its first bytes tell of what kind it is. Member names lose a leading ``./`` and the folders in
    ``drop``. Nothing is read before the first look-up.
    """

    def __init__(self, path: Path, drop: Sequence[str] = WRAPPERS) -> None:
        self.path = path
        self.slow = path.suffix.lower() in (".gz", ".tgz")
        self._drop = frozenset(drop)

    @property
    def where(self) -> str:
        """See :attr:`Folder.where`."""
        return f"archive {self.path}"

    def stamp(self, name: str) -> str | None:
        """The checksum a zip keeps of every file; in a tar the place of the file and the archive's.

        A plain tar is known by its size and time of the last change, a compressed one by the
        checksum at its end.
        """
        if name in self._folders:
            return "folder"
        member = self._members.get(name)
        return None if member is None else member.stamp

    def list(self, folder: str) -> list[str]:
        """See :meth:`Folder.list`."""
        return list(self._folders.get(folder, ()))

    def locate(self, name: str) -> str:
        """See :meth:`Folder.locate`."""
        return f"{self.path}:{name}"

    def read(self, name: str, limit: int) -> bytes:
        """See :meth:`Folder.read`; a zip's checksums are verified."""
        member = self._members.get(name)
        if member is None:
            raise DataError(f"{self.locate(name)} cannot be read: it is a folder.")
        limit, size = min(limit, _most_unpacked(member.packed)), max(member.size, member.packed)
        try:
            if size > limit:
                raise ValueError(
                    f"it would have {size:,} bytes, more than the {limit:,} that are read"
                )
            with self._open(member) as file:
                data = file.read(member.size)  # of what is packed no more than it declares
            if len(data) < member.size:
                raise ValueError("the archive is cut short")
        except (OSError, ValueError, EOFError, RuntimeError, *DAMAGE) as error:
            raise DataError(f"{self.locate(name)} cannot be read: {error}.") from error
        return data

    def _open(self, member: Member) -> IO[bytes]:
        if member.info is not None:
            return self._zip.open(member.info)
        file = self._source.open("rb")
        file.seek(member.offset)
        return file

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    @cached_property
    def _kind(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                return file.read(2)
        except OSError as error:
            raise DataError(f"Archive {self.path} cannot be read: {error.strerror}.") from error

    @cached_property
    def _identity(self) -> str:
        """What tells this archive from others, and from its own later versions."""
        found = self.path.stat()
        if self._kind != GZIP:
            return f"{found.st_size} {found.st_mtime_ns}"
        return f"{found.st_size} {_gzip_trailer(self.path).hex()}"

    @cached_property
    def _source(self) -> Path:
        """The file with the members: the archive, or the tar that was in it."""
        return _unpacked(self.path, self._identity) if self._kind == GZIP else self.path

    @cached_property
    def _members(self) -> dict[str, Member]:
        source = self._source
        try:
            if self._kind == ZIP:
                found = _zip_members(self._zip)
            else:
                found = _tar_members(source, self._identity)
        except (OSError, ValueError, *DAMAGE) as error:
            raise DataError(
                f"Archive {self.path} is damaged or not an archive: {error}. Compare its size with "
                "the publisher's and fetch it again."
            ) from error
        return {self._own_name(name): member for name, member in found}

    def _own_name(self, name: str) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        while len(parts) > 1 and parts[0] in self._drop:
            del parts[0]
        return "/".join(parts)

    @cached_property
    def _folders(self) -> dict[str, dict[str, None]]:
        """The base names in every folder; a dict without values is an ordered set."""
        folders: dict[str, dict[str, None]] = {"": {}}
        for name in self._members:
            while name:
                parent, _, base = name.rpartition("/")
                known = folders.setdefault(parent, {})
                if base in known:
                    break
                known[base] = None
                name = parent
        return folders


#: One place of a tree.
Store: TypeAlias = Folder | Archive


class Tree:
    """A data set's files as one read-only tree.

    Names are POSIX paths below the data set's own top: ``VOC2012/JPEGImages/2008_000002.jpg``,
    ``annotations/instances_train2014.json``. Where several places have a file of the same name, the
    first place wins. What holds the files is ``hidden`` from the list of the top.
    """

    def __init__(self, stores: Sequence[Store], hidden: Sequence[str] = ()) -> None:
        self._stores = tuple(stores)
        self._hidden = frozenset(hidden)

    @property
    def where(self) -> str:
        """All places that are searched, for messages."""
        return ", ".join(store.where for store in self._stores)

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of that name."""
        return self.find(name) is not None

    def list(self, folder: str = "") -> list[str]:
        """Sorted base names of the files and folders in ``folder``; empty when it is not there.

        Compressed archives are asked only when nothing else has such a folder.
        """
        path = _checked(folder) if folder else ""
        hidden = self._hidden if not path else frozenset[str]()
        for slow in (False, True):
            stores = (store for store in self._stores if store.slow == slow)
            if found := {base for store in stores for base in store.list(path)} - hidden:
                return sorted(found)
        return []

    def read(self, name: str, limit: int = FILE_LIMIT) -> bytes:
        """The content of a file; :class:`DataError` naming it when that fails."""
        found = self.find(name)
        if found is None:
            raise DataError(f"{self.locate(name)} cannot be read: there is no such file.")
        return found[0].read(_checked(name), limit)

    def locate(self, name: str) -> str:
        """A file for messages: its path, or ``archive:member``, whether it is there or not."""
        found = self.find(name)
        return (self._stores[0] if found is None else found[0]).locate(_checked(name))

    def images(self, names: Sequence[str]) -> TreeImages:
        """The named files as :class:`ImageFiles`; whether they are there is not asked yet."""
        return TreeImages(self, names)

    def find(self, name: str) -> tuple[Store, str] | None:
        """The place of a file and the file's stamp, or None when it is nowhere."""
        path = _checked(name)
        for store in self._stores:
            if (stamp := store.stamp(path)) is not None:
                return store, stamp
        return None


class TreeImages:
    """Named files of a tree, as :class:`ImageFiles`."""

    def __init__(self, tree: Tree, names: Sequence[str]) -> None:
        self._tree = tree
        self._names = tuple(names)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, i: int) -> str:
        """See :meth:`ImageFiles.name`."""
        return self._tree.locate(self._names[i])

    def read(self, i: int) -> bytes:
        """See :meth:`ImageFiles.read`."""
        return self._tree.read(self._names[i], IMAGE_LIMIT)

    def fingerprint(self) -> str:
        """SHA-256 of names and stamps; the folder around them is left out, so data may move."""
        digest = hashlib.sha256()
        for named in zip(self._names, self._stamps, strict=True):
            digest.update(repr(named).encode())
        return digest.hexdigest()

    def missing(self) -> list[int]:
        """The indices of the files that are not there."""
        return [i for i, stamp in enumerate(self._stamps) if stamp is None]

    @cached_property
    def _stamps(self) -> list[str | None]:
        """What was found when first asked: half a million files take seconds to look up."""
        places = (self._tree.find(name) for name in self._names)
        return [None if place is None else place[1] for place in places]


def open_tree(path: Path | str, drop: Sequence[str] = WRAPPERS) -> Tree:
    """The tree of a folder, of an archive (:data:`ARCHIVES`), or of a folder that holds archives.

    Archives in a folder are opened only when something is not found in the folder itself, those
    that must be unpacked last. Folders in ``drop`` are left out at the head of names.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     inner = Path(folder, "VOCdevkit", "VOC2012")
    ...     inner.mkdir(parents=True)
    ...     _ = (inner / "note.txt").write_text("hello")
    ...     tree = open_tree(folder)
    ...     tree.list(), tree.list("VOC2012"), tree.read("VOC2012/note.txt")
    (['VOC2012'], ['note.txt'], b'hello')
    """
    path = user_path(path)
    if is_folder(path):
        wrapped = [inner for name in drop if is_folder(inner := path / name)]
        try:
            inside = sorted(path.iterdir())
        except OSError as error:
            raise DataError(
                f"The folder {path} cannot be read: {error.strerror}. Check its permissions."
            ) from error
        packed = [Archive(file, drop) for file in inside if _is_archive(file)]
        packed.sort(key=lambda archive: archive.slow)
        hidden = [*drop, *(archive.path.name for archive in packed)]
        return Tree([*map(Folder, (path, *wrapped)), *packed], hidden)
    if _is_archive(path):
        return Tree([Archive(path, drop)])
    if is_there(path):
        raise DataError(
            f"{path} is neither a folder nor an archive ({', '.join(ARCHIVES)}). Name what holds "
            "the data."
        )
    raise DataError(f"There is no file or folder {path}. Check the path.")


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ARCHIVES) and is_file(path)


def _checked(name: str) -> str:
    """``name`` in its plain form; names come from annotation files and must stay in the tree."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts or "\0" in name:
        raise DataError(
            f"The file name {name!r} does not name a file of the data set. Correct the annotations."
        )
    return "/".join(parts)


def _tar_members(path: Path, identity: str) -> list[tuple[str, Member]]:
    with tarfile.open(path, "r:") as tar:
        found = [
            (m.name, Member(m.size, m.size, f"{identity} {m.offset_data}", m.offset_data))
            for m in tar
            if m.isreg() and m.sparse is None
        ]
        end = tar.offset
    # tarfile takes a damaged header for the end of the archive, which two empty blocks mark.
    with path.open("rb") as file:
        file.seek(end)
        if any(file.read(BLOCK)):
            raise tarfile.ReadError(f"damaged at byte {end:,}")
    return found


def _zip_members(archive: zipfile.ZipFile) -> list[tuple[str, Member]]:
    return [
        (m.filename, Member(m.compress_size, m.file_size, f"{m.CRC:08x} {m.file_size}", info=m))
        for m in archive.infolist()
        if not m.is_dir()
    ]


def _most_unpacked(packed: int) -> int:
    """How large something packed may become.

    >>> _most_unpacked(1000), _most_unpacked(10**9)
    (67108864, 100000000000)
    """
    return max(UNPACKED_LEAST, UNPACKED_RATIO * packed)


def _gzip_trailer(path: Path) -> bytes:
    """The end of a gzip file: checksum, and length modulo 2³², of what it holds."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8))
        return file.read()


def _unpacked(path: Path, identity: str) -> Path:
    """The tar inside a gzip file, in the cache folder."""
    key = hashlib.sha256(identity.encode()).hexdigest()[:20]
    unpacked = cache_folder() / "unpacked" / f"{path.name.split('.')[0]}-{key}.tar"
    if unpacked.is_file():
        return unpacked
    with building(unpacked.parent):
        if not unpacked.is_file():
            advice = f"or unpack {path} yourself and name the folder"
            with new_file(
                unpacked, _unpacked_size(path), f"The unpacked {path.name}", advice
            ) as out:
                _gunzip(path, out)
    return unpacked


def _unpacked_size(path: Path) -> int:
    size = int.from_bytes(_gzip_trailer(path)[4:], "little")
    while size < 0.9 * path.stat().st_size:  # packing cannot make anything a tenth larger
        size += 2**32
    return size


def _gunzip(path: Path, out: BinaryIO) -> None:
    left = _most_unpacked(path.stat().st_size)
    with gzip.open(path) as packed:
        while True:
            try:
                data = packed.read(COPY)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(
                    f"Archive {path} is damaged or cut short: {error}. Compare its size with the "
                    "publisher's and fetch it again."
                ) from error
            if not data:
                return
            left -= len(data)
            if left < 0:
                raise DataError(
                    f"Archive {path} unpacks to more than {UNPACKED_RATIO} times its size, which "
                    "no data set does. Fetch it again, or unpack it yourself and name the folder."
                )
            out.write(data)
