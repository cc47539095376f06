"""Where tensors live between stages: a directory, Redis, S3, or Redis and S3 together, behind one interface."""
