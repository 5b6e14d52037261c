"""Memory and time of every configuration of a space, as the search wants them: from laws, before any trial.

What fits is decided by replaying the allocator under the limit. The band in between is left to real trials: DESIGN's margins are a configuration
that is 3 % over even with a perfect allocator (`peak allocated`), and one that has 7 % to spare with ours (`min capacity`); 7.4 % is the largest
under-prediction seen against published measurements at fixed shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autofit.beliefs.predict import MemoryForecast
from autofit.forecasts.laws import ClassLaws, Setting, law_class
from autofit.memory.roofline import Roof, StepSeconds
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.extras import TRACED

OVER, SPARE = 1.03, 0.93
FAR = 1.5  #: times the limit: beyond it nobody asks how much the allocator could give back


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedForecast:
    """A `predict.MemoryModel` and a `speed.TimePrior` over laws.

    Attributes:
        setting: what the laws were made for.
        laws: class -> laws.
        context_bytes: what the device loses before the first tensor.
        limit_bytes: what a run may use of the device, context included.
        roof: the card's peaks; None = no time is predicted.
        releases: whether the allocator gives back what it can when short of memory; a replayed landscape knows its recorded peaks only.
    """

    setting: Setting
    laws: Mapping[str, ClassLaws]
    context_bytes: int
    limit_bytes: int
    roof: Roof | None = None
    releases: bool = True
    _known: dict[str, MemoryForecast | None] = field(default_factory=dict, repr=False, compare=False)

    def needed(self, config: TrialConfig) -> MemoryForecast | None:
        """Device bytes that `config` takes under the limit, context included; None when its class could not be traced."""
        key = config.key()
        if key not in self._known:
            self._known[key] = self._forecast(config)
        return self._known[key]

    def micro_seconds(self, config: TrialConfig) -> float | None:
        """Roofline seconds of one micro-step."""
        step = self._seconds(config)
        return None if step is None else step.micro_step

    def update_seconds(self, config: TrialConfig) -> float | None:
        """Roofline seconds of one update."""
        step = self._seconds(config)
        return None if step is None else step.update

    def _class(self, config: TrialConfig) -> ClassLaws | None:
        return self.laws.get(law_class(self.setting, config))

    def _forecast(self, config: TrialConfig) -> MemoryForecast | None:
        found = self._class(config)
        if found is None or found.laws is None:
            return None
        law, batch = found.laws.memory, config.per_device_train_batch_size
        room = self.limit_bytes - self.context_bytes
        allocated, likely = law.peak_allocated_bytes(batch), law.peak_reserved_bytes(batch)
        least = likely
        if self.releases and likely / SPARE > room and allocated < FAR * room:
            # Short of memory the allocator gives back what it can: less than it would like to hold may do.
            least = law.min_capacity_bytes(batch)
            likely = max(least, min(likely, room))
        low = min(int(allocated / OVER), likely)
        high = max(int(least / SPARE), likely)
        return MemoryForecast(
            low_bytes=self.context_bytes + low,
            bytes=self.context_bytes + likely,
            high_bytes=self.context_bytes + high,
        )

    def _seconds(self, config: TrialConfig) -> StepSeconds | None:
        # Time as without what cannot be traced: the search learns the difference.
        traced = tuple(pair for pair in config.extra if pair[0] in TRACED)
        ways = (self._class(config.but(extra=extra)) for extra in dict.fromkeys((config.extra, traced, ())))
        found = next((way for way in ways if way is not None and way.laws is not None), None)
        if self.roof is None or found is None or found.laws is None or found.laws.cost is None:
            return None
        tf32 = config.precision is Precision.TF32
        return found.laws.cost.seconds(self.roof, config.per_device_train_batch_size, tf32=tf32)
