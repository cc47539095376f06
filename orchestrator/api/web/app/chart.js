// A chart of a few series over steps (uPlot), with what a canvas lacks: a name, values by key, a table.
import { html, useEffect, useRef, useState } from "app/html.js";
import { Table, useWidth } from "app/parts.js";
import { color, dark, mixed } from "app/theme.js";
import { number, ticks } from "app/format.js";

const { uPlot } = globalThis;
const ROWS = 60; // of a table: more are thinned out
const linked = uPlot.sync("steps");

// `series`: [{label, values, color?, low?, high?, fill?, scale?, points?, show?}], `x`: numbers; null: no value.
// `from`: where the y axis begins and ends ("data", "zero", "rate": 0 to 1); `log`: logarithmic; `prefix` of its labels.
export function Chart({ title, x, series, height = 168, unit = "step", format = number, axes, link = true, marks, from = "data", log = false, prefix = "", name }) {
  const box = useRef();
  const plot = useRef();
  const width = useWidth(box);
  const [table, setTable] = useState(false);
  const [read, setRead] = useState("");
  const theme = dark.value;
  const shape = series.map((s) => `${s.label}${s.low ? "b" : ""}`).join("|");

  useEffect(() => {
    if (!width || table) return undefined;
    const made = new uPlot(options({ width, height, series, unit, format, axes, link, marks, from, log, prefix }), data(x, series), box.current);
    plot.current = made;
    return () => {
      plot.current = null;
      made.destroy();
    };
  }, [width > 0, theme, shape, table, height, from, log]);
  useEffect(() => {
    if (plot.current && width) plot.current.setSize({ width, height });
  }, [width]);
  useEffect(() => {
    const made = plot.current;
    if (!made) return;
    const { min, max } = made.scales.x;
    const whole = !made.data[0].length || (min <= made.data[0][0] && max >= made.data[0].at(-1));
    made.setData(data(x, series), whole);
    if (!whole) made.redraw();
  }, [x, series]);

  const last = (s) => s.values.findLast((v) => v !== null && v !== undefined);
  const described = series.map((s) => `${s.label}: ${describe(s.values, format)}`).join("; ");
  const step = (event) => {
    const made = plot.current;
    if (!made) return;
    if (event.key === "Escape") {
      made.setData(made.data);
      return;
    }
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(x.length - 1, (made.cursor.idx ?? (by > 0 ? -1 : x.length)) + by));
    made.setCursor({ left: made.valToPos(x[at], "x"), top: made.bbox.height / (4 * devicePixelRatio) });
    setRead(`${unit} ${x[at]}: ${series.map((s) => `${s.label} ${format(s.values[at])}`).join(", ")}`);
  };
  return html`<figure class="chart">
    <figcaption><span class="name">${title}</span><span class="last">${series.length === 1 ? format(last(series[0])) : ""}</span>
      <button type="button" class="quiet" aria-pressed=${table} onClick=${() => setTable(!table)}>${table ? "Curve" : "Table"}<span class="away"> of ${name ?? plain(title, series)}</span></button>
    </figcaption>
    ${table
      ? html`<${Table} caption=${name ?? plain(title, series)} hidden=${true} columns=${[{ title: unit, key: "x" }, ...series.map((s, i) => ({ title: s.label, value: (row) => format(row.y[i]) }))]} rows=${rows(x, series)} />`
      : html`<div class="plot" ref=${box} tabindex="0" role="img" aria-label=${`${name ?? plain(title, series)} over ${unit}. ${described}`} onKeyDown=${step} style=${`height:${height}px`}></div>`}
    <p class="away" aria-live="polite">${read}</p>
  </figure>`;
}

const plain = (title, series) => (typeof title === "string" ? title : series.map((s) => s.label).join(", "));

function data(x, series) {
  const columns = [x];
  for (const s of series) {
    columns.push(s.values);
    if (s.low) columns.push(s.high, s.low);
  }
  return columns;
}

function options({ width, height, series, unit, format, axes, link, marks, from, log, prefix }) {
  const ink = color("muted");
  const grid = { stroke: color("grid"), width: 1 };
  const font = "11px system-ui, sans-serif";
  const made = [{}];
  const bands = [];
  for (const [i, s] of series.entries()) {
    const stroke = color(s.color ?? `s${(i % 6) + 1}`);
    made.push({ label: s.label, stroke, width: s.width ?? 1.5, dash: s.dash, fill: s.fill && mixed(stroke, s.fill), scale: s.scale ?? "y", spanGaps: true,
      points: { show: s.points ? true : (u, at, i0, i1) => i1 - i0 < 24 || s.values.filter((v) => v !== null).length < 24, size: 5 }, paths: s.paths });
    if (s.low) {
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, scale: "y", spanGaps: true, fill: `${stroke}22` };
      made.push({ ...hidden, label: "high" }, { ...hidden, label: "low", fill: undefined });
      bands.push({ series: [made.length - 2, made.length - 1], fill: `${stroke}22` });
    }
  }
  const y = { stroke: ink, grid, ticks: { show: false }, font, size: 50, gap: 4, values: (u, values) => ticks(values, prefix) };
  return {
    width, height, series: made, bands, legend: { show: false }, padding: [8, 10, 0, 0],
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (u, low, high) => room(low, high, from) }, ...(axes?.scales ?? {}) },
    axes: [
      { stroke: ink, grid: { show: false }, ticks: { stroke: color("grid"), size: 4 }, font, size: 26, gap: 2, incrs: unit === "step" || unit === "replicas" ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] : undefined },
      y, ...(axes?.more?.map((more) => ({ ...y, grid: { show: false }, ...more })) ?? []),
    ],
    cursor: { sync: link ? { key: linked.key, setSeries: false } : undefined, points: { size: 6 }, drag: { x: true, y: false, uni: 12 } },
    plugins: [tooltip(series, unit, format), ...(marks ? [marks] : [])],
  };
}

function room(low, high, from) {
  if (from === "rate" || low === null || low === undefined) return [0, 1];
  if (from === "zero") return [Math.min(0, low), 1.08 * high || 1];
  const span = high - low || Math.abs(high) * 0.2 || 1;
  const floor = low >= 0 && low - 0.08 * span < 0 ? 0 : low - 0.08 * span;
  return [floor, high + 0.08 * span];
}

// The values under the cursor, in a box that follows it.
function tooltip(series, unit, format) {
  let box;
  return {
    hooks: {
      init: (u) => {
        box = document.createElement("div");
        box.className = "tip";
        box.hidden = true;
        u.over.append(box);
      },
      setCursor: (u) => {
        const { idx, left } = u.cursor;
        const seen = idx !== null && idx !== undefined && left >= 0;
        box.hidden = !seen;
        if (!seen) return;
        const own = u.over.matches(":hover") || document.activeElement?.contains(u.root);
        box.textContent = [`${unit} ${u.data[0][idx]}`, ...series.map((s) => `${series.length > 1 ? `${s.label} ` : ""}${format(s.values[idx])}`)].join("\n");
        box.classList.toggle("own", own);
        const right = left > u.over.clientWidth / 2;
        box.style.transform = `translate(${right ? left - box.offsetWidth - 10 : left + 10}px, 4px)`;
      },
    },
  };
}

function describe(values, format) {
  const known = values.filter((v) => v !== null && v !== undefined);
  if (!known.length) return "no values yet";
  return `last ${format(known.at(-1))}, first ${format(known[0])}, least ${format(Math.min(...known))}, greatest ${format(Math.max(...known))}`;
}

function rows(x, series) {
  const every = Math.ceil(x.length / ROWS);
  return x.map((at, i) => ({ x: at, y: series.map((s) => s.values[i]), i })).filter((row) => (x.length - 1 - row.i) % every === 0).reverse();
}
