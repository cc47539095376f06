// What the planner decided before a step: T(N) and C(N) of generate with the chosen point, replicas, shards; and what came.
import { html, useEffect, useMemo, useState } from "app/html.js";
import { useKeys } from "app/keys.js";
import { Chart } from "app/chart.js";
import { Failure, Panel, Table, useAsk } from "app/parts.js";
import { color } from "app/theme.js";
import { dollars, duration, number, plural, ticks } from "app/format.js";

export function Plan({ store }) {
  const [step, setStep] = useState(null); // null: the current one
  const { value, problem } = useAsk(() => store.source.plan(step), [step, store.steps.value, store.job.value.step]);
  const at = value?.step ?? 0;
  const last = store.job.value.steps;
  const move = (by) => setStep(Math.max(1, Math.min(last, at + by)));
  useKeys({ "[": () => move(-1), "]": () => move(1) });
  if (problem && !value) return html`<${Failure} problem=${problem} />`;
  if (!value) return html`<p class="quietly">Reading the plan…</p>`;
  if (!value.plan) {
    return html`<div class="empty"><h2>${step === null ? "No plan yet" : `Step ${step} was not planned`}</h2>
      <p>${step === null ? "The planner is asked before each step." : html`<button type="button" onClick=${() => setStep(null)}>The current step</button>`}</p></div>`;
  }
  return html`
    <div class="controls">
      <button type="button" onClick=${() => move(-1)} disabled=${at <= 1} aria-keyshortcuts="[">Step before</button>
      <label class="inline">Step <input type="number" min="1" max=${last} value=${at} onChange=${(e) => setStep(Number(e.target.value) || null)} /></label>
      <button type="button" onClick=${() => move(1)} aria-keyshortcuts="]">Step after</button>
      <button type="button" onClick=${() => setStep(null)} aria-pressed=${step === null}>Current</button>
    </div>
    <${Curve} plan=${value.plan} priced=${(store.cost.value?.usd ?? 0) > 0} policy=${store.job.value.config.planner} />
    <${Decided} value=${value} />
  `;
}

function Curve({ plan, priced, policy }) {
  const points = useMemo(() => [...plan.curve].sort((a, b) => a[0] - b[0]), [plan]);
  const cost = priced ? 2 : 3;
  const unit = priced ? "USD" : "GPU s";
  const series = useMemo(() => [
    { label: "T(N), s", values: points.map((p) => p[1]), color: "s1", points: true },
    { label: `C(N), ${unit}`, values: points.map((p) => p[cost]), color: "s3", points: true, scale: "cost" },
  ], [points, cost]);
  const axes = { scales: { cost: { range: (u, low, high) => [0, (high || 1) * 1.1] }, y: { range: (u, low, high) => [0, (high || 1) * 1.1] } },
    more: [{ scale: "cost", side: 1, size: 64, values: (u, values) => ticks(values, priced ? "$" : "") }] };
  const goal = policy.policy === "adaptive" ? policy.objective ?? "knee" : policy.policy;
  if (points.length < 2) {
    return html`<${Panel} title="Time and cost by replicas"><p class="quietly">${policy.policy === "static"
      ? html`The static planner takes the replicas that are configured and weighs nothing. With <code>planner.policy = "adaptive"</code> it weighs time against cost and shows both here.`
      : "The planner has not seen enough to predict this step: it learns from each step, or from a roofline where planner.gpu names the device."}</p></${Panel}>`;
  }
  return html`<${Panel} title="Time and cost by replicas" note=${`chosen: ${plural(plan.chosen, "replica")} of generate (${goal})`}>
    <ul class="legend"><li><i class="ink-s1" aria-hidden="true"></i>T(N): seconds of the step</li><li><i class="ink-s3" aria-hidden="true"></i>C(N): its cost, ${unit}</li><li><i class="ring" aria-hidden="true"></i>chosen</li></ul>
    <${Chart} key=${JSON.stringify([plan.chosen, points])} title="Time and cost of the step by replicas of generate" x=${points.map((p) => p[0])} series=${series} height=${260} unit="replicas" axes=${axes} link=${false} marks=${ring(plan.chosen, series)} />
  </${Panel}>`;
}

// A line at the chosen number, and a ring around its point on each curve.
function ring(chosen, series) {
  return {
    hooks: {
      draw: (u) => {
        const at = u.data[0].indexOf(chosen);
        if (at < 0) return;
        const x = u.valToPos(chosen, "x", true);
        const { ctx } = u;
        ctx.save();
        ctx.strokeStyle = color("muted");
        ctx.setLineDash([4, 4]);
        ctx.beginPath();
        ctx.moveTo(x, u.bbox.top);
        ctx.lineTo(x, u.bbox.top + u.bbox.height);
        ctx.stroke();
        ctx.setLineDash([]);
        ctx.lineWidth = 2 * devicePixelRatio;
        for (const s of series) {
          ctx.strokeStyle = color(s.color);
          ctx.beginPath();
          ctx.arc(x, u.valToPos(s.values[at], s.scale ?? "y", true), 7 * devicePixelRatio, 0, 7);
          ctx.stroke();
        }
        ctx.restore();
      },
    },
  };
}

function Decided({ value }) {
  const { plan, actual } = value;
  const error = plan.predicted_step_s && actual.step_s ? `${number(100 * (plan.predicted_step_s / actual.step_s - 1), 2)} %` : "–";
  const shards = plan.shards.length;
  const facts = [
    ["Predicted step", plan.predicted_step_s ? duration(plan.predicted_step_s) : "no prediction"],
    ["It took, without validation", actual.step_s ? duration(actual.step_s) : "not committed yet"],
    ["Prediction was off by", error],
    ...(actual.cost_usd || plan.predicted_cost_usd ? [["Predicted cost", plan.predicted_cost_usd ? dollars(plan.predicted_cost_usd) : "no prediction"], ["It cost", actual.cost_usd ? dollars(actual.cost_usd) : "–"]] : []),
    ["Shards", shards ? `${shards}, of ${Math.min(...plan.shards)} to ${Math.max(...plan.shards)} samples` : "none"],
    ["Handed on", plan.overlap ? `${plan.micro_batch} finished samples at a time, beside generation` : "when generation has ended"],
    ["Tail", plan.cut_below ? `cut when ${plural(plan.cut_below, "sample")} are left, moved to ${plural(plan.migrate_to, "replica")} of ${plan.tail}` : "not cut"],
  ];
  const stages = Object.fromEntries(plan.stages.map(([name, start, stop]) => [name, `${duration(start)} to ${duration(stop)}`]));
  const rows = Object.entries(plan.replicas).map(([name, replicas]) => ({ name, replicas, kept: plan.keep.includes(name) ? "stays warm" : "goes to zero", stage: stages[name] ?? "–" }));
  return html`<div class="two">
    <${Panel} title="Decided"><dl class="facts">${facts.map(([name, text]) => html`<div><dt>${name}</dt><dd>${text}</dd></div>`)}</dl></${Panel}>
    <${Panel} title="Replicas"><${Table} caption="Replicas of the step" hidden=${true} rows=${rows}
      columns=${[{ title: "Function", key: "name", left: true }, { title: "Replicas", key: "replicas" }, { title: "Expected at work", key: "stage" }, { title: "After the step", key: "kept", left: true }]} /></${Panel}>
  </div>`;
}
