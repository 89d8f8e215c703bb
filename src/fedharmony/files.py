"""Writing files so that a crash leaves the old content or the new, never a mixture."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write ``data`` to ``path`` in one step; several processes may do so at once.

    The data go to a temporary file in the same folder, are forced to the disk, and replace the old
    file. Raises :class:`OSError` when that fails; the old file is then untouched.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
