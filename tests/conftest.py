"""No test asserts on time: an example of hypothesis may take as long as the machine lets it."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("any-speed", deadline=None)
settings.load_profile("any-speed")
