// All samples of one prompt side by side, with mean and deviation; and the same prompt over the steps.
import { html, useState } from "app/html.js";
import { Failure, Panel, Table, useAsk } from "app/parts.js";
import { id, scored } from "app/sample.js";
import { number, plural } from "app/format.js";

const BINS = 12;

// How the scores of a step lie: bars from the least to the greatest.
export function Histogram({ scores }) {
  if (scores.length < 2) return null;
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  const bins = new Array(high > low ? BINS : 1).fill(0);
  for (const s of scores) bins[high > low ? Math.min(BINS - 1, Math.floor(((s - low) / (high - low)) * BINS)) : 0] += 1;
  const most = Math.max(...bins);
  const label = `${plural(scores.length, "score")} from ${number(low)} to ${number(high)}`;
  return html`<figure class="histogram" role="img" aria-label=${`${label}: ${bins.join(", ")} in ${plural(bins.length, "part")}`}>
    <div>${bins.map((n, i) => html`<i style=${`height:${(100 * n) / most}%`} title=${`${n} from ${number(low + (i * (high - low)) / bins.length)} on`}></i>`)}</div>
    <figcaption><span>${number(low)}</span><span>${label.split(" from")[0]}</span><span>${number(high)}</span></figcaption>
  </figure>`;
}

export function Group({ store, query, step, group, close }) {
  const { value, problem } = useAsk(() => store.source.samples({ step, of: query.of, group: group.group, limit: 1000 }), [step, query.of, group.group]);
  const [over, setOver] = useState(false);
  if (problem && !value) return html`<${Failure} problem=${problem} />`;
  const samples = value?.samples ?? [];
  const first = samples[0];
  const truth = first?.ground_truth;
  const actions = html`<button type="button" aria-pressed=${over} onClick=${() => setOver(!over)}>Over the steps</button><button type="button" onClick=${close}>All prompts</button>`;
  return html`<${Panel} title=${`Prompt ${group.group} of step ${step}`} note=${`${plural(group.count, "sample")}, mean ${number(group.mean)}, deviation ${number(group.deviation)}`} actions=${actions}>
    ${first && html`<pre tabindex="0">${first.prompt}</pre>`}
    ${truth !== undefined && html`<p class="truth"><b>Ground truth</b> <code>${typeof truth === "string" ? truth : JSON.stringify(truth)}</code></p>`}
    ${over
      ? html`<${Over} store=${store} of=${query.of} step=${step} group=${group.group} />`
      : html`<div class="side-by-side">${samples.map((s) => html`<article key=${id(s)} aria-label=${`Sample ${id(s)}`}>
          <h3>${id(s)} <b>${scored(s)}</b>${s.advantage === undefined || s.advantage === null ? "" : html` <span class=${s.advantage < 0 ? "bad" : "good"}>${s.advantage < 0 ? "" : "+"}${number(s.advantage)}</span>`}<small>${plural(s.tokens, "token")}${s.finish === "length" ? ", at the limit" : ""}</small></h3>
          <pre tabindex="0">${s.response}</pre></article>`)}</div>`}
  </${Panel}>`;
}

function Over({ store, of, step, group }) {
  const { value, problem } = useAsk(() => store.source.prompt({ of, step, group }), [of, step, group]);
  if (problem && !value) return html`<${Failure} problem=${problem} />`;
  const scores = (row) => row.samples.map((s) => s.score).filter((s) => s !== null && s !== undefined);
  const columns = [
    { title: "Step", key: "step", left: true }, { title: "Samples", value: (row) => row.samples.length },
    { title: "Mean score", value: (row) => (scores(row).length ? number(scores(row).reduce((a, b) => a + b, 0) / scores(row).length) : "–") },
    { title: "First response", left: true, value: (row) => html`<code>${row.samples[0].response}</code>` },
  ];
  return html`<${Table} caption="The same prompt over the steps" hidden=${true} columns=${columns} rows=${value?.steps ?? []} />`;
}
