// Whether the run learns as it should: a strip of numbers, each green, yellow or red, with the bound in words.
import { html, useState } from "app/html.js";
import { useAsk } from "app/parts.js";

const SAYS = { good: "good", warn: "look at it", bad: "wrong" };

export function Health({ store }) {
  const { value } = useAsk(() => store.source.health(), [store.steps.value, store.job.value.step]);
  const [open, setOpen] = useState(null);
  const signs = value?.signs ?? [];
  if (!signs.length) return null;
  const shown = signs.find((sign) => sign.name === open) ?? null;
  return html`<section class="health" aria-label="Health">
    <ul>${signs.map((sign) => html`<li key=${sign.name}><button type="button" class=${`sign ${sign.level}`} aria-expanded=${open === sign.name} title=${sign.reason}
      onClick=${() => setOpen(open === sign.name ? null : sign.name)}><i aria-hidden="true"></i>${sign.name} <b>${sign.value}</b><span class="away"> ${SAYS[sign.level]}</span></button></li>`)}</ul>
    ${shown ? html`<p class="note">${shown.name}: ${shown.reason}.</p>` : signs.filter((s) => s.level !== "good").map((s) => html`<p class=${s.level}>${s.name} ${s.value}: ${s.reason}.</p>`)}
  </section>`;
}
