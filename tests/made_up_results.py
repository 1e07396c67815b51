"""A run's ``result.json`` without the run."""


def made_up(overrides: list[str] | None = None, seed: int = 0, sent: float = 1000.0, **metrics: float | None) -> dict:
    """A ``result.json`` with the metrics for both parts, those of the test part a thousandth higher."""
    parts = {"val": 0.0, "test": 0.001}
    return {
        "choices": {"strategy": "dct"},
        "overrides": overrides or [],
        "seed": seed,
        "world_size": 2,
        "steps": 4,
        "metrics": {
            f"{part}/{name}": None if value is None else value + more
            for part, more in parts.items()
            for name, value in metrics.items()
        },
        "best_known": {},
        "compression_ratio": 8000 / sent if sent else None,
        "bytes_sent_per_step": sent,
        "bytes_dense_per_step": 8000.0,
        "split_ratio": None,
        "split_bytes_per_step": None,
        "split_bytes_dense_per_step": None,
        "milliseconds_per_step": 10.0,
        "trainable_parameters": 1000,
    }
