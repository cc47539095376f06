// What happened, newest first.
import { html, useState } from "app/html.js";
import { Panel } from "app/parts.js";
import { Lines } from "app/trouble.js";
import { clock, dollars, headline, moment, number, plural, validated } from "app/format.js";

const KINDS = [["all", "All"], ["steps", "Steps"], ["trouble", "Trouble"]];
const TROUBLE = ["failed", "sample_failures", "note", "cancelled"];

export function Events({ store }) {
  const [kind, setKind] = useState("all");
  const events = store.events.value.filter((e) => kind === "all" || (kind === "steps" ? ["step", "validation"].includes(e.type) : TROUBLE.includes(e.type)));
  const actions = html`<div class="group" role="group" aria-label="Which events">${KINDS.map(([key, text]) => html`<button type="button" aria-pressed=${kind === key} onClick=${() => setKind(key)}>${text}</button>`)}</div>`;
  return html`<${Panel} title="Events" note="newest first" actions=${actions}>
    ${events.length === 0
      ? html`<p class="quietly">${store.events.value.length ? "None of this kind among those that are read." : "Nothing has happened yet."}</p>`
      : html`<ol class="events">${events.map((e) => html`<${Line} key=${e.id} event=${e} />`)}</ol>`}
    ${store.older.value !== null && html`<button type="button" onClick=${() => store.moreEvents()}>Older events</button>`}
  </${Panel}>`;
}

function Line({ event }) {
  return html`<li class=${event.type}><time datetime=${new Date(event.time * 1000).toISOString()} title=${moment(event.time)}>${clock(event.time)}</time>
    <span class="kind">${event.type.replace("_", " ")}</span><div>${told(event)}</div></li>`;
}

function told({ type, data }) {
  const m = data.metrics ?? {};
  const learns = headline(m);
  switch (type) {
    case "started":
      return data.execution === 1 ? `${plural(data.steps, "step")} to go` : `Execution ${data.execution}: goes on after step ${data.step}`;
    case "step":
      return html`Step ${data.step} is committed${learns.value === undefined ? "" : `, ${learns.title.toLowerCase()} ${number(learns.value)}`}${m["timing_s/step"] ? `, ${number(m["timing_s/step"])} s` : ""}${data.cost_usd > 0 ? `, ${dollars(data.cost_usd)} until now` : ""}`;
    case "validation":
      return Object.entries(m).map(([name, value]) => html`<span class="metric"><code>${name}</code> ${validated(name, value).shown}</span> `);
    case "sample_failures":
      return html`${plural(data.count, "sample was", "samples were")} dropped in step ${data.step}: the scorer failed
        <ul class="lines">${data.first.map((f) => html`<li><span class="where"><code>group ${f.group}, index ${f.index}</code></span><strong>${f.message}</strong></li>`)}</ul>`;
    case "failed":
      return html`<${Lines} message=${data.message} />`;
    case "finished":
      return "All steps are done; the model is in model/ of the run directory";
    default:
      return data.message ?? "";
  }
}
