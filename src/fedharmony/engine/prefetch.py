"""What the next steps need, brought to the device while this one is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

from fedharmony.data.base import Images, TensorImages

#: Steps read ahead.
AHEAD = 2


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a GPU is not waited for, as it would be without pinned memory."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def gathered(
    images: Images, gather: Callable[[Tensor], Tensor], indices: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """``(index, images at index)`` for each index, in order.

    Images in memory are taken when they are needed; what comes from a file is read ahead by a
    thread of its own.

    >>> import torch
    >>> images = TensorImages(torch.arange(4, dtype=torch.uint8).reshape(4, 1, 1, 1))
    >>> steps = [torch.tensor([1]), torch.tensor([3])]
    >>> [int(x) for _, x in gathered(images, lambda i: images.gather(i, "cpu"), steps)]
    [1, 3]
    """
    if isinstance(images, TensorImages):
        for index in indices:
            yield index, gather(index)
        return
    waiting: deque[tuple[Tensor, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="images") as pool:
        todo = iter(indices)
        for index in islice(todo, AHEAD):
            waiting.append((index, pool.submit(gather, index)))
        while waiting:
            index, ready = waiting.popleft()
            pixels = ready.result()
            for following in islice(todo, 1):
                waiting.append((following, pool.submit(gather, following)))
            yield index, pixels
