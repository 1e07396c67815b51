"""Lightning callbacks: refreshed thresholds, monitoring, advice, and what ends a run."""
