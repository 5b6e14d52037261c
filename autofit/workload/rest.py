"""When memory has come to rest: a run that is near its limit goes on until then.

What PyTorch's allocator holds can grow in later steps than the second (seen: in the third of gpt2, in the fourth of a ViT, by 3 to 4 %), because
batches and gradients land in other holes each time. Of a run with room to spare that need not be known; one that is near its limit
would tell too early that it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from autofit.workload.limits import MemoryMeter

NEAR = 0.8  #: of the limit
STILL_STEPS = 3  #: optimizer steps in a row without growth or a retry


@dataclass
class RestWatch:
    """Asked after every optimizer step: whether more of them would tell nothing new about memory.

    Args:
        meter: of the run.
        limit_bytes: what it may use, context included; None = without limit.
    """

    meter: MemoryMeter
    limit_bytes: int | None
    _seen: tuple[int, int] = (0, 0)
    _still: int = 0

    def __call__(self) -> bool:
        if self.limit_bytes is None:
            return True
        memory = self.meter.read()
        reserved = memory.peak_reserved_bytes or 0
        now = (reserved, memory.alloc_retries)
        self._still = self._still + 1 if now == self._seen else 0
        self._seen = now
        return self._still >= STILL_STEPS or (memory.context_bytes or 0) + reserved <= NEAR * self.limit_bytes
