// What the job was told, and the versions that are kept.
import { html } from "app/html.js";
import { Copied, Panel, Table, useAsk } from "app/parts.js";
import { bytes, moment } from "app/format.js";

export function Settings({ store }) {
  const { value } = useAsk(() => store.source.checkpoints(), [store.steps.value, store.job.value.state]);
  const job = store.job.value;
  const rows = (value?.checkpoints ?? []).map((c) => ({ ...c, models: [...new Set(Object.values(c.versions).map((v) => `${v.model} v${v.number}`))].join(", ") }));
  return html`
    <${Panel} title="Checkpoints" note=${value?.model ? "the final model is exported to model/ of the run directory" : ""}>
      ${rows.length
        ? html`<${Table} caption="Versions whose weights are kept" hidden=${true} rows=${rows} columns=${[{ title: "Step", key: "step", left: true }, { title: "Versions", key: "models", left: true }, { title: "Size", value: (row) => bytes(row.bytes) }, { title: "Committed", value: (row) => moment(row.created_at), left: true },
            { title: "As a model", left: true, value: (row) => html`<${Copied} text=${`rlhf-orchestrate export ${value.run} --step ${row.step} model-${row.step}`} />` }]} />`
        : html`<p class="quietly">The first is kept with step 0.</p>`}
    </${Panel}>
    ${value?.profiles?.length > 0 && html`<${Panel} title="Profiles" note="Chrome traces of calls, for ui.perfetto.dev">
      <${Table} caption="Traces of calls" hidden=${true} rows=${value.profiles} columns=${[{ title: "Step", key: "step", left: true }, { title: "Call", key: "name", left: true }, { title: "Size", value: (row) => bytes(row.bytes) },
        { title: "Trace", left: true, value: (row) => (store.source.fixed ? html`<code>${value.run}/profile</code>` : html`<button type="button" onClick=${() => store.source.profile(row.step, row.name)}>Download</button>`) }]} />
    </${Panel}>`}
    <${Panel} title="Configuration" note="as resolved: the job file, the recipe's settings under it, defaults under both">
      <div class="config">${Object.entries({ ...sections(job.config), ...trained(job) }).map(([name, values]) => html`<section><h3>${name || "job"}</h3><dl class="facts">${Object.entries(values).map(
        ([key, v]) => html`<div><dt><code>${key}</code></dt><dd><code>${typeof v === "string" ? v : JSON.stringify(v)}</code></dd></div>`,
      )}</dl></section>`)}</div>
    </${Panel}>`;
}

// Top-level values, then each table that has any; functions one by one.
function sections(config) {
  const found = { "": {} };
  for (const [key, value] of Object.entries(config)) {
    if (value === null) continue;
    if (typeof value !== "object" || Array.isArray(value)) found[""][key] = value;
    else if (key === "functions") for (const [name, f] of Object.entries(value)) found[`functions.${name}`] = known(f);
    else if (Object.keys(known(value)).length) found[key] = known(value);
  }
  return found;
}

// What each model is trained with.
export const trained = (job) => Object.fromEntries(Object.entries(job.trains ?? {}).map(([model, settings]) => [`${job.recipe}: ${model}`, known(settings)]));

const known = (table) => Object.fromEntries(Object.entries(table).filter(([, v]) => v !== null && !(typeof v === "object" && !Object.keys(v).length)));
