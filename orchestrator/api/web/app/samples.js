// Samples of a step: filtered, sorted and paged by the server; what does not fit a line is behind it.
import { html, useEffect, useRef, useState } from "app/html.js";
import { useKeys } from "app/keys.js";
import { Failure, Panel, Table, useAsk } from "app/parts.js";
import { Sample, id, scored } from "app/sample.js";
import { Group, Histogram } from "app/group.js";
import { number, plural, whole } from "app/format.js";

const PAGE = 50;
const WAIT_MS = 200;
const SORTS = [
  ["index", "as in the step"], ["-score", "reward, highest first"], ["score", "reward, lowest first"], ["-tokens", "longest first"],
  ["tokens", "shortest first"], ["-advantage", "advantage, greatest first"], ["advantage", "advantage, least first"], ["-mismatch", "mismatch, greatest first"], ["-version", "newest version first"], ["version", "oldest version first"],
];
const TOOLS = [{ title: "Tool", key: "tool", left: true }, { title: "Calls", value: (t) => whole(t.calls) }, { title: "Failed", value: (t) => html`<span class=${t.failed ? "bad" : ""}>${whole(t.failed)}</span>` }];
const FRESH = { of: "training", step: null, contains: "", min_score: "", max_score: "", finish: "", sort: "index", offset: 0 };

export function Samples({ store }) {
  const [query, setQuery] = useState(FRESH);
  const [open, setOpen] = useState(null);
  const [group, setGroup] = useState(null);
  const field = useRef();
  const asked = useSlow(query, WAIT_MS);
  const following = asked.step === null && asked.offset === 0;
  const { value, problem, busy } = useAsk(() => store.source.samples({ ...asked, limit: PAGE }), [JSON.stringify(asked), following ? store.steps.value : 0]);
  const set = (change) => setQuery({ ...query, offset: 0, ...change });
  const [first, last] = value?.steps ?? [];
  const move = (by) => value?.step != null && set({ step: near(value, by) });
  const chosen = group !== null && value?.groups.find((g) => g.group === group);
  useKeys({ "[": () => move(-1), "]": () => move(1), "/": () => field.current?.focus() });

  if (problem && problem.status !== 404 && !value) return html`<${Failure} problem=${problem} />`;
  const kinds = html`<div class="group" role="group" aria-label="Which samples">${[["training", "Training"], ["validation", "Validation"]].map(([of, text]) => html`<button type="button" aria-pressed=${query.of === of} onClick=${() => { setGroup(null); set({ of, step: null }); }}>${text}</button>`)}</div>`;
  if (value && value.steps.length === 0) {
    return html`<div class="controls">${kinds}</div><div class="empty"><h2>No samples yet</h2><p>The first ${store.job.value.config.telemetry.samples} of each step are kept when it is committed (<code>telemetry.samples</code>).</p></div>`;
  }
  const shown = value?.samples ?? [];
  const filtered = query.contains || query.min_score !== "" || query.max_score !== "" || query.finish;
  const input = (key, more) => html`<input value=${query[key]} onInput=${(e) => set({ [key]: e.target.value })} ...${more} />`;
  return html`
    <div class="controls">${kinds}
      <button type="button" onClick=${() => move(-1)} disabled=${value?.step === first} aria-keyshortcuts="[">Step before</button>
      <label class="inline">Step <input type="number" min=${first} max=${last} value=${query.step ?? value?.step ?? ""} onChange=${(e) => set({ step: e.target.value === "" ? null : Number(e.target.value) })} /></label>
      <button type="button" onClick=${() => move(1)} disabled=${value?.step === last} aria-keyshortcuts="]">Step after</button>
      <button type="button" onClick=${() => set({ step: null })} aria-pressed=${query.step === null}>Newest</button>
      <label class="inline grow">Contains <input ref=${field} type="search" value=${query.contains} maxlength="200" onInput=${(e) => set({ contains: e.target.value })} /></label>
      <label class="inline">Reward from ${input("min_score", { type: "number", step: "any", class: "short" })}</label>
      <label class="inline">to ${input("max_score", { type: "number", step: "any", class: "short" })}</label>
      <label class="inline">Ended <select value=${query.finish} onChange=${(e) => set({ finish: e.target.value })}><option value="">either way</option><option value="stop">by itself</option><option value="length">at the limit</option></select></label>
      <label class="inline">Order <select value=${query.sort} onChange=${(e) => set({ sort: e.target.value })}>${SORTS.map(([key, text]) => html`<option value=${key}>${text}</option>`)}</select></label>
    </div>
    ${problem && html`<p class="bad" role="alert">${problem.message}. ${first !== undefined ? `Samples are kept of steps ${first} to ${last}.` : ""}</p>`}
    ${value && value.groups.length > 0 && html`<${Panel} title="Scores" note=${`of step ${value.step}`} className="scores">
      <${Histogram} scores=${value.scores} />
      <ul class="chips" aria-label="Prompts">${value.groups.map((g) => html`<li key=${g.group}><button type="button" aria-pressed=${group === g.group} onClick=${() => setGroup(group === g.group ? null : g.group)}
        title=${`mean and deviation of ${plural(g.count, "sample")} of prompt ${g.group}`}>${g.group}: <b>${number(g.mean)}</b> ± ${number(g.deviation, 2)}</button></li>`)}</ul>
    </${Panel}>`}
    ${value?.tools?.length > 0 && html`<${Panel} title="Tools" note=${`of step ${value.step}; failed: the model read an error`}><${Table} caption="Tools" hidden=${true} columns=${TOOLS} rows=${value.tools} /></${Panel}>`}
    ${chosen && html`<${Group} key=${`${query.of} ${value.step} ${group}`} store=${store} query=${query} step=${value.step} group=${chosen} close=${() => setGroup(null)} />`}
    <p class="note" role="status" aria-busy=${busy}>${value ? `${whole(value.total)} ${value.total === 1 ? "sample" : "samples"} of step ${value.step}${filtered ? " match" : ""}` : "Reading the samples…"}</p>
    <div class="scroll panel flush" tabindex="0" role="region" aria-label="Samples">
      <table class="samples cards"><caption class="away">Samples of step ${value?.step}</caption>
        <thead><tr><th scope="col" class="left">Sample</th><th scope="col">Reward</th><th scope="col">Advantage</th><th scope="col">Tokens</th><th scope="col">Ended</th><th scope="col">Version</th>
          <th scope="col">Mismatch</th><th scope="col" class="left">Prompt</th><th scope="col" class="left">Response</th></tr></thead>
        <tbody>${shown.map((s) => html`<${Row} key=${`${value.step} ${s.group} ${s.index}`} sample=${s} open=${open === `${value.step} ${s.group} ${s.index}`}
          flip=${() => setOpen(open === `${value.step} ${s.group} ${s.index}` ? null : `${value.step} ${s.group} ${s.index}`)} />`)}</tbody>
      </table>
    </div>
    ${value && value.total > PAGE && html`<nav class="controls" aria-label="Pages of samples">
      <button type="button" disabled=${query.offset === 0} onClick=${() => setQuery({ ...query, offset: Math.max(0, query.offset - PAGE) })}>Page before</button>
      <span>${query.offset + 1} to ${Math.min(value.total, query.offset + PAGE)} of ${whole(value.total)}</span>
      <button type="button" disabled=${query.offset + PAGE >= value.total} onClick=${() => setQuery({ ...query, offset: query.offset + PAGE })}>Page after</button>
    </nav>`}
  `;
}

function Row({ sample: s, open, flip }) {
  return html`<tr class=${open ? "open" : ""}>
      <th scope="row" class="left"><button type="button" class="fold" aria-expanded=${open} onClick=${flip}>${id(s)}</button></th>
      <td data-label="Reward">${scored(s)}</td>
      <td data-label="Advantage">${number(s.advantage)}</td><td data-label="Tokens">${whole(s.tokens)}</td><td data-label="Ended">${s.finish === "length" ? html`<span class="warn">limit</span>` : s.finish ?? "–"}</td><td data-label="Version">${s.version ?? "–"}</td><td data-label="Mismatch">${number(s.mismatch, 2)}</td>
      <td class="left text" data-label="Prompt" onClick=${flip}><div>${s.prompt}</div></td><td class="left text" data-label="Response" onClick=${flip}><div>${s.response}</div></td>
    </tr>
    ${open && html`<tr class="whole"><td colspan="9"><${Sample} sample=${s} /></td></tr>`}`;
}

// The step before or after; in a report, the nearest that is kept.
function near(value, by) {
  const [first, last] = value.steps;
  if (!value.kept) return Math.max(first, Math.min(last, value.step + by));
  return value.kept[Math.max(0, Math.min(value.kept.length - 1, value.kept.indexOf(value.step) + by))];
}

function useSlow(value, ms) {
  const [slow, setSlow] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSlow(value), ms);
    return () => clearTimeout(timer);
  }, [value]);
  return slow;
}
