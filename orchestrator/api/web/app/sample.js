// One sample, as it is read: what was asked, what was answered, what would be right, and its numbers.
import { html } from "app/html.js";
import { number } from "app/format.js";

const TEXTS = ["prompt", "response", "ground_truth", "turns"];
export const id = (s) => `${s.group}.${s.index}`;
export const scored = (s) => (s.score === undefined || s.score === null ? html`<span class="bad">no score</span>` : number(s.score));

// The parts of a sample in their order: [{role, text}]. An episode of several turns has more of them.
export const parts = (s) => s.turns ?? [{ role: "Prompt", text: s.prompt }, { role: "Response", text: s.response }];

export function Sample({ sample }) {
  const truth = sample.ground_truth;
  const facts = Object.entries(sample).filter(([key, v]) => !TEXTS.includes(key) && v !== null);
  return html`
    <div class="two">${parts(sample).map(({ role, text }) => html`<div><h3>${role}</h3><pre tabindex="0">${text}</pre></div>`)}</div>
    ${truth !== undefined && html`<p class="truth"><b>Ground truth</b> <code>${typeof truth === "string" ? truth : JSON.stringify(truth)}</code></p>`}
    <dl class="facts inline">${facts.map(([key, v]) => html`<div><dt>${key}</dt><dd>${typeof v === "number" ? number(v, 6) : String(v)}</dd></div>`)}</dl>`;
}
