"""A W&B dashboard for runs with ``CompressionMonitor``, kept as code: its contents, and the workspace made of them."""
