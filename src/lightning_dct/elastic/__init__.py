"""Local updates among ranks that come and go, on torchft: a lost or slow rank costs a round, not the job."""

from lightning_dct.elastic.elastic_strategy import DCTElasticStrategy

__all__ = ["DCTElasticStrategy"]
