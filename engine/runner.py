"""Run a packed batch through a transformers model whose attention reads and writes pages."""

from __future__ import annotations

import inspect
import logging
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention.base import LayerCall
from engine.attention.flashinfer_backend import FlashInferBackend
from engine.attention.hook import attending
from engine.graphs import DecodeGraphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.attention.base import AttentionBackend
    from engine.attention.hook import HookCall
    from engine.batch import Batch
    from engine.graphs import Capture
    from engine.model import LoadedModel
    from hicache.transfer.operation import LayerGate

__all__ = ["ModelRunner"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """Forwards of one model over one backend's pages. Used by one thread (the loop's)."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend) -> None:
        self._hf = model.hf
        self._device = model.device
        self._backend = backend
        self._layers = {layer.layer_idx: layer for layer in model.layers}
        self._picks_logits = "logits_to_keep" in inspect.signature(model.hf.forward).parameters
        self._last_page_layer = len(model.page_layers) - 1
        self._gates: Sequence[LayerGate] = ()
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture_decodes(self, sizes: list[int], spare_page: int, max_pages: int, capture: Capture) -> None:
        """Record decode steps of these sizes as graphs, if the backend can; a model that can't be recorded runs without.

        spare_page: a device slot that nobody owns. max_pages: of a request.
        """
        if not isinstance(self._backend, FlashInferBackend):
            return
        begun_s = time.perf_counter()
        try:
            self._graphs = DecodeGraphs(self._backend, self._compute, sizes, spare_page, max_pages, capture, self._device)
        except Exception as error:  # whatever a driver, a library or the model's own code may say to being recorded
            logger.warning("decodes run without CUDA graphs: %s", " ".join(str(error).split())[:300])
        else:
            logger.info("captured decodes of up to %d rows in %.1f s", max(sizes), time.perf_counter() - begun_s)

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps are replayed from graphs."""
        return self._graphs is not None

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a step: write the KV of its tokens to their pages and return the logits that its chunks ask for.

        Returns float32 (rows, vocab) on the model's device, each chunk's `logits` last tokens; good until the next forward.
        """
        places = None
        graph = None
        if all(len(chunk.tokens) == 1 for chunk in batch.chunks):
            batch, places = self._backend.arrange(batch)
            graph = None if self._graphs is None else self._graphs.find(batch)
        if graph is None:
            logits = self._forward(batch)
        else:
            for gate in batch.gates:  # a recording can't wait between its layers
                gate.wait(self._last_page_layer)
            self._gates = ()
            logits = graph.forward(batch)
        return logits if places is None else logits[torch.from_numpy(places).to(self._device)]

    def wait(self) -> None:
        """Return when the device has computed what this thread gave it; copies under way are not waited for."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Compute a step kernel by kernel."""
        self._backend.plan(batch)
        self._gates = batch.gates
        ids = np.concatenate([chunk.tokens for chunk in batch.chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in batch.chunks])
        return self._compute(self._tensor(ids), self._tensor(positions), self._tensor(_logit_rows(batch)))

    def _compute(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Run the model over a planned step; nothing here waits for the device."""
        # A tensor and never a number: Gemma 4 cuts queries by a number.
        kept = {"logits_to_keep": rows} if self._picks_logits else {}
        with attending(self._attend):
            output = self._hf(input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False, **kept)
        logits: torch.Tensor = output.logits[0]
        return (logits if kept else logits[rows]).float()

    def _attend(self, call: HookCall) -> torch.Tensor:
        """Answer one layer's attention call of the running forward."""
        layer = self._layers[call.layer_idx]
        for gate in self._gates:
            gate.wait(layer.pages_of)
        q, k, v = (part[0].transpose(0, 1) for part in (call.query, call.key, call.value))
        sinks = None if call.sinks is None else call.sinks.reshape(-1)
        return self._backend.attend(layer, LayerCall(q, k, v, sinks))[None]

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self._device)


def _logit_rows(batch: Batch) -> np.ndarray:
    """Rows of the packed tokens at which logits are wanted."""
    ends = np.cumsum([len(chunk.tokens) for chunk in batch.chunks])
    if all(chunk.logits == 1 for chunk in batch.chunks):
        return ends - 1
    return np.concatenate([np.arange(end - chunk.logits, end) for chunk, end in zip(batch.chunks, ends, strict=True)])
