// Cancel and resume, each after a question; and another job like this one.
import { html, useState } from "app/html.js";
import { go } from "app/go.js";
import { Dialog } from "app/parts.js";
import { Submit, settingsOf } from "app/submit.js";

export function Actions({ store, job }) {
  const [asking, setAsking] = useState(null);
  return html`
    ${job.can.includes("cancel") && html`<button type="button" class="danger" onClick=${() => setAsking("cancel")}>Cancel…</button>`}
    ${job.can.includes("resume") && html`<button type="button" class="main" onClick=${() => setAsking("resume")}>Resume…</button>`}
    <button type="button" onClick=${() => setAsking("clone")}>Clone…</button>
    ${asking === "clone" && html`<${Submit} title=${`Another job like ${job.id}`} text=${settingsOf(job)} onClose=${() => setAsking(null)} onMade=${(id) => go(`/jobs/${id}`)} />`}
    ${asking && asking !== "clone" && html`<${Ask} what=${asking} store=${store} job=${job} onClose=${() => setAsking(null)} />`}
  `;
}

function Ask({ what, store, job, onClose }) {
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const cancel = what === "cancel";
  const next = (job.step ?? -1) + 1;
  const act = async () => {
    setBusy(true);
    try {
      store.job.value = { ...store.job.value, ...(await (cancel ? store.source.cancel() : store.source.resume())) };
      store.poke();
      onClose();
    } catch (error) {
      setProblem(error);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${cancel ? `Cancel ${job.id}?` : `Resume ${job.id}?`} onClose=${onClose}>
    <p>${cancel
      ? `The orchestrator ends in order and every function goes to zero. What is committed stays; the work on step ${next} is lost. Resume goes on from there.`
      : `It goes on from its last committed step${job.step === null ? "" : ` (${job.step})`} and spends money again.`}</p>
    ${problem && html`<p class="bad" role="alert">${problem.message}</p>`}
    <div class="buttons">
      <button type="button" onClick=${onClose}>${cancel ? "Keep it running" : "Not now"}</button>
      <button type="button" class=${cancel ? "danger" : "main"} disabled=${busy} onClick=${act}>${cancel ? "Cancel the job" : "Resume the job"}</button>
    </div>
  </${Dialog}>`;
}
