"""Landscapes computed from closed physical formulas, for cards that are not at hand. Always labelled `modelled`.

Time: every matrix product is priced by tiles and waves over the card's multiprocessors (a partly filled last wave costs a
whole one), every other kernel by its bytes, the sum against the host's launches (whichever is slower counts);
checkpointing repeats the forward pass; optimizers move bytes and launch kernels. Memory: parameters, gradients, optimizer state,
saved activations (Korthikanti et al. 2022, eq. 2, with and without attention scores), logits, the caching allocator's
granularity. Noise: jitter and rare slow steps within a run, drift between runs. Peaks and bandwidths are data-sheet numbers.

This is not the sampler's model of the world: no half-saturation batch, no smooth curve and no prior of it appears here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autofit.devices.device import Device
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import divisors
from autofit.trials.landscape import Landscape, Point
from autofit.trials.measurement import Measurement, Memory
from autofit.units import GIB, MIB

SIXTEEN = (Precision.BF16, Precision.FP16)
OPTIMS = ("adamw_torch_fused", "adamw_torch", "adafactor", "adamw_bnb_8bit")
SEGMENT = 20 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Data-sheet facts: TFLOP/s (dense) by precision, GB/s, bytes, multiprocessors; launch microseconds of its usual host."""

    name: str
    tflops: Mapping[Precision, float]
    gigabytes_per_second: float
    total_bytes: int
    multiprocessors: int
    launch_us: float
    context_bytes: int
    capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Shape of a transformer: `ffn_matrices` is 2 (GELU) or 3 (gated); `vocab` 0 = no language-model head."""

    name: str
    task: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    embeddings: int
    ffn_matrices: int = 2

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the matrix products of all layers."""
        return self.layers * (4 * self.hidden**2 + self.ffn_matrices * self.hidden * self.ffn)

    @property
    def parameters(self) -> int:
        """All parameters; a language-model head shares the embedding."""
        return self.matrix_parameters + self.embeddings * self.hidden + self.layers * 13 * self.hidden

    @property
    def tensors(self) -> int:
        """Number of parameter tensors."""
        return self.layers * (8 + 2 * self.ffn_matrices + 4) + 8


def _card(
    name: str,
    tflops: tuple[float, ...],
    bandwidth: float,
    memory: float,
    sms: int,
    launch: float,
    context: int,
    sm: str,
) -> Card:
    fp32, tf32, fp16, bf16 = tflops
    peaks = {Precision.FP32: fp32, Precision.TF32: tf32, Precision.FP16: fp16, Precision.BF16: bf16}
    return Card(
        name=name,
        tflops={p: v for p, v in peaks.items() if v > 0},
        gigabytes_per_second=bandwidth,
        total_bytes=int(memory * GIB),
        multiprocessors=sms,
        launch_us=launch,
        context_bytes=context * MIB,
        capability=sm,
    )


CARDS = {
    card.name: card
    for card in (
        _card("V100", (15.7, 0, 125, 0), 900, 16, 80, 7.0, 450, "7.0"),
        _card("T4", (8.1, 0, 65, 0), 320, 15, 40, 8.0, 350, "7.5"),
        _card("RTX 3090", (35.6, 35.6, 71, 71), 936, 24, 82, 5.0, 400, "8.6"),
        _card("A100", (19.5, 156, 312, 312), 1555, 40, 108, 5.5, 480, "8.0"),
        _card("H100", (67, 494, 989, 989), 3350, 80, 132, 4.0, 550, "9.0"),
    )
}
ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture(name="bert-large", task="sequence-classification", layers=24, hidden=1024, ffn=4096, heads=16, vocab=0, embeddings=31036),
        Architecture(name="gpt2-medium", task="causal-lm", layers=24, hidden=1024, ffn=4096, heads=16, vocab=50257, embeddings=51281),
        Architecture(name="t5-base", task="seq2seq-lm", layers=30, hidden=768, ffn=3072, heads=12, vocab=32128, embeddings=32128),
        Architecture(name="llama-1b", task="causal-lm", layers=16, hidden=2048, ffn=8192, heads=32, vocab=128256, embeddings=128256, ffn_matrices=3),
        Architecture(name="vit-base", task="image-classification", layers=12, hidden=768, ffn=3072, heads=12, vocab=0, embeddings=965),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Laws:
    """The formulas for one card, architecture and sequence length."""

    card: Card
    model: Architecture
    seq_len: int

    def micro_seconds(self, config: TrialConfig, *, ideal: bool = False) -> float:
        """One forward and backward. `ideal`: the roofline alone (no waves, no launches, full efficiency)."""
        precision, batch = config.precision, config.per_device_train_batch_size
        tokens = batch * self.seq_len
        eager = dict(config.extra).get("attn_implementation") == "eager"
        layer_gemms = self._layer_gemms(tokens)
        head = [(tokens, self.model.vocab, self.model.hidden)] if self.model.vocab else []
        forward = self.model.layers * sum(self._gemm(g, precision, ideal) for g in layer_gemms)
        backward = 2 * forward
        head_seconds = 3 * sum(self._gemm(g, precision, ideal) for g in head)
        attention = self.model.layers * self._attention(batch, precision, eager, ideal)
        element = 2 if precision in SIXTEEN else 4
        pointwise = (
            self.model.layers
            * tokens
            * (14 * self.model.hidden + 5 * self.model.ffn)
            * element
            / self._bytes_per_s
        )
        casts = 6.0 * self.model.parameters / self._bytes_per_s if precision in SIXTEEN else 0.0
        logits = 5 * tokens * self.model.vocab * 4 / self._bytes_per_s
        passes = 4 / 3 if config.gradient_checkpointing else 1.0
        gpu = passes * (forward + backward + 3 * attention + 3 * pointwise) + casts + head_seconds + logits
        kernels = self.model.layers * (30 + (8 if eager else 0)) * 3.2 * passes + 60
        kernels += self.model.tensors * (1 if precision in SIXTEEN else 0)
        if ideal:
            return gpu
        return max(gpu, kernels * self.card.launch_us * 1e-6) + 60 * self.card.launch_us * 1e-6

    def update_seconds(self, config: TrialConfig, *, ideal: bool = False) -> float:
        """Clip, optimizer step, zero_grad."""
        passes, kernels = {
            "adamw_torch_fused": (28 + 8, 0.12), "adamw_torch": (64 + 8, 0.4),
            "adafactor": (48 + 8, 18.0), "adamw_bnb_8bit": (16 + 8, 2.0),
        }[config.optim]  # fmt: skip
        unscale = 8 if config.precision is Precision.FP16 else 0
        moved = (passes + unscale) * self.model.parameters / self._bytes_per_s
        launches = (kernels * self.model.tensors + 30) * self.card.launch_us * 1e-6
        return moved if ideal else max(moved, launches) + 2e-4

    def fetch_seconds(self, config: TrialConfig) -> float:
        """Loader and loop per micro-step."""
        return 3e-4 + 1.5e-5 * config.per_device_train_batch_size

    def reserved_bytes(self, config: TrialConfig) -> int:
        """Peak reserved by the caching allocator."""
        weights = 4 * self.model.parameters
        state = {"adamw_torch_fused": 2.0, "adamw_torch": 2.0, "adafactor": 0.01, "adamw_bnb_8bit": 0.6}[
            config.optim
        ]
        transient = {"adamw_torch": 1.0, "adafactor": 0.25}.get(config.optim, 0.05)
        cast = 0.5 * weights if config.precision in SIXTEEN else 0.0
        gradients = weights if config.gradient_accumulation_steps > 1 else 0.35 * weights
        forward = weights * (1 + state) + gradients + cast + self._activations(config)
        update = weights * (2 + state + transient)
        allocated = max(forward, update)
        return int(math.ceil(1.02 * allocated / SEGMENT) * SEGMENT)

    @property
    def _bytes_per_s(self) -> float:
        return 0.8e9 * self.card.gigabytes_per_second

    def _layer_gemms(self, tokens: int) -> list[tuple[int, int, int]]:
        h, f = self.model.hidden, self.model.ffn
        return [
            (tokens, 3 * h, h),
            (tokens, h, h),
            *[(tokens, f, h)] * (self.model.ffn_matrices - 1),
            (tokens, h, f),
        ]

    def _gemm(self, shape: tuple[int, int, int], precision: Precision, ideal: bool) -> float:
        m, n, k = shape
        peak = self.card.tflops[precision] * 1e12
        element = 2 if precision in SIXTEEN else 4
        moved = (m * k + k * n + m * n) * element / self._bytes_per_s
        if ideal:
            return max(2.0 * m * n * k / peak, moved)
        rows, columns = (128, 128) if m * n >= 128 * 128 * self.card.multiprocessors else (64, 64)
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / self.card.multiprocessors)
        efficiency = (0.72 if precision in SIXTEEN else 0.85) * (
            1.0 if m % 8 == 0 or precision not in SIXTEEN else 0.7
        )
        compute = waves * 2.0 * rows * columns * k * self.card.multiprocessors / (peak * efficiency)
        return max(compute, moved)

    def _attention(self, batch: int, precision: Precision, eager: bool, ideal: bool) -> float:
        work = 4.0 * batch * self.seq_len**2 * self.model.hidden
        seconds = work / (self.card.tflops[precision] * 1e12 * (1.0 if ideal else 0.5))
        if eager:
            element = 2 if precision in SIXTEEN else 4
            seconds += 6 * batch * self.model.heads * self.seq_len**2 * element / self._bytes_per_s
        return seconds

    def _activations(self, config: TrialConfig) -> float:
        batch, tokens = config.per_device_train_batch_size, config.per_device_train_batch_size * self.seq_len
        half = config.precision in SIXTEEN
        eager = dict(config.extra).get("attn_implementation") == "eager"
        hidden = tokens * self.model.hidden * (34 if half else 66)
        gated = tokens * self.model.ffn * (4 if half else 8) * (self.model.ffn_matrices - 2)
        scores = batch * self.model.heads * self.seq_len**2 * (5 if half else 9) if eager else 0.0
        layer = hidden + gated + scores
        logits = tokens * self.model.vocab * (14 if half else 12)
        if config.gradient_checkpointing:
            return layer + self.model.layers * tokens * self.model.hidden * 4 + logits
        return self.model.layers * layer + logits


def modelled_landscape(
    card: Card,
    model: Architecture,
    *,
    seq_len: int,
    effective_batch: int,
    extras: Sequence[str] = (),
    seed: int = 0,
) -> Landscape:
    """Return the exhaustive grid of a card and an architecture, with raw samples.

    Args:
        extras: alternatives of `attn_implementation`; none = the library's choice.
        seed: of the noise.
    """
    laws, rng = Laws(card=card, model=model, seq_len=seq_len), np.random.default_rng(seed)
    points = []
    jitter = float(rng.uniform(0.004, 0.02))
    for batch in divisors(effective_batch):
        for precision in card.tflops:
            for checkpointing in (False, True):
                for optim in OPTIMS:
                    for extra in extras or (None,):
                        config = TrialConfig(
                            per_device_train_batch_size=batch,
                            gradient_accumulation_steps=effective_batch // batch,
                            gradient_checkpointing=checkpointing,
                            precision=precision,
                            optim=optim,
                            extra=() if extra is None else (("attn_implementation", extra),),
                        )
                        points.append(_point(laws, config, jitter, rng))
    device = Device(
        kind="cuda",
        name=card.name,
        total_memory_bytes=card.total_bytes,
        context_bytes=card.context_bytes,
        compute_capability=card.capability,
        precisions=tuple(card.tflops),
    )
    spec = {"model": model.name, "task": model.task, "seq_len": seq_len, "effective_batch": effective_batch}
    return Landscape(points=tuple(points), device=device, spec=spec, modelled=True)


def _point(laws: Laws, config: TrialConfig, jitter: float, rng: np.random.Generator) -> Point:
    reserved = laws.reserved_bytes(config)
    if reserved + laws.card.context_bytes > laws.card.total_bytes:
        return Point(config=config)
    drift = math.exp(float(rng.normal(0.0, 0.3 * jitter)))

    def samples(seconds: float, count: int) -> tuple[float, ...]:
        noise = rng.normal(0.0, jitter, count) + (rng.random(count) < 0.03) * rng.exponential(0.2, count)
        return tuple(float(x) for x in np.round(seconds * drift * np.exp(noise), 9))

    return Point(
        config=config,
        measurement=Measurement(
            micro_step_seconds=samples(laws.micro_seconds(config), 16),
            fetch_seconds=samples(laws.fetch_seconds(config), 8),
            update_seconds=samples(laws.update_seconds(config), 8),
            memory=Memory(peak_allocated_bytes=int(reserved / 1.02), peak_reserved_bytes=reserved),
        ),
    )
