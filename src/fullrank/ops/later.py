"""Numbers that a device makes, read without waiting for what is launched after them."""

from __future__ import annotations

import torch
from torch import Tensor


class Later:
    """Some numbers on their way to the host; `read` waits for them alone."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._ready: torch.cuda.Event | None = None
        if numbers.is_cuda:
            # To pinned memory, because the host goes on.
            self._numbers = numbers.to("cpu", non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> Tensor:
        if self._ready is not None:
            self._ready.synchronize()
        return self._numbers
