// What went wrong, as a person wants it: what, where, what would be right; the orchestrator's own lines behind a fold.
import { html, useState } from "app/html.js";
import { plural } from "app/format.js";
import { Failure } from "app/parts.js";

export function Trouble({ store, job }) {
  if (job.state === "failed") return html`<${Failed} store=${store} job=${job} />`;
  if (job.state === "interrupted") {
    const next = (job.step ?? -1) + 1;
    return html`<div class="trouble mild" role="status"><h2>Nobody is working on it</h2>
      <p>Its orchestrator ended without a word; what is committed stays. ${job.can.includes("resume")
        ? html`<b>Resume</b> goes on from step ${next}.`
        : `The server starts it again by itself, from step ${next}.`}</p></div>`;
  }
  if (job.state === "queued") {
    return html`<div class="trouble plain" role="status"><h2>In the queue</h2><p>It starts as soon as a job before it ends; the server runs only so many at a time. Nothing is paid for until then.</p></div>`;
  }
  if (job.state === "running" && job.step === null) {
    const there = Object.entries(job.replicas).filter(([, n]) => n).map(([name, n]) => `${name} ${n}`).join(", ");
    return html`<div class="trouble plain" role="status"><h2>Starting</h2><p>${there ? html`Replicas are there: ${there}.` : "The libraries are imported and the model is read; no replica is paid for yet."} Figures come with the first committed step.</p></div>`;
  }
  if (job.sample_failures > 0) {
    return html`<div class="trouble mild" role="status"><p>${plural(job.sample_failures, "sample was", "samples were")} dropped because
      the scorer failed. None of them became reward 0. The events say what the scorer said.</p></div>`;
  }
  return null;
}

function Failed({ store, job }) {
  const [output, setOutput] = useState(null);
  const [problem, setProblem] = useState(null);
  const next = job.step === null ? "nothing is committed yet" : `steps 0 to ${job.step} are committed and stay`;
  const look = async (event) => {
    if (!event.target.open || output) return;
    try {
      setOutput((await store.source.output()).lines);
    } catch (error) {
      setProblem(error);
    }
  };
  return html`<div class="trouble" role="alert">
    <h2>Failed ${job.step === null ? "before its first step" : `in step ${job.step + 1}`}</h2>
    <${Lines} message=${job.message ?? "no reason was told"} />
    <p class="next">${next[0].toUpperCase() + next.slice(1)}. When the cause is mended, <b>Resume</b> goes on from there${store.source.fixed ? html`: <code>rlhf-orchestrate resume RUN</code>` : ""}.</p>
    <details onToggle=${look}><summary>The orchestrator's last lines</summary>
      ${problem && html`<${Failure} problem=${problem} />`}
      ${output && (output.length ? html`<pre tabindex="0">${output.join("\n")}</pre>` : html`<p class="quietly">It has printed nothing.</p>`)}
    </details>
  </div>`;
}

// Lines are `where: what; what would be right` (orchestrator/base/errors.py). A place is a key's path, a file (and line), a
// function and its call, a step or a sample; there may be several, each inside of the one before.
const PLACE = /^(?:step \d+[^:]*|[a-z][\w-]*, call [\w.]+|sample [^:]*|(?:group \d+[^:]*)|(?:[a-z_]\w*\.)+[\w.-]+|\.{0,2}\/[^\s:]+(?::\d+)?|[\w-]+\.(?:py|toml|jsonl?|parquet)(?::\d+)?|planner|exchange \S+): /;

export function explain(message) {
  return message.split("\n").filter(Boolean).map((line) => {
    const where = [];
    let rest = line;
    for (let found = rest.match(PLACE); found; found = rest.match(PLACE)) {
      where.push(found[0].slice(0, -2));
      rest = rest.slice(found[0].length);
    }
    const [what, ...right] = rest.split("; ");
    return { where, what, right: right.join("; ") };
  });
}

export function Lines({ message }) {
  return html`<ul class="lines">${explain(message).map(({ where, what, right }) => html`<li>
    ${where.length > 0 && html`<span class="where">${where.map((place, i) => html`${i ? " › " : ""}<code>${place}</code>`)}</span>`}
    <strong>${what}</strong>${right && html`<span class="right">${right}</span>`}</li>`)}</ul>`;
}
