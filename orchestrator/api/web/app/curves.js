// Curves of metrics, under verl's names; which ones is the user's choice and is remembered.
import { html, useEffect, useMemo, useState } from "app/html.js";
import { Chart } from "app/chart.js";
import { Dialog, Panel } from "app/parts.js";
import { validated } from "app/format.js";
import { SMOOTHING, reach, smooth } from "app/series.js";

const KEY = "rlhf-metrics";
export const WORDS = {
  "critic/score/mean": "Reward", "sft/loss": "Loss", "dpo/loss": "Loss", "rm/loss": "Loss", "dpo/accuracy": "Chosen preferred", "rm/accuracy": "Chosen preferred", "actor/ppo_kl": "Change of the policy within the step", "actor/kl_loss": "KL to the reference",
  "actor/reward_kl_penalty": "KL penalty in the reward", "response_length/mean": "Response length", "actor/entropy": "Entropy",
  "actor/grad_norm": "Gradient norm", "timing_s/step": "Seconds a step", "rollout_corr/abs_diff_mean": "Log-probability mismatch",
  "actor/pg_loss": "Policy loss", "response_length/clip_ratio": "Cut off at the limit", "perf/throughput": "Tokens a second paid for", "rollout/tokens_per_s": "Tokens/s per generate replica",
};
// The first of each that the job has.
const USUAL = [
  ["critic/score/mean", "sft/loss", "dpo/loss", "rm/loss"], ["dpo/accuracy", "rm/accuracy"], [/^val-core\/.*\/acc\//, /^val-core\/.*\/reward\//], ["actor/kl_loss", "actor/reward_kl_penalty"], ["response_length/mean"],
  ["actor/entropy"], ["actor/grad_norm"], ["rollout_corr/abs_diff_mean"], ["timing_s/step"], ["rollout/tokens_per_s", "perf/throughput"],
];

export function usual(names) {
  const found = USUAL.flatMap((options) => {
    const name = options.flatMap((o) => (o instanceof RegExp ? names.filter((n) => o.test(n)).slice(0, 1) : names.includes(o) ? [o] : []))[0];
    return name ? [name] : [];
  });
  return found.length ? found : names.slice(0, 8);
}

function remembered() {
  try {
    return JSON.parse(localStorage.getItem(KEY));
  } catch {
    return null;
  }
}

export function Curves({ store }) {
  const [choosing, setChoosing] = useState(false);
  const [by, setBy] = useState(0);
  const [log, setLog] = useState(false);
  const found = store.metrics.value;
  const names = store.names.value;
  const key = names.join();
  useEffect(() => {
    if (!names.length) return; // they come with the first step
    const own = remembered()?.filter((name) => names.includes(name));
    store.choose(own?.length ? own : usual(names));
  }, [key]);

  const pick = (chosen) => {
    try {
      if (chosen) localStorage.setItem(KEY, JSON.stringify(chosen));
      else localStorage.removeItem(KEY);
    } catch {
      // kept for this page only
    }
    store.choose(chosen ?? usual(names));
  };
  const shown = store.shown.value.filter((name) => found?.metrics[name]);
  return html`<${Panel} title="Curves" note=${found?.low && Object.keys(found.low).length ? "means of runs of steps, with their least and greatest" : ""}
      actions=${html`<${Smoothing} by=${by} setBy=${setBy} log=${log} setLog=${setLog} /><button type="button" onClick=${() => setChoosing(true)} disabled=${!names.length}>Metrics…</button>`}>
    ${!found || !shown.length
      ? html`<p class="quietly">${names.length ? "Reading the metrics…" : "Curves come with the first committed step."}</p>`
      : html`<div class="charts">${shown.map((name) => html`<${Curve} key=${`${name} ${log}`} name=${name} found=${found} by=${by} log=${log} />`)}</div>`}
    ${choosing && html`<${Choice} names=${names} chosen=${store.shown.value} pick=${pick} onClose=${() => setChoosing(false)} />`}
  </${Panel}>`;
}

export function Smoothing({ by, setBy, log, setLog }) {
  return html`<label class="inline">Smoothing <select value=${by} onChange=${(e) => setBy(Number(e.target.value))}>${SMOOTHING.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></label>
    <label class="inline"><input type="checkbox" checked=${log} onChange=${(e) => setLog(e.target.checked)} /> Log scale</label>`;
}

function Curve({ name, found, by, log }) {
  const series = useMemo(() => {
    const [low, high] = by ? [] : [found.low?.[name], found.high?.[name]];
    return [{ label: name, values: smooth(found.metrics[name], by), low, high, color: hue(name) }];
  }, [found, name, by]);
  const word = WORDS[name] ?? (name.startsWith("val-core/") ? validated(name).title : "");
  return html`<${Chart} x=${found.steps} series=${series} from=${reach(name)} log=${log} title=${word ? html`${word} <code>${name}</code>` : html`<code>${name}</code>`} />`;
}

const HUES = { critic: "s2", "val-core": "s2", actor: "s1", response_length: "s5", prompt_length: "s5", rollout_corr: "s4", timing_s: "s3", perf: "s3" };
const hue = (name) => HUES[name.split("/")[0]] ?? "s6";

function Choice({ names, chosen, pick, onClose }) {
  const [word, setWord] = useState("");
  const [own, setOwn] = useState(chosen);
  const groups = Object.entries(Object.groupBy(names.filter((n) => n.includes(word.trim())), (n) => n.split("/")[0]));
  const flip = (name) => setOwn(own.includes(name) ? own.filter((n) => n !== name) : [...own, name]);
  const done = (event) => {
    event.preventDefault();
    pick(own);
    onClose();
  };
  return html`<${Dialog} title="Which metrics?" onClose=${onClose} className="wide">
    <form onSubmit=${done}>
      <label>Find <input type="search" value=${word} onInput=${(e) => setWord(e.target.value)} placeholder="kl, length, val-core …" autofocus /></label>
      <div class="choice" tabindex="0" role="group" aria-label="Metrics">${groups.map(([group, list]) => html`<fieldset><legend>${group}</legend>
        ${list.map((name) => html`<label><input type="checkbox" checked=${own.includes(name)} onChange=${() => flip(name)} /> <code>${name}</code></label>`)}</fieldset>`)}
      </div>
      <div class="buttons">
        <button type="button" onClick=${() => { pick(null); onClose(); }}>The usual ones</button>
        <span class="grow"></span>
        <button type="button" onClick=${onClose}>Back</button>
        <button type="submit" class="main" disabled=${!own.length}>Show ${own.length}</button>
      </div>
    </form>
  </${Dialog}>`;
}
