"""How long the compute stream of a trace stands still, and the drawing of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from usp.tools.bench.timeline import PASS, draw, kind_of
from usp.tools.bench.waits import report, streams, work_of


def event(stream: int, start: float, took: float, name: str, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "ts": start, "dur": took, "name": name, "args": {"stream": stream}}


def test_waits_of_each_stream(tmp_path: Path) -> None:
    events = [
        event(7, 100.0, 1000.0, "product"),
        event(7, 1099.5, 500.5, "norm"),  # half a microsecond of it overlaps
        event(7, 2600.0, 500.0, "product"),  # after one millisecond of nothing
        event(20, 500.0, 100.0, "ncclDevKernel", "gpu_memcpy"),
        {"ph": "X", "cat": "cpu_op", "ts": 0.0, "dur": 9e6, "name": "host"},
        {"ph": "i", "cat": "kernel", "ts": 0.0, "name": "mark"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    work = work_of(path)
    compute, other = streams(work)
    assert (compute.name, other.name) == ("7", "20")
    assert compute.span == pytest.approx(3.0)
    assert compute.busy == pytest.approx(2.0)
    assert compute.waits == pytest.approx(1 / 3)
    assert compute.kernels["product"] == pytest.approx(1.5)
    assert other.waits == pytest.approx(0.0)
    assert next(report([compute, other])) == "stream 7: 2.00 of 3.00 ms busy, waits 33.3%"
    assert draw(work, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}', encoding="utf-8")
    assert streams(work_of(path)) == []
    assert list(report([])) == []
    assert not draw({}, tmp_path / "trace.png")
    assert not (tmp_path / "trace.png").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all-to-all"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "scatter"),
        ("Memcpy DtoH (Device -> Pinned)", "host copy"),
        ("Memcpy DtoD (Device -> Device)", PASS[0]),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "product"),
        ("triton_poi_fused__unsafe_view_mul_silu_1", PASS[0]),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name)[0] == kind
