// What each function cost, per step and in all; and the same steps on machines that are held, simulated.
import { html, useMemo } from "app/html.js";
import { Chart } from "app/chart.js";
import { Panel, Table } from "app/parts.js";
import { against, unitOf } from "app/tiles.js";
import { duration, number, percent, plural, whole } from "app/format.js";

export function Cost({ store }) {
  const cost = store.cost.value;
  const steps = store.costSteps.value;
  if (!cost || !steps) return html`<p class="quietly">Reading the books…</p>`;
  const names = Object.keys(cost.functions);
  if (!names.length) return html`<div class="empty"><h2>Nothing was spent yet</h2><p>The books open with the first replica.</p></div>`;
  const unit = unitOf(cost);
  return html`
    <div class="two"><${Books} cost=${cost} unit=${unit} /><${Reserved} reserved=${store.reserved.value} unit=${unit} /></div>
    <${PerStep} steps=${steps} unit=${unit} names=${names} />
  `;
}

function Books({ cost, unit }) {
  const sum = (rows, key) => rows.reduce((total, row) => total + row[key], 0);
  const rows = Object.entries(cost.functions).map(([name, f]) => ({ name, ...f }));
  const all = { name: "all", className: "sum" };
  for (const key of ["replica_s", "busy_s", "gpu_s", "usd", "starts"]) all[key] = sum(rows, key);
  const columns = [
    { title: "Function", key: "name", left: true },
    { title: "Paid for", value: (row) => duration(row.replica_s) },
    { title: "Of that busy", value: (row) => (row.replica_s ? percent(row.busy_s / row.replica_s) : "–") },
    { title: "Cold starts", value: (row) => whole(row.starts) },
    ...(all.gpu_s > 0 && unit.measure !== "gpu_s" ? [{ title: "GPU time", value: (row) => `${number(row.gpu_s)} s` }] : []),
    { title: unit.title, value: (row) => unit.show(row[unit.measure]) },
  ];
  return html`<${Panel} title="The books" note=${`${duration(cost.wall_s)} in ${plural(cost.executions, "execution")}`}>
    <${Table} caption="Cost by function" hidden=${true} columns=${columns} rows=${[...rows, all]} />
  </${Panel}>`;
}

const ASSUMES = {
  dedicated: "Each function has machines of its own, held from beginning to end.",
  colocated: "All functions take turns on the same machines, as verl places them by default; moving weights between them is free.",
};

function Reserved({ reserved, unit }) {
  const found = against(reserved, unit.measure);
  if (!found.length) return html`<${Panel} title="On reserved machines"><p class="quietly">${reserved?.why ?? "Simulated when there are steps to compare."}</p></${Panel}>`;
  const rows = [{ name: "this run", ...reserved.used }, ...found.map(({ place, held, words }) => ({ name: place, words, ...held }))];
  const columns = [
    { title: "Run", left: true, value: (row) => html`${row.name}${row.machines && html`<small>${row.machines}</small>`}` },
    { title: "Time", value: (row) => duration(row.wall_s) },
    { title: unit.title, value: (row) => unit.show(row[unit.measure]) },
    { title: "This run", left: true, value: (row) => row.words ?? "" },
  ];
  return html`<${Panel} title="On reserved machines" note=${`steps 0 to ${reserved.steps}, simulated with this run's lengths and measured times`}>
    <${Table} caption="The same steps on reserved machines, simulated" hidden=${true} columns=${columns} rows=${rows} />
    <ul class="assumed">${found.map(({ place }) => html`<li><b>${place}</b> ${ASSUMES[place]}</li>`)}<li>Stages come one after the other and nothing starts but once; validations take what their calls took here. What this run used has its starts and retries in it.</li></ul>
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
    return found;
  }, [steps, unit.measure]);
  if (!steps.steps.length) return html`<${Panel} title="By step"><p class="quietly">No step is committed yet.</p></${Panel}>`;
  return html`<${Panel} title="By step" note=${runs ? "means of runs of steps" : ""}>
    <ul class="legend">${names.map((name, i) => html`<li><i class=${`ink-s${(i % 6) + 1}`} aria-hidden="true"></i>${name}</li>`)}</ul>
    <${Chart} title=${`${unit.title} of a step, ${unit.axis}, functions stacked`} x=${steps.steps} series=${series} height=${300} format=${unit.show} from="zero" prefix=${unit.measure === "usd" ? "$" : ""} />
  </${Panel}>`;
}
