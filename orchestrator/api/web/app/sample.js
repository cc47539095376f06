// One sample, as it is read: what was asked, what was answered, what would be right, and its numbers.
import { html } from "app/html.js";
import { number, plural } from "app/format.js";

const TEXTS = ["prompt", "response", "ground_truth", "conversation"];
export const id = (s) => `${s.group}.${s.index}`;
export const scored = (s) => (s.score === undefined || s.score === null ? html`<span class="bad">no score</span>` : number(s.score));

// The parts of a sample in their order: [{role, text}]. An episode has its turns, and what was given between them.
export const parts = (s) => [{ role: "Prompt", text: s.prompt }, ...(s.conversation?.map(turn) ?? [{ role: "Response", text: s.response }])];

function turn(m) {
  const errors = Object.entries(m.errors ?? {}).map(([kind, count]) => `${count} ${kind.replaceAll("_", " ")}`);
  const facts = m.role === "assistant" ? [plural(m.tokens, "token"), m.reward == null ? "" : `reward ${number(m.reward)}`, ...errors] : ["not trained on", `${number(m.seconds)} s`];
  const role = m.role === "assistant" ? "Assistant" : m.name && m.name !== m.role ? `${m.role} ${m.name}` : m.role;
  return { role: [role, ...facts].filter(Boolean).join(" · "), text: m.content };
}

export function Sample({ sample }) {
  const truth = sample.ground_truth;
  const facts = Object.entries(sample).filter(([key, v]) => !TEXTS.includes(key) && v !== null);
  return html`
    <div class="two">${parts(sample).map(({ role, text }) => html`<div><h3>${role}</h3><pre tabindex="0">${text}</pre></div>`)}</div>
    ${truth !== undefined && html`<p class="truth"><b>Ground truth</b> <code>${typeof truth === "string" ? truth : JSON.stringify(truth)}</code></p>`}
    <dl class="facts inline">${facts.map(([key, v]) => html`<div><dt>${key}</dt><dd>${typeof v === "number" ? number(v, 6) : String(v)}</dd></div>`)}</dl>`;
}
