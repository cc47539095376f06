"""Secrets never leave through the API: credentials in URLs, and the values of this process's secret settings."""

import os
import re

_USER_INFO = re.compile(r'://[^/@\s"\\]*@')
_QUERY = re.compile(r'([?&][\w.-]*(?:token|key|secret|password|signature)[\w.-]*=)[^&\s"\\]+', re.IGNORECASE)
_NAME = re.compile(r"PASSWORD|SECRET|TOKEN|CREDENTIAL|ACCESS_KEY|API_KEY")
_SHORTEST = 6
"""Shorter values would hide ordinary words."""


def redacted(text: str) -> str:
    """The text (or JSON) with `***` for what is a secret."""
    text = _QUERY.sub(r"\1***", _USER_INFO.sub("://***@", text))
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _NAME.search(name.upper()):
            text = text.replace(value, "***")
    return text
