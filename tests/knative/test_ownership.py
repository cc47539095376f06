"""What another run, or somebody else, has under a job's names is neither changed nor deleted."""

from __future__ import annotations

import copy

import pytest

from orchestrator.platforms.base import PlatformError
from orchestrator.platforms.knative.platform import KnativePlatform
from tests.knative.conftest import Start
from tests.knative.objects import Cluster
from tests.knative.test_platform import COUNT, FAST, answer, context, count, knative, run
from tests.support.waiting import eventually


def test_another_runs_functions_are_neither_taken_over_nor_deleted(control_plane: Start) -> None:
    plane = control_plane()

    async def test() -> None:
        async with knative(plane) as platform:
            await platform.scale("count", 1)
            await answer(platform, count("a"))
            before = plane.ask(lambda cluster: copy.deepcopy(cluster.objects["services", "job-count"]))
            stranger = KnativePlatform(context(plane, "b2"), timing=FAST)
            try:
                with pytest.raises(
                    PlatformError, match=r"job-token in namespace default belongs to run a1, not to .*b2"
                ):
                    await stranger.deploy([COUNT])
            finally:
                await stranger.close()
            assert plane.ask(lambda cluster: cluster.objects["services", "job-count"]) == before
            assert (await answer(platform, count("b")))[-1].kind == "done"

    run(test())


@pytest.mark.parametrize(
    ("labels", "whose"),
    [
        ({}, "others"),
        ({"app.kubernetes.io/managed-by": "Helm"}, "Helm"),
        ({"app.kubernetes.io/managed-by": "rlhf-orchestrate", "rlhf-orchestrate/run": "c3"}, "run c3"),
    ],
)
def test_a_service_of_others_is_refused_in_one_line(control_plane: Start, labels: dict[str, str], whose: str) -> None:
    plane = control_plane()
    meta = {"name": "job-count", "labels": labels}
    plane.ask(lambda cluster: cluster.create("services", {"metadata": meta, "spec": {"template": "theirs"}}))

    async def test() -> None:
        with pytest.raises(PlatformError, match=f"Service job-count in namespace default belongs to {whose},") as told:
            async with knative(plane):
                pass
        assert "\n" not in str(told.value)
        found = plane.ask(lambda cluster: cluster.objects)
        assert list(found) == [("services", "job-count")], "and of ours nothing is left"
        assert found["services", "job-count"]["spec"] == {"template": "theirs"}

    run(test())


def test_a_service_that_became_anothers_is_not_deleted(control_plane: Start) -> None:
    plane = control_plane()
    tags = {"app.kubernetes.io/managed-by": "rlhf-orchestrate", "rlhf-orchestrate/run": "c3"}

    def replace_service(cluster: Cluster) -> None:
        cluster.delete("services", "job-count", None)
        cluster.create("services", {"metadata": {"name": "job-count", "labels": tags}})

    async def test() -> None:
        async with knative(plane):
            plane.ask(replace_service)
        kept = [("services", "job-count")]  # what the first one made goes in the background
        await eventually(lambda: plane.ask(lambda cluster: list(cluster.objects)) == kept)

    run(test())
