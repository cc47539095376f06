from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.knative.control_plane import ControlPlane

Start = Callable[..., ControlPlane]


@pytest.fixture
def control_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a stand-in cluster that KUBECONFIG points to."""
    running: list[ControlPlane] = []

    def start(**limits: Any) -> ControlPlane:
        root = tmp_path / "cluster"
        root.mkdir()
        plane = ControlPlane(root, **limits)
        running.append(plane)
        monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig()))
        return plane

    yield start
    for plane in running:
        plane.close()
