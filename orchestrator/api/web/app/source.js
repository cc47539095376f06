// Where a page's data comes from: a server, or (in a report) what is written into the page itself. Both answer the same.
import { ask, download } from "app/api.js";

export function liveSource(id) {
  const at = (rest = "") => `/v1/jobs/${id}${rest}`;
  return {
    fixed: false,
    job: () => ask(at()),
    metrics: (names, points) => ask(at("/metrics"), { name: names, points }),
    cost: () => ask(at("/cost"), { steps: false }),
    costSteps: (points) => ask(at("/cost/steps"), { points }),
    reserved: () => ask(at("/reserved")),
    health: () => ask(at("/health")),
    prompt: (query) => ask(at("/prompt"), query),
    where: (to_step, count) => ask(at("/where"), { to_step, count }),
    replicas: (query) => ask(at("/replicas"), query),
    plan: (step) => ask(at("/plan"), { step }),
    samples: (query) => ask(at("/samples"), query),
    events: (query) => ask(at("/event-log"), query),
    checkpoints: () => ask(at("/checkpoints")),
    profile: (step, name) => download(at(`/profiles/${step}/${name}`), `${id}-${step}-${name}`),
    output: () => ask(at("/output"), { lines: 60 }),
    cancel: () => ask(at("/cancel"), {}, { method: "POST" }),
    resume: () => ask(at("/resume"), {}, { method: "POST" }),
  };
}

// `data` as orchestrator/api/report.py writes it.
export function fixedSource(data) {
  const later = (value) => Promise.resolve(value);
  return {
    fixed: true,
    job: () => later(data.job),
    metrics: (names) => later(pick(data.metrics, names)),
    cost: () => later(data.cost),
    costSteps: () => later(data.cost_steps),
    reserved: () => later(data.reserved),
    health: () => later(data.health),
    prompt: ({ of = "training", step, group }) => {
      const text = data.samples[of].find((s) => s.step === step)?.samples.find((s) => s.group === group)?.prompt;
      const found = data.samples[of].map((s) => ({ step: s.step, samples: s.samples.filter((one) => one.prompt === text) }));
      return later({ steps: found.filter((s) => s.samples.length) });
    },
    where: (to_step, count) => later({ steps: data.where.steps.filter((s) => to_step == null || s.step <= to_step).slice(-count) }),
    replicas: (query) => later(window_(data.replicas, query)),
    plan: (step) => later(data.plans.find((plan) => plan.step === step) ?? data.plans.at(-1) ?? NO_PLAN),
    samples: (query) => later(samples(data.samples[query.of ?? "training"], query)),
    events: ({ before, limit = 100, kind }) => {
      const kinds = kind?.length ? data.events.filter((event) => kind.includes(event.type)) : data.events;
      const older = before ? kinds.filter((event) => event.id < before) : kinds;
      const page = older.slice(0, limit);
      return later({ events: page, total: kinds.length, next: older.length > limit ? page.at(-1).id : null });
    },
    checkpoints: () => later(data.checkpoints),
    output: () => later(data.output),
  };
}

const NO_PLAN = { step: null, time: null, plan: null, actual: {} };

function pick(table, names) {
  if (!names?.length) return table;
  const wanted = (name) => names.some((n) => n === name || (n.endsWith("/") && name.startsWith(n)));
  const of = (columns) => Object.fromEntries(Object.entries(columns).filter(([name]) => wanted(name)));
  return { ...table, metrics: of(table.metrics), low: of(table.low), high: of(table.high) };
}

// The finest of the timelines that covers the window, cut to it.
function window_(timelines, { from_s = 0, to_s = Infinity, most }) {
  if (most === 0) return timelines.at(-1); // counts of the whole job
  const covers = (t) => t.from_s <= from_s + 1e-6 && t.to_s >= Math.min(to_s, t.end_s) - 1e-6;
  return timelines.find((t) => t.lanes && covers(t)) ?? timelines.find(covers) ?? timelines.at(-1);
}

function samples(steps, query) {
  const numbers = steps.map((entry) => entry.step);
  const entry = steps.findLast((one) => one.step <= (query.step ?? Infinity)) ?? steps.at(-1);
  if (!entry) return { step: null, steps: [], total: 0, samples: [], scores: [], groups: [], tools: [] };
  const word = (query.contains ?? "").toLowerCase();
  const has = (text) => text.toLowerCase().includes(word);
  let found = entry.samples.filter(
    (s) =>
      (!word || has(s.prompt) || has(s.response)) &&
      (query.min_score == null || query.min_score === "" || s.score >= Number(query.min_score)) &&
      (query.max_score == null || query.max_score === "" || s.score <= Number(query.max_score)) &&
      (!query.finish || s.finish === query.finish) &&
      (query.group == null || s.group === query.group),
  );
  if (query.sort && query.sort !== "index") {
    const key = query.sort.replace("-", "");
    const sign = query.sort.startsWith("-") ? -1 : 1;
    const place = (s) => (s[key] == null ? Infinity : sign * s[key]);
    found = [...found].sort((a, b) => place(a) - place(b));
  }
  const page = found.slice(query.offset, query.offset + query.limit);
  return { ...entry, steps: [numbers[0], numbers.at(-1)], kept: numbers, total: found.length, samples: page };
}
