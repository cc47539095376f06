// Where the time of the last steps went: a bar for each, and what would make it shorter.
import { html, useState } from "app/html.js";
import { Failure, Panel, useAsk } from "app/parts.js";
import { duration, number, percent } from "app/format.js";

const SHOWN = 8;
const WORDS = { tail: "waiting for the tail" };
const word = (part) => WORDS[part] ?? part;

export function Where({ store }) {
  const [to, setTo] = useState(null); // the last step that is shown; null: the newest
  const { value, problem } = useAsk(() => store.source.where(to, SHOWN), [to, store.steps.value, store.job.value.step]);
  if (problem && !value) return html`<${Failure} problem=${problem} />`;
  const steps = value?.steps ?? [];
  if (!steps.length) return html`<${Panel} title="Where the time goes"><p class="quietly">${value ? "Told from the first committed step on." : "Reading the steps…"}</p></${Panel}>`;
  const total = (s) => Object.values(s.parts).reduce((a, b) => a + b, 0);
  const longest = Math.max(...steps.map(total));
  const last = steps.at(-1);
  const named = Object.keys(last.parts).filter((part) => steps.some((s) => s.parts[part] > 0));
  const move = (by) => setTo(Math.max(0, last.step + by));
  const actions = html`<button type="button" onClick=${() => move(-SHOWN)} disabled=${steps[0].step === 0}>Before</button>
    <button type="button" onClick=${() => setTo(last.step + SHOWN >= store.job.value.step ? null : last.step + SHOWN)} disabled=${to === null}>After</button>`;
  return html`<${Panel} title="Where the time goes" actions=${actions}
      note=${html`<span class="legend inline">${named.map((part) => html`<span><i class=${`part-${part}`} aria-hidden="true"></i>${word(part)}</span>`)}</span>`}>
    <ol class="where">${steps.map((s) => html`<li key=${s.step}>
      <span>step ${s.step}</span>
      <div class="bar-of" role="img" aria-label=${`Step ${s.step}: ${spoken(s.parts, total(s))}`} style=${`width:${(100 * total(s)) / longest}%`}>
        ${Object.entries(s.parts).filter(([, seconds]) => seconds > 0).map(([part, seconds]) => html`<i class=${`part-${part}`} style=${`flex-grow:${seconds}`} title=${`${word(part)} ${duration(seconds)}, ${percent(seconds / total(s))}`}></i>`)}
      </div><span class="took">${duration(total(s))}</span></li>`)}</ol>
    <p class="advice">${last.advice ? html`<b>Step ${last.step}:</b> ${last.advice}.` : html`<b>Step ${last.step}:</b> nothing stands out that a setting would save.`}</p>
  </${Panel}>`;
}

const spoken = (parts, total) => Object.entries(parts).filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1]).map(([part, s]) => `${word(part)} ${number(s)} s, ${percent(s / total)}`).join("; ");
