// The list of shortcuts.
import { html } from "app/html.js";
import { Dialog } from "app/parts.js";

const KEYS = [
  ["Everywhere", [["?", "this list"], ["t", "dark or light"], ["g", "all jobs"], ["Esc", "close"]]],
  ["In the list of jobs", [["j  k", "next, previous job"], ["Enter", "open"], ["/", "filter"]]],
  ["In a job", [["1 … 6", "overview, cost, plan, samples, events, configuration"], ["[  ]", "step before, step after (plan, samples)"], ["/", "search the samples"]]],
  ["On the replicas (click or tab to them)", [["←  →", "move"], ["+  −", "zoom; so does the wheel"], ["Home  End", "the job's beginning; now, and follow"], ["0", "all of it"], ["s", "the last steps"]]],
  ["On a curve", [["←  →", "read the values"], ["Esc", "whole range; drag to zoom"]]],
];

export function Help({ onClose }) {
  return html`<${Dialog} title="Keys" onClose=${onClose} className="wide">
    <div class="keys">
      ${KEYS.map(([where, keys]) => html`<div><h3>${where}</h3><dl>${keys.map(
        ([key, does]) => html`<div><dt>${key.split("  ").map((one) => html`<kbd>${one}</kbd> `)}</dt><dd>${does}</dd></div>`,
      )}</dl></div>`)}
    </div>
    <div class="buttons"><button type="button" class="main" onClick=${onClose}>Close</button></div>
  </${Dialog}>`;
}
