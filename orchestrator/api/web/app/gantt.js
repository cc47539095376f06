// Replicas per function over time. The window moves by drag, wheel and keys; the server sends what it shows.
import { html, useEffect, useMemo, useRef, useState } from "app/html.js";
import { Failure, Panel, Table, useWidth } from "app/parts.js";
import { color, dark } from "app/theme.js";
import { duration, percent } from "app/format.js";
import { STATES, at, draw, layout, sums } from "app/gantt_draw.js";
import { Overview } from "app/gantt_overview.js";
import { useWindow } from "app/gantt_window.js";

const STEPS = 8; // that are seen at first
const HELP = "Arrow keys move, plus and minus zoom, 0 shows all of it, End follows the job";

export function colors() {
  return Object.fromEntries([...STATES, "grid", "muted", "ink", "lane", "now", "veil", "accent"].map((name) => [name, color(name)]));
}

export function Gantt({ store }) {
  const canvas = useRef();
  const box = useRef();
  const width = useWidth(box);
  const gutter = width < 560 ? 68 : 92;
  const job = store.job.value;
  const stepS = job.metrics["timing_s/step"];
  const usual = stepS ? Math.max(2, STEPS * stepS) : null;
  const { timeline, whole, view, problem, zoom, pan, show, follow, nowS } = useWindow(store, { pixels: width - gutter, usual });
  const [tip, setTip] = useState(null);
  const [table, setTable] = useState(false);
  const [said, setSaid] = useState("");
  const places = useMemo(() => timeline && layout(timeline), [timeline]);
  const theme = dark.value;
  const palette = useMemo(colors, [theme]);
  const scene = timeline && view && { width, gutter, timeline, places, view, colors: palette, nowS: nowS() };

  useEffect(() => {
    if (!scene || !canvas.current || !width) return undefined;
    const frame = requestAnimationFrame(() => {
      const ratio = window.devicePixelRatio || 1;
      const element = canvas.current;
      if (!element) return;
      const size = [Math.round(width * ratio), Math.round(places.height * ratio)];
      if (element.width !== size[0] || element.height !== size[1]) [element.width, element.height] = size;
      const ctx = element.getContext("2d");
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
      draw(ctx, { ...scene, nowS: nowS() });
    });
    return () => cancelAnimationFrame(frame);
  });

  useEffect(() => {
    const element = canvas.current;
    if (!element) return undefined;
    const wheel = (event) => {
      const focused = document.activeElement === element;
      if (!(focused || event.ctrlKey || event.metaKey || event.deltaX)) return; // else the page scrolls
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / (width - gutter));
      else zoom(Math.exp(event.deltaY / 300), (event.offsetX - gutter) / (width - gutter));
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, [width, gutter, table, timeline !== null]);

  const keys = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
    0: () => show(0, Infinity), Home: () => show(0, view.to - view.from), End: follow, s: () => follow(usual),
  };
  const key = (event) => {
    const act = !event.ctrlKey && !event.metaKey && !event.altKey && keys[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
    setSaid("");
    setTimeout(() => setSaid(canvas.current?.getAttribute("aria-label") ?? ""), 600);
  };
  const drag = (event) => {
    if (event.button) return;
    const element = event.currentTarget;
    element.setPointerCapture(event.pointerId);
    let last = event.clientX;
    const moved = (e) => {
      pan((last - e.clientX) / (width - gutter));
      last = e.clientX;
      setTip(null);
    };
    const done = () => {
      element.removeEventListener("pointermove", moved);
      element.removeEventListener("pointerup", done);
      element.removeEventListener("pointercancel", done);
    };
    element.addEventListener("pointermove", moved);
    element.addEventListener("pointerup", done);
    element.addEventListener("pointercancel", done);
  };
  const hover = (event) => {
    if (!scene || event.buttons) return;
    const lines = at(event.offsetX, event.offsetY, scene);
    setTip(lines && { lines, x: event.offsetX, y: event.offsetY });
  };

  const rows = scene ? sums(timeline, view) : [];
  const label = scene ? `Replicas from ${duration(view.from)} to ${duration(view.to)} of the job. ${rows.map(spoken).join(". ")}. ${HELP}.` : "";
  const empty = timeline && whole && whole.end_s === 0;
  const actions = html`
    <div class="group" role="group" aria-label="Window">
      <button type="button" onClick=${() => zoom(1 / 0.6)} aria-label="Zoom out">−</button>
      <button type="button" onClick=${() => zoom(0.6)} aria-label="Zoom in">+</button>
      <button type="button" onClick=${() => show(0, Infinity)}>All</button>
      <button type="button" onClick=${() => follow(usual)} aria-pressed=${Boolean(view?.follow && timeline?.alive)}>${timeline?.alive ? "Follow" : "Last steps"}</button>
    </div>
    <button type="button" class="quiet" aria-pressed=${table} onClick=${() => setTable(!table)}>${table ? "Chart" : "Table"}<span class="away"> of replicas</span></button>`;
  return html`<${Panel} title="Replicas" actions=${actions} className="gantt"
      note=${html`<span class="legend inline">${STATES.map((state) => html`<span><i class=${`ink-${state}`} aria-hidden="true"></i>${state}</span>`)}</span>`}>
    ${problem && html`<${Failure} problem=${problem} />`}
    ${empty && html`<p class="quietly">No function has had a replica yet.</p>`}
    ${!timeline && !problem && !empty && html`<p class="quietly over">Reading the replicas…</p>`}
    <div ref=${box} class="canvas" onPointerLeave=${() => setTip(null)}>
      ${table
        ? html`<${Table} caption=${view ? `Seconds of replicas by state, ${duration(view.from)} to ${duration(view.to)}` : "Replicas"} rows=${rows}
            columns=${[{ title: "Function", key: "name", left: true }, ...STATES.map((s) => ({ title: s, value: (row) => duration(row[s]) })), { title: "busy", value: (row) => share(row) }]} />`
        : !empty && html`<canvas ref=${canvas} role="img" tabindex="0" aria-label=${label} style=${`width:100%;height:${places?.height ?? 180}px`}
            onKeyDown=${key} onPointerDown=${drag} onPointerMove=${hover} onDblClick=${() => follow(usual)}></canvas>`}
      ${tip && html`<div class="tip own" style=${`transform:translate(${Math.min(tip.x + 14, width - 190)}px,${tip.y + 14}px)`}>${tip.lines.join("\n")}</div>`}
    </div>
    ${!empty && whole && view && html`<${Overview} timeline=${whole} view=${view} palette=${palette} width=${width} gutter=${gutter} nowS=${nowS()} show=${show} />`}
    <p class="away" aria-live="polite">${said}</p>
  </${Panel}>`;
}

const total = (row) => STATES.reduce((sum, state) => sum + row[state], 0);
const share = (row) => (total(row) ? percent(row.busy / total(row)) : "at zero");
const spoken = (row) => (total(row) ? `${row.name} ${duration(total(row))} of replicas, ${share(row)} busy` : `${row.name} at zero`);
