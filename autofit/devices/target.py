"""The device that a question about memory is about: a card of the table, a size, or both."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.devices import cards
from autofit.errors import UserError
from autofit.problem.config import Precision
from autofit.units import MIB, parse_size

TYPICAL_CONTEXT_BYTES = 450 * MIB  #: of recent cards with lazily loaded kernels, see `cards`
TYPICAL_CAPABILITY = "8.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The device that is asked about.

    Attributes:
        name: for the reader.
        memory_bytes: what a run may use, context included; None = not said.
        context_bytes: what is lost before the first tensor.
        compute_capability: decides kernels and workspaces.
        precisions: native ones.
        warnings: what was assumed.
    """

    name: str
    memory_bytes: int | None
    context_bytes: int
    compute_capability: str
    precisions: tuple[Precision, ...]
    warnings: tuple[str, ...] = ()


def target_of(gpu: str | None, memory: str | int | None) -> Target:
    """The device that is meant.

    Raises:
        UserError: an unknown card (with the nearest names), or a size that is none.
    """
    size = None if memory is None else parse_size(memory, what="memory")
    if gpu is None:
        warnings = [
            f"no card was named: compute capability {TYPICAL_CAPABILITY} and a context of {TYPICAL_CONTEXT_BYTES // MIB} MiB are assumed"
        ]
        name = "an unnamed card"
        precisions = tuple(p for p in Precision if p is not Precision.PURE_BF16)
        return Target(
            name=name,
            memory_bytes=size,
            context_bytes=TYPICAL_CONTEXT_BYTES,
            compute_capability=TYPICAL_CAPABILITY,
            precisions=precisions,
            warnings=tuple(warnings),
        )
    card = cards.find(gpu)
    warnings = [f"figures of {card.name} are approximate"] if card.approximate else []
    if size is not None and size > card.usable_bytes:
        raise UserError(f"--memory is more than {card.name} has", hint="leave it out to use all of the card")
    capability = TYPICAL_CAPABILITY if card.is_amd else card.compute_capability
    if card.is_amd:
        warnings.append("AMD card: kernels of an NVIDIA card of compute capability 8.0 were assumed")
    return Target(
        name=card.name,
        memory_bytes=size or card.usable_bytes,
        context_bytes=card.context_bytes,
        compute_capability=capability,
        precisions=cards.precisions(card),
        warnings=tuple(warnings),
    )
