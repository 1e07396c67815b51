"""Local updates among ranks that come and go, on torchft: a lost or slow rank costs a round, not
the job.
"""
