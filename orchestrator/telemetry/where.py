"""Where a step's time went: each moment of it counts for one part, so that the parts add up to the step's time.

Of all that happens at a moment the part is the first of these that does:

    generating    samples are made
    tail          the same, once more than half of the step's most replicas did and now at most half of them do
    training      scoring (rewards, log-probabilities, values)      publishing (results, versions)
    reading       inputs              loading (weights, models)     starting (from the request of a call to its start,
                                      and, of the first, from when its stage began: the import of the libraries)
    idle          nothing of it: the orchestrator draws, decides and commits

A call's parts are its phases in the trace, the innermost of those that are open; between them it does what its function
is for. Seconds of the event loop.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.job.roles import BY_NAME
from orchestrator.planner.base import CallObservation

PARTS = ("starting", "loading", "reading", "generating", "tail", "scoring", "training", "publishing", "idle")
"""In the order in which a bar shows them."""
WORDS = {"tail": "waiting for the tail"}
FIRST = ("generating", "training", "scoring", "publishing", "reading", "loading", "starting")
METRIC, COLD, UNEVEN = "step_time_s/", "step_time_s/saved/keep_warm", "step_time_s/saved/even_tail"
PHASES = {
    "start": "starting", "fetch": "loading", "fetch delta": "loading", "start engine": "loading", "load": "loading",
    "read": "reading", "generate": "generating", "score": "scoring", "forward": "scoring", "train": "training",
    "publish": "publishing", "compare": "publishing",
}  # fmt: skip
KINDS = {
    "generate": "generating",
    "environment": "scoring",
    "reward": "scoring",
    "reference": "scoring",
    "train": "training",
}
WORTH = 0.1
"""Advice that would save less of a step is not worth a sentence."""


@dataclass(frozen=True)
class _Piece:
    """What one call does from `start_s` to `stop_s`. `cold`: what a replica that had stayed would not have done."""

    part: str
    start_s: float
    stop_s: float
    replica: str
    cold: bool = False


def where_time_went(
    start_s: float, stop_s: float, calls: Iterable[CallObservation], asked_s: float | None = None
) -> dict[str, float]:
    """METRIC + part: seconds, for each of PARTS; they add up to stop_s - start_s. Beside them what would be saved:
    COLD by replicas that stay, UNEVEN by a tail that all replicas of generate share. `asked_s`: the first stage began.
    """
    pieces = sorted((piece for call in calls for piece in _pieces(call)), key=lambda p: p.start_s)
    if pieces and asked_s is not None and asked_s < pieces[0].start_s:
        pieces.insert(0, _Piece("starting", asked_s, pieces[0].start_s, ""))
    edges = {t for p in pieces for t in (p.start_s, p.stop_s) if start_s < t < stop_s} | {start_s, stop_s}
    moments = list(_moments(sorted(edges), pieces))
    most = max((_makers(open_) for _, open_ in moments), default=0)
    found, full = dict.fromkeys((*PARTS, "cold", "uneven"), 0.0), False
    for seconds, open_ in moments:
        part, makers = next((part for part in FIRST if any(p.part == part for p in open_)), "idle"), _makers(open_)
        full = makers > most / 2 or (full and makers > 0)
        if makers and full and makers <= most / 2:
            part = "tail"
            found["uneven"] += seconds * (1 - makers / most)
        elif part in ("starting", "loading") and all(p.cold for p in open_ if p.part == part):
            found["cold"] += seconds
        found[part] += seconds
    return {METRIC + part: found[part] for part in PARTS} | {COLD: found["cold"], UNEVEN: found["uneven"]}


def _moments(edges: Sequence[float], pieces: Sequence[_Piece]) -> Iterable[tuple[float, list[_Piece]]]:
    """(seconds, what is open) between each two of `edges`; `pieces` by start."""
    number, open_ = 0, list[_Piece]()
    for left, right in itertools.pairwise(edges):
        open_ = [p for p in open_ if p.stop_s > left]
        while number < len(pieces) and pieces[number].start_s <= left:
            open_ += [pieces[number]] if pieces[number].stop_s > left else []
            number += 1
        yield right - left, open_


def _makers(open_: Sequence[_Piece]) -> int:
    """How many replicas make samples."""
    return len({p.replica for p in open_ if p.part == "generating"})


def _pieces(call: CallObservation) -> Iterable[_Piece]:
    """What the call does, without a gap from its request to its end."""
    begun_s = call.stop_s - call.work_s
    if call.start_s > 0:
        yield _Piece("starting", begun_s - call.start_s, begun_s, call.replica, call.cold)
    role = BY_NAME.get(call.function)
    usual = KINDS[role.kind] if role is not None else "scoring"
    edges = sorted({begun_s, call.stop_s, *(t for _, a, b in call.phases for t in (a, b) if begun_s < t < call.stop_s)})
    for left, right in itertools.pairwise(edges):
        inside = [phase for phase in call.phases if phase[1] <= left and phase[2] >= right]
        inner = max(inside, key=lambda phase: (phase[1], -phase[2]), default=None)
        part = usual if inner is None else PHASES.get(inner[0], usual)
        yield _Piece(part, left, right, call.replica, call.cold)


def parts_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part from a step's metrics; {} for a step that was made before they were told."""
    return {part: metrics[METRIC + part] for part in PARTS if METRIC + part in metrics}


def advice(metrics: Mapping[str, float], *, policy: str, warm: bool) -> str:
    """One sentence: what would make the step faster, and by how much; "" where nothing is worth one.

    `policy`: the planner's; `warm`: planner.keep_warm.
    """
    parts = parts_of(metrics)
    step_s = sum(parts.values())
    if not step_s:
        return ""
    keep = "planner.keep_warm" if policy == "static" else 'planner.objective = "speed"'
    even = ', and planner.policy = "adaptive" cuts tails' if policy == "static" else ""
    said: list[tuple[float, tuple[str, ...], str]] = [
        (0.0 if warm else metrics[COLD], ("starting", "loading"), f"{keep} would save about {{}}"),
        (metrics[UNEVEN], ("tail",), f"samples that end together would save about {{}}{even}"),
    ]
    if max(said)[0] < WORTH * step_s:  # nothing but more replicas, which cost more
        more = "functions.{}.replicas" if policy == "static" else 'planner.objective = "speed"'
        functions = {"generating": "generate", "training": "train", "scoring": "reward"}
        said = [
            (parts[part] / 2, (part,), f"twice the replicas ({more.format(name)}) would save at most {{}}")
            for part, name in functions.items()
        ]
    saved_s, names, how = max(said)
    if saved_s < WORTH * step_s:
        return ""
    share, words = sum(parts[name] for name in names) / step_s, " and ".join(WORDS.get(name, name) for name in names)
    return f"{100 * share:.0f} % of this step was {words}; {how.format(f'{saved_s:.2g} s')}"
