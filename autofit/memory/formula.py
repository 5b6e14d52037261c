"""Peak memory by arithmetic, for when a model cannot be traced.

Activations of a transformer layer are those of Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (arXiv:2205.05198), equation 1: `s b h (34 + 5 a s / h)` bytes in 16 bit, where s is the sequence
length, b the batch, h the hidden size and a the number of heads. 32 of the 34 are 16-bit values and 2 are dropout masks
of one byte; of the 5, four are softmax's output and dropout's and one is the mask. In fp32 the values double and the
masks stay: `s b h (66 + 9 a s / h)`. A fused attention kernel stores no scores: the second term goes. With checkpointing
a layer keeps its input (`2 s b h`, fp32 `4 s b h`) and one layer at a time is recomputed in full. A language model's head
adds fp32 logits, their log-softmax and their gradient.

Bytes per parameter: weights, gradients of the same type, the optimizer's state, and a 16-bit copy under autocast. Of a model under an adapter, or
with frozen parts, only what is trained has gradients and state; quantised weights take the bytes that they are stored in, and no copy. The
peak is the larger of two moments: backward's beginning (activations and copies; gradients only if they persist between
micro-steps) and the update (gradients and the optimizer's temporaries; neither activations nor copies).

Ignored: gated and grouped architectures (their true factor is not 34), convolutions, the allocator's fragments, and all
that is not a transformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autofit.memory.events import Kind
from autofit.memory.replay import Peaks
from autofit.problem.config import PRECISION_FACTS, Precision

USUAL_ERROR = 0.30
"""Against traced steps of eight models: 15 % in the mean, 27 % too low at worst."""

ADAPTER_ERROR = 0.15
"""The same under LoRA on all linear layers, against traced steps of an encoder and two decoders."""

LOOSE_ERROR = 0.30
"""For a guess: the model's shape is in part unknown."""

QUANTISED_ERROR = 0.40
"""Under LoRA on quantised weights, 12 to 48 % too low against PyTorch's allocator; such models are traced where they can be."""

STATE_BYTES: tuple[tuple[str, float], ...] = (
    ("8bit", 2.0),
    ("4bit", 1.0),
    ("adafactor", 0.0),
    ("galore", 2.0),
    ("apollo", 2.0),
    ("adalomo", 0.0),
    ("lomo", 0.0),
    ("stable_adamw", 8.0),
    ("schedule_free_sgd", 4.0),
    ("schedule_free", 8.0),
    ("adagrad", 4.0),
    ("rmsprop", 4.0),
    ("lion", 4.0),
    ("sgd", 0.0),
    ("adam", 8.0),
)
"""Optimizer state per fp32 parameter by what the Trainer's `optim` contains; the first match counts. Momentum-free SGD
is the Trainer's default; 8-bit Lion and Adagrad have one state of a byte instead of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the formula wants to know of a model; None where its configuration does not say.

    Attributes:
        n_params: parameters.
        n_trainable: parameters with gradients; None = all.
        hidden_size, layers, heads: of the transformer's blocks.
        vocab_size: rows of a language model's head; None = no such head.
        seq_len: tokens per sample.
        adapter: whether an adapter is trained, which is float32 whatever the frozen weights are.
        quantised_bytes: all weights as stored, where linear layers are quantised; None = nothing is.
        n_quantised: parameters in those layers.
        convolutions: whether convolutions stand before the blocks, whose activations the formula does not know.
    """

    n_params: int
    n_trainable: int | None = None
    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    vocab_size: int | None = None
    seq_len: int | None = None
    adapter: bool = False
    quantised_bytes: int | None = None
    n_quantised: int = 0
    convolutions: bool = False

    def __post_init__(self) -> None:
        for name in ("n_params", "n_trainable", "hidden_size", "layers", "heads", "vocab_size", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < (0 if name in ("n_params", "n_trainable") else 1):
                raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaEstimate:
    """An answer of the closed form.

    Attributes:
        peaks: its one number in three places: the formula knows no allocator.
        kinds: bytes at the peak by what they hold.
        usual_error: relative error to expect, as measured; None where activations are unknown and left out, so that
            the number is a lower bound.
        notes: what was assumed, a line each.
    """

    peaks: Peaks
    kinds: Mapping[Kind, int]
    usual_error: float | None
    notes: tuple[str, ...] = field(default_factory=tuple)


def estimate_by_formula(
    shape: ModelShape,
    *,
    batch: int,
    precision: Precision,
    optim: str,
    checkpointing: bool = False,
    accumulates: bool = False,
    fused_attention: bool = False,
) -> FormulaEstimate:
    """Peak memory without the context, by the closed form.

    Args:
        shape: the model.
        batch: samples per micro-step.
        precision, optim, checkpointing: as in `TrialConfig`.
        accumulates: whether there is more than one micro-step per update.
        fused_attention: whether attention runs in a kernel that stores no scores.
    """
    notes: list[str] = []
    fixed, gradients, update = _parameters(shape, precision, optim, notes)
    activations = saved_activation_bytes(
        shape,
        batch=batch,
        precision=precision,
        checkpointing=checkpointing,
        fused_attention=fused_attention,
    )
    if activations is None:
        notes.append("the model's shape is unknown: activations are left out, this is a lower bound")
    elif shape.convolutions:
        notes.append("activations of the convolutions before the blocks are left out: this is a lower bound")
    temporaries = _logits_bytes(shape, batch)
    copies = _copies(shape, checkpointing) if PRECISION_FACTS[precision].autocast_dtype is not None else 0
    backward = (activations or 0) + temporaries + copies + (gradients if accumulates else 0)
    if backward >= gradients + update:
        kinds = {
            Kind.GRADIENTS: gradients if accumulates else 0,
            Kind.AUTOCAST_COPIES: copies,
            Kind.SAVED_ACTIVATIONS: activations or 0,
            Kind.TEMPORARIES: temporaries,
        }
    else:
        kinds = {Kind.GRADIENTS: gradients, Kind.TEMPORARIES: update}
    kinds = {kind: size for kind, size in {**fixed, **kinds}.items() if size}
    total = sum(kinds.values())
    complete = shape.heads is not None and shape.seq_len is not None
    error = LOOSE_ERROR if not complete else ADAPTER_ERROR if shape.adapter else USUAL_ERROR
    error = QUANTISED_ERROR if shape.quantised_bytes is not None else error
    return FormulaEstimate(
        peaks=Peaks(peak_allocated_bytes=total, peak_reserved_bytes=total, min_capacity_bytes=total),
        kinds=kinds,
        usual_error=None if activations is None or shape.convolutions else error,
        notes=tuple(notes),
    )


def saved_activation_bytes(
    shape: ModelShape,
    *,
    batch: int,
    precision: Precision,
    checkpointing: bool = False,
    fused_attention: bool = False,
) -> int | None:
    """Bytes that the blocks keep from forward to backward, and one block's recomputation; None without a shape.

    Checkpointing never raises it.
    """
    if shape.hidden_size is None or shape.layers is None:
        return None
    facts = PRECISION_FACTS[precision]
    half = facts.autocast_dtype is not None or facts.weight_dtype != "float32"
    length, hidden = shape.seq_len or 512, shape.hidden_size
    tokens = batch * length
    block = tokens * hidden * (34 if half else 66)
    if not fused_attention:
        heads = shape.heads or max(1, hidden // 64)
        block += tokens * heads * length * (5 if half else 9)
    everything = block * shape.layers
    if not checkpointing:
        return everything
    return min(everything, tokens * hidden * (2 if half else 4) * shape.layers + block)


def optimizer_state_bytes(optim: str) -> float | None:
    """State per fp32 parameter of the Trainer's optimizer `optim`; None when its name is unknown."""
    name = optim.lower()
    found = next((size for part, size in STATE_BYTES if part in name), None)
    if found == 2.0 and ("lion" in name or "rmsprop" in name or "adagrad" in name):
        return 1.0
    return found


def _parameters(
    shape: ModelShape, precision: Precision, optim: str, notes: list[str]
) -> tuple[dict[Kind, int], int, int]:
    """Bytes that stay, bytes of gradients, and the update's temporaries."""
    facts = PRECISION_FACTS[precision]
    width = 4 if facts.weight_dtype == "float32" else 2
    trainable = shape.n_params if shape.n_trainable is None else shape.n_trainable
    state = optimizer_state_bytes(optim)
    if state is None:
        state = 8.0
        notes.append(f"the optimizer {optim!r} is unknown: counted with AdamW's state")
    trained_width = 4 if shape.adapter else width
    if "bit" not in optim.lower():
        state *= trained_width / 4
    weights = (shape.n_params - trainable) * width + trainable * trained_width
    if shape.quantised_bytes is not None:
        weights = shape.quantised_bytes
        notes.append("quantised layers: the matrix that a layer unpacks while it multiplies is not counted, nor what it keeps: too low, by up to half")
    fixed = {
        Kind.WEIGHTS: weights,
        Kind.OPTIMIZER_STATE: int(trainable * state),
    }
    # Without `fused`, AdamW works on lists: one more list as large as the parameters while it updates.
    listwise = "fused" not in optim and optim.lower().startswith("adamw_torch")
    return fixed, trainable * trained_width, trainable * trained_width if listwise else 0


def _copies(shape: ModelShape, checkpointing: bool) -> int:
    """16-bit copies of the weights. Autocast keeps those of trained weights; backward needs those of frozen ones, of one layer at a time if it recomputes."""
    plain = shape.n_params - shape.n_quantised
    trainable = shape.n_params if shape.n_trainable is None else shape.n_trainable
    frozen = max(0, plain - trainable)
    if checkpointing and shape.layers:
        frozen //= shape.layers
    return 2 * (min(plain, trainable) + frozen)


def _logits_bytes(shape: ModelShape, batch: int) -> int:
    """fp32 logits, their log-softmax and their gradient."""
    if shape.vocab_size is None:
        return 0
    return 3 * 4 * batch * (shape.seq_len or 512) * shape.vocab_size
