"""What a person sees while a job runs: on a terminal a view that stays in place, on a dumb one a line per step.

Elsewhere the log (functions/base/logs.py) has a line of JSON for each of the job's events.

    arithmetic  grpo   step 17/60   ━━━━━━━━╺━━━━━━━━━━━━━━━   0:41 gone, 1:44 left
    now        generate ▸ reward
    replicas   generate ■■□□   reward ■   train ·
    reward     0.81  ▂▂▃▄▅▅▆▇
    validation 0.87  ▃▆▇   val-core/arithmetic/acc/mean@1
    tokens/s   5,210           cost  $0.0042

The recorder gives it `Snapshot`s (view.py), plain values; it draws them and knows nothing of the job.
"""

import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.session.view import Snapshot, View, later

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
REFRESH_PER_S = 8.0


def open_view(console: Console) -> View:
    """The view in place on a terminal, lines on a dumb one, and nothing beside the log elsewhere."""
    if not console.is_terminal:
        return View()
    return LineView(console) if console.is_dumb_terminal else LiveView(console)


class LiveView(View):
    """Redraws in place, REFRESH_PER_S times a second, from a thread of rich's; the clock goes on between snapshots."""

    def __init__(self, console: Console) -> None:
        self._snapshot: Snapshot | None = None
        self._since_s = time.monotonic()
        self._live = Live(console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self._render)
        self._live.start()

    def changed(self, snapshot: Snapshot) -> None:
        self._snapshot, self._since_s = snapshot, time.monotonic()

    def committed(self, snapshot: Snapshot) -> None:
        self.changed(snapshot)

    def close(self) -> None:
        """Draws the last snapshot once more; it stays on the terminal."""
        self._live.stop()

    def _render(self) -> RenderableType:
        if self._snapshot is None:
            return Text("starting", "dim")
        return render(later(self._snapshot, time.monotonic() - self._since_s))


class LineView(View):
    """One line per committed step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._note = ""

    def changed(self, snapshot: Snapshot) -> None:
        """Prints nothing but a new note."""
        if snapshot.note and snapshot.note != self._note:
            self._print(snapshot.note)
        self._note = snapshot.note

    def committed(self, snapshot: Snapshot) -> None:
        self._print(line(snapshot))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def line(snapshot: Snapshot) -> str:
    """`step 17/60  reward 0.810  val-core/arithmetic/acc/mean@1 0.870  5,210 tok/s  $0.0042  0:41 gone  1:44 left`."""
    parts = [f"step {snapshot.step}/{snapshot.steps}"]
    if snapshot.headlines:
        parts.append(f"{snapshot.headline} {snapshot.headlines[-1]:.3f}")
    if snapshot.validations:
        parts.append(f"{snapshot.validation_name} {snapshot.validations[-1]:.3f}")
    if snapshot.tokens_per_s is not None:
        parts.append(f"{snapshot.tokens_per_s:,.0f} tok/s")
    parts += [spending(snapshot.cost_usd, snapshot.replica_s), f"{duration(snapshot.elapsed_s)} gone"]
    if snapshot.left_s is not None:
        parts.append(f"{duration(snapshot.left_s)} left")
    return "  ".join(parts)


def render(snapshot: Snapshot) -> RenderableType:
    """The view of a terminal."""
    s = snapshot
    head = Table.grid(padding=(0, 2))
    left = f", {duration(s.left_s)} left" if s.left_s is not None else ""
    head.add_row(
        Text(s.job, "bold"),
        Text(s.recipe),
        Text(f"step {s.step}/{s.steps}"),
        ProgressBar(total=max(1, s.steps), completed=s.step, width=24),
        Text(f"{duration(s.elapsed_s)} gone{left}"),
    )
    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim", no_wrap=True)
    body.add_column(overflow="ellipsis", no_wrap=True)
    idle = "done" if s.steps and s.step == s.steps else "nothing runs"
    body.add_row("now", Text(" ▸ ".join(s.stages) or idle, "green" if s.stages else "dim"))
    body.add_row("replicas", _replicas(s.replicas))
    body.add_row(s.headline, _curve(s.headlines, ""))
    if s.validation_name:
        body.add_row("validation", _curve(s.validations, s.validation_name))
    body.add_row("tokens/s", "-" if s.tokens_per_s is None else f"{s.tokens_per_s:,.0f}")
    body.add_row("cost", spending(s.cost_usd, s.replica_s))
    if s.note:
        body.add_row("note", Text(s.note, "yellow"))
    return Group(head, body)


def _replicas(replicas: Mapping[str, tuple[int, int]]) -> Text:
    """A filled square for each replica that exists, a hollow one for each that may; a dot for none."""
    text = Text()
    for name, (now, limit) in replicas.items():
        text.append(f"{name} ", "bold" if now else "dim")
        bar = f"{now}/{limit}" if max(now, limit) > 16 else "■" * now + "□" * max(0, limit - now) if now else "·"
        text.append(f"{bar}   ", "green" if now else "dim")
    return text


def _curve(values: Sequence[float], name: str) -> Text:
    if not values:
        return Text("-")
    return Text.assemble(f"{values[-1]:.3f}  ", (sparkline(values), "cyan"), (f"  {name}", "dim"))


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The last `width` values as blocks between their least and their greatest; a flat line is at the bottom."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in shown)


def duration(seconds: float) -> str:
    """`0:41`, `12:05`, `3:07:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def dollars(usd: float) -> str:
    """Two digits after the point from a dollar on, four below: `$12.30`, `$0.0042`."""
    return f"${usd:,.2f}" if usd >= 1 else f"${usd:.4f}"


def spending(usd: float, replica_s: float) -> str:
    """Dollars, or, where nothing has a price, what there is a price for."""
    return dollars(usd) if usd else f"{number(replica_s)} replica-seconds"


def number(value: float | None) -> str:
    """Four significant digits; `-` for none."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
