// What each function cost, per step and in all, against machines that are held for the whole job.
import { html, useMemo } from "app/html.js";
import { Chart } from "app/chart.js";
import { Panel, Table } from "app/parts.js";
import { unitOf } from "app/tiles.js";
import { duration, number, percent, plural, whole } from "app/format.js";

export function Cost({ store }) {
  const cost = store.cost.value;
  const steps = store.costSteps.value;
  if (!cost || !steps) return html`<p class="quietly">Reading the books…</p>`;
  const names = Object.keys(cost.functions);
  if (!names.length) return html`<div class="empty"><h2>Nothing was spent yet</h2><p>The books open with the first replica.</p></div>`;
  const unit = unitOf(cost);
  return html`
    <${Books} cost=${cost} unit=${unit} />
    <${PerStep} steps=${steps} unit=${unit} names=${names} />
  `;
}

function Books({ cost, unit }) {
  const sum = (rows, key) => rows.reduce((total, row) => total + row[key], 0);
  const rows = Object.entries(cost.functions).map(([name, f]) => ({ name, ...f, reserved: cost.serverful[name]?.[unit.measure] ?? 0, reserved_s: cost.serverful[name]?.replica_s ?? 0 }));
  const all = { name: "all", className: "sum" };
  for (const key of ["replica_s", "busy_s", "gpu_s", "usd", "starts", "reserved", "reserved_s"]) all[key] = sum(rows, key);
  const saved = (row) => (row.reserved > 0 ? percent(1 - row[unit.measure] / row.reserved, 1) : "–");
  const columns = [
    { title: "Function", key: "name", left: true },
    { title: "Paid for", value: (row) => duration(row.replica_s) },
    { title: "Of that busy", value: (row) => (row.replica_s ? percent(row.busy_s / row.replica_s) : "–") },
    { title: "Cold starts", value: (row) => whole(row.starts) },
    ...(all.gpu_s > 0 && unit.measure !== "gpu_s" ? [{ title: "GPU time", value: (row) => `${number(row.gpu_s)} s` }] : []),
    { title: unit.title, value: (row) => unit.show(row[unit.measure]) },
    { title: "Serverful", value: (row) => unit.show(row.reserved) },
    { title: "Saved", value: (row) => html`<span class=${row[unit.measure] < row.reserved ? "good" : ""}>${saved(row)}</span>` },
  ];
  return html`<${Panel} title="The books" note=${`${duration(cost.wall_s)} in ${plural(cost.executions, "execution")}; serverful: every function's replicas held for that time`}>
    <${Table} caption="Cost by function" hidden=${true} columns=${columns} rows=${[...rows, all]} />
  </${Panel}>`;
}

function PerStep({ steps, unit, names }) {
  const per = steps.counts;
  const runs = per.some((count) => count > 1);
  // Stacked: each line is the sum of the functions up to it, the last drawn first.
  const series = useMemo(() => {
    const found = [];
    const sums = steps.steps.map(() => 0);
    for (const [i, name] of names.entries()) {
      const own = steps.functions[name]?.[unit.measure] ?? [];
      steps.steps.forEach((_, k) => (sums[k] += (own[k] ?? 0) / per[k]));
      found.unshift({ label: names.length > 1 && i ? `${name} and those before` : name, values: [...sums], color: `s${(i % 6) + 1}`, fill: 0.45, width: 1.5 });
    }
    found.push({ label: "serverful", values: steps.serverful[unit.measure].map((v, k) => v / per[k]), color: "muted", dash: [5, 4] });
    return found;
  }, [steps, unit.measure]);
  if (!steps.steps.length) return html`<${Panel} title="By step"><p class="quietly">No step is committed yet.</p></${Panel}>`;
  return html`<${Panel} title="By step" note=${runs ? "means of runs of steps" : ""}>
    <ul class="legend">${names.map((name, i) => html`<li><i class=${`ink-s${(i % 6) + 1}`} aria-hidden="true"></i>${name}</li>`)}<li><i class="dash" aria-hidden="true"></i>serverful, in the same time</li></ul>
    <${Chart} title=${`${unit.title} of a step, ${unit.axis}, functions stacked`} x=${steps.steps} series=${series} height=${300} format=${unit.show} />
  </${Panel}>`;
}
