"""GPUs that a user may ask about without owning one: memory, dense peaks, bandwidth, and the name under which each is found.

Peaks are those of dense matrix products with fp32 accumulation, which is what torch asks for: half the figure with structured sparsity, and on GeForce
half the figure with fp16 accumulation. `reported` is the capacity that torch's own out-of-memory messages name ("has a total capacity of"), the lowest
seen with recent drivers, and for old cards with those of their day; the rest is reserved by driver, firmware and, on GDDR cards, ECC where it is on. The context is what the same
messages count as the process's memory outside the allocator (kernels loaded lazily, torch 2.x); it moves with model, driver and library by
some 300 MiB and should be measured where the card is at hand. Boost clocks, power limits and laptop editions are not covered.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from autofit.errors import UserError
from autofit.problem.config import Precision
from autofit.units import GIB, MIB

#: Taken as reserved where no reported capacity is known: 0.4 GiB and 1 %; the GDDR cards seen with recent drivers lose 0.38 to 0.55 GiB.
RESERVE_BYTES, RESERVE_SHARE = 410 * MIB, 0.01
SIZE_TOLERANCE = (
    0.10  #: between a size in a name and the card's: 192GB and 180GB are one B200, 10GB and 12GB two cards
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU as torch sees it (an MI250 is two devices; the figures are those of one).

    Attributes:
        name: unique, as `names` lists it.
        aliases: further names; two memory sizes of one product share theirs.
        memory_bytes: nominal memory.
        reported_bytes: `total_memory` as torch reports it; None where it was not seen.
        compute_capability: `8.0`, or the architecture of an AMD card (`gfx90a`).
        fp32_tflops: peak of fp32 matrix products, in 10^12 operations per second, as all peaks.
        tf32_tflops: None where the hardware has no such format.
        fp16_tflops: with fp32 accumulation. GeForce Pascal: the fp32 peak, because cuBLAS computes in fp32 there.
        bf16_tflops: None where it is emulated.
        bandwidth_gbps: memory bandwidth in 10^9 bytes per second.
        context_bytes: typical loss before the first tensor.
        approximate: figures that its makers state differently from place to place, or that nobody here could check.
        source: title of the document that the figures are from.
    """

    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    reported_bytes: int | None
    compute_capability: str
    fp32_tflops: float
    tf32_tflops: float | None
    fp16_tflops: float
    bf16_tflops: float | None
    bandwidth_gbps: float
    context_bytes: int
    approximate: bool
    source: str

    @property
    def usable_bytes(self) -> int:
        """What a process and its context can have: the reported capacity, else the nominal one less a usual reserve."""
        return self.reported_bytes or int(self.memory_bytes * (1 - RESERVE_SHARE)) - RESERVE_BYTES

    @property
    def is_amd(self) -> bool:
        """Whether the card is programmed through HIP."""
        return self.compute_capability.startswith("gfx")


# Columns: name, aliases, nominal GiB, reported GiB, capability, TFLOPS fp32, tf32, fp16, bf16, GB/s, context MiB, source.
_Row = tuple[
    str, tuple[str, ...], float, float | None, str, float, float | None, float, float | None, float, int, str
]
_TURING = "NVIDIA Turing GPU Architecture whitepaper, appendices"
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendices"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendices"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendices"
# fmt: off
_ROWS: tuple[_Row, ...] = (
    ("T4",              (),                         16, 14.56, "7.5",   8.1,  None,  65.0,  None,  320,  130, "NVIDIA T4 Tensor Core GPU data sheet"),
    ("V100-SXM-16GB",   ("V100",),                  16, 15.77, "7.0",  15.7,  None, 125.0,  None,  900,  310, "NVIDIA V100 Tensor Core GPU data sheet"),
    ("V100-SXM-32GB",   ("V100",),                  32, 31.73, "7.0",  15.7,  None, 125.0,  None,  900,  310, "NVIDIA V100 Tensor Core GPU data sheet"),
    ("V100-PCIE-16GB",  (),                         16, 15.77, "7.0",  14.0,  None, 112.0,  None,  900,  310, "NVIDIA V100 Tensor Core GPU data sheet"),
    ("V100-PCIE-32GB",  (),                         32, 31.73, "7.0",  14.0,  None, 112.0,  None,  900,  310, "NVIDIA V100 Tensor Core GPU data sheet"),
    ("P100-PCIE-16GB",  ("P100",),                  16, 15.89, "6.0",   9.3,  None,  18.7,  None,  732,  260, "NVIDIA Tesla P100 data sheet"),
    ("P100-SXM-16GB",   (),                         16, 15.89, "6.0",  10.6,  None,  21.2,  None,  732,  260, "NVIDIA Tesla P100 data sheet"),
    ("GTX 1080 Ti",     ("1080 Ti",),               11, 10.90, "6.1",  11.3,  None,  11.3,  None,  484,  180, "GeForce GTX 1080 Ti specifications"),

    ("RTX 2060",        ("2060",),                   6,  None, "7.5",   6.5,  None,  25.8,  None,  336,  150, _TURING),
    ("RTX 2070",        ("2070",),                   8,  None, "7.5",   7.5,  None,  29.9,  None,  448,  160, _TURING),
    ("RTX 2080",        ("2080",),                   8,  None, "7.5",  10.1,  None,  40.3,  None,  448,  170, _TURING),
    ("RTX 2080 Ti",     ("2080 Ti",),               11, 10.75, "7.5",  13.4,  None,  53.8,  None,  616,  190, _TURING),
    ("Titan RTX",       (),                         24, 23.64, "7.5",  16.3,  None, 130.5,  None,  672,  200, _TURING),
    ("Quadro RTX 8000", ("RTX 8000",),              48,  None, "7.5",  16.3,  None, 130.5,  None,  672,  200, _TURING),
    ("Titan V",         (),                         12, 11.77, "7.0",  13.8,  None, 110.0,  None,  653,  300, "NVIDIA Titan V specifications"),

    ("RTX 3060 12GB",   ("RTX 3060", "3060"),       12, 11.63, "8.6",  12.7,  12.7,  25.4,  25.4,  360,  200, _AMPERE),
    ("RTX 3070",        ("3070",),                   8,  None, "8.6",  20.3,  20.3,  40.6,  40.6,  448,  170, _AMPERE),
    ("RTX 3080 10GB",   ("RTX 3080", "3080"),       10,  9.62, "8.6",  29.8,  29.8,  59.5,  59.5,  760,  220, _AMPERE),
    ("RTX 3080 Ti",     ("3080 Ti",),               12,  None, "8.6",  34.1,  34.1,  68.2,  68.2,  912,  250, _AMPERE),
    ("RTX 3090",        ("3090",),                  24, 23.56, "8.6",  35.6,  35.6,  71.0,  71.0,  936,  310, _AMPERE),
    ("RTX 3090 Ti",     ("3090 Ti",),               24,  None, "8.6",  40.0,  40.0,  80.0,  80.0, 1008,  310, _AMPERE),
    ("RTX 4060 Ti 8GB", ("RTX 4060 Ti", "4060 Ti"),  8,  None, "8.9",  22.1,  22.1,  44.1,  44.1,  288,  180, _ADA),
    ("RTX 4060 Ti 16GB", ("RTX 4060 Ti", "4060 Ti"), 16, 15.57, "8.9", 22.1,  22.1,  44.1,  44.1,  288,  180, _ADA),
    ("RTX 4070",        ("4070",),                  12, 11.56, "8.9",  29.1,  29.1,  58.3,  58.3,  504,  200, _ADA),
    ("RTX 4070 Ti",     ("4070 Ti",),               12,  None, "8.9",  40.1,  40.1,  80.2,  80.2,  504,  230, _ADA),
    ("RTX 4080",        ("4080",),                  16,  None, "8.9",  48.7,  48.7,  97.5,  97.5,  717,  280, _ADA),
    ("RTX 4080 SUPER",  ("4080 SUPER",),            16,  None, "8.9",  52.2,  52.2, 104.4, 104.4,  736,  280, "GeForce RTX 4080 SUPER specifications"),
    ("RTX 4090",        ("4090",),                  24, 23.52, "8.9",  82.6,  82.6, 165.2, 165.2, 1008,  320, _ADA),
    ("RTX 5070",        ("5070",),                  12,  None, "12.0", 30.9,  30.9,  61.7,  61.7,  672,  250, _BLACKWELL),
    ("RTX 5070 Ti",     ("5070 Ti",),               16,  None, "12.0", 43.9,  43.9,  87.9,  87.9,  896,  300, _BLACKWELL),
    ("RTX 5080",        ("5080",),                  16, 15.45, "12.0", 56.3,  56.3, 112.6, 112.6,  960,  350, _BLACKWELL),
    ("RTX 5090",        ("5090",),                  32, 31.34, "12.0", 104.8, 104.8, 209.5, 209.5, 1792, 500, _BLACKWELL),

    ("RTX A2000 6GB",   ("RTX A2000", "A2000"),      6,  None, "8.6",   8.0,  16.0,  31.9,  31.9,  288,  170, "NVIDIA RTX A2000 data sheet"),
    ("RTX A2000 12GB",  ("RTX A2000", "A2000"),     12,  None, "8.6",   8.0,  16.0,  31.9,  31.9,  288,  170, "NVIDIA RTX A2000 data sheet"),
    ("RTX A4000",       ("A4000",),                 16,  None, "8.6",  19.2,  38.3,  76.7,  76.7,  448,  220, "NVIDIA RTX A4000 data sheet"),
    ("RTX A4500",       ("A4500",),                 20, 19.57, "8.6",  23.7,  47.3,  94.6,  94.6,  640,  300, "NVIDIA RTX A4500 data sheet"),
    ("RTX A5000",       ("A5000",),                 24,  None, "8.6",  27.8,  55.6, 111.1, 111.1,  768,  310, "NVIDIA RTX A5000 data sheet"),
    ("RTX A6000",       ("A6000",),                 48, 47.40, "8.6",  38.7,  77.4, 154.8, 154.8,  768,  320, "NVIDIA RTX A6000 data sheet"),
    ("RTX 6000 Ada",    ("6000 Ada",),              48, 47.40, "8.9",  91.1, 182.1, 364.2, 364.2,  960,  330, "NVIDIA RTX 6000 Ada Generation data sheet"),

    ("A10",             (),                         24, 22.06, "8.6",  31.2,  62.5, 125.0, 125.0,  600,  250, "NVIDIA A10 Tensor Core GPU data sheet"),
    ("A10G",            (),                         24, 21.98, "8.6",  35.0,  35.0,  70.0,  70.0,  600,  250, "NVIDIA A10G Tensor Core GPU data sheet (AWS)"),
    ("A30",             (),                         24,  None, "8.0",  10.3,  82.0, 165.0, 165.0,  933,  400, "NVIDIA A30 Tensor Core GPU data sheet"),
    ("A40",             (),                         48, 44.34, "8.6",  37.4,  74.8, 149.7, 149.7,  696,  320, "NVIDIA A40 data sheet"),
    ("A100-SXM-40GB",   ("A100",),                  40, 39.38, "8.0",  19.5, 156.0, 312.0, 312.0, 1555,  500, "NVIDIA A100 Tensor Core GPU data sheet"),
    ("A100-SXM-80GB",   ("A100",),                  80, 79.15, "8.0",  19.5, 156.0, 312.0, 312.0, 2039,  500, "NVIDIA A100 Tensor Core GPU data sheet"),
    ("A100-PCIE-40GB",  (),                         40, 39.38, "8.0",  19.5, 156.0, 312.0, 312.0, 1555,  500, "NVIDIA A100 Tensor Core GPU data sheet"),
    ("A100-PCIE-80GB",  (),                         80, 79.14, "8.0",  19.5, 156.0, 312.0, 312.0, 1935,  500, "NVIDIA A100 Tensor Core GPU data sheet"),
    ("L4",              (),                         24, 22.03, "8.9",  30.3,  60.0, 121.0, 121.0,  300,  250, "NVIDIA L4 Tensor Core GPU data sheet"),
    ("L40",             (),                         48, 44.39, "8.9",  90.5,  90.5, 181.0, 181.0,  864,  330, "NVIDIA L40 data sheet"),
    ("L40S",            (),                         48, 44.39, "8.9",  91.6, 183.0, 362.0, 362.0,  864,  330, "NVIDIA L40S data sheet"),
    ("H100-SXM",        ("H100",),                  80, 79.18, "9.0",  67.0, 494.5, 989.5, 989.5, 3350,  600, "NVIDIA H100 Tensor Core GPU data sheet"),
    ("H100-PCIE",       (),                         80, 79.10, "9.0",  51.0, 378.0, 756.5, 756.5, 2000,  600, "NVIDIA H100 PCIe GPU product brief"),
    ("H100-NVL",        (),                         94, 93.09, "9.0",  60.0, 417.5, 835.5, 835.5, 3900,  650, "NVIDIA H100 Tensor Core GPU data sheet"),
    ("H200",            ("H200-SXM",),             141, 139.72, "9.0", 67.0, 494.5, 989.5, 989.5, 4800,  650, "NVIDIA H200 Tensor Core GPU data sheet"),
    ("B200",            ("B200-SXM",),             180, 178.35, "10.0", 80.0, 1100.0, 2250.0, 2250.0, 8000, 700, "NVIDIA Blackwell Architecture technical brief, HGX B200, per GPU"),

    ("MI210",           (),                         64, 63.98, "gfx90a", 45.3,  None, 181.0, 181.0, 1638, 600, "AMD Instinct MI210 data sheet"),
    ("MI250",           (),                         64, 63.98, "gfx90a", 45.3,  None, 181.0, 181.0, 1638, 600, "AMD Instinct MI250 data sheet, one of two dies"),
    ("MI250X",          ("MI250X/MI250",),          64, 63.98, "gfx90a", 47.9,  None, 191.5, 191.5, 1638, 600, "AMD Instinct MI250X data sheet, one of two dies"),
    ("MI300X",          ("MI300X OAM",),           192, 191.69, "gfx942", 163.4, 653.7, 1307.4, 1307.4, 5325, 700, "AMD Instinct MI300X data sheet"),
)
# fmt: on
_APPROXIMATE = frozenset({"MI210", "MI250", "MI250X", "MI300X", "B200", "Titan V", "GTX 1080 Ti"})


def _card(row: _Row) -> Card:
    name, aliases, gib, reported, capability, fp32, tf32, fp16, bf16, bandwidth, context, source = row
    return Card(
        name=name,
        aliases=aliases,
        memory_bytes=int(gib * GIB),
        reported_bytes=None if reported is None else int(reported * GIB),
        compute_capability=capability,
        fp32_tflops=fp32,
        tf32_tflops=tf32,
        fp16_tflops=fp16,
        bf16_tflops=bf16,
        bandwidth_gbps=bandwidth,
        context_bytes=context * MIB,
        approximate=name in _APPROXIMATE,
        source=source,
    )


CARDS: tuple[Card, ...] = tuple(_card(row) for row in _ROWS)


def names() -> tuple[str, ...]:
    """The names of all cards, in the table's order."""
    return tuple(card.name for card in CARDS)


def find(name: str) -> Card:
    """Return the card of this name, written as a person or `nvidia-smi` writes it.

    Case, dashes, spaces, `NVIDIA`, `Tesla`, `GeForce` and the like do not matter; a memory size picks one of several, and has to agree.

    Raises:
        UserError: no card or more than one has this name; the hint names the nearest.
    """
    if not isinstance(name, str):
        raise UserError(f"a GPU is named in words, got {name!r}", hint="write it as T4, A100-80GB or RTX 4090")
    if not name.strip():
        raise UserError("the name of a GPU is empty", hint="write it as T4, A100-80GB or RTX 4090")
    key, sizes = _parse(name)
    same = [card for card in CARDS if key in _keys(card)]
    found = [card for card in same if all(_agrees(card, size) for size in sizes)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"GPU {name!r} is ambiguous", hint=f"say which: {_either(card.name for card in found)}"
        )
    if same:
        raise UserError(
            f"no GPU {name!r} is known with that much memory",
            hint=f"did you mean {_either(c.name for c in same)}?",
        )
    raise UserError(
        f"unknown GPU {name!r}",
        hint=f"did you mean {_either(_nearest(key))}? For any other card give its memory instead",
    )


def precisions(card: Card) -> tuple[Precision, ...]:
    """What the hardware computes natively: fp32 and fp16 always, tf32 and bf16 from capability 8.0, on AMD bf16, and tf32 on the MI300 only."""
    if card.is_amd:
        bf16, tf32 = True, card.compute_capability.startswith("gfx94")
    else:
        bf16 = tf32 = float(card.compute_capability) >= 8.0
    native = {Precision.FP32: True, Precision.TF32: tf32, Precision.BF16: bf16, Precision.FP16: True}
    return tuple(precision for precision, there in native.items() if there)


_NOISE = re.compile(
    r"\b(nvidia|amd|ati|corporation|tesla|geforce|quadro|instinct|radeon|graphics|gpu|tensor|core|generation|hbm\de?|gddr\dx?)\b|[()\[\]]"
)
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+) ?g(?:i?b)?\b")


def _parse(name: str) -> tuple[str, list[int]]:
    """Letters and digits of a name without what does not tell cards apart, and the memory sizes (GB) in it."""
    text = re.sub(r"[-_\s]+", " ", name.lower())
    text = re.sub(r"\bpci e\b", "pcie", re.sub(r"\bsxm\d\b", "sxm", text))
    sizes = [int(size) for size in _SIZE.findall(text)]
    return re.sub(r"[^a-z0-9]", "", _NOISE.sub(" ", _SIZE.sub(" ", text))), sizes


def _keys(card: Card) -> set[str]:
    return {_parse(name)[0] for name in (card.name, *card.aliases)}


def _agrees(card: Card, size_gb: int) -> bool:
    nominal = card.memory_bytes / GIB
    return abs(size_gb - nominal) <= SIZE_TOLERANCE * nominal


def _nearest(key: str) -> list[str]:
    """Names of the three cards that look most like `key`; digits in another order (3900 for 3090) come first."""

    def likeness(card: Card) -> tuple[bool, float]:
        return max(
            (sorted(key) == sorted(other), difflib.SequenceMatcher(None, key, other).ratio())
            for other in _keys(card)
        )

    return [card.name for card in sorted(CARDS, key=likeness, reverse=True)[:3]]


def _either(options: Iterable[str]) -> str:
    listed = list(options)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"
