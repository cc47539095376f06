// The few numbers that answer: how far, is it learning, what does it cost.
import { html } from "app/html.js";
import { Spark } from "app/parts.js";
import { dollars, duration, headline, number, percent, validation, whole } from "app/format.js";

function Tile({ title, value, note, children }) {
  return html`<div class="tile"><dt>${title}</dt><dd><strong>${value}</strong>${children}${note && html`<small>${note}</small>`}</dd></div>`;
}

export function Tiles({ store, job }) {
  const cost = store.cost.value;
  const costs = store.costSteps.value;
  const m = job.metrics;
  const perStep = median((costs?.wall_s ?? []).map((s, i) => s / costs.counts[i]).slice(-10));
  const left = perStep && job.state === "running" ? perStep * (job.steps - (job.step ?? 0)) : null;
  const held = validation(m);
  const learns = headline(m);
  const money = spending(cost, job, store.reserved.value);
  const replicas = Object.entries(job.replicas);
  return html`<dl class="tiles">
    <${Tile} title="Step" value=${job.steps ? `${job.step ?? "–"} / ${job.steps}` : "evaluation"} note=${left !== null ? `about ${duration(left)} left` : perStep ? `${duration(perStep)} a step` : ""} />
    <${Tile} title=${learns.title} value=${number(learns.value)} note="mean of the last step"><${Spark} values=${job.trend} /></${Tile}>
    <${Tile} title=${held?.title ?? "Validation"} value=${held ? held.shown : "–"} note=${held ? html`<code>${held.name}</code>` : "none yet"} />
    <${Tile} title=${money.title} value=${money.value} note=${money.note} />
    <${Tile} title="Generation" value=${whole(m["rollout/tokens_per_s"])} note="tokens/s per generate replica" />
    <${Tile} title="Replicas now" value=${job.state === "running" ? replicas.reduce((sum, [, n]) => sum + n, 0) : 0}
      note=${replicas.filter(([, n]) => n).map(([name, n]) => `${name} ${n}`).join(", ") || (job.state !== "running" ? "all at zero" : job.stages.length ? `starting ${job.stages.join(", ")}` : "between stages: all at zero")} />
  </dl>`;
}

function spending(cost, job, reserved) {
  if (!cost || !Object.keys(cost.functions).length) return { title: "Cost", value: "–", note: "nothing was spent yet" };
  const unit = unitOf(cost);
  const spent = Object.values(cost.functions).reduce((total, f) => total + f[unit.measure], 0);
  const notes = against(reserved, unit.measure).map((a) => html`<span class=${a.change < 0 ? "good" : ""}>${a.words}</span>`);
  return { title: unit.title, value: unit.show(spent), note: notes.length ? html`${notes[0]}, ${notes[1]}` : "" };
}

// How the run compares with the same steps on machines that are held, simulated: [{place, held, change, words}].
export function against(reserved, measure) {
  if (!reserved?.used?.[measure]) return [];
  return ["dedicated", "colocated"].map((place) => {
    const held = reserved[place];
    const change = reserved.used[measure] / held[measure] - 1;
    return { place, held, change, words: `${percent(Math.abs(change))} ${change < 0 ? "under" : "over"} ${place}` };
  });
}

// Dollars where the job names prices, else GPU-seconds, else seconds of replicas.
export function unitOf(cost) {
  const any = (measure) => Object.values(cost.functions).some((f) => f[measure] > 0);
  if (any("usd")) return { measure: "usd", title: "Cost", axis: "USD", show: dollars };
  if (any("gpu_s")) return { measure: "gpu_s", title: "GPU time", axis: "GPU-seconds", show: (s) => `${number(s)} GPU s` };
  return { measure: "replica_s", title: "Replica time", axis: "replica-seconds", show: (s) => `${number(s)} s` };
}

function median(values) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}
