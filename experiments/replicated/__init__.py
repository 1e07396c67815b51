"""Many replicas of one training in one process: threads as ranks, gradients of all replicas, the command's table."""
