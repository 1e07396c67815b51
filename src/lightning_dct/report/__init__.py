"""One HTML page out of the logs of one or several runs; no service, no network."""
