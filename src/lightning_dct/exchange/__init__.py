"""Between whom: the collectives that carry the payloads of a bucket, and who sums what."""
