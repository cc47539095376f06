"""The reference function: log-probabilities and critic values of finished samples."""
