"""Hand-made laws: small training loops whose memory depends on every knob as a real one's does, and searches over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from autofit.devices.device import Device
from autofit.forecasts.forecast import TracedForecast
from autofit.forecasts.laws import ClassLaws, Setting, law_class
from autofit.memory.cache import CachedLaws
from autofit.memory.events import Facts, Kind, Moment, Trace
from autofit.memory.law import MemoryLaw
from autofit.memory.trace_builder import TraceBuilder
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import Space
from autofit.problem.spec import Workload
from autofit.search.search import Search, Terms
from autofit.study.journal import open_study
from autofit.study.sampler import make_sampler
from autofit.study.study import TrialStudy
from autofit.trials.landscape import Landscape, Point
from autofit.trials.measurement import Measurement, Memory
from autofit.trials.replay import ReplayRunner
from autofit.units import MIB

WEIGHTS = 64 * MIB
LAYERS = 6
EFFECTIVE_BATCH = 64
CONTEXT = 200 * MIB
SETTING = Setting(
    workload=Workload(model="by-hand", seq_len=128), facts={"digest": "by hand", "seq_len": 128}
)


def toy_trace(config: TrialConfig, batch: int) -> Trace:
    """Two optimizer steps of six layers: what is kept depends on precision, checkpointing, optimizer and accumulation."""
    half = config.precision in (Precision.BF16, Precision.FP16)
    activation = batch * (3 if half else 5) * MIB
    builder = TraceBuilder()
    weights = [builder.alloc(WEIGHTS // LAYERS, "parameter", Kind.WEIGHTS) for _ in range(LAYERS)]
    gradients: list[int] = []
    for step in range(2):
        for micro_step in range(min(2, config.gradient_accumulation_steps)):
            saved = _forward(builder, config, step, micro_step, activation)
            builder.mark(Moment.BACKWARD, step=step, micro_step=micro_step)
            for tensor in reversed(saved):
                again = (
                    builder.alloc(activation, "aten.mm.default") if config.gradient_checkpointing else None
                )
                flowing = builder.alloc(2 * batch * MIB, "aten.mm.default")
                if len(gradients) < len(weights):
                    gradients.append(builder.alloc(WEIGHTS // LAYERS, "aten.mm.default", Kind.GRADIENTS))
                for dead in (again, flowing, tensor):
                    if dead is not None:
                        builder.free(dead)
        builder.mark(Moment.UPDATE, step=step)
        if step == 0 and config.optim != "adafactor":
            builder.alloc(2 * WEIGHTS, "aten.zeros_like.default", Kind.OPTIMIZER_STATE)
        builder.mark(Moment.ZERO, step=step)
        while gradients:
            builder.free(gradients.pop())
    return builder.build(
        Facts(batch=batch, seq_len=128, accumulation=min(2, config.gradient_accumulation_steps))
    )


def _forward(
    builder: TraceBuilder, config: TrialConfig, step: int, micro_step: int, activation: int
) -> list[int]:
    builder.mark(Moment.FORWARD, step=step, micro_step=micro_step)
    saved = []
    for _ in range(LAYERS):
        kept = activation // 8 if config.gradient_checkpointing else activation
        saved.append(builder.alloc(kept, "aten.relu.default"))
        builder.free(builder.alloc(activation, "aten.dropout.default"))
    return saved


def toy_laws(configs: Iterable[TrialConfig]) -> dict[str, ClassLaws]:
    """Laws of every class of `configs`."""
    found: dict[str, ClassLaws] = {}
    for config in configs:
        key = law_class(SETTING, config)
        if key not in found:
            found[key] = ClassLaws(laws=CachedLaws(memory=toy_law(config)))
    return found


def toy_law(config: TrialConfig) -> MemoryLaw:
    """The law of one class, with batch 1 traced apart."""
    return MemoryLaw.fit(toy_trace(config, 2), toy_trace(config, 4), single=toy_trace(config, 1))


class Child:
    """Answers estimate requests with hand-made laws, and remembers what it was asked."""

    def __init__(self, *, refuse: str | None = None) -> None:
        self.payloads: list[dict[str, Any]] = []
        self._refuse = refuse

    def __call__(self, payload: dict[str, Any]) -> dict[str, Any]:
        self.payloads.append(payload)
        return {"answers": [self._answer(request) for request in payload["requests"]]}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        config = TrialConfig.from_json(request["config"])
        if self._refuse is not None and config.optim == self._refuse:
            return {"law": None, "costs": None, "trace": None, "reason": f"{self._refuse} has no fake kernel"}
        return {"law": toy_law(config).to_json(), "costs": None, "trace": None, "reason": None}


def grid(precisions: Sequence[Precision] = (Precision.BF16, Precision.FP32)) -> tuple[TrialConfig, ...]:
    """Every configuration of the toy's space, the plainest class first."""
    return tuple(
        TrialConfig(
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=EFFECTIVE_BATCH // batch,
            gradient_checkpointing=on,
            precision=precision,
            optim=optim,
        )
        for optim in ("adamw_torch_fused", "adafactor")
        for on in (False, True)
        for precision in precisions
        for batch in (64, 32, 16, 8, 4, 2, 1)
    )


def samples_per_second(config: TrialConfig) -> float:
    """Large batches and 16 bit are fast, checkpointing is slow."""
    batch = config.per_device_train_batch_size
    speed = 100.0 * batch / (batch + 6)
    speed *= 1.0 if config.precision is Precision.FP32 else 2.5
    return (
        speed
        * (0.75 if config.gradient_checkpointing else 1.0)
        * (0.97 if config.optim == "adafactor" else 1.0)
    )


def landscape_of(forecast: TracedForecast, *, context_bytes: int = CONTEXT, factor: float = 1.0) -> Landscape:
    """A device on which the forecasts are true, but for its context and a factor on what the allocator holds.

    A point holds what the allocator has to hold at least: that a configuration could not run with less.
    """
    points = []
    for config in grid():
        law = forecast.laws[law_class(SETTING, config)].laws
        assert law is not None
        peaks = law.memory.predict(config.per_device_train_batch_size)
        memory = Memory(
            peak_allocated_bytes=int(factor * peaks.peak_allocated_bytes),
            peak_reserved_bytes=int(factor * peaks.min_capacity_bytes),
        )
        micro = config.per_device_train_batch_size / samples_per_second(config)
        measured = Measurement(
            micro_step_seconds=(micro, 1.01 * micro, 0.99 * micro), update_seconds=(0.001,), memory=memory
        )
        points.append(Point(config=config, measurement=measured))
    device = Device(kind="cuda", name="by hand", total_memory_bytes=0, context_bytes=context_bytes)
    return Landscape(points=tuple(points), device=device)


def toy_forecast(
    limit_bytes: int, *, context_bytes: int = CONTEXT, laws: dict[str, ClassLaws] | None = None
) -> TracedForecast:
    """Forecasts for the toy's space under a limit."""
    laws = toy_laws(grid()) if laws is None else laws
    return TracedForecast(setting=SETTING, laws=laws, context_bytes=context_bytes, limit_bytes=limit_bytes)


def search_over(
    landscape: Landscape, forecast: TracedForecast, *, seed: int = 0
) -> tuple[Search, TrialStudy]:
    """A search that replays `landscape` with the cost-model sampler; not yet run."""
    space = Space(configs=tuple(point.config for point in landscape.points))
    limit = forecast.limit_bytes
    sampler = make_sampler("auto", space=space, seed=seed, memory_limit_bytes=limit, memory=forecast)
    study = TrialStudy(open_study(None, sampler=sampler, identity={"model": "by hand"}), space)
    terms = Terms(
        effective_batch=EFFECTIVE_BATCH,
        memory_limit_bytes=limit,
        native_precisions=(Precision.FP32, Precision.BF16),
        baselines_outside_space=False,
        seed=seed,
    )
    return Search(
        terms=terms, space=space, study=study, runner=ReplayRunner(landscape, seed=seed), memory=forecast
    ), study


def needed_bytes(landscape: Landscape, config: TrialConfig) -> int:
    """What a configuration takes on the landscape's device."""
    point = next(p for p in landscape.points if p.config == config)
    assert point.measurement is not None
    reserved = point.measurement.memory.peak_reserved_bytes
    assert reserved is not None
    return reserved + landscape.device.context_bytes


def under(forecast: TracedForecast, limit_bytes: int) -> TracedForecast:
    """The same laws under another limit."""
    return replace(forecast, limit_bytes=limit_bytes, _known={})
