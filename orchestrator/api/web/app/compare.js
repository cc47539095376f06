// Several jobs: their curves laid over each other, by step, time, cost or tokens; and how their configurations differ.
import { html, useMemo, useState } from "app/html.js";
import { ask } from "app/api.js";
import { Chart } from "app/chart.js";
import { Smoothing, WORDS, usual } from "app/curves.js";
import { Failure, Panel, State, Table, useAsk } from "app/parts.js";
import { trained } from "app/settings.js";
import { number, validated } from "app/format.js";
import { reach, smooth, sums, together } from "app/series.js";

const POINTS = 300;
const LEAST = 2;
const AXES = [["step", "Step", "step"], ["time", "Time at work", "s"], ["cost", "Cost", "USD"], ["replicas", "Replica time", "replica-seconds"], ["tokens", "Tokens", "tokens"]];

async function read(id) {
  const at = `/v1/jobs/${id}`;
  const [job, head, cost] = await Promise.all([ask(at), ask(`${at}/metrics`, { name: "training/", points: 1 }), ask(`${at}/cost/steps`, { points: POINTS })]);
  const names = [...new Set([...usual(head.names), "perf/total_num_tokens"])];
  const metrics = await ask(`${at}/metrics`, { name: names, points: POINTS });
  return { id, job, metrics, names: head.names, axes: axesOf(metrics, cost) };
}

// What each step stands at, by axis: sums until its end.
function axesOf(metrics, cost) {
  const place = new Map(cost.steps.map((step, i) => [step, i]));
  const of = (measure) => cost.steps.map((_, i) => Object.values(cost.functions).reduce((total, f) => total + f[measure][i], 0));
  const tokens = metrics.metrics["perf/total_num_tokens"] ?? [];
  const counts = metrics.steps.map((step) => cost.counts[place.get(step)] ?? 1);
  const until = (column) => {
    const known = sums(column);
    return metrics.steps.map((step) => known[place.get(step)] ?? null);
  };
  return { step: metrics.steps, time: until(cost.wall_s), cost: until(of("usd")), replicas: until(of("replica_s")), tokens: sums(tokens.map((v, i) => (v ?? 0) * counts[i])) };
}

export function Compare({ ids }) {
  const { value, problem } = useAsk(() => Promise.all(ids.map(read)), [ids.join()]);
  const [axis, setAxis] = useState("step");
  const [by, setBy] = useState(0);
  const [log, setLog] = useState(false);
  if (problem && !value) return html`<${Failure} problem=${problem} /><p><a href="/" data-page>All jobs</a></p>`;
  if (!value) return html`<p class="quietly">Reading ${ids.join(", ")}…</p>`;
  const axes = AXES.filter(([key]) => value.some((run) => run.axes[key].some((v) => v > 0)));
  const known = [...new Set(value.flatMap((run) => run.names))];
  const shown = usual(known).filter((name) => value.filter((run) => run.metrics.metrics[name]).length >= LEAST);
  const actions = html`<label class="inline">Over <select value=${axis} onChange=${(e) => setAxis(e.target.value)}>${axes.map(([key, title]) => html`<option value=${key}>${title}</option>`)}</select></label>
    <${Smoothing} by=${by} setBy=${setBy} log=${log} setLog=${setLog} />`;
  return html`
    <div class="title"><h1>Compare</h1><p class="note">${ids.length} jobs</p><span class="grow"></span><a href="/" data-page>All jobs</a></div>
    <${Panel} title="Curves" actions=${actions} note=${html`<span class="legend inline">${value.map((run, i) => html`<span><i class=${`ink-s${(i % 6) + 1}`} aria-hidden="true"></i><a href=${`/jobs/${run.id}`} data-page>${run.id}</a></span>`)}</span>`}>
      <div class="charts">${shown.map((name) => html`<${Over} key=${`${name} ${axis} ${log}`} name=${name} runs=${value} axis=${axes.find(([key]) => key === axis) ?? AXES[0]} by=${by} log=${log} />`)}</div>
    </${Panel}>
    <${Differences} runs=${value} />`;
}

function Over({ name, runs, axis: [key, , unit], by, log }) {
  const { x, series } = useMemo(() => {
    const found = together(runs.map((run) => ({ x: run.axes[key], values: run.metrics.metrics[name] ?? [] })).map((c) => kept(c)));
    return { x: found.x, series: runs.map((run, i) => ({ label: run.id, values: smooth(found.columns[i], by), color: `s${(i % 6) + 1}` })) };
  }, [runs, key, name, by]);
  return html`<${Chart} name=${name} x=${x} series=${series} unit=${unit} link=${false} log=${log} from=${reach(name)} title=${html`${WORDS[name] ?? (name.startsWith("val-core/") ? validated(name).title : "")} <code>${name}</code>`} />`;
}

// Points that have both an x and a value.
function kept({ x, values }) {
  const places = x.map((_, i) => i).filter((i) => x[i] !== null && values[i] !== null && values[i] !== undefined);
  return { x: places.map((i) => x[i]), values: places.map((i) => values[i]) };
}

function Differences({ runs }) {
  const own = new Set(runs.map((run) => run.job.recipe)).size > 1; // else what models are trained with differs as the jobs do
  const flat = runs.map((run) => flatten({ ...run.job.config, ...(own ? { trains: trained(run.job) } : {}) }));
  const keys = [...new Set(flat.flatMap(Object.keys))].filter((key) => key !== "name" && new Set(flat.map((one) => one[key])).size > 1).sort();
  const rows = [{ key: "state", of: runs.map((run) => html`<${State} state=${run.job.state} />`) }, { key: "step", of: runs.map((run) => number(run.job.step)) },
    ...keys.map((key) => ({ key, of: flat.map((one) => html`<code>${one[key] ?? "–"}</code>`) }))];
  const columns = [{ title: "Setting", left: true, value: (row) => html`<code>${row.key}</code>` }, ...runs.map((run, i) => ({ title: run.id, left: true, value: (row) => row.of[i] }))];
  return html`<${Panel} title="Configuration" note=${keys.length ? "what differs" : "the same in all"}><${Table} caption="Settings that differ" hidden=${true} columns=${columns} rows=${rows} /></${Panel}>`;
}

function flatten(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return { [path]: JSON.stringify(value) };
  return Object.assign({}, ...Object.entries(value).map(([key, inner]) => flatten(inner, path ? `${path}.${key}` : key)));
}
