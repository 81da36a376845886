"""Data sheets: present, plausible, sourced."""

import pytest

from qspec.schema.devices import read_devices


def test_dense_rates_keep_the_ratios_of_the_hardware():
    """Would catch a sparse figure (twice the dense one) copied from a data sheet into the table."""
    for name, sheet in read_devices().items():
        if sheet.bf16_tflops is not None and sheet.fp8_tflops is not None:
            # FP8 runs at twice BF16; data sheets round each figure on its own (L40S: 362 and 733).
            assert sheet.fp8_tflops / sheet.bf16_tflops == pytest.approx(2, rel=0.02), name


def test_cpu_states_no_data_sheet_figures():
    """Would catch an invented bandwidth for a machine that nobody has measured."""
    cpu = read_devices()["cpu"]
    assert cpu.architecture == "CPU"
    assert (cpu.bandwidth_tb_s, cpu.bf16_tflops, cpu.memory_gb) == (None, None, None)


def test_ridge_of_h200_and_l40s():
    """Would catch swapped columns: rows per pass at which compute and bandwidth balance, 2-byte weights, F b / 2 BW."""
    sheets = read_devices()
    ridge = {n: sheets[n].bf16_tflops / sheets[n].bandwidth_tb_s for n in ("h200", "h100", "l40s", "rtx4090")}
    # published ridges 206, 295, 419, 164 are rounded to whole tokens
    assert [round(r) for r in ridge.values()] == [206, 295, 419, 164]
