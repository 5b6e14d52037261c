"""The table of cards is plausible in itself, and every way of writing a card's name leads to it or to a helpful refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.devices.cards import CARDS, Card, find, names, precisions
from autofit.errors import UserError
from autofit.problem.config import Precision
from autofit.units import GIB, MIB

ASKED_FOR = (
    "T4", "V100 16GB", "V100 32GB", "P100", "GTX 1080 Ti", "RTX 2060", "RTX 2070", "RTX 2080", "RTX 2080 Ti", "RTX 3060 12GB", "RTX 3070",
    "RTX 3080 10GB", "RTX 3090", "RTX 3090 Ti", "RTX 4060 Ti 16GB", "RTX 4070", "RTX 4080", "RTX 4090", "RTX 5070", "RTX 5080", "RTX 5090",
    "A10", "A10G", "A30", "A40", "A100 40GB PCIe", "A100 80GB PCIe", "A100 SXM 40GB", "A100 SXM 80GB", "L4", "L40", "L40S", "H100 PCIe",
    "H100 SXM", "H100 NVL", "H200", "B200", "RTX A2000 12GB", "RTX A4000", "RTX A4500", "RTX A5000", "RTX A6000", "RTX 6000 Ada", "Titan RTX",
    "Titan V", "Quadro RTX 8000", "MI210", "MI250", "MI300X",
)  # fmt: skip
KNOWN_SIZES = {6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 141, 180, 192}


def test_the_cards_that_people_ask_for_are_there() -> None:
    found = [find(name) for name in ASKED_FOR]
    assert len({card.name for card in found}) == len(ASKED_FOR) >= 36
    assert len(CARDS) >= 50


def test_names_are_unique_and_each_finds_its_own_card() -> None:
    assert len(set(names())) == len(CARDS)
    for card in CARDS:
        assert find(card.name) is card


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
class TestEveryCard:
    def test_peaks_are_ordered(self, card: Card) -> None:
        assert card.fp32_tflops > 0
        assert card.fp16_tflops >= card.fp32_tflops
        if card.tf32_tflops is not None:
            assert card.fp32_tflops <= card.tf32_tflops <= card.fp16_tflops
        if card.bf16_tflops is not None:
            assert card.bf16_tflops == card.fp16_tflops

    def test_a_format_has_a_peak_exactly_when_the_hardware_has_it(self, card: Card) -> None:
        native = precisions(card)
        assert native[0] is Precision.FP32
        assert Precision.FP16 in native
        assert (Precision.BF16 in native) == (card.bf16_tflops is not None)
        assert (Precision.TF32 in native) == (card.tf32_tflops is not None)

    def test_memory_is_a_size_that_is_sold_and_what_is_reported_is_a_little_less(self, card: Card) -> None:
        assert card.memory_bytes / GIB in KNOWN_SIZES
        assert 0.90 * card.memory_bytes <= card.usable_bytes < card.memory_bytes
        assert 100 * MIB <= card.context_bytes <= GIB

    def test_bandwidth_and_intensity_are_those_of_a_gpu(self, card: Card) -> None:
        assert 200 <= card.bandwidth_gbps <= 10_000
        flops_per_byte = card.fp16_tflops * 1e12 / (card.bandwidth_gbps * 1e9)
        assert 20 <= flops_per_byte <= 450

    def test_it_names_its_source_and_no_address(self, card: Card) -> None:
        assert len(card.source) > 10
        assert "://" not in card.source

    def test_tensor_peaks_keep_their_generations_ratio_to_fp32(self, card: Card) -> None:
        """GeForce: 4x on Turing and 2x from Ampere on; full-rate cards 8x and 4x; a wrong column would break this."""
        ratio = card.fp16_tflops / card.fp32_tflops
        exact = {
            "6.0": (2,),
            "6.1": (1,),
            "7.0": (8,),
            "7.5": (4, 8),
            "8.6": (2, 4),
            "8.9": (2, 4),
            "12.0": (2,),
        }
        allowed = exact.get(card.compute_capability)
        if allowed is not None:
            assert any(abs(ratio - value) <= 0.06 * value for value in allowed)
        else:
            assert 3.9 <= ratio <= 31


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a100-80gb", "A100-SXM-80GB"),
        ("A100 80G", "A100-SXM-80GB"),
        ("a100 40gb", "A100-SXM-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE-16GB"),
        ("v100 32 GiB", "V100-SXM-32GB"),
        ("Tesla T4", "T4"),
        ("t4 16gb", "T4"),
        ("Tesla P100-PCIE-16GB", "P100-PCIE-16GB"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("rtx3090", "RTX 3090"),
        ("3090", "RTX 3090"),
        ("RTX-3090-24GB", "RTX 3090"),
        ("GeForce GTX 1080 Ti", "GTX 1080 Ti"),
        ("2080ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 3080", "RTX 3080 10GB"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti"),
        ("rtx 4060 ti 16gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX 4080 SUPER"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("H100", "H100-SXM"),
        ("h100 sxm5", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("H100 PCI-E", "H100-PCIE"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("H200 141GB", "H200"),
        ("NVIDIA B200", "B200"),
        ("B200 192GB", "B200"),
        ("NVIDIA A10G", "A10G"),
        ("A10", "A10"),
        ("NVIDIA A10", "A10"),
        ("nvidia-l4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("a6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 8000", "Quadro RTX 8000"),
        ("NVIDIA TITAN RTX", "Titan RTX"),
        ("TITAN V", "Titan V"),
        ("NVIDIA RTX A2000 12GB", "RTX A2000 12GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
        ("mi210", "MI210"),
    ],
)
def test_names_as_people_and_nvidia_smi_write_them(written: str, expected: str) -> None:
    assert find(written).name == expected


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("A100", ("A100-SXM-40GB", "A100-SXM-80GB")),
        ("NVIDIA A100 PCIe", ("A100-PCIE-40GB", "A100-PCIE-80GB")),
        ("v100", ("V100-SXM-16GB", "V100-SXM-32GB")),
        ("NVIDIA GeForce RTX 4060 Ti", ("RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB")),
    ],
)
def test_a_name_of_two_cards_is_refused_with_both(written: str, options: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="ambiguous") as caught:
        find(written)
    for option in options:
        assert option in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("written", "suggested"),
    [
        ("RTX 4900", "RTX 4090"),
        ("A1000", "A100-SXM-40GB"),
        ("H10O", "H100-SXM"),
        ("RTX 3090 Laptop GPU", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090"),
        ("MI300", "MI300X"),
        ("rtx 6000", "RTX 6000 Ada"),
    ],
)
def test_an_unknown_card_is_refused_with_the_nearest(written: str, suggested: str) -> None:
    with pytest.raises(UserError, match="unknown GPU") as caught:
        find(written)
    assert suggested in (caught.value.hint or "")
    assert "\n" not in caught.value.message + (caught.value.hint or "")


@pytest.mark.parametrize(
    "written", ["RTX 3090 48GB", "RTX 3080 12GB", "A100 64GB", "RTX 3060 8GB", "V100 8GB"]
)
def test_a_memory_size_that_the_card_is_not_sold_with_is_refused(written: str) -> None:
    with pytest.raises(UserError, match="that much memory"):
        find(written)


@pytest.mark.parametrize(
    "written", ["", "  ", "gpu", "NVIDIA", "16GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, 3]
)
def test_what_names_no_card_is_refused(written: str) -> None:
    with pytest.raises(UserError):
        find(written)


@given(st.text(max_size=40))
def test_any_text_is_a_card_or_a_user_error(text: str) -> None:
    try:
        found = find(text)
    except UserError:
        return
    assert found in CARDS


@given(
    st.sampled_from(CARDS),
    st.sampled_from(["", "NVIDIA ", "nvidia-", " "]),
    st.sampled_from([str.lower, str.upper, str.title]),
)
def test_case_vendor_and_separators_do_not_matter(card: Card, prefix: str, spell: object) -> None:
    assert callable(spell)
    for separator in (" ", "-", "_"):
        assert find(prefix + spell(card.name).replace(" ", separator)) is card


def test_native_precisions_follow_the_generation() -> None:
    assert precisions(find("T4")) == (Precision.FP32, Precision.FP16)
    assert precisions(find("V100 16GB")) == (Precision.FP32, Precision.FP16)
    assert precisions(find("RTX 3060")) == (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)
    assert precisions(find("MI250")) == (Precision.FP32, Precision.BF16, Precision.FP16)
    assert precisions(find("MI300X")) == (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)


def test_known_capacities_as_torch_reports_them() -> None:
    assert abs(find("V100 16GB").usable_bytes - 16160 * MIB) < 16 * MIB
    assert abs(find("A100 40GB").usable_bytes - 40326 * MIB) < 16 * MIB
    assert abs(find("H200").usable_bytes - 139.8 * GIB) < 0.1 * GIB


def test_figures_that_could_not_be_checked_are_marked() -> None:
    assert all(card.approximate for card in CARDS if card.is_amd)
    assert not find("A100 80GB").approximate
