// One job: what it is, how it stands, and its parts under tabs.
import { html, useEffect, useMemo, useRef, useState } from "app/html.js";
import { openStore } from "app/store.js";
import { useKeys } from "app/keys.js";
import { Failure, State } from "app/parts.js";
import { moment } from "app/format.js";
import { Actions } from "app/actions.js";
import { Tiles } from "app/tiles.js";
import { Health } from "app/health.js";
import { Trouble } from "app/trouble.js";
import { Where } from "app/where.js";
import { Gantt } from "app/gantt.js";
import { Curves } from "app/curves.js";
import { Cost } from "app/cost.js";
import { Plan } from "app/plan.js";
import { Samples } from "app/samples.js";
import { Events } from "app/events.js";
import { Settings } from "app/settings.js";

const TABS = [
  ["overview", "Overview", Overview],
  ["cost", "Cost", Cost],
  ["plan", "Plan", Plan],
  ["samples", "Samples", Samples],
  ["events", "Events", Events],
  ["settings", "Configuration", Settings],
];
const SAYS = {
  connecting: "connecting", live: "live",
  away: "The server does not answer. The job goes on without it; what you see is how it was. Trying again.",
};

// Before the first commit there is nothing to tell but replicas, and before the first of those nothing at all.
const empty = (store) => store.job.value.step === null && !Object.values(store.cost.value?.functions ?? {}).some((f) => f.replica_s > 0) && !Object.values(store.job.value.replicas).some(Boolean);

function Overview({ store }) {
  if (store.job.value.step !== null) return html`<${Where} store=${store} /><${Gantt} store=${store} /><${Curves} store=${store} />`;
  return html`${!empty(store) && html`<${Gantt} store=${store} />`}<div class="empty"><h2>No step yet</h2><p>Curves, and where the time goes, come with the first that is committed.</p></div>`;
}

export function Job({ id, source, made }) {
  const store = useMemo(() => openStore(id, source), [id]);
  const [tab, setTab] = useState(fromHash());
  const [said, setSaid] = useState("");
  const before = useRef(null);
  useEffect(() => {
    store.open();
    const changed = () => setTab(fromHash());
    window.addEventListener("hashchange", changed);
    return () => {
      window.removeEventListener("hashchange", changed);
      store.close();
    };
  }, [id]);

  const open = (name) => {
    history.replaceState(null, "", `#${name}`);
    setTab(name);
  };
  useKeys(Object.fromEntries(TABS.map(([name], i) => [String(i + 1), () => open(name)])));

  const job = store.job.value;
  const connection = store.connection.value;
  useEffect(() => {
    if (!job) return;
    document.title = `${job.step ?? 0}/${job.steps} ${job.id} · rlhf-orchestrate`;
    if (before.current && before.current !== job.state) setSaid(`${job.id}: ${job.state}`);
    before.current = job.state;
  });

  if (!job) {
    const problem = store.failure.value;
    if (!problem) return html`<p class="quietly">Reading ${id}…</p>`;
    return html`<${Failure} problem=${problem} />${!source.fixed && html`<p><a href="/" data-page>All jobs</a></p>`}`;
  }
  const Shown = TABS.find(([name]) => name === tab)[2];
  return html`
    <div class="title">
      <h1>${job.name}</h1>
      <${State} state=${job.state} />
      ${!source.fixed && connection === "live" && html`<span class="live" title="Events come as they happen"><i aria-hidden="true"></i>live</span>`}
      <p class="note"><code>${job.id}</code> · ${job.recipe} · ${source.fixed ? `report of ${moment(made)}` : `submitted ${moment(job.created_at)}`}${job.executions > 1 ? ` · execution ${job.executions}` : ""}</p>
      <span class="grow"></span>
      ${!source.fixed && html`<${Actions} store=${store} job=${job} />`}
    </div>
    ${connection === "away" && html`<p class="away-bar" role="status">${SAYS.away}</p>`}
    <progress class="steps" max=${job.steps || 1} value=${job.steps ? job.step ?? 0 : Number(job.step !== null)} aria-label="steps done"></progress>
    <${Trouble} store=${store} job=${job} />
    ${!empty(store) && html`<${Tiles} store=${store} job=${job} />`}
    <${Health} store=${store} />
    <${Tabs} tab=${tab} open=${open} />
    <div role="tabpanel" id="tabpanel" aria-labelledby=${`tab-${tab}`} class=${`tab ${tab}`}><${Shown} store=${store} /></div>
    <p class="away" role="status" aria-live="polite">${said}</p>
  `;
}

function Tabs({ tab, open }) {
  const ref = useRef();
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = TABS.findIndex(([name]) => name === tab);
    const [next] = TABS[(at + by + TABS.length) % TABS.length];
    open(next);
    ref.current.querySelector(`#tab-${next}`).focus();
  };
  return html`<div class="tabs" role="tablist" aria-label="Parts of the job" ref=${ref} onKeyDown=${move}>
    ${TABS.map(([name, title]) => html`<button type="button" role="tab" id=${`tab-${name}`} aria-selected=${name === tab} aria-controls="tabpanel"
      tabindex=${name === tab ? 0 : -1} onClick=${() => open(name)}>${title}</button>`)}
  </div>`;
}

function fromHash() {
  const name = location.hash.slice(1);
  return TABS.some(([tab]) => tab === name) ? name : "overview";
}
