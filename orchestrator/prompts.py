"""Prompts as the loop draws them: rows of the data sets, as tokens, in the order of the cursor."""

from __future__ import annotations
