"""Policy versions: published by the trainer, fetched by whoever needs them. Immutable; the manifest is written last."""
