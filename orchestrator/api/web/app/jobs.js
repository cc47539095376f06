// All jobs, newest first, asked for again every two seconds while the page is seen.
import { html, useEffect, useRef, useState } from "app/html.js";
import { ask } from "app/api.js";
import { go } from "app/go.js";
import { useKeys } from "app/keys.js";
import { Submit } from "app/submit.js";
import { Failure, Spark, State } from "app/parts.js";
import { ago, dollars, duration, headline, number, plural, validation } from "app/format.js";

const EVERY_MS = 2000;
const PAGE = 100;

function first(message) {
  const [line, ...more] = message.split("\n");
  return more.length ? `${line} (and ${more.length} more)` : line;
}

function Row({ job, chosen, choose }) {
  const spent = job.spent_usd ?? job.cost_usd;
  const held = validation(job.metrics);
  const learns = headline(job.metrics);
  const replicas = Object.entries(job.replicas).filter(([, count]) => count).map(([name, count]) => `${name} ${count}`).join(", ");
  return html`<tr>
    <td class="tick"><input type="checkbox" checked=${chosen} onChange=${choose} aria-label=${`compare ${job.id}`} /></td>
    <th scope="row" class="left"><a class="job" href=${`/jobs/${job.id}`} data-page>${job.id}</a><small>${job.recipe}</small></th>
    <td class="left" data-label="State"><${State} state=${job.state} /></td>
    <td data-label="Step"><span>${job.steps ? html`${job.step ?? 0}<small>/${job.steps}</small>` : "evaluation"}</span><progress max=${job.steps || 1} value=${job.steps ? job.step ?? 0 : Number(job.step !== null)} aria-label=${`steps of ${job.id}`}></progress></td>
    <td class="trend" data-label=${learns.title}><span>${number(learns.value)}${learns.title === "Loss" && html`<small> loss</small>`}</span><${Spark} values=${job.trend} /></td>
    <td data-label="Validation" title=${held?.name}>${held ? held.shown : "–"}</td>
    <td data-label="Cost now">${spent > 0 ? dollars(spent) : job.spent_replica_s ? html`${number(job.spent_replica_s)}<small>replica s</small>` : "–"}</td>
    <td data-label="Time at work">${duration(job.wall_s)}<small>${ago(job.created_at)}</small></td>
    <td class="left now" data-label="Now">${job.message ? html`<span class="bad clamp">${first(job.message)}</span>` : replicas || (job.state === "running" ? "at zero" : "")}</td>
  </tr>`;
}

export function Jobs() {
  const [jobs, setJobs] = useState(null);
  const [more, setMore] = useState(null);
  const [problem, setProblem] = useState(null);
  const [word, setWord] = useState("");
  const [limit, setLimit] = useState(PAGE);
  const [chosen, setChosen] = useState([]);
  const [making, setMaking] = useState(false);
  const flip = (id) => setChosen(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]);
  const field = useRef();
  const body = useRef();

  useEffect(() => {
    let timer;
    let current = true;
    const look = async () => {
      try {
        const found = document.hidden && jobs ? null : await ask("/v1/jobs", { limit });
        if (found && current) {
          setJobs(found.jobs);
          setMore(found.next);
          setProblem(null);
        }
      } catch (error) {
        if (current) setProblem(error);
      }
      if (current) timer = setTimeout(look, EVERY_MS);
    };
    look();
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [limit]);

  const move = (by) => {
    const links = [...body.current.querySelectorAll("a.job")];
    const at = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, at + by))]?.focus();
  };
  useKeys({ "/": () => field.current?.focus(), j: () => jobs?.length && move(1), k: () => jobs?.length && move(-1) });

  if (!jobs) return problem && problem.status ? html`<${Failure} problem=${problem} />` : html`<h1>Jobs</h1><p class="quietly">Reading the jobs…</p>`;
  const shown = jobs.filter((job) => !word || `${job.id} ${job.recipe} ${job.state}`.includes(word.toLowerCase()));
  const counts = Object.entries(Object.groupBy(jobs, (job) => job.state)).map(([state, list]) => `${list.length} ${state}`).join(", ");
  return html`
    <div class="title">
      <h1>Jobs</h1><p class="note">${counts}</p><span class="grow"></span>
      ${chosen.length > 0 && html`<button type="button" disabled=${chosen.length < 2} onClick=${() => go(`/compare?jobs=${chosen.join()}`)}>${chosen.length < 2 ? "Tick another to compare" : `Compare ${chosen.length}`}</button>`}
      <button type="button" class="main" onClick=${() => setMaking(true)}>New job…</button>
      <label class="inline">Filter <input ref=${field} type="search" value=${word} onInput=${(e) => setWord(e.target.value)} /></label>
    </div>
    ${making && html`<${Submit} title="New job" onClose=${() => setMaking(false)} onMade=${(id) => go(`/jobs/${id}`)} />`}
    ${jobs.length === 0
      ? html`<div class="empty"><h2>No jobs yet</h2><p>Start one here, or send it: <code>rlhf-orchestrate submit job.toml --url ${location.origin}</code></p></div>`
      : html`<div class="scroll panel flush" tabindex="0" role="region" aria-label="Jobs"><table class="jobs cards">
          <caption class="away">Jobs, newest first</caption>
          <thead><tr><td class="tick"></td><th scope="col" class="left">Job</th><th scope="col" class="left">State</th><th scope="col">Step</th><th scope="col">Reward</th>
            <th scope="col">Validation</th><th scope="col">Cost now</th><th scope="col">Time at work</th><th scope="col" class="left">Now</th></tr></thead>
          <tbody ref=${body}>${shown.map((job) => html`<${Row} key=${job.id} job=${job} chosen=${chosen.includes(job.id)} choose=${() => flip(job.id)} />`)}</tbody>
        </table></div>
        ${shown.length === 0 && html`<p class="quietly">No job has “${word}” in its id, recipe or state.</p>`}
        ${more && html`<button type="button" onClick=${() => setLimit(Math.min(1000, limit + PAGE))}>Show more than ${plural(jobs.length, "job")}</button>`}`}
  `;
}
