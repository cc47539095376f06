// One sample, as it is read: what was asked, what was answered, what would be right, and its numbers.
import { html } from "app/html.js";
import { number, plural } from "app/format.js";

const TEXTS = ["prompt", "response", "ground_truth", "conversation"];
const OFF = [0.01, 0.1, 0.5]; // |difference| of log-probabilities from which a token is marked
export const id = (s) => `${s.group}.${s.index}`;
export const scored = (s) => (s.score === undefined || s.score === null ? html`<span class="bad">no score</span>` : number(s.score));

// The parts of a sample in their order: [{role, text, tokens}]. An episode has its turns, and what was given between them.
export const parts = (s) => [{ role: "Prompt", text: s.prompt }, ...(s.conversation?.map(turn) ?? [{ role: "Response", text: s.response }])];

function turn(m) {
  const errors = Object.entries(m.errors ?? {}).map(([kind, count]) => `${count} ${kind.replaceAll("_", " ")}`);
  const off = (m.difference ?? []).filter((d) => d !== null).map(Math.abs);
  const mismatch = off.length ? `mismatch ${number(off.reduce((a, b) => a + b) / off.length, 2)}, at most ${number(Math.max(...off), 2)}` : "";
  const facts = m.role === "assistant" ? [plural(m.tokens, "token"), m.reward == null ? "" : `reward ${number(m.reward)}`, mismatch, ...errors] : ["not trained on", `${number(m.seconds)} s`];
  const role = m.role === "assistant" ? "Assistant" : m.name && m.name !== m.role ? `${m.role} ${m.name}` : m.role;
  return { role: [role, ...facts].filter(Boolean).join(" · "), text: m.content, tokens: off.length ? m.pieces.map((text, i) => ({ text, off: m.difference[i] })) : null };
}

// A turn token by token: the darker, the further the trainer's log-probability lies from the engine's.
const Tokens = ({ tokens }) => tokens.map(({ text, off }) => html`<span class=${off === null ? null : `off${OFF.filter((bound) => Math.abs(off) >= bound).length}`} title=${off === null ? "not trained on" : `trainer ${off < 0 ? "−" : "+"}${number(Math.abs(off), 2)}`}>${text}</span>`);

export function Sample({ sample }) {
  const truth = sample.ground_truth;
  const facts = Object.entries(sample).filter(([key, v]) => !TEXTS.includes(key) && v !== null);
  return html`
    <div class="two">${parts(sample).map(({ role, text, tokens }) => html`<div><h3>${role}</h3><pre tabindex="0">${tokens ? html`<${Tokens} tokens=${tokens} />` : text}</pre></div>`)}</div>
    ${truth !== undefined && html`<p class="truth"><b>Ground truth</b> <code>${typeof truth === "string" ? truth : JSON.stringify(truth)}</code></p>`}
    <dl class="facts inline">${facts.map(([key, v]) => html`<div><dt>${key}</dt><dd>${typeof v === "number" ? number(v, 6) : String(v)}</dd></div>`)}</dl>`;
}
