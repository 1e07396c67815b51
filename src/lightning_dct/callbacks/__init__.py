"""Lightning callbacks: refreshed thresholds, monitoring, advice, and what ends a run."""

import lightning.pytorch  # noqa: F401  (a module here would be half imported when the strategies register)
