"""Read values back from a device without waiting for them at once."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """A copy of a tensor in host memory, which is under way until `wait`.

    Args:
        values: on any device; the copy begins when the device gets here.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._event: Any = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.current_stream(values.device).record_event()
        else:
            self._host = values.cpu()

    def wait(self) -> torch.Tensor:
        """Return the values, once the device has got there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
