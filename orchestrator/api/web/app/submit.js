// A new job: a job file, or another job's settings to be changed. The server checks it before anything is paid for.
import { html, useEffect, useRef, useState } from "app/html.js";
import { ask } from "app/api.js";
import { Dialog } from "app/parts.js";
import { Lines } from "app/trouble.js";

const FIRST = `name = "my-job"
recipe = "grpo"
steps = 100

[model]
path = "Qwen/Qwen2.5-0.5B-Instruct"

[data]
train = "openai/gsm8k/main"
prompt_key = "question"
apply_chat_template = true

[reward]
score = "rule:gsm8k"
`;

export function Submit({ title, text, onClose, onMade }) {
  const [body, setBody] = useState(text ?? FIRST);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const field = useRef();
  useEffect(() => field.current.setSelectionRange(0, 0), []);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const type = body.trimStart().startsWith("{") ? "application/json" : "application/toml";
      onMade((await ask("/v1/jobs", {}, { method: "POST", body, headers: { "Content-Type": type } })).id);
    } catch (error) {
      setProblem(error);
      setBusy(false);
    }
  };
  const hidden = body.includes("***");
  return html`<${Dialog} title=${title} onClose=${onClose} className="wide">
    <form onSubmit=${send}>
      <label class="stacked">Job, as TOML or JSON; paths are the server's <textarea ref=${field} rows="18" spellcheck="false" value=${body} onInput=${(e) => setBody(e.target.value)} autofocus></textarea></label>
      ${hidden && html`<p class="warn">Secrets are shown as ***: write them again, or take those keys out.</p>`}
      ${problem && html`<div class="failure" role="alert"><${Lines} message=${problem.message} /></div>`}
      <div class="buttons"><button type="button" onClick=${onClose}>Back</button><button type="submit" class="main" disabled=${busy || !body.trim()}>Start the job</button></div>
    </form>
  </${Dialog}>`;
}

// A job's settings as they were given: without what is not set.
export function settingsOf(job) {
  const set = (value) => value !== null && !(typeof value === "object" && !Object.keys(value).length);
  const clean = (value) => (value === null || typeof value !== "object" || Array.isArray(value) ? value : Object.fromEntries(Object.entries(value).map(([k, v]) => [k, clean(v)]).filter(([, v]) => set(v))));
  return JSON.stringify(clean(job.config), null, 2);
}
