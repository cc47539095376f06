"""Scores of finished samples: by rule, by the user's function, by a reward model, by a remote service."""
