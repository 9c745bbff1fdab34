"""Which attention backend a model gets, and that a backend which is wrong is found out at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine.attention.base import LayerSpec
from engine.attention.choose import disagreement, make_backend
from engine.attention.flashinfer_kernels import unsupported
from engine.attention.torch_backend import TorchBackend
from hicache.errors import ConfigError
from hicache.geometry import LayerGeometry, PageGeometry
from tests.reference_kernels import ReferenceKernels

if TYPE_CHECKING:
    from engine.attention.kernels import AttentionShape
    from engine.attention.paged_plan import PagedTables

LAYER = LayerSpec(0, 0, True, 4, 2, 64, 64, 0.125)
VARIED = [
    LAYER,
    LAYER._replace(layer_idx=1, window=7),
    LAYER._replace(layer_idx=2, softcap=2.0),
    LAYER._replace(layer_idx=3, sinks=True),
    LAYER._replace(layer_idx=4, scale=1.0),
]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def geometry(page_size: int = 16, dtype: str = "bfloat16") -> PageGeometry:
    return PageGeometry(page_size, dtype, (LayerGeometry(2, 64, 64),))


def test_a_cpu_has_the_torch_backend_and_no_other():
    pool = torch.zeros(4, geometry().page_bytes, dtype=torch.uint8)
    assert isinstance(make_backend("auto", pool, geometry(), [LAYER], BF16), TorchBackend)
    with pytest.raises(ConfigError, match="--attention-backend flashinfer: there is no NVIDIA GPU"):
        make_backend("flashinfer", pool, geometry(), [LAYER], BF16)


@pytest.mark.parametrize(
    ("layer", "dtype", "kv_dtype", "says"),
    [
        (LAYER, torch.float32, torch.float32, "not float32"),
        (LAYER, BF16, torch.float16, "float16 KV with bfloat16"),
        (LAYER._replace(k_dim=192, v_dim=128), BF16, BF16, "keys of 192 and values of 128"),
        (LAYER._replace(k_dim=80, v_dim=80), BF16, FP8, "head dim of 80"),
    ],
)
def test_what_flashinfer_cant_run_is_known_beforehand(layer, dtype, kv_dtype, says):
    reason = unsupported([LAYER, layer], dtype, kv_dtype)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, BF16), (torch.float16, torch.float16), (BF16, FP8)])
def test_what_flashinfer_can_run(dtype, kv_dtype):
    assert unsupported(VARIED, dtype, kv_dtype) is None


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]
)
def test_right_kernels_agree_with_the_reference(page_size, dtype, kv_dtype):
    pages = geometry(page_size, kv_dtype)
    assert disagreement(ReferenceKernels(), pages, VARIED, getattr(torch, dtype), torch.device("cpu")) is None


class Wrong(ReferenceKernels):
    """Kernels that see one key too few, or take a log-sum-exp for a natural one."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def decode(self):
        kernel = super().decode()
        if self._fault == "short":
            plan = kernel.plan

            def short(tables: PagedTables, shape: AttentionShape) -> None:
                plan(tables._replace(last_page_len=tables.last_page_len - (tables.last_page_len > 1).astype("int32")), shape)

            kernel.plan = short
        return kernel

    def merge(self, out, lse, other, other_lse):
        factor = 0.5 if self._fault == "base" else 1.0
        super().merge(out, lse, other, other_lse * factor)


@pytest.mark.parametrize("fault", ["short", "base"])
def test_kernels_that_are_wrong_are_found_out(fault):
    assert disagreement(Wrong("none"), geometry(), VARIED, torch.float32, torch.device("cpu")) is None
    said = disagreement(Wrong(fault), geometry(dtype="float32"), VARIED, torch.float32, torch.device("cpu"))
    assert said is not None
    assert "differs from the reference" in said
