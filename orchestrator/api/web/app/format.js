// Numbers, times and money as a person reads them.

const NONE = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(Math.max(0, digits - 1)).replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

export const whole = (value) => (value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US"));

export function dollars(usd) {
  if (usd === null || usd === undefined) return NONE;
  const size = Math.abs(usd);
  if (size >= 1) return `$${usd.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
  return size >= 0.001 || size === 0 ? `$${usd.toFixed(4)}` : `$${usd.toPrecision(2)}`;
}

export function percent(share, digits = 0) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(digits)} %` : NONE;
}

// 0.42 s, 41 s, 12:05, 3:07:00
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const total = Math.round(seconds);
  const two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(total / 3600);
  const rest = `${two(Math.floor(total / 60) % 60)}:${two(total % 60)}`;
  return hours ? `${hours}:${rest}` : rest.replace(/^0/, "");
}

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });

export const clock = (unix) => CLOCK.format(unix * 1000);
export const moment = (unix) => (unix === null || unix === undefined ? NONE : `${DAY.format(unix * 1000)}, ${clock(unix)}`);

export function ago(unix, now = Date.now() / 1000) {
  const seconds = Math.max(0, now - unix);
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return DAY.format(unix * 1000);
}

export const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

const TIMES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

// Round times for an axis in seconds.
export function times(low, high, most) {
  const step = TIMES.find((s) => (high - low) / s <= most) ?? 86400 * Math.ceil((high - low) / 86400 / most);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(Number((k * step).toFixed(3)));
  return found;
}

// The one number by which a job is followed (telemetry/headline.py).
export function headline(metrics) {
  const name = ["critic/score/mean", "sft/loss", "dpo/loss", "rm/loss", "actor/pg_loss"].find((n) => n in metrics);
  return { title: name && name !== "critic/score/mean" ? "Loss" : "Reward", value: metrics[name] };
}

// What a validation is shown by: the accuracy where the scorer gives one, else the score. Null: there is none.
export function validation(metrics) {
  const names = Object.keys(metrics).filter((name) => name.startsWith("val-core/")).sort();
  const name = names.find((n) => n.includes("/acc/")) ?? names.find((n) => n.includes("/reward/"));
  return name ? { name, ...validated(name, metrics[name]) } : null;
}

export function validated(name, value) {
  const rate = name.includes("/acc/");
  return { title: rate ? "Pass rate" : "Validation score", shown: rate ? percent(value, 1) : number(value) };
}

// Labels of an axis that differ wherever its ticks do. `unit` stands in front.
export function ticks(values, unit = "") {
  const known = values.filter((v) => v !== null);
  const least = known.length > 1 ? Math.min(...known.slice(1).map((v, i) => Math.abs(v - known[i])).filter(Boolean)) : 1;
  const most = Math.max(...known.map(Math.abs), 0);
  const first = Math.max(0, -Math.floor(Math.log10(least) + 1e-9));
  const places = Math.abs((least * 10 ** first) % 1 - 0.5) < 1e-6 ? first + 1 : first; // 0.25 has two
  const small = most < 1e-3 || most >= 1e7;
  const digits = Math.max(0, Math.floor(Math.log10(most)) + places);
  return values.map((v) => (v === null ? "" : v === 0 ? `${unit}0` : small ? `${unit}${v.toExponential(digits)}` : `${unit}${v.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places })}`));
}

export function bytes(count) {
  if (count === null || count === undefined) return NONE;
  const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, s]) => count >= s) ?? ["B", 1];
  return `${number(count / size)} ${unit}`;
}
