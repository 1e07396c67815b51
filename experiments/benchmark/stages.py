"""The split points that the benchmark of pipelines compares, and the language model around them."""

from typing import Any

from benchmark.job import Job
from lightning_dct import DCTPipelineStrategy
from nlp.data import TextData
from nlp.module import LanguageModule

STAGES = 2
LEARNING_RATE = 1e-3


def _dense(value_format: str) -> dict[str, Any]:
    return {"kind": "quantised", "forward_format": value_format, "backward_format": value_format}


FP32 = "fp32"
OURS = "DCT, subspace"
"""The reference, and the default."""

CROSSINGS: dict[str, dict[str, Any]] = {
    FP32: _dense("fp32"),
    "bf16": _dense("bf16"),
    "int8": _dense("int8"),
    "int4": _dense("int4"),
    OURS: {"kind": "subspace", "density": 0.2, "forward_format": "int8", "backward_format": "int4"},
}
"""Settings of :func:`nlp.splits.make_split` by name. All but the last send every entry."""


def split_model(name: str, job: Job) -> tuple[DCTPipelineStrategy, LanguageModule, TextData]:
    """Make the pipeline for a key of :data:`CROSSINGS`, the model in pieces, and its text."""
    pieces = STAGES * (2 if job.schedule == "interleaved_1f1b" else 1)
    strategy = DCTPipelineStrategy(
        stages=STAGES, micro_batches=job.micro_batches, schedule=job.schedule
    )
    model = LanguageModule(
        width=job.width, learning_rate=LEARNING_RATE, split={"pieces": pieces, **CROSSINGS[name]}
    )
    return strategy, model, TextData(batch_size=job.batch_size)
